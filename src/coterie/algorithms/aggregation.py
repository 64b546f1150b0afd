"""How released updates of several clients become one step of a model, whatever one of them sends.

Updates of records are released values, so whatever is done to them costs no privacy. A mean follows whoever
shouts loudest: an update may be as long as the noise and the clip allow any. All other rules first leave out
every update that is longer than an honest one stays within, which is public (`Released.norm_bound`), and
shorten the rest to the median of the norms that came. Then they take the mean of those that do not speak
against the others, or each coordinate's median or trimmed mean. No rule resists one liar of two, or two of
three.
"""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from coterie.algorithms.protocol import Vector
from coterie.privacy import Released

Rule = Literal["mean", "filtered-mean", "median", "trimmed-mean"]

TRIM = 0.25
"""Share of the values of a coordinate that a trimmed mean leaves out at each end."""
DISAGREEMENT = 0.5
"""By how many standard deviations of its noise an update may speak against the others. More lets a liar pull
further, less leaves out honest updates when little is left to learn; best of 0, 0.5 and 1 on two seeds."""


def believable(updates: Sequence[Released[Vector]]) -> NDArray[np.bool_]:
    """Which updates are no longer than an honest one, but for one in a million; all, where none is.

    To shorten the others would be to believe them: whoever is loud enough to be caught here has lied about
    the direction, too.
    """
    norms = [float(np.linalg.norm(update.value.astype(np.float64))) for update in updates]
    within = np.array([norm <= update.norm_bound for norm, update in zip(norms, updates, strict=True)])
    return within if within.any() else ~within


def shortened(updates: Sequence[Released[Vector]]) -> NDArray[np.float64]:
    """Updates, one in each row, none longer than an honest one may be, nor than most of them are.

    Honest updates of one model are about equally long, since most of their length is noise of a public level.
    """
    values = np.stack([update.value for update in updates]).astype(np.float64)
    norms = np.linalg.norm(values, axis=1)
    bounds = np.minimum([update.norm_bound for update in updates], np.median(norms))
    longer = norms > bounds
    values[longer] *= (bounds[longer] / norms[longer])[:, None]
    return values


def combined(updates: Sequence[Released[Vector]], rule: Rule, trim: float = TRIM) -> NDArray[np.float64]:
    """One update for all of these.

    Args:
        trim: share of values that a trimmed mean leaves out at each end of every coordinate.
    """
    if rule == "mean":
        mean: NDArray[np.float64] = np.mean([update.value for update in updates], axis=0, dtype=np.float64)
        return mean
    updates = [update for update, kept in zip(updates, believable(updates), strict=True) if kept]
    values = shortened(updates)
    if rule == "filtered-mean":
        values = values[agreeing(values, [update.noise_std for update in updates])]
    return centre(values, rule, trim)


def agreeing(values: NDArray[np.float64], noise: Sequence[float]) -> NDArray[np.bool_]:
    """Which updates do not speak against the others by more than their noise explains.

    Were there nothing to learn, the inner product of one update with the mean of the others would be Gaussian
    around 0, with a standard deviation that follows from the noise, which is public. Where there is
    something, honest ones have larger products; one that pulls the other way has a smaller one.
    """
    count, norms = len(values), np.linalg.norm(values, axis=1)
    if count < 3:  # of two, nobody can tell which one lies
        return np.ones(count, dtype=np.bool_)
    others = (values.sum(axis=0) - values) / (count - 1)
    variances = np.square(np.asarray(noise, dtype=np.float64))
    spread = np.sqrt((variances.sum() - variances) / (count - 1) ** 2)
    product = np.einsum("ij,ij->i", values, others)
    kept: NDArray[np.bool_] = product >= -DISAGREEMENT * norms * spread
    return kept if kept.any() else ~kept


def centre(values: NDArray[np.float64], rule: Rule, trim: float = TRIM) -> NDArray[np.float64]:
    """The centre of each column."""
    found: NDArray[np.float64]
    if rule == "median":
        found = np.median(values, axis=0)
        return found
    left_out = 0
    if rule == "trimmed-mean":
        left_out = min(math.floor(trim * len(values) + 1e-9), (len(values) - 1) // 2)
        values = np.sort(values, axis=0)
    found = values[left_out : len(values) - left_out].mean(axis=0, dtype=np.float64)
    return found
