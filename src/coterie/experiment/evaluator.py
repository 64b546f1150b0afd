"""How the models of a run do on held-out records: exactly, or privately and within the guarantee.

One evaluator serves every run. What differs is where held-out records lie: on this machine, where they can
be read, or at sites, which answer with noisy counts or leave the noise to a server that they trust.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from coterie.algorithms.protocol import Assignment, OwnChoice, State
from coterie.data import ClustersFederation, Federation, load_dataset, whole_test
from coterie.engines.evaluation import PrivateScores
from coterie.engines.feature_cache import FeatureCache
from coterie.engines.features import encoded
from coterie.engines.local import LocalEngine
from coterie.experiment.calibrated import CalibratedRun, wanted_scores
from coterie.experiment.private_scores import Floats, bounded_rmse, joint_scores
from coterie.experiment.result import Scores, Spread, cluster_means, fairness, groups
from coterie.experiment.schema import EvaluationKind, Experiment
from coterie.experiment.scores import PooledScores, exact_scores, scores_from_json
from coterie.files import Json
from coterie.privacy import EVALUATION, POPULATION, JointScores, Released, Unit, held_out
from coterie.privacy.joint_scores import Statistic
from coterie.training.learner import Batch, Learner
from coterie.training.scoring import Score, client_outputs, client_sums, evaluate, join
from coterie.training.statistics import statistic_sums

log = logging.getLogger(__name__)

NORMAL_95 = 1.959963984540054
EPOCHS, BATCH = 30, 64
"""Of central models without privacy, which show what a cluster could reach at best."""
QUICK_WORK = 5e9
"""Parameters times records of central models that `references: auto` still trains."""
Served = Assignment | OwnChoice
"""The models that clients use, or choose from."""


@dataclass(frozen=True)
class Evaluation:
    """What held-out records said after a round.

    Args:
        assignment: which model each client uses; None where only the client knows, and is not asked to tell.
        reached: accuracy, or a regression's bounded score.
        scores: of every client, where they are exact.
        pooled: of all held-out records together, where they are private.
    """

    assignment: Assignment | None
    reached: Spread
    loss: Spread | None = None
    scores: Scores | None = None
    pooled: PooledScores = field(default_factory=dict)


class HeldOutScores(Protocol):
    """Whoever answers for held-out records with noise, charged before any of them is read."""

    def of_records(
        self, served: Assignment, clients: Collection[str], round: int
    ) -> Mapping[str, Released[float]]:
        """Noisy number of held-out records that its model gets right, of each of the clients that answers."""

    def of_clients(self, served: Served, round: int) -> Released[float]:
        """Noisy sum over all clients of the share of held-out records that each gets right."""

    def jointly_of_records(
        self, served: Assignment, clients: Collection[str], round: int
    ) -> Mapping[str, Released[Floats]]:
        """Noisy sums of several statistics of held-out records, of each of the clients."""

    def jointly_of_clients(self, served: Served, round: int) -> Released[Floats]:
        """Noisy sum over all clients of the means of several statistics."""


class Evaluator:
    """Judges the models of a run whenever that is due."""

    def __init__(
        self,
        calibrated: CalibratedRun,
        private: HeldOutScores,
        exact: Callable[[Served], tuple[Assignment, Scores]] | None = None,
        metrics: Sequence[Json] = (),
    ) -> None:
        """Create.

        Args:
            private: answers with noise.
            exact: gives scores as they are, where evaluation is exact.
            metrics: what the run has told of its rounds so far.
        """
        self._calibrated = calibrated
        self._private = private
        self._exact = exact
        self._latest: tuple[int, Evaluation | None] | None = None
        if metrics and exact is None:
            # What was told of a round stays as it was: nobody is asked again, also after a crash.
            last = metrics[-1]
            reached, pooled = last["accuracy"] or last.get("bounded_score"), last.get("scores", {})
            told = None
            if reached:
                told = Evaluation(None, Spread.from_json(reached), pooled=scores_from_json(pooled))
            self._latest = int(metrics[-1]["round"]), told

    def after(self, state: State) -> Evaluation | None:
        """What this round's models do, the same when asked again; None in rounds that are not evaluated."""
        if self._latest is None or self._latest[0] != state.round:
            self._latest = state.round, self._judge(state)
        return self._latest[1]

    def _judge(self, state: State) -> Evaluation | None:
        experiment, served = self._calibrated.experiment, self._calibrated.algorithm.models(state)
        kind = EvaluationKind.PRIVATE if self._exact is None else EvaluationKind.EXACT
        due = experiment.evaluation.due(kind, experiment.schedule.rounds)
        if state.round not in due:
            return None
        if self._exact is not None:
            assignment, scores = self._exact(served)
            right = Spread.of({client: score.accuracy for client, score in scores.items()})
            lost = Spread.of({client: score.loss for client, score in scores.items()})
            return Evaluation(assignment, right, lost, scores)
        # Operators of sites may allow fewer reports than are wanted: then the last ones are made.
        reported = self._calibrated.population.reported
        sizes = {name: own.units for name, own in reported.items() if state.round in due[-own.reports :]}
        if not sizes:
            return None
        if not experiment.privacy.unit.within_client:
            return self._of_clients(served, state.round)
        assert isinstance(served, Assignment)
        return self._of_records(served, sizes, state.round)

    def _of_clients(self, served: Served, round: int) -> Evaluation:
        """Means over clients; of single ones nothing is known."""
        population = self._calibrated.population
        clients, about = len(population.records), (population.task, population.label_range)
        known = served if isinstance(served, Assignment) else None
        wanted = wanted_scores(self._calibrated.experiment, population)
        if wanted.is_plain:
            total = self._private.of_clients(served, round)
            return Evaluation(
                known, private_mean(total, clients), pooled=bounded_rmse(total, clients, *about)
            )
        mechanism = self._calibrated.plan.planned(JointScores, EVALUATION, POPULATION)
        joint = self._private.jointly_of_clients(served, round)
        first = Released(float(mechanism.natural(joint.value, clients)[0]), joint.noise_std)
        pooled = joint_scores(wanted, mechanism, joint, clients, *about)
        return Evaluation(known, private_mean(first, clients), pooled=pooled)

    def _of_records(self, served: Assignment, sizes: Mapping[str, int], round: int) -> Evaluation | None:
        """By client and all together, of those that answer."""
        population = self._calibrated.population
        about, wanted = (
            (population.task, population.label_range),
            wanted_scores(self._calibrated.experiment, population),
        )
        if wanted.is_plain:
            counts = self._private.of_records(served, sizes, round)
            if not counts:
                return None
            total, units = added(counts), sum(sizes[client] for client in counts)
            pooled = bounded_rmse(total, units, *about)
            return Evaluation(served, private_accuracy(counts, sizes), pooled=pooled)
        joint = self._private.jointly_of_records(served, sizes, round)
        plan, units = self._calibrated.plan, sum(sizes[client] for client in joint)
        mechanisms = {client: plan.planned(JointScores, EVALUATION, held_out(client)) for client in joint}
        first = {
            client: Released(float(mechanisms[client].natural(own.value, sizes[client])[0]), own.noise_std)
            for client, own in joint.items()
        }
        pooled = joint_scores(wanted, next(iter(mechanisms.values())), added(joint), units, *about)
        return Evaluation(served, private_accuracy(first, sizes), pooled=pooled)


