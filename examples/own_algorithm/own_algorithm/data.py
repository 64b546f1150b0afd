"""`sensors`: readings of devices of two makes, drawn under the seed."""

import numpy as np

from coterie.data import Dataset, Records, Task


def sensors(seed: int, *, readings: int = 600, width: int = 4) -> Dataset:
    """Which of two states a device is in; values lie in [-1, 1] by construction, so nothing is scaled."""
    rng = np.random.default_rng(seed)
    states = rng.integers(2, size=readings)
    features = np.tanh(rng.normal(size=(readings, width)) + (2 * states - 1)[:, None])
    return Dataset(
        name="sensors",
        train=Records(features.astype(np.float32), states.astype(np.int64)),
        test=None,
        task=Task("classification", (width,), 2),
        note="drawn under the seed; values in [-1, 1]",
    )
