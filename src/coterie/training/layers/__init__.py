"""What layers put out, from stacked weights, and what each record adds to their gradients.

A new kind of layer needs one rule (`base.LayerRule`), registered under the layer's type with `@rule_for` and
imported here. Layers without parameters need none; they run as they are. How a whole model is run and what is
done with the gradients belong elsewhere (`bookkeeping.py`, `clipping.py`).
"""

from coterie.training.layers import conv, simple  # noqa: F401  (each registers its rules)
