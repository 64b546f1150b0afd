"""What a group's master does with its released sums: one optimiser per group, fed by that group alone.

A master's state is a function of its own group's releases, so it adds nothing to what its models tell, and
nothing of one group enters another's model except through workers that are in both.
"""

from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from coterie.algorithms.protocol import Floats, Models
from coterie.algorithms.settings import StepSize
from coterie.settings import Acts, Settings

# Decay of both moments and the floor of the step size, as in FedAdam (Reddi et al. 2021).
_ADAM = (0.9, 0.99, 1e-3)


class MasterSettings(Settings):
    """How a master turns the mean update of a release into a step."""

    optimiser: Literal["plain", "momentum", "adam"] = Field(
        "plain", description="plain (adds the mean update) | momentum | adam"
    )
    lr: StepSize = Field(1.0, description="step size of a master")
    momentum: Annotated[
        float, Acts("algorithm.master.optimiser momentum", lambda own, _: own.optimiser == "momentum")
    ] = Field(0.9, ge=0, lt=1, description="of the optimiser momentum")

    def moments(self, groups: int, parameters: int) -> tuple[Models, Models]:
        """The first and second moment of every group before the first release; empty where none is kept."""
        first = parameters if self.optimiser != "plain" else 0
        second = parameters if self.optimiser == "adam" else 0
        return np.zeros((groups, first), np.float32), np.zeros((groups, second), np.float32)

    def step(self, means: Floats, first: Models, second: Models) -> tuple[Floats, Models, Models]:
        """By how much every group's model moves, and the moments afterwards."""
        if self.optimiser == "plain":
            return self.lr * means, first, second
        if self.optimiser == "momentum":
            moved = self.momentum * first + means
            return self.lr * moved, moved.astype(np.float32), second
        decay, slow, floor = _ADAM
        moved = decay * first + (1 - decay) * means
        spread = slow * second + (1 - slow) * means**2
        step = self.lr * moved / (np.sqrt(spread) + floor)
        return step, moved.astype(np.float32), spread.astype(np.float32)
