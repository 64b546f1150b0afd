"""Algorithms that know how many clients each cluster has, released or told: how their server steps.

A sum is divided by how many clients of its cluster a round expects. All sums have the same noise, so the step
of a small cluster would be mostly noise: `step_noise` bounds the noise in a step, and clusters that would
exceed it take shorter ones. All of it is a function of public numbers and of what was released.
"""

from abc import abstractmethod
from typing import Annotated, TypeVar

import numpy as np
from pydantic import Field

from coterie.algorithms.client.client_level import ClientLevel, ClientLevelSettings, ClientLevelState
from coterie.algorithms.protocol import Floats, Sums
from coterie.algorithms.settings import PRIVATE, Ratio

C = TypeVar("C", bound=ClientLevelState)


class KnownSizesSettings(ClientLevelSettings):
    """Options of algorithms that know the sizes of clusters."""

    step_noise: Annotated[Ratio | None, PRIVATE] = Field(
        0.08,
        description="most noise in any number of a cluster's step, in clips: small clusters take shorter "
        "steps; null: all step alike",
    )


class KnownSizes(ClientLevel[C]):
    """Each cluster's model moves by its own sum, over a public number."""

    settings: KnownSizesSettings

    @abstractmethod
    def sizes(self, state: C) -> Floats:
        """Clients in each cluster: released or told."""

    def expected_in(self, state: C) -> Floats:
        """Clients that a round expects in each cluster, at least one."""
        return np.asarray(np.maximum(1.0, self.settings.rate * self.sizes(state)))

    def noise_in_clips(self, state: C, sums: Sums) -> float:
        """On any number of a sum."""
        return sums.rows.noise_std / (state.clip or self.privacy.clip)

    def stepped(self, state: C, sums: Sums, divisors: Floats, louder: Floats | float = 1.0) -> C:
        """The state after a step by these sums.

        Args:
            divisors: public, one for each cluster.
            louder: how many times the noise of a sum each row carries.
        """
        most = self.settings.step_noise
        if most is not None:
            floor = self.settings.server_step * self.noise_in_clips(state, sums) * np.asarray(louder) / most
            divisors = np.maximum(divisors, floor)
        return self.moved(state, sums, divisors[:, None])
