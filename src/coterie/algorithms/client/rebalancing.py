"""Rebalancing, the plug-in of RR-Cluster: no cluster is updated from fewer than B sampled clients.

It goes on top of any algorithm whose clients choose a cluster. A small cluster's sum would drown in noise
that is as large for it as for any other; filled up with clients of large ones it is divided by at least B.

`route` releases a noisy histogram of the choices, computes from it alone with which probability a client of
each cluster moves to each other, and lets every sampled client draw for itself. Clusters then have B members
in expectation, and divisors are public. `rebalance` is the published rule, with noisy identifiers instead of
a histogram and draws without replacement, accounted for soundly: samples of fixed size, compared by replacing
one client. Both stand in `docs/rr-cluster.md`, with proofs. B = 0 is the base algorithm, bit for bit.
"""

from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, NonNegativeInt, model_validator

from coterie.algorithms.client.clustered import Clustered, ClusteredSettings, ClusteredState
from coterie.algorithms.protocol import Count, Floats, Histogram, PublicFacts, Rounds, Sum, Sums, ask
from coterie.algorithms.settings import PRIVATE, Ratio
from coterie.errors import InputError
from coterie.privacy import Mechanism
from coterie.privacy.errors import PrivacyInputError
from coterie.privacy.plans import HISTOGRAM_RATIO, IDENTIFIER_RATIO
from coterie.settings import Acts, Settings

# `minimum: auto` begins at this share of what every cluster would have if all were equal.
AUTO_SHARE = 0.5
_ROUTED = Acts("algorithm.rebalance.rule route and minimum above 0", lambda own, _: own.routes)


class RebalanceSettings(Settings):
    """How small clusters are filled up."""

    rule: Annotated[
        Literal["route", "rebalance", "none"],
        Acts("algorithm.rebalance.minimum above 0", lambda own, _: own.rule == "none" or own.minimum != 0),
    ] = Field("route", description="route | rebalance (as published, sound accounting) | none")
    minimum: Annotated[
        NonNegativeInt | Literal["auto"],
        Acts("algorithm.rebalance.rule route or rebalance", lambda own, _: own.rule != "none"),
    ] = Field(
        0,
        description="B, least clients in a cluster's update (0: none) | auto (falls from half a fair share)",
    )
    histogram_ratio: Annotated[Ratio, _ROUTED, PRIVATE] = Field(
        HISTOGRAM_RATIO, description="route: noise of the histogram over that of the sums"
    )
    memory: Annotated[float, _ROUTED] = Field(
        0.0, ge=0, lt=1, description="route: weight of earlier rounds in the sizes it goes by (0: this alone)"
    )
    identifier_ratio: Annotated[
        Ratio,
        Acts(
            "algorithm.rebalance.rule rebalance and minimum above 0",
            lambda own, _: own.active and own.rule == "rebalance",
        ),
        PRIVATE,
    ] = Field(IDENTIFIER_RATIO, description="rebalance: sigma_s over sigma_theta")

    @model_validator(mode="after")
    def _a_fixed_minimum_for_the_published_rule(self) -> "RebalanceSettings":
        if self.rule == "rebalance" and self.minimum == "auto":
            raise ValueError("minimum: auto is for rule route; the published rule takes a number")
        return self

    @property
    def active(self) -> bool:
        return self.rule != "none" and self.minimum != 0

    @property
    def routes(self) -> bool:
        return self.active and self.rule == "route"


class RebalancedSettings(ClusteredSettings):
    """Options of a clustered algorithm that takes the plug-in."""

    rebalance: RebalanceSettings = Field(
        RebalanceSettings(), description="{rule: route | rebalance | none, minimum: B}; B = 0: as it is"
    )

    @property
    def counts(self) -> bool:
        return self.rebalance.routes