class LocalScores:
    """Scores on held-out records that lie on this machine."""

    def __init__(self, federation: Federation, engine: LocalEngine) -> None:
        self._engine = engine
        self._tests = {
            client.name: Batch.of(client.test, engine.learner.device) for client in federation.clients
        }
        self._sizes = np.array([len(records) for records in self._tests.values()])
        self._private = PrivateScores(engine.facts, engine.plan, engine.ledger, engine.context)

    def exact(self, served: Served) -> tuple[Assignment, Scores]:
        """The score of every client, with the model that it uses."""
        assignment = self._assigned(served)
        means = self._sums(assignment) / self._sizes[:, None]
        return assignment, {
            client: Score(*row) for client, row in zip(self._tests, means.tolist(), strict=True)
        }

    def of_records(
        self, served: Assignment, clients: Collection[str], round: int
    ) -> dict[str, Released[float]]:
        models = {client: served.model_of(client) for client in clients}
        return self._private.of_records(models, round, lambda: self._right(served, 1))

    def of_clients(self, served: Served, round: int) -> Released[float]:
        # Which model each of them uses is found for this sum alone, and forgotten.
        return self._private.of_clients(
            rows_of(served), round, lambda: self._right(self._assigned(served), self._sizes)
        )

    def jointly_of_records(
        self, served: Assignment, clients: Collection[str], round: int
    ) -> dict[str, Released[Floats]]:
        models = {client: served.model_of(client) for client in clients}
        statistics = self._statistics(held_out(next(iter(clients))))
        return self._private.jointly_of_records(models, round, lambda: self._summed(served, statistics))

    def jointly_of_clients(self, served: Served, round: int) -> Released[Floats]:
        statistics = self._statistics(POPULATION)

        def means() -> dict[str, Floats]:
            found = self._summed(self._assigned(served), statistics)
            return {client: own / len(self._tests[client]) for client, own in found.items()}

        return self._private.jointly_of_clients(rows_of(served), round, means)

    def _statistics(self, subject: str) -> tuple[Statistic, ...]:
        return self._engine.plan.for_subject(subject).planned(JointScores, EVALUATION).statistics

    def _summed(self, served: Assignment, statistics: tuple[Statistic, ...]) -> dict[str, Floats]:
        learner = self._engine.learner
        models = torch.from_numpy(rows_of(served)).to(learner.device)
        rows = rows_in_use(served, self._tests)
        return {
            client: statistic_sums(learner, models[row], records, statistics)
            for row, (client, records) in zip(rows, self._tests.items(), strict=True)
        }

    def _right(self, served: Assignment, parts: NDArray[np.int64] | int) -> dict[str, float]:
        """How many held-out records each client gets right, in so many parts."""
        return dict(zip(self._tests, (self._sums(served)[:, 0] / parts).tolist(), strict=True))

    def _assigned(self, served: Served) -> Assignment:
        """Which model each client uses now; where only the clients know, the engine asks them."""
        return self._engine.members.serve(served) if isinstance(served, OwnChoice) else served

    def _sums(self, served: Assignment) -> NDArray[np.float64]:
        """Of scores and of losses, by client."""
        return held_out_sums(self._engine.learner, self._tests, served)


