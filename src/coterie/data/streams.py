"""Reproducible randomness for everything that is dealt or drawn."""

from __future__ import annotations

import numpy as np


def stream(seed: int, *key: int) -> np.random.Generator:
    """An independent generator for each key, so that one more cluster leaves the others as they were."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))
