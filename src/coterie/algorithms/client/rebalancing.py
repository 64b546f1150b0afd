"""Rebalancing, the plug-in of RR-Cluster: no cluster is updated from fewer than B sampled clients.

It goes on top of any algorithm whose clients choose a cluster. A small cluster's sum would drown in noise
that is as large for it as for any other; filled up with clients of large ones it is divided by at least B.

`route` releases a noisy histogram of the choices, computes from it alone with which probability a client of
each cluster moves to each other, and lets every sampled client draw for itself. Clusters then have B members
in expectation, and divisors are public. `rebalance` is the published rule, with noisy identifiers instead of
a histogram and draws without replacement, accounted for soundly: samples of fixed size, compared by replacing
one client. Both stand in `docs/rr-cluster.md`, with proofs. B = 0 is the base algorithm, bit for bit.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, NonNegativeInt, model_validator

from coterie.algorithms.client.client_level import (
    SUMS,
    ClientLevelSettings,
    cohort_size,
    routed_sums,
    sampled_sum,
)
from coterie.algorithms.protocol import CohortJob, Rounds, add_up, count, open_cohort
from coterie.algorithms.settings import PrivacySettings, Ratio
from coterie.errors import InputError
from coterie.privacy import Mechanism, NoiseRule, RebalancedSums, Released
from coterie.privacy.reference import routed_denominators, routing_matrix
from coterie.settings import Settings

AUTO_SHARE = 0.5
"""`minimum: auto` begins at this share of what every cluster would have if all were equal."""


class RebalanceSettings(Settings):
    """How small clusters are filled up."""

    rule: Literal["route", "rebalance", "none"] = Field(
        "route", description="route | rebalance (as published, sound accounting) | none"
    )
    minimum: NonNegativeInt | Literal["auto"] = Field(
        0,
        description="B, least clients in a cluster's update (0: none) | auto (falls from half a fair share)",
    )
    histogram_ratio: Ratio = Field(4.0, description="route: noise of the histogram over that of the sums")
    memory: float = Field(
        0.0, ge=0, lt=1, description="route: weight of earlier rounds in the sizes it goes by (0: this alone)"
    )
    identifier_ratio: Ratio = Field(1.0, description="rebalance: sigma_s over sigma_theta")

    @model_validator(mode="after")
    def _a_fixed_minimum_for_the_published_rule(self) -> "RebalanceSettings":
        if self.rule == "rebalance" and self.minimum == "auto":
            raise ValueError("minimum: auto is for rule route; the published rule takes a number")
        return self

    @property
    def active(self) -> bool:
        return self.rule != "none" and self.minimum != 0


@dataclass(frozen=True)
class Update:
    """Noisy sums and the public numbers to divide them by, one for each cluster."""

    rows: NDArray[np.float64]
    divisors: NDArray[np.float64]
    histogram: Released[NDArray[np.float64]] | None = None
    """Noisy number of clients that chose each cluster, where it was released."""
    believed: NDArray[np.float64] | None = None
    """Cluster sizes that the route and the divisors went by, where there was a route."""
    within: Released[float] | None = None
    """The count that the next clip follows, where it does."""


@dataclass(frozen=True)
class Rebalancing:
    """The plug-in, for one algorithm and population size."""

    settings: RebalanceSettings
    base: ClientLevelSettings
    """What the algorithm beneath is told, too."""
    clusters: int
    rounds: int

    def check(self, clients: int) -> None:
        """Refuse a minimum that a round cannot reach, and a clip that the rule has no proof for."""
        if self.settings.active and self.settings.rule == "rebalance" and self.base.adaptive_clip:
            raise InputError(
                "algorithm.adaptive_clip: the published rule rebalance has a fixed clip; allowed with rule "
                "route or none"
            )
        most = self.fair_share(clients)
        if self.settings.active and self.settings.minimum != "auto" and self.settings.minimum > most:
            raise InputError(
                f"algorithm.rebalance.minimum: {self.settings.minimum}; a round samples {self.base.rate:g} "
                f"of {clients} clients, for {self.clusters} clusters that allows 0 to {int(most)}"
            )

    def fair_share(self, clients: int) -> float:
        """Clients of a round in each cluster, if all were equal: q n / k, a public number."""
        return self.base.rate * clients / self.clusters

    def minimum(self, round: int, clients: int) -> float:
        """B in the round after so many. `auto` helps most at first, when choices mean least."""
        if self.settings.minimum == "auto":
            return AUTO_SHARE * self.fair_share(clients) * (1.0 - round / self.rounds)
        return float(self.settings.minimum)

    def release(self, privacy: PrivacySettings, clients: int) -> Mechanism:
        """What one round releases."""
        if not self.settings.active:
            return sampled_sum(privacy, self.base)
        if self.settings.rule == "route":
            return routed_sums(privacy, self.base, self.settings.histogram_ratio)
        return RebalancedSums(
            clip=privacy.clip,
            noise_multiplier=NoiseRule.SHARED,
            identifier_ratio=self.settings.identifier_ratio,
            clients=clients,
            cohort=cohort_size(self.base.rate, clients),
            adjacency=privacy.adjacency,
        )

    def believed(
        self, before: NDArray[np.float64], histogram: NDArray[np.float64], round: int
    ) -> NDArray[np.float64]:
        """The sizes to go by after so many rounds: a mean of what was released, as far as memory goes.

        Any function of released histograms will do. One histogram's noise would make the divisors noisy, too.
        """
        weight = max(1.0 - self.settings.memory, 1.0 / (round + 1))
        return (1.0 - weight) * before + weight * histogram

    def ask(self, job: CohortJob, round: int, before: NDArray[np.float64]) -> Rounds[Update]:
        """Everything that one round asks of its cohort.

        Args:
            round: rounds completed.
            before: the sizes that the round before went by.
        """
        clients = len(job.members)
        cohort = yield from open_cohort(SUMS, job)
        if not self.settings.active:
            sums = yield from add_up(cohort)
            divisors = np.full(self.clusters, self.fair_share(clients))
            return Update(sums.rows.value, divisors, within=sums.within)
        if self.settings.rule == "rebalance":
            least = int(self.minimum(round, clients))
            sums = yield from add_up(cohort, minimum=least)
            assert sums.sizes is not None
            return Update(sums.rows.value, np.maximum(sums.sizes, least).astype(np.float64))
        released = yield from count(cohort)
        sizes = self.believed(before, released.value, round)
        least_expected = max(self.minimum(round, clients), 1.0)
        route = routing_matrix(sizes, least_expected)
        sums = yield from add_up(cohort, route)
        divisors = routed_denominators(sizes, route, least_expected)
        return Update(sums.rows.value, divisors, released, sizes, sums.within)
