"""One file per kind of layer: its output from stacked weights, and what each record adds to its gradient.

A new kind of layer needs one rule (`base.LayerRule`), registered under the layer's type with `@rule_for` and
imported here. Layers without parameters need none; they run as they are. How a whole model is run and what is
done with the gradients belong elsewhere (`bookkeeping.py`, `clipping.py`).
"""

from coterie.training.layers import conv, embedding, linear, norm  # noqa: F401  (each registers its rule)
