"""`r-dpcfl`: robust clustered federated learning under record-level privacy.

Malekmohammadi, Taik and Farnadi, "Differentially Private Clustered Federated Learning", TMLR 2025,
Algorithm 1. Line numbers in comments are the paper's. What differs, and why:

- Round 1 serves only to cluster, so by default a client releases a random projection of its clipped
  gradients (`first_round_release: sketch`) with a noise of its own (`first_round_noise: auto`) instead
  of the update under the noise of training: same sensitivity, far fewer noisy dimensions.
- The mixture knows the noise that was added; its separation scores are what remains once noise and the
  search for the best partition are taken off, and an unknown M is the one with the most evidence
  (`coterie.clustering`).
- Clients choose by the exponential mechanism on counts, and the assignment that is kept is the choice
  made most often, not the last one: the votes are released anyway.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field, field_validator

from coterie.algorithms.clusters import check_clusters, equal_starts
from coterie.algorithms.protocol import Findings, Floats, PublicFacts, Rng, Rounds, Vector, select, train
from coterie.algorithms.record.record_level import MixtureState, RecordClusters
from coterie.algorithms.settings import PRIVATE, AlgorithmSettings, PrivacySettings, Schedule
from coterie.clustering.embedding import principal_components
from coterie.clustering.mixture import CLEAR_OVERLAP, Mixture, choose_mixture, fit_mixture
from coterie.errors import InputError
from coterie.privacy import NoiseRule, PlannedRelease, PrivacyPlan, Released
from coterie.privacy.plans import FIRST_ROUND, SELECTION, SELECTION_SHARE
from coterie.privacy.ranges import CLUSTERS, DIMENSIONS, NOISE, RECORDS, Range
from coterie.settings import Acts, within

# Earliest round with private selections: before one round of training all cluster models are equal.
FIRST_SELECTION = 3


def default_sketch_dimensions(parameters: int) -> int:
    """Enough to keep distances, few enough to keep noise out: measured best between 50 and 200."""
    return max(2, min(parameters, 200, max(64, parameters // 10)))


Sketched = Annotated[int | Literal["auto"], within(Range(2, DIMENSIONS.most, whole=True), "auto")]


class RDPCFLSettings(AlgorithmSettings):
    """Options of r-dpcfl."""

    clusters: Annotated[int | Literal["auto"], within(CLUSTERS, "auto")] = Field(
        "auto", description="number of clusters, or auto"
    )
    candidates: Annotated[
        tuple[int, ...], Acts("algorithm.clusters auto", lambda own, _: own.clusters == "auto")
    ] = Field(tuple(range(2, 11)), min_length=1, description="numbers of clusters that auto tries")
    first_round_release: Literal["sketch", "update"] = Field(
        "sketch", description="sketch (a random projection) | update (the paper's)"
    )
    sketch_dimensions: Annotated[
        Sketched,
        Acts("algorithm.first_round_release sketch", lambda own, _: own.first_round_release == "sketch"),
    ] = Field("auto", description="length of the sketch, or auto")
    first_round_noise: Annotated[
        float | Literal["auto", "shared"],
        within(NOISE, "auto", "shared"),
        Acts(
            "privacy.epsilon below .inf, or as a number",
            lambda own, run: own.first_round_noise != "shared" or run.privacy.promises,
        ),
    ] = Field("auto", description="auto | shared (the paper's: that of training) | a noise multiplier")
    first_round_batch: Annotated[
        int | Literal["all"],
        within(RECORDS, "all"),
        Acts("algorithm.first_round_release update", lambda own, _: own.first_round_release == "update"),
    ] = Field("all", description="all records in one step (the paper's), or Poisson batches: for update only")
    selection_share: Annotated[
        float,
        PRIVATE,
        Acts("schedule.rounds 3 or more", lambda _, run: run.schedule.rounds >= FIRST_SELECTION),
    ] = Field(
        SELECTION_SHARE,
        gt=0,
        lt=1,
        description="epsilon of one private selection, as a share of privacy.epsilon",
    )

    @field_validator("candidates")
    @classmethod
    def _candidates_at_least_two(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if min(value) < 2:
            raise ValueError("every candidate must be at least 2")
        return tuple(sorted(set(value)))


@dataclass(frozen=True)
class RDPCFLState(MixtureState):
    """Before clusters are known, `models` holds the initial model alone.

    Args:
        votes: private selections of each client so far.
        switch_round: E_c: first round in which clients choose themselves (0 before it is known).
    """

    growing: ClassVar[Mapping[str, int]] = {"models": 0, "responsibilities": 1, "centres": 0}
    initial: Vector
    votes: Mapping[str, tuple[int, ...]]
    switch_round: int
    scores: Mapping[str, float]
    spread: float
    separation: float
    overlap: float
    clustered: bool
    points: Floats
    centres: Floats

    def check(self) -> None:
        super().check()
        self.check_clusters("votes", self.votes)


class RDPCFL(RecordClusters[RDPCFLState]):
    name = "r-dpcfl"
    settings: RDPCFLSettings

    def __init__(self, settings: RDPCFLSettings, schedule: Schedule, privacy: PrivacySettings) -> None:
        super().__init__(settings, schedule, privacy)
        if schedule.rounds < 2:
            raise InputError(
                f"schedule.rounds: {schedule.rounds} leaves no round to train after the clustering round; "
                "allowed for r-dpcfl: 2 or more"
            )

    @property
    def selections(self) -> int:
        """Rounds E_c .. E_c + floor(E/10), both ends included, if there are so many."""
        return min(self.schedule.rounds // 10 + 1, self.schedule.rounds - FIRST_SELECTION + 1)

    def plan(self, facts: PublicFacts) -> PrivacyPlan:
        self._clusters_allowed(len(facts.clients))
        return super().plan(facts)

    def releases(self, facts: PublicFacts, client: str) -> list[PlannedRelease]:
        records = facts.records[client]
        epsilon = self.settings.selection_share * self.privacy.epsilon_of(client)
        return [
            self._first_round(records, facts.parameters),
            self.training(records, self.schedule.rounds - 1),
            *self.about(records).selections(epsilon, self.selections),
        ]

    def start(self, facts: PublicFacts, rng: Rng) -> RDPCFLState:
        seed, models = equal_starts(facts, rng, 1)
        return RDPCFLState(
            round=0,
            clients=facts.clients,
            seed=seed,
            initial=models[0],
            models=models,
            responsibilities=np.ones((len(facts.clients), 1)),
            cluster_of=dict.fromkeys(facts.clients, 0),
            votes=dict.fromkeys(facts.clients, ()),
            switch_round=0,
            scores={},
            spread=0.0,
            separation=0.0,
            overlap=1.0,
            clustered=False,
            points=np.zeros((len(facts.clients), 2)),
            centres=np.zeros((1, 2)),
        )

    def round(self, state: RDPCFLState) -> Rounds[RDPCFLState]:
        if state.round == 0:
            return (yield from self._cluster(state))
        current = state.round + 1
        votes, joined, kept = state.votes, state.cluster_of, state.cluster_of
        if current < state.switch_round:  # l. 15-17: join a cluster with the mixture's probability
            joined = state.drawn()
        elif current < state.switch_round + self.selections:  # l. 19-21, made private
            choices = yield from select(SELECTION, state.clients, state.models)
            votes = {
                client: (*own, choices[client]) if client in choices else own for client, own in votes.items()
            }
            joined = kept = {**kept, **{client: _most_voted(own) for client, own in votes.items() if own}}
        trained = yield from super().round(replace(state, cluster_of=joined))  # l. 22-28
        return replace(trained, cluster_of=kept, votes=votes)

    def findings(self, state: RDPCFLState) -> Findings | None:
        if state.switch_round == 0:
            return None
        warnings = []
        help_by = (
            "more records, a larger epsilon or a larger share of it in round 1 "
            "(algorithm.first_round_noise) would help"
        )
        if not state.clustered:
            warnings.append(
                f"round 1 shows no clusters: a single one explains it no worse than {len(state.centres)}; "
                f"{help_by}, if there are any"
            )
        elif state.overlap > CLEAR_OVERLAP:
            warnings.append(
                f"the clusters found in round 1 are not clearly apart: the closest two overlap by "
                f"{state.overlap:.0%}, clear is up to {CLEAR_OVERLAP:.0%}; {help_by}"
            )
        return Findings(
            clients=state.clients,
            points=tuple((float(x), float(y)) for x, y in state.points),
            centres=tuple((float(x), float(y)) for x, y in state.centres),
            spread=state.spread,
            responsibilities=tuple(tuple(float(p) for p in row) for row in state.responsibilities),
            separation=state.separation,
            overlap=state.overlap,
            scores=dict(state.scores),
            switch_round=state.switch_round,
            warnings=tuple(warnings),
            clustered=state.clustered,
        )

    # --- round 1 ------------------------------------------------------------------------------------

    def _first_round(self, records: int, parameters: int) -> PlannedRelease:
        wanted, batch = self.settings.first_round_noise, self.settings.first_round_batch
        noise = NoiseRule(wanted) if isinstance(wanted, str) else float(wanted)
        own = self.about(records)
        if self.settings.first_round_release == "sketch":
            return own.sketch(self._sketch_dimensions(parameters), noise)
        if batch == "all":
            return own.steps(FIRST_ROUND, 1, None, noise)
        if batch > records:
            raise InputError(
                f"algorithm.first_round_batch: {batch} is more than the {records} records of a client; "
                f"allowed: all, or 1 to {records}"
            )
        return own.steps(FIRST_ROUND, 1, batch, noise)

    def _sketch_dimensions(self, parameters: int) -> int:
        wanted = self.settings.sketch_dimensions
        if wanted == "auto":
            return default_sketch_dimensions(parameters)
        if wanted > parameters:
            raise InputError(
                f"algorithm.sketch_dimensions: {wanted} is more than the model's {parameters} parameters, "
                f"which a sketch is to be shorter than; allowed: auto, or 2 to {parameters}"
            )
        return wanted

    def _cluster(self, state: RDPCFLState) -> Rounds[RDPCFLState]:
        answers = yield from train(FIRST_ROUND, self.jobs(state))  # l. 6-7
        present, releases = list(answers), list(answers.values())
        mixture, scores = self._fit(releases, int(state.rng().integers(2**31)))  # l. 9-11
        points = np.zeros((len(state.clients), 2))
        rows = state.rows_of(present)
        plane = principal_components(np.stack([release.value for release in releases]), 2)
        points[rows, : plane.shape[1]] = plane
        centres = np.stack([points[rows][mixture.labels == k].mean(axis=0) for k in range(mixture.clusters)])
        return replace(
            state,
            round=1,
            models=np.tile(state.initial, (mixture.clusters, 1)),  # l. 13
            responsibilities=state.odds(present, mixture),
            cluster_of={**state.cluster_of, **dict(zip(present, mixture.labels.tolist(), strict=True))},
            # l. 12
            switch_round=max(FIRST_SELECTION, int((1.0 - mixture.overlap) * self.schedule.rounds / 2 + 1e-6)),
            scores={str(candidate): score for candidate, score in scores.items()},
            spread=mixture.spread,
            separation=mixture.separation,
            overlap=mixture.overlap,
            clustered=mixture.clustered,
            points=points,
            centres=centres,
        )

    def _fit(self, releases: list[Released[Vector]], seed: int) -> tuple[Mixture, Mapping[int, float]]:
        allowed = self._clusters_allowed(len(releases))
        if self.settings.clusters == "auto":
            return choose_mixture(releases, allowed, seed)
        mixture = fit_mixture(releases, self.settings.clusters, seed)
        return mixture, {self.settings.clusters: mixture.separation}

    def _clusters_allowed(self, clients: int) -> list[int]:
        """Numbers of clusters that can be told apart among so many clients."""
        if self.settings.clusters != "auto":
            check_clusters(self.settings.clusters, clients, also="auto, or ")
            return [self.settings.clusters]
        allowed = [candidate for candidate in self.settings.candidates if candidate < clients]
        if clients < 3:
            found = "2 clients" if clients == 2 else "1 client"
            instead = "2, or another algorithm" if clients == 2 else "another algorithm"
            raise InputError(
                f"algorithm.clusters: auto cannot tell clusters among {found}, it takes 3 or more; "
                f"allowed here: {instead} (local, global)"
            )
        if not allowed:
            raise InputError(
                f"algorithm.candidates: {list(self.settings.candidates)} leaves nothing to try with "
                f"{clients} clients; allowed: numbers from 2 to {clients - 1}"
            )
        return allowed


def _most_voted(votes: tuple[int, ...]) -> int:
    """The cluster a client chose most often; between equals, the one chosen last."""
    return Counter(reversed(votes)).most_common(1)[0][0]
