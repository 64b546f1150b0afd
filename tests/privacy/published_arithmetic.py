"""How far noise blurs clusters (R-DPCFL, Lemma 4.2)."""

import math

from coterie.privacy.errors import PrivacyInputError
from coterie.privacy.ranges import DIMENSIONS


def separation_score(distance: float, variance: float, parameters: int) -> float:
    """Half the distance of two cluster centres over the standard deviation of one coordinate.

    >>> separation_score(distance=6.0, variance=4.0, parameters=4)
    3.0
    """
    _check_positive("variance", variance)
    DIMENSIONS.check("parameters", parameters)
    return distance / (2.0 * math.sqrt(variance / parameters))


def overlap(score: float) -> float:
    """Lemma 4.2: the mass that two equal spherical Gaussians share, 2 Q(score); above 3 they are apart.

    >>> overlap(0.0)
    1.0
    >>> round(overlap(3.0), 4)
    0.0027
    """
    return math.erfc(score / math.sqrt(2.0))


def overlap_after_growth(score: float, growth: float, noise_growth: float = 1.0) -> float:
    """Lemma 4.2: a bound on the overlap when the first batch grows `growth`-fold and z `noise_growth`-fold.

    One epoch of larger batches takes fewer steps, so centres come closer by `growth` while the noise in the
    update shrinks by its power 3/2.

    >>> overlap_after_growth(1.0, growth=4.0) == overlap(2.0)
    True
    """
    _check_positive("growth", growth)
    _check_positive("noise_growth", noise_growth)
    return overlap(math.sqrt(growth) * score / noise_growth)


def _check_positive(key: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise PrivacyInputError(f"{key}: {value} is not allowed, a finite number above 0 is")
