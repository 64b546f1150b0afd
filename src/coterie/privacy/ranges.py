"""The ranges of every number that decides how much noise is drawn, and the check of it before it is drawn.

Files, command lines and servers choose clips, noise, step sizes and counts. Arithmetic on a machine keeps its
promises for numbers of ordinary size only: a clip of 5e-324 rounds what is clipped to it to several times its
length, and its noise to two thirds of what was planned. So numbers are bounded where they enter. Whoever
draws noise comes through `gaussian` or `gumbel` here (a program for a GPU through `check_noise`), which look
once more at what is about to be used.
"""

import math
import sys
from dataclasses import dataclass
from numbers import Integral, Real
from typing import cast

from coterie.privacy.errors import NoiseError, RangeError
from coterie.privacy.randomness import Floats, RandomStream, Shape


@dataclass(frozen=True)
class Range:
    """Numbers from `least` to `most`, both included, and one `besides`; counts where `whole`."""

    least: float
    most: float
    whole: bool = False
    besides: float | None = None

    def __contains__(self, value: object) -> bool:
        kind = Integral if self.whole else Real
        if isinstance(value, bool) or not isinstance(value, kind):
            return False
        return value == self.besides or bool(self.least <= cast(float, value) <= self.most)

    def __str__(self) -> str:
        if self.whole:
            return f"an integer from {self.least} to {self.most}"
        other = "" if self.besides is None else f"{self.besides:g} or "
        return f"{other}a number from {self.least:g} to {self.most:g}"

    def check(self, key: str, value: float) -> None:
        """Refuse a value outside the range."""
        if value not in self:
            raise RangeError(f"{key}: {value} is not allowed, {self} is")

    def nearest(self, value: float) -> float:
        """The value, or the end of the range that it lies beyond."""
        return min(max(value, self.least), self.most)


# Far wider than any use known to us, and narrow enough that every product of them is an ordinary number: the
# least noise on a mean over the most records, after the least step, is 1e-6 * 1e-12 / 1e9 * 1e-9 = 1e-36, and
# the most is 1e6 * 1e12 * 1e6 = 1e24; a normal float32 lies between 1.2e-38 and 3.4e38, a float64 far beyond.
CLIP = Range(1e-6, 1e6)
"""Largest norm of one unit's contribution. Adaptive clipping stays in here, too."""
NOISE = Range(1e-12, 1e12)
"""Standard deviation of noise over the clip, where there is noise at all."""
RATIO = Range(1e-6, 1e6)
"""Noise of a part of a release over that of its sums."""
RATE = Range(1e-9, 1.0)
"""Probability that a unit is sampled."""
EPSILON = Range(1e-9, 1e9, besides=math.inf)
"""Of a budget; an infinite one asks for no privacy."""
EVALUATION_EPSILON = Range(1e-9, 1e6)
"""What scores of held-out records may cost one of them."""
SELECTION_EPSILON = Range(1e-9, 1e9)
"""Range of the log-probabilities of a private selection, where it is private at all."""
DELTA = Range(1e-30, 1.0)
"""Of a guarantee, below 1: far less than one over the number of units anywhere."""
STEP_SIZE = Range(1e-9, 1e6)
"""Of clients, servers and masters."""
PULL = Range(1e-9, 1e6)
"""Weight of a pull towards an anchor or a start, where there is one."""
RECORDS = Range(1, 10**9, whole=True)
"""Records of a client and of a batch, clients of a population."""
RECORDS_PER_PERSON = Range(1, 10**4, whole=True)
"""Of one person that count at a client: every person takes as many places."""
EPOCHS = Range(1, 10**4, whole=True)
"""Passes over a client's records in one round."""
STEPS = Range(1, 10**7, whole=True)
"""Steps of one round: more is no plan but a way to keep a site busy."""
ROUNDS = Range(1, 10**6, whole=True)
CLIENTS = Range(1, 10**6, whole=True)
"""Who is simulated, and who works in groups."""
GROUPS = Range(1, 10**4, whole=True)
"""Groups of workers, of which every pair has a place in a matrix."""
GROUP_EPOCHS = Range(1, 10**9, whole=True)
"""Index of a model that groups make: so many releases of so many groups are counted exactly."""
CLUSTERS = Range(2, 1000, whole=True)
"""Models that clients choose from."""
VALUE = Range(-1e30, 1e30)
"""An end of the declared range of a feature or a target: a float32 holds it, and one over it."""
CONCENTRATION = Range(1e-9, 1e9)
"""Of the Dirichlet distribution that mixes labels."""
DIMENSIONS = Range(1, 10**9, whole=True)
"""Of a sketch."""
SEED = Range(0, 2**63 - 1, whole=True)
"""Of public randomness and of simulations."""

EQUAL = 1e-12
"""By how much noise may differ from what was planned, relative: some thousand roundings."""


def check_noise(std: float, multiplier: float, clip: float = 1.0) -> None:
    """Refuse noise that is not the multiplier times the clip, and any that a float64 cannot hold in full.

    Args:
        std: standard deviation about to be used.
        multiplier: as it was planned and charged; 0 where the plan has no noise.
        clip: how far one unit moves what the noise is added to.
    """
    for name, value in (("clip", clip), ("standard deviation", std)):
        normal = sys.float_info.min <= value < math.inf
        if not (normal or (value == 0 == multiplier and name != "clip")):
            raise NoiseError(f"noise: a {name} of {value} is not allowed, a normal finite number above 0 is")
    planned = multiplier * clip
    if not abs(std - planned) <= EQUAL * planned:
        raise NoiseError(f"noise: a standard deviation of {std} is not allowed, {planned} is planned")


def gaussian(
    stream: RandomStream, shape: Shape, std: float, *, multiplier: float, clip: float = 1.0
) -> Floats:
    """Gaussian noise of this standard deviation, if it is the multiplier times the clip (`check_noise`)."""
    check_noise(std, multiplier, clip)
    return stream.normal(shape, std=std)


def gumbel(stream: RandomStream, shape: Shape, scale: float, *, epsilon: float, reach: float) -> Floats:
    """Gumbel noise of this scale, if it is `reach` over the selection's epsilon (infinite: none)."""
    check_noise(scale, 0.0 if math.isinf(epsilon) else 1.0 / epsilon, reach)
    return scale * stream.gumbel(shape)
