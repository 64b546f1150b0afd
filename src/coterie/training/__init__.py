"""How a client learns: per-record gradients, clipping, noise on the sum, public denominators.

Mechanisms are described in `privacy` and executed here on tensors; nothing here decides what is released or
what it costs.
"""
