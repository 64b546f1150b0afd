"""How much noise an update carries (R-DPCFL, Lemma 4.1)."""

import math

from coterie.privacy.ranges import DIMENSIONS, EPOCHS, RECORDS, Range


def update_noise_variance(
    *,
    records: int,
    batch: int,
    epochs: int,
    learning_rate: float,
    parameters: int,
    clip: float,
    noise_multiplier: float,
) -> float:
    """Lemma 4.1: variance of a client's update, summed over all parameters.

    Every step adds noise of variance (learning_rate clip z / batch)^2 to each parameter, and a round has
    epochs * ceil(records / batch) of them; with records / batch for the ceiling the variance falls with the
    cube of the batch. The variance of the sampled batches themselves is not in it.

    >>> setting = dict(records=6600, epochs=1, learning_rate=5e-4, parameters=11_181_642, clip=3.0)
    >>> round(update_noise_variance(batch=32, noise_multiplier=1.078, **setting), 2)
    5.91
    >>> round(update_noise_variance(batch=6600, noise_multiplier=1.310, **setting), 8)
    9.9e-07
    """
    RECORDS.check("records", records)
    Range(1, records, whole=True).check("batch", batch)
    EPOCHS.check("epochs", epochs)
    DIMENSIONS.check("parameters", parameters)
    steps = epochs * math.ceil(records / batch)
    return steps * parameters * (learning_rate * clip * noise_multiplier / batch) ** 2
