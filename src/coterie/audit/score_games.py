"""Games on private scores: what models get right of held-out records, or of all clients.

A score is centred, so that a record that counts for nothing adds as much as one that is right half of the
time. No record is: what can be played is a record that is right against one that is wrong, which is the
replacement of one by another, and the claim is that for replacement."""

from typing import Any

import numpy as np
import torch

from coterie.algorithms.protocol import Assignment
from coterie.audit.arena import Audited, as_units, client_of, engine_of, finite
from coterie.audit.bounds import Scores
from coterie.audit.claims import Claim
from coterie.audit.games import Floats, Game
from coterie.audit.record_games import names_of
from coterie.audit.scenes import one_record, repeated, sure_start
from coterie.data import Client, Federation
from coterie.data.records import Records
from coterie.experiment.evaluator import LocalScores
from coterie.privacy import POPULATION, Adjacency, PlannedRelease, UnitPlan, held_out
from coterie.training.learner import Batch
from coterie.training.statistics import statistic_sums

COUNT, LINE = "the score", "the scores, along what tells the worlds apart"
_ROUNDS = 10**6


class ScoresGame(Game):
    """Scores of held-out records of clients, or of all clients together."""

    def __init__(self, audited: Audited, unit: UnitPlan, planned: PlannedRelease) -> None:
        self.audited, self.planned = audited, planned
        self.name, self.what, self.delta = (
            planned.name,
            planned.mechanism.summary(audited.plan.unit),
            audited.deltas[unit.subject],
        )
        self.mechanism: Any = planned.mechanism
        self.together = unit.subject == POPULATION
        self.joint = self.mechanism.kind == "several scores"
        self.claim = Claim.of(self.mechanism.event, Adjacency.REPLACE_ONE, audited.accountant)
        self.usual = LINE if self.joint else COUNT
        self.chunk = 100 if self.together else 250
        found = sure_start(audited.learner, audited.initial)
        self._model = audited.initial if found is None else found

    def scenes(self) -> list[str]:
        return ["a held-out record that is right, or wrong"]

    def _worlds(self) -> tuple[Records, Records]:
        task = self.audited.learner.task
        wrong = 1 if task.kind == "classification" else 1e6
        return one_record(task, 0), one_record(task, wrong)

    def play(self, scene: int, trials: int, wanted: str | None = None) -> dict[str, Scores]:
        values = self._together(trials) if self.together else self._apart(trials)
        if not self.joint:
            return {COUNT: Scores(*(finite(world[:, 0]) for world in values))}
        way = self._way()
        return {LINE: Scores(*(finite(world @ way) for world in values))}

    def _way(self) -> Floats:
        """How the centred statistics of the two worlds differ."""
        learner, model = self.audited.learner, torch.from_numpy(self._model)
        sums = [
            statistic_sums(learner, model, Batch.of(record, learner.device), self.mechanism.statistics)
            for record in self._worlds()
        ]
        right, wrong = (self.mechanism.centred(np.asarray(each), 1.0) for each in sums)
        apart: Floats = right - wrong
        return apart / np.linalg.norm(apart)

    def _federation(self, clients: list[Client]) -> Federation:
        units = tuple(as_units(client, self.audited.plan) for client in clients)
        return Federation(units, self.audited.learner.task)

    def _served(self, names: list[str]) -> Assignment:
        return Assignment(self._model[None], dict.fromkeys(names, 0))

    def _apart(self, trials: int) -> tuple[Floats, Floats]:
        """Clients of which each holds the canary or not."""
        present, absent = names_of(trials)
        right, wrong = self._worlds()
        train = one_record(self.audited.learner.task, 0)
        clients = [
            client_of(name, train, own)
            for names, own in ((present, right), (absent, wrong))
            for name in names
        ]
        own = [PlannedRelease(self.name, self.mechanism, 1)]
        names = [*present, *absent]
        with engine_of(self.audited, clients, {held_out(name): own for name in names}) as engine:
            scores = LocalScores(self._federation(clients), engine)
            ask = scores.jointly_of_records if self.joint else scores.of_records
            found = ask(self._served(names), names, 1)
        rows = [np.atleast_1d(np.asarray(found[name].value, dtype=np.float64)) for name in names]
        return np.array(rows[:trials]), np.array(rows[trials:])

    def _together(self, trials: int) -> tuple[Floats, Floats]:
        """Rounds of a population in which one client is right in one world, and wrong in the other."""
        found = []
        for own in self._worlds():
            train = one_record(self.audited.learner.task, 0)
            clients = [client_of("canary", train, repeated(own, 2))]
            releases = {POPULATION: [PlannedRelease(self.name, self.mechanism, _ROUNDS)]}
            with engine_of(self.audited, clients, releases) as engine:
                scores = LocalScores(self._federation(clients), engine)
                ask = scores.jointly_of_clients if self.joint else scores.of_clients
                rows = [ask(self._served(["canary"]), number + 1).value for number in range(trials)]
            found.append(np.array([np.atleast_1d(np.asarray(row, dtype=np.float64)) for row in rows]))
        return found[0], found[1]
