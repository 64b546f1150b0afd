"""A game: two neighbouring worlds, played often, of which an attacker's statistics remain.

A game has scenes (which canary, among whom, from which start) and each play of a scene gives several
statistics. Which scene and which statistic serve best is found on trials of their own; then one test is left,
so looking at many costs no confidence."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from coterie.audit.bounds import Scores
from coterie.audit.claims import Claim

Floats = NDArray[np.float64]


class Game(ABC):
    """One kind of release under attack.

    Attributes:
        name: of the release, as the plan calls it.
        what: one use of it lets out, in words.
        claim: what is claimed of the uses that one trial sees.
        delta: at which the plan states epsilon.
        usual: the statistic that is best where the release is what it claims to be; so is the first scene.
        uses: of the release in one trial.
        chunk: trials of each world that are played at once.
    """

    name: str
    what: str
    claim: Claim
    delta: float
    usual: str
    uses: int = 1
    chunk: int = 250

    @abstractmethod
    def scenes(self) -> Sequence[str]:
        """What the scenes are called."""

    def thorough(self, scene: int) -> bool:
        """Whether all statistics are worth their trials here; what runs share they share in every scene."""
        return scene == 0

    @abstractmethod
    def play(self, scene: int, trials: int, wanted: str | None = None) -> dict[str, Scores]:
        """Statistics of so many trials of each world.

        Args:
            wanted: the statistic that is asked for; None for all of them, those that take more trials, too.
        """


def likelihood(seen: Floats, shift: Floats | float, noise: float, rate: float) -> Floats:
    """Log-likelihood ratio of a sum that a coin of this rate moves by `shift`, in noise of this deviation."""
    if noise <= 0:
        return np.where(np.abs(seen) > 1e-3 * np.abs(shift), 1e6, 0.0)
    exponent = (seen * shift - np.square(shift) / 2.0) / noise**2
    if rate >= 1:
        return np.asarray(exponent)
    return np.asarray(np.logaddexp(np.log1p(-rate), np.log(rate) + exponent))
