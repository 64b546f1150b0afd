"""`dp-sketch-cluster`: clusters of clients are found privately first, and trained then.

In round 1 all clients release three noisy sums of what each derives from a sketch of its own gradient at the
common start (`coterie.algorithms.sketches`): second moments, which show in which directions clients differ;
random Fourier features in these directions, to which a mixture with a common spread is fitted
(`coterie.clustering.feature_mixture`); and how many clients are nearest to each component. From round 2 on a
sampled client trains the model of the component that its own sketch is nearest to. The sketch never leaves
it, and which component that is, neither. Privacy of every part is proven in `docs/rr-cluster.md`.

The idea of clustering once, before training, is that of one-shot clustered federated learning (Ghosh, Hong,
Yin and Ramchandran 2019; Dennis, Li and Smith, ICML 2021), which releases each client's own model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field, NonNegativeInt

from coterie.algorithms.client.client_level import ClientLevelState
from coterie.algorithms.client.known_sizes import KnownSizes, KnownSizesSettings
from coterie.algorithms.client.rebalancing import routed_denominators, routing_matrix
from coterie.algorithms.clusters import check_clusters, equal_starts
from coterie.algorithms.protocol import (
    Choice,
    Cohort,
    CohortJob,
    Findings,
    Floats,
    Opened,
    OwnChoice,
    PublicFacts,
    Rng,
    Rounds,
    Sketch,
    Sum,
    Sums,
    Vector,
    ask,
)
from coterie.algorithms.settings import PRIVATE, PrivacySettings, Schedule
from coterie.algorithms.sketches import SQUARES, SketchStatistic, moment_numbers, read_moments
from coterie.clustering.feature_mixture import (
    MOST_DIRECTIONS,
    FeatureMixture,
    fit_features,
    reported_sizes,
    strongest_directions,
)
from coterie.errors import InputError
from coterie.privacy import NoiseRule, PlannedRelease, Released, SketchSums
from coterie.privacy.ranges import CLUSTERS, NOISE, Range
from coterie.privacy.sketch_sums import EVERYONE
from coterie.settings import Acts, Settings, within

# Numbers of a sketch: fewer bring clusters together by chance, more add noise to their moments.
DIMENSIONS = 48
# Frequencies at which features are taken.
FREQUENCIES = 256
# Noise of features and of sizes over that of moments: what each needs, measured.
FEATURES_RATIO, SIZES_RATIO = 0.8, 2.1
# Standard deviations of its noise above which a component's released size must be, or it is none.
CLEAR_SIZE = 2.5
# Most components that are looked for where their number is not told.
MOST_COMPONENTS = 12
# Clients that a round expects in a cluster, in units of the noise on its sum, below which it is not served.
SERVED = 2.0
_CONTRIBUTIONS = {
    SketchStatistic.MOMENTS: "the moments of its projected gradient",
    SketchStatistic.FEATURES: "random Fourier features of its projected gradient",
    SketchStatistic.SIZES: "which component its projected gradient is nearest to",
}
_RATIOS = {
    SketchStatistic.MOMENTS: 1.0,
    SketchStatistic.FEATURES: FEATURES_RATIO,
    SketchStatistic.SIZES: SIZES_RATIO,
}


class SmallClusters(Settings):
    """What becomes of clusters of which a round expects fewer than so many clients."""

    rule: Annotated[
        Literal["route", "gmfsc"],
        Acts("algorithm.rebalance.minimum above 0", lambda own, _: own.minimum > 0),
    ] = Field("route", description="route (filled up from large ones) | gmfsc (they step as all do)")
    minimum: NonNegativeInt = Field(
        0, description="B, least clients that a round expects in a cluster's own update (0: any number)"
    )


class SketchClusterSettings(KnownSizesSettings):
    """Options of dp-sketch-cluster."""

    clusters: Annotated[int | Literal["auto"], within(CLUSTERS, "auto")] = Field(
        "auto", description="most clusters to look for, or auto: as many as stand out of the noise"
    )
    sketch_dimensions: Annotated[int | Literal["auto"], within(Range(2, 128, whole=True), "auto")] = Field(
        "auto",
        description="numbers of a client's sketch, a random projection of its gradient; auto: 48, or half as "
        "many as clients if that is less",
    )
    sketch_noise: Annotated[float | Literal["auto"], within(NOISE, "auto"), PRIVATE] = Field(
        "auto", description="noise multiplier of the first round's moments, or auto: a small part of all"
    )
    rebalance: SmallClusters = Field(
        SmallClusters(),
        description="{rule: route | gmfsc, minimum: B}, by the sizes of round 1; B = 0: as it is",
    )


@dataclass(frozen=True)
class SketchClusterState(ClientLevelState):
    """Before clusters are known, `models` holds the initial model alone.

    Args:
        initial: the model at which gradients are sketched, and from which every cluster starts.
        middle, basis, centres: of the components, from what was released; beyond the directions used, zeros.
        sizes: released size of each component.
        spread: of a component along each direction.
        noise: on a sum, in units of the clip, in the last round.
    """

    growing: ClassVar[Mapping[str, int]] = {"models": 0, "centres": 0, "sizes": 0}
    initial: Vector
    middle: Floats
    basis: Floats
    centres: Floats
    sizes: Floats
    size_noise: float
    spread: float
    separation: float
    overlap: float
    gains: tuple[float, ...]
    noise: float


class SketchCluster(KnownSizes[SketchClusterState]):
    name = "dp-sketch-cluster"
    settings: SketchClusterSettings
    choice = Choice.SKETCH

    def __init__(self, settings: SketchClusterSettings, schedule: Schedule, privacy: PrivacySettings) -> None:
        super().__init__(settings, schedule, privacy)
        if schedule.rounds < 2:
            raise InputError(
                f"schedule.rounds: {schedule.rounds} leaves no round to train after the clustering round; "
                f"allowed for {self.name}: 2 or more"
            )

    # --- plan -----------------------------------------------------------------------------------------

    def first_releases(self, facts: PublicFacts) -> Sequence[PlannedRelease]:
        if self.settings.clusters != "auto":
            check_clusters(self.settings.clusters, len(facts.clients), also="auto, or ")
        least, most = self.settings.rebalance.minimum, self.expected(facts)
        if least > most:
            raise InputError(
                f"algorithm.rebalance.minimum: {least}; a round samples {self.settings.rate:g} of "
                f"{len(facts.clients)} clients, that allows 0 to {int(most)}"
            )
        dimensions = self.dimensions(facts)
        if dimensions > facts.parameters:
            raise InputError(
                f"algorithm.sketch_dimensions: {dimensions} is more than the model's {facts.parameters} "
                f"parameters, which a sketch is to be shorter than; allowed: auto, or 2 to {facts.parameters}"
            )
        numbers = {
            SketchStatistic.MOMENTS: moment_numbers(dimensions),
            SketchStatistic.FEATURES: 2 * FREQUENCIES,
            SketchStatistic.SIZES: self.most_components,
        }
        return [
            self._planned(statistic, numbers[statistic], len(facts.clients)) for statistic in SketchStatistic
        ]

    def dimensions(self, facts: PublicFacts) -> int:
        """Of a sketch."""
        wanted = self.settings.sketch_dimensions
        if wanted != "auto":
            return wanted
        # In as many directions as there are clients any few of them stand apart by chance.
        return min(DIMENSIONS, facts.parameters, max(2, len(facts.clients) // 2))

    @property
    def most_components(self) -> int:
        wanted = self.settings.clusters
        return MOST_COMPONENTS if wanted == "auto" else max(MOST_COMPONENTS, wanted)

    def _planned(self, statistic: SketchStatistic, numbers: int, clients: int) -> PlannedRelease:
        wanted = self.settings.sketch_noise
        noise = NoiseRule.AUTO if wanted == "auto" else float(wanted)
        sums = SketchSums(
            1.0,
            noise,
            EVERYONE,
            self.privacy.adjacency,
            numbers=numbers,
            clients=clients,
            ratio=_RATIOS[statistic],
            about=_CONTRIBUTIONS[statistic],
        )
        return PlannedRelease(statistic.value, sums, 1)

    # --- rounds ---------------------------------------------------------------------------------------

    def start(self, facts: PublicFacts, rng: Rng) -> SketchClusterState:
        seed, models = equal_starts(facts, rng, 1)
        dimensions = self.dimensions(facts)
        return SketchClusterState(
            0,
            facts.clients,
            seed,
            models,
            initial=models[0],
            middle=np.zeros(dimensions),
            basis=np.zeros((dimensions, MOST_DIRECTIONS)),
            centres=np.zeros((1, MOST_DIRECTIONS)),
            sizes=np.array([float(len(facts.clients))]),
            size_noise=0.0,
            spread=1.0,
            separation=0.0,
            overlap=1.0,
            gains=(),
            noise=0.0,
            clip=self.first_clip(),
        )

    def round(self, state: SketchClusterState) -> Rounds[SketchClusterState]:
        if state.round == 0:
            return (yield from self._cluster(state))
        cohort = yield from self.opened(state)
        rebalance, expected = self.settings.rebalance, self.expected_in(state)
        least, louder = float(rebalance.minimum), np.ones(len(expected))
        route = None
        if least and rebalance.rule == "route":
            # Of released sizes alone: clients need not be counted again in every round.
            route = routing_matrix(expected, least)
            expected = routed_denominators(expected, route, least)
        sums = yield from ask(Sum(cohort, route), Sums)
        if rebalance.rule == "gmfsc":
            small = expected < least
            rows = sums.rows.map(lambda own: np.where(small[:, None], own.sum(axis=0), own))
            sums = replace(sums, rows=rows)
            louder = np.where(small, np.sqrt(len(small)), louder)
            expected = np.where(small, self.expected(state), expected)
        moved = self.stepped(state, sums, expected, louder)
        return replace(moved, noise=self.noise_in_clips(state, sums))

    def sizes(self, state: SketchClusterState) -> Floats:
        return state.sizes

    def sketch(self, state: SketchClusterState) -> Sketch:
        return Sketch(
            state.initial,
            len(state.middle),
            mean=state.middle,
            basis=state.basis,
            centres=state.centres,
        )

    def models(self, state: SketchClusterState) -> OwnChoice:
        return OwnChoice(state.models, self.choice, self.local_training(), sketch=self.sketch(state))

    def _cluster(self, state: SketchClusterState) -> Rounds[SketchClusterState]:
        """Round 1: moments, features, sizes; whatever is done with what was released is free."""
        clients, dimensions = len(state.clients), len(state.middle)
        known = Sketch(state.initial, dimensions, SketchStatistic.MOMENTS)
        moments = yield from self._released(state, known)
        sums, squares = read_moments(moments.value, dimensions)
        where = strongest_directions(sums, squares, moments.noise_std / np.sqrt(SQUARES), clients)
        used = where.basis.shape[1]
        frequencies = np.zeros((FREQUENCIES, MOST_DIRECTIONS))
        rng = state.rng()
        frequencies[:, :used] = rng.normal(size=(FREQUENCIES, used)) / where.width
        basis = np.zeros((dimensions, MOST_DIRECTIONS))
        basis[:, :used] = where.basis
        known = replace(
            known, statistic=SketchStatistic.FEATURES, mean=where.mean, basis=basis, frequencies=frequencies
        )
        features = yield from self._released(state, known)
        wanted = self.settings.clusters
        mixture = fit_features(
            frequencies[:, :used],
            features.value,
            features.noise_std,
            where,
            state.seed,
            clients=clients,
            most=self.most_components,
            wanted=None if wanted == "auto" else wanted,
        )
        # As many places as were planned, whatever was found: nobody is nearest to one that is far away.
        centres = np.full((self.most_components, MOST_DIRECTIONS), 1e3)
        centres[: len(mixture.centres)] = 0.0
        centres[: len(mixture.centres), :used] = mixture.centres
        sizes = yield from self._released(
            state, replace(known, statistic=SketchStatistic.SIZES, centres=centres)
        )
        return self._clustered(state, replace(known, centres=centres), mixture, sizes)

    def _released(self, state: SketchClusterState, sketch: Sketch) -> Rounds[Released[Floats]]:
        """The noisy sum of what every client derives from its sketch."""
        assert sketch.statistic is not None
        job = CohortJob(state.clients, state.initial[None], self.local_training(), sketch=sketch)
        cohort = yield from ask(Cohort(sketch.statistic.value, job), Opened)
        return (yield from ask(Sum(cohort), Sums)).rows.map(lambda rows: rows[0])

    def _clustered(
        self, state: SketchClusterState, known: Sketch, mixture: FeatureMixture, sizes: Released[Floats]
    ) -> SketchClusterState:
        """The state in which every component that somebody is nearest to is a cluster, the largest first."""
        assert known.mean is not None
        assert known.basis is not None
        assert known.centres is not None
        found = sizes.value[: len(mixture.centres)]
        order = np.argsort(-found, kind="stable")
        kept = [place for place in order if found[place] > CLEAR_SIZE * sizes.noise_std] or [order[0]]
        left = FeatureMixture(mixture.centres[kept], found[kept], mixture.spread)
        return replace(
            state,
            round=1,
            models=np.tile(state.initial, (len(kept), 1)),
            middle=known.mean,
            basis=known.basis,
            centres=known.centres[kept],
            sizes=np.maximum(found[kept], 1.0),
            size_noise=sizes.noise_std,
            spread=mixture.spread,
            separation=min(left.separation, 1e6),
            overlap=left.overlap,
            gains=mixture.gains,
        )

    # --- what was found -------------------------------------------------------------------------------

    def findings(self, state: SketchClusterState) -> Findings | None:
        if state.round == 0:
            return None
        plane = state.centres[:, :2]
        return Findings(
            clients=(),
            points=(),
            centres=tuple((float(x), float(y)) for x, y in plane),
            spread=state.spread,
            responsibilities=(),
            separation=state.separation,
            overlap=state.overlap,
            scores={str(len(state.centres)): state.separation},
            switch_round=0,
            warnings=tuple(self._warnings(state)),
            clustered=len(state.centres) > 1,
            sizes=reported_sizes(state.sizes.tolist()),
            size_noise=state.size_noise,
        )

    def _warnings(self, state: SketchClusterState) -> list[str]:
        told, wanted = [], self.settings.clusters
        if len(state.centres) == 1:
            told.append(
                "round 1 shows no clusters: everyone has one model; more clients, a larger epsilon or less "
                "noise in round 1 (algorithm.sketch_noise) would help, if there are any"
            )
        elif wanted != "auto" and len(state.centres) < wanted:
            told.append(f"round 1 shows {len(state.centres)} clusters, not the {wanted} that were asked for")
        for cluster, size in enumerate(state.sizes):
            if self.settings.rate * size < SERVED * state.noise:
                told.append(
                    f"cluster {cluster}, about {round(size)} clients: below what epsilon "
                    f"{self.privacy.epsilon:g} can serve; they would do better with the model of cluster 0 "
                    "or a larger epsilon"
                )
        return told
