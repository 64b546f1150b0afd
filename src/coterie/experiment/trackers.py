"""Runs shown by what people watch runs with: TensorBoard, MLflow, Weights & Biases.

Each is a function that returns `Callbacks`; the package behind it is an extra of its name. Told are the
settings, the guarantee and, after each round, epsilon and accuracy; an accuracy outside the guarantee is told
only of published records, or where `outside=True` says so: such a service may be read by others.
"""