def held_out_sums(learner: Learner, tests: Mapping[str, Batch], served: Assignment) -> NDArray[np.float64]:
    """Of scores and of losses on the held-out records of clients, each with the model that it uses."""
    models = torch.from_numpy(rows_of(served)).to(learner.device)
    return client_sums(learner, models, rows_in_use(served, tests), list(tests.values()))


def rows_of(served: Served) -> NDArray[np.float32]:
    """All models that clients use or choose from: those of the clusters, then those of single clients."""
    own = served.own.values() if isinstance(served, Assignment) else ()
    return np.concatenate([served.models, *(row[None] for row in own)])


def rows_in_use(served: Assignment, clients: Collection[str]) -> list[int]:
    """Of each client, the row of its model among them."""
    # Those of clients with a model of their own come after those of the clusters.
    places = {client: len(served.models) + position for position, client in enumerate(served.own)}
    return [places.get(client, served.cluster_of[client]) for client in clients]


# --- what exact scores tell beside accuracy --------------------------------------------------------------


def exact_figures(
    calibrated: CalibratedRun, judged: Evaluation, clusters: Mapping[str, int]
) -> dict[str, Any]:
    """Figures of a result that only exact scores give: nothing where scores are private."""
    scores, assignment, truth = judged.scores, judged.assignment, calibrated.population.truth
    if scores is None or assignment is None:
        return {}
    models = tuple(map(tuple, assignment.models.tolist())) if assignment.models.size <= 64 else None
    federation, best = None if calibrated.federation is None else calibrated.featured.federation, None
    if federation and wants_references(calibrated.experiment, federation, calibrated.facts.parameters):
        best = train_references(calibrated, truth or clusters)
    figures: dict[str, Any] = {"fairness": fairness(scores, best), "models": models}
    if federation is not None:
        figures["scores"] = _pooled(calibrated, federation, assignment)
    if truth is not None:
        by_cluster = {str(k): v for k, v in cluster_means(scores, truth).items()}
        figures |= {
            "cluster_accuracy": by_cluster if calibrated.population.task.classes else None,
            "groups": groups(scores, truth),
            "whole_tests": _whole_tests(calibrated, assignment, truth),
        }
    return figures


def _pooled(calibrated: CalibratedRun, federation: Federation, assignment: Assignment) -> PooledScores:
    """Every score that people use, of all held-out records."""
    learner, task = calibrated.learner, calibrated.population.task
    tests = {client.name: Batch.of(client.test, learner.device) for client in federation.clients}
    models = torch.from_numpy(rows_of(assignment)).to(learner.device)
    said = client_outputs(learner, models, rows_in_use(assignment, tests), list(tests.values()))
    true = [client.test.flat.targets for client in federation.clients]
    outputs = dict(zip(tests, zip(said, true, strict=True), strict=True))
    return exact_scores(task, outputs, calibrated.population.label_range)


def _whole_tests(
    calibrated: CalibratedRun, assignment: Assignment, truth: Mapping[str, int]
) -> dict[str, float] | None:
    """Every true cluster's own model on all test records under that cluster's shift.

    A client of a large federation has few test records, and its cluster together perhaps not all. Where
    clients keep parts of their own, a cluster has no model to be tested.
    """
    experiment, learner = calibrated.experiment, calibrated.learner
    whole = experiment.privacy.unit is Unit.CLIENT and not calibrated.algorithm.personal
    if not whole or not isinstance(experiment.federation, ClustersFederation):
        return None
    dataset = load_dataset(experiment.data, experiment.seeds.simulation)
    found = {}
    for cluster in sorted(set(truth.values())):
        users = Counter(assignment.cluster_of[client] for client, own in truth.items() if own == cluster)
        raw = whole_test(dataset, experiment.federation, cluster, experiment.seeds.simulation)
        records = encoded(raw, experiment.model.features, dataset.task, learner.device, FeatureCache())
        model = torch.from_numpy(assignment.models[users.most_common(1)[0][0]]).to(learner.device)
        found[str(cluster)] = evaluate(learner, model, Batch.of(records, learner.device)).accuracy
    return found


