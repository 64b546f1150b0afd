"""How the models of a simulation do on held-out records: exactly, or privately and within the guarantee."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from coterie.algorithms import AnyAlgorithm
from coterie.algorithms.protocol import Assignment, OwnChoice, State
from coterie.data import Federation
from coterie.engines.evaluation import PrivateScores
from coterie.engines.local import LocalEngine
from coterie.errors import InputError
from coterie.experiment.metrics import Scores, Spread, accuracy, loss
from coterie.experiment.schema import EvaluationKind, Experiment
from coterie.privacy import Budget, HeldOut, PrivacyPlan, Released, Unit
from coterie.privacy.evaluation import with_client_scores, with_held_out_records
from coterie.training.learner import Batch, Learner
from coterie.training.scoring import Score, client_sums

MEMORABLE = 1.0
"""Epsilon of private evaluations where nobody says otherwise and the budget allows it."""
CLIENT_SHARE = 0.1
"""Of a client's whole budget, which its scores are a part of."""
NORMAL_95 = 1.959963984540054

HELD_OUT = "test scores are computed on held-out records, outside the guarantee"
REFERENCES = "fairness figures compare with central models trained without privacy, outside the guarantee"
OWN_CHOICE = "which model a client uses is its own affair: what a simulation prints of it is outside, too"


@dataclass(frozen=True)
class Evaluation:
    """What held-out records said after a round."""

    round: int
    assignment: Assignment | None
    """Which model each client uses; None where only the client knows, and is not asked to tell."""
    accuracy: Spread
    loss: Spread | None = None
    scores: Scores | None = None
    """Of every client, where they are exact."""


# --- what is planned --------------------------------------------------------------------------------


def caveats_of(experiment: Experiment, kind: EvaluationKind, references: bool) -> Iterator[str]:
    """What a guarantee must add because of what is shown beside it."""
    if kind is EvaluationKind.EXACT:
        yield HELD_OUT
        if references:
            yield REFERENCES
        if experiment.privacy.unit is Unit.CLIENT:
            yield OWN_CHOICE


def held_out_records(
    experiment: Experiment, kind: EvaluationKind, test_records: Mapping[str, int]
) -> dict[str, HeldOut]:
    """What each client of a simulation reports about the records that it holds out."""
    if kind is not EvaluationKind.PRIVATE:
        return {}
    reports = experiment.evaluation.times(kind, experiment.schedule.rounds)
    return {
        client: HeldOut(count, evaluation_epsilon(experiment, experiment.privacy.epsilon_of(client)), reports)
        for client, count in test_records.items()
    }


def with_evaluation(
    draft: PrivacyPlan,
    budgets: Mapping[str, Budget],
    reported: Mapping[str, HeldOut],
    accountant: str,
) -> tuple[PrivacyPlan, dict[str, Budget]]:
    """The draft of a plan, and its budgets, with all private scores in it.

    Args:
        reported: of every client that reports. Where clients are protected, all report, and as often.
    """
    if not reported:
        return draft, dict(budgets)
    if draft.unit is Unit.RECORD:
        return with_held_out_records(draft, budgets, reported)
    each = {(own.epsilon, own.reports) for own in reported.values()}
    epsilon, reports = min(epsilon for epsilon, _ in each), min(reports for _, reports in each)
    together = HeldOut(len(reported), epsilon, reports)
    return with_client_scores(draft, budgets, together, accountant), dict(budgets)


def evaluation_epsilon(experiment: Experiment, budget: float) -> float:
    """What evaluations may cost where the whole budget is this."""
    asked = experiment.evaluation.epsilon
    if asked is None:
        share = 1.0 if experiment.privacy.unit is Unit.RECORD else CLIENT_SHARE
        return min(MEMORABLE, share * budget)
    if asked > budget:
        raise InputError(
            f"evaluation.epsilon: {asked:g} is more than the budget of {budget:g}; allowed: at most that"
        )
    return asked


# --- what is measured -------------------------------------------------------------------------------