class Rebalanced(Clustered):
    """A clustered algorithm with rebalancing on top, if that is asked for."""

    settings: RebalancedSettings

    def release(self, facts: PublicFacts) -> Mechanism:
        plain, rebalance, clients = super().release(facts), self.settings.rebalance, len(facts.clients)
        if not rebalance.active:
            return plain
        if rebalance.rule == "rebalance" and self.settings.adaptive_clip:
            raise InputError(
                "algorithm.adaptive_clip: the published rule rebalance has a fixed clip; allowed with rule "
                "route or none"
            )
        most = self.fair_share(facts)
        if rebalance.minimum != "auto" and rebalance.minimum > most:
            raise InputError(
                f"algorithm.rebalance.minimum: {rebalance.minimum}; a round samples {self.settings.rate:g} "
                f"of {clients} clients, for {self.settings.clusters} clusters that allows 0 to {int(most)}"
            )
        if rebalance.rule == "route":
            return self.about.sums(histogram_ratio=rebalance.histogram_ratio)
        return self.about.rebalanced(clients, rebalance.identifier_ratio)

    def minimum(self, state: ClusteredState) -> float:
        """B in the round that follows. `auto` helps most at first, when choices mean least."""
        minimum = self.settings.rebalance.minimum
        if minimum == "auto":
            return AUTO_SHARE * self.fair_share(state) * (1.0 - state.round / self.schedule.rounds)
        return float(minimum)

    def believed(self, state: ClusteredState, histogram: Floats) -> Floats:
        """The sizes to go by: a mean of what was released, as far as memory goes.

        Any function of released histograms will do. One histogram's noise would make the divisors noisy, too.
        """
        weight = max(1.0 - self.settings.rebalance.memory, 1.0 / (state.round + 1))
        return (1.0 - weight) * state.believed + weight * histogram

    def round(self, state: ClusteredState) -> Rounds[ClusteredState]:
        rebalance, least = self.settings.rebalance, self.minimum(state)
        cohort = yield from self.opened(state)
        if not rebalance.active:
            sums = yield from ask(Sum(cohort), Sums)
            return self.moved(state, sums, self.fair_share(state))
        if rebalance.rule == "rebalance":
            sums = yield from ask(Sum(cohort, minimum=int(least)), Sums)
            assert sums.sizes is not None
            return self.moved(state, sums, np.maximum(sums.sizes, int(least)).astype(np.float64))
        histogram = (yield from ask(Count(cohort), Histogram)).counts
        sizes, least = self.believed(state, histogram.value), max(least, 1.0)
        route = routing_matrix(sizes, least)
        sums = yield from ask(Sum(cohort, route), Sums)
        moved = self.moved(state, sums, routed_denominators(sizes, route, least))
        return self.revived(replace(moved, believed=sizes), histogram)


def routing_matrix(histogram: Floats, least: float) -> Floats:
    """Probabilities by which members of each cluster move, so that every cluster expects `least` or more.

    Clusters below `least` are filled from those above it, each giving in proportion to its surplus. Rows are
    probabilities for any histogram, also a negative one: it is all that is known about the sample.
    """
    sizes = np.maximum(histogram, 0.0)
    deficit = np.maximum(least - sizes, 0.0)
    surplus = np.maximum(sizes - least, 0.0)
    matrix = np.eye(len(sizes))
    if deficit.sum() == 0.0 or surplus.sum() == 0.0:
        return matrix
    given = surplus * min(1.0, deficit.sum() / surplus.sum())
    leaving = np.divide(given, sizes, out=np.zeros_like(sizes), where=sizes > 0)
    return np.asarray(matrix * (1.0 - leaving)[:, None] + np.outer(leaving, deficit / deficit.sum()))


def routed_denominators(histogram: Floats, matrix: Floats, least: float) -> Floats:
    """Public divisors of the cluster sums: the expected sizes, but at least `least`."""
    if not least > 0:
        raise PrivacyInputError(f"least cluster size: {least} is not allowed, a number above 0 is")
    return np.asarray(np.maximum(least, matrix.T @ np.maximum(histogram, 0.0)))