def wants_references(experiment: Experiment, federation: Federation, parameters: int) -> bool:
    """Whether central models are trained beside a run: as the experiment says, or where that is quick."""
    asked, exact = experiment.evaluation.references, experiment.evaluation_kind is EvaluationKind.EXACT
    if asked != "auto" or not exact:
        return exact and asked is True
    # Workers in the same groups have nothing else in common; own records are not published.
    alike = experiment.privacy.unit is not Unit.WORKER and not experiment.own_records
    records = sum(len(client.train) for client in federation.clients)
    return alike and EPOCHS * records * parameters <= QUICK_WORK


def train_references(
    calibrated: CalibratedRun, cluster_of: Mapping[str, int], epochs: int = EPOCHS
) -> Scores:
    """Score of each client under a model trained on the pooled records of its cluster."""
    log.info("training central models to compare with")
    learner, federation = calibrated.learner, calibrated.featured.federation
    seed = calibrated.experiment.seeds.simulation
    start = torch.from_numpy(calibrated.facts.initialise(seed)).to(learner.device)
    scores = {}
    for cluster in sorted(set(cluster_of.values())):
        members = [client for client in federation.clients if cluster_of[client.name] == cluster]
        pooled = join([Batch.of(client.train.flat, learner.device) for client in members])
        best = _train_centrally(learner, start, pooled, seed, epochs)
        for client in members:
            scores[client.name] = evaluate(learner, best, Batch.of(client.test, learner.device))
    return scores


def _train_centrally(
    learner: Learner, start: torch.Tensor, records: Batch, seed: int, epochs: int
) -> torch.Tensor:
    parameters = start.clone().requires_grad_(True)
    optimiser = torch.optim.Adam([parameters], lr=3e-3)
    shuffle = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        order = torch.randperm(len(records), generator=shuffle).to(learner.device)
        for batch in torch.split(order, BATCH):
            optimiser.zero_grad()
            learner.client_losses(parameters, records.take(batch)).mean().backward()  # type: ignore[no-untyped-call]
            optimiser.step()
    return parameters.detach()


# --- from noisy sums to figures -----------------------------------------------------------------------


def added(released: Mapping[str, Released[Any]]) -> Released[Any]:
    """What all clients released together, with the noise of all of them."""
    noise = math.hypot(*(own.noise_std for own in released.values()))
    return Released(sum(own.value for own in released.values()), noise)


def private_accuracy(counts: Mapping[str, Released[float]], sizes: Mapping[str, int]) -> Spread:
    """Accuracy of each client and their mean, with the 95 % intervals of the noise in them."""
    shares = {client: counted.value / sizes[client] for client, counted in counts.items()}
    noise = {client: counted.noise_std / sizes[client] for client, counted in counts.items()}
    per_client = {client: _within(share) for client, share in shares.items()}
    spread = [share * (1.0 - share) / sizes[client] for client, share in per_client.items()]
    return replace(
        _private(
            math.fsum(shares.values()) / len(shares),
            math.hypot(*noise.values()) / len(noise),
            NORMAL_95 * math.sqrt(math.fsum(spread)) / len(spread),
        ),
        min=min(per_client.values()),
        max=max(per_client.values()),
        per_client=per_client,
        intervals={client: _interval(share, noise[client]) for client, share in shares.items()},
    )


def private_mean(total: Released[float], clients: int) -> Spread:
    """The mean over clients of what each gets right; of single clients nothing is known."""
    mean = total.value / clients
    # Shares in [0, 1] with this mean vary by at most so much from client to client.
    spread = NORMAL_95 * math.sqrt(_within(mean) * (1.0 - _within(mean)) / clients)
    return _private(mean, total.noise_std / clients, spread)


def _private(mean: float, deviation: float, sampling_error: float) -> Spread:
    kind, interval = EvaluationKind.PRIVATE.value, _interval(mean, deviation)
    return Spread(_within(mean), None, None, {}, kind, interval, sampling_error)


def _interval(value: float, deviation: float) -> tuple[float, float]:
    """Where the exact score is in 95 of 100 cases; it cannot be outside [0, 1]."""
    half = NORMAL_95 * deviation
    return _within(value - half), _within(value + half)


def _within(share: float) -> float:
    return min(max(share, 0.0), 1.0)
