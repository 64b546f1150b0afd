"""A game between workers: one worker's canary, seen by another in every model of its own groups.

A trial is a run of the algorithm itself for a few epochs, of which the observer keeps what it is shown.
"""

from dataclasses import replace
from functools import cache

import numpy as np

from coterie.algorithms.protocol import Assignment
from coterie.audit.arena import Audited, client_of, engine_of, finite
from coterie.audit.bounds import Scores
from coterie.audit.claims import Claim
from coterie.audit.games import Floats, Game
from coterie.audit.scenes import LOUD, one_record, repeated, sure_start
from coterie.engines.driver import drive
from coterie.engines.local import LocalEngine
from coterie.groups import Observer
from coterie.privacy import PlannedRelease
from coterie.training.local_sgd import LocalSGD

EVERY, LAST = "every model that the observer is shown", "the last models alone"
_ROUNDS = 10**6
_MOST_EPOCHS = 4


class GroupGame(Game):
    """What the worker that leaks most tells the one that learns most of it."""

    chunk = 50

    def __init__(self, audited: Audited, observer: Observer, target: int, watcher: int) -> None:
        assert audited.algorithm is not None
        assert audited.facts is not None
        self.audited, self.usual = audited, EVERY
        names, adjacency = audited.facts.clients, audited.plan.adjacency
        self.target, self.watcher = names[target], names[watcher]
        self.epochs = min(observer.epochs, _MOST_EPOCHS)
        self.name, self.uses = f"{self.target} seen by {self.watcher}", self.epochs
        self.what = f"every model of the observer's groups in {self.epochs} epochs"
        self.delta = audited.deltas[self.target]

        @cache
        def epsilon(delta: float) -> float:
            found = observer.leakage(self.epochs, delta=delta, adjacency=adjacency)
            return float(found.pair_epsilon(target, watcher))

        self.claim = Claim(epsilon, adjacency, "rdp")
        start = sure_start(audited.learner, audited.initial)
        self.start = audited.initial if start is None else start
        self.facts = replace(audited.facts, initialise=lambda seed: self.start.copy())

    def scenes(self) -> list[str]:
        return ["a worker whose update is a Dirac"]

    def play(self, scene: int, trials: int, wanted: str | None = None) -> dict[str, Scores]:
        found = [self._world(trials, present=present) for present in (True, False)]
        return {name: Scores(*(finite(world[name]) for world in found)) for name in found[0]}

    def _world(self, trials: int, *, present: bool) -> dict[str, list[float]]:
        task = self.audited.learner.task
        other = 1 if task.kind == "classification" else -LOUD
        canary, null = one_record(task, other, 0), one_record(task, 0)
        holds = dict.fromkeys(self.facts.clients, null) | ({self.target: canary} if present else {})
        clients = [client_of(name, repeated(own, 2)) for name, own in holds.items()]
        releases = self._releases()
        found: dict[str, list[float]] = {EVERY: [], LAST: []}
        with engine_of(self.audited, clients, releases) as engine:
            way = self._way()
            for trial in range(trials):
                seen = self._run(engine, trial, way)
                found[EVERY].append(float(seen.sum()))
                found[LAST].append(float(seen[-1]))
        return found

    def _releases(self) -> dict[str, list[PlannedRelease]]:
        return {
            unit.subject: [PlannedRelease(own.name, own.mechanism, _ROUNDS) for own in unit.releases]
            for unit in self.audited.plan.units
        }

    def _way(self) -> Floats:
        """The direction of the canary's update; what a bystander learns has no length."""
        assert self.audited.algorithm is not None
        training = self.audited.algorithm.local_training()
        task = self.audited.learner.task
        other = 1 if task.kind == "classification" else -LOUD
        canary = client_of(self.target, repeated(one_record(task, other, 0), 2))
        with engine_of(self.audited, [canary], {self.target: self._releases()[self.target]}) as alone:
            update = alone.clients.learn(self.target, self.start, LocalSGD(**vars(training)), 0)
        return np.asarray(update, dtype=np.float64) / max(float(np.linalg.norm(update)), 1e-30)

    def _run(self, engine: LocalEngine, trial: int, way: Floats) -> Floats:
        """How far the models that the observer is shown went along the canary's direction, epoch by epoch."""
        algorithm = self.audited.algorithm
        assert algorithm is not None
        state = algorithm.start(self.facts, np.random.default_rng(trial))
        seen = []
        for epoch in range(1, self.epochs + 1):
            state = drive(algorithm.round(state), engine, trial * self.epochs + epoch)
            models = algorithm.models(state)
            assert isinstance(models, Assignment)
            seen.append(float((models.model_of(self.watcher).astype(np.float64) - self.start) @ way))
        return np.array(seen)
