"""How a client learns: per-record gradients, clipping, noise on the sum, public denominators."""