class Evaluator:
    """Judges models on the held-out records of a federation."""

    def __init__(
        self,
        experiment: Experiment,
        federation: Federation,
        learner: Learner,
        algorithm: AnyAlgorithm,
        engine: LocalEngine,
    ) -> None:
        self._settings = experiment.evaluation
        self._rounds = experiment.schedule.rounds
        self._unit = experiment.privacy.unit
        self._learner = learner
        self._algorithm = algorithm
        self._engine = engine
        self._tests = {client.name: Batch.of(client.test, learner.device) for client in federation.clients}
        self._sizes = np.array([len(records) for records in self._tests.values()])
        self._latest: Evaluation | None = None
        self.kind = experiment.evaluation_kind

    def after(self, state: State) -> Evaluation | None:
        """What this round's models do; None in rounds that are not evaluated.

        Asked again about a round, a private evaluation gives the same answer and is not charged again.
        """
        if not self._settings.due(self.kind, state.round, self._rounds):
            return None
        if self._latest is None or self._latest.round != state.round:
            exact = self.kind is EvaluationKind.EXACT
            self._latest = self._exactly(state) if exact else self._privately(state)
        return self._latest

    def _exactly(self, state: State) -> Evaluation:
        assignment = self._served(state)
        means = self._sums(assignment) / self._sizes[:, None]
        scores = {client: Score(*row) for client, row in zip(self._tests, means.tolist(), strict=True)}
        return Evaluation(state.round, assignment, accuracy(scores), loss(scores), scores)

    def _privately(self, state: State) -> Evaluation:
        scores, served = self._private_scores(), self._algorithm.models(state)
        if self._unit is Unit.RECORD:
            assert isinstance(served, Assignment)

            def count() -> dict[str, float]:
                return dict(zip(self._tests, self._sums(served)[:, 0].tolist(), strict=True))

            sizes = dict(zip(self._tests, self._sizes.tolist(), strict=True))
            models = {client: served.model_of(client) for client in self._tests}
            counts = scores.of_records(models, state.round, count)
            return Evaluation(state.round, served, private_accuracy(counts, sizes))

        def shares() -> dict[str, float]:
            # Which model each of them uses is found for this sum alone, and forgotten.
            found = self._sums(self._served(state))[:, 0] / self._sizes
            return dict(zip(self._tests, found.tolist(), strict=True))

        total = scores.of_clients(rows_of(served), state.round, shares)
        known = served if isinstance(served, Assignment) else None
        return Evaluation(state.round, known, private_mean(total, len(self._tests)))

    def _private_scores(self) -> PrivateScores:
        engine = self._engine
        return PrivateScores(engine.facts, engine.plan, engine.ledger, engine.context)

    def _served(self, state: State) -> Assignment:
        """Which model each client uses now; where only the clients know, the engine asks them."""
        served = self._algorithm.models(state)
        return self._engine.members.serve(served) if isinstance(served, OwnChoice) else served

    def _sums(self, served: Assignment) -> NDArray[np.float64]:
        """Of scores and of losses, by client."""
        clients, learner = list(self._tests), self._learner
        # Rows of clients with a model of their own come after those of the clusters.
        model_of = [served.cluster_of[client] for client in clients]
        for position, client in enumerate(served.own):
            model_of[clients.index(client)] = len(served.models) + position
        models = torch.from_numpy(rows_of(served)).to(learner.device)
        return client_sums(learner, models, model_of, list(self._tests.values()))


def rows_of(served: Assignment | OwnChoice) -> NDArray[np.float32]:
    """All models that clients use or choose from: those of the clusters, then those of single clients."""
    own: Sequence[NDArray[np.float32]] = (
        [row[None] for row in served.own.values()] if isinstance(served, Assignment) else []
    )
    return np.concatenate([served.models, *own])


# --- from noisy sums to figures -----------------------------------------------------------------------


def private_accuracy(counts: Mapping[str, Released[float]], sizes: Mapping[str, int]) -> Spread:
    """Accuracy of each client and their mean, with the 95 % intervals of the noise in them."""
    shares = {client: counted.value / sizes[client] for client, counted in counts.items()}
    noise = {client: counted.noise_std / sizes[client] for client, counted in counts.items()}
    per_client = {client: _within(share) for client, share in shares.items()}
    mean = math.fsum(shares.values()) / len(shares)
    deviation = math.hypot(*noise.values()) / len(noise)
    spread = [share * (1.0 - share) / sizes[client] for client, share in per_client.items()]
    return Spread(
        mean=_within(mean),
        min=min(per_client.values()),
        max=max(per_client.values()),
        per_client=per_client,
        kind=EvaluationKind.PRIVATE.value,
        interval=_interval(mean, deviation),
        sampling_error=NORMAL_95 * math.sqrt(math.fsum(spread)) / len(spread),
        intervals={client: _interval(share, noise[client]) for client, share in shares.items()},
    )


def private_mean(total: Released[float], clients: int) -> Spread:
    """The mean over clients of what each gets right; of single clients nothing is known."""
    mean, deviation = total.value / clients, total.noise_std / clients
    # Shares in [0, 1] with this mean vary by at most so much from client to client.
    spread = NORMAL_95 * math.sqrt(_within(mean) * (1.0 - _within(mean)) / clients)
    return Spread(
        mean=_within(mean),
        min=None,
        max=None,
        per_client={},
        kind=EvaluationKind.PRIVATE.value,
        interval=_interval(mean, deviation),
        sampling_error=spread,
    )


def _interval(value: float, deviation: float) -> tuple[float, float]:
    """Where the exact score is in 95 of 100 cases; it cannot be outside [0, 1]."""
    half = NORMAL_95 * deviation
    return _within(value - half), _within(value + half)


def _within(share: float) -> float:
    return min(max(share, 0.0), 1.0)
