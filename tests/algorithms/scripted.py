"""An engine that answers from a script: algorithms are tested without data, noise or torch."""

from collections.abc import Callable

import numpy as np

from coterie.algorithms.protocol import (
    Choices,
    PublicFacts,
    Reply,
    Request,
    Select,
    Train,
    TrainJob,
    Updates,
    Vector,
)
from coterie.privacy import Released

SCRIPTED_NOISE = 0.1
"""Standard deviation of the noise that every scripted release claims to have."""


class ScriptedEngine:
    """Answers training with `update(job, release)` and selections with `choice(client, models)`."""

    def __init__(
        self,
        update: Callable[[TrainJob, str], Vector],
        choice: Callable[[str, np.ndarray], int] = lambda client, models: 0,
        missing: frozenset[str] = frozenset(),
    ) -> None:
        self.update, self.choice, self.missing = update, choice, missing
        self.asked: list[tuple[int, Request]] = []

    def answer(self, request: Request, round: int) -> Reply:
        self.asked.append((round, request))
        if isinstance(request, Train):
            jobs = [job for job in request.jobs if job.client not in self.missing]
            return Updates(
                {job.client: Released(self.update(job, request.release), SCRIPTED_NOISE) for job in jobs}
            )
        assert isinstance(request, Select)
        clients = [client for client in request.clients if client not in self.missing]
        return Choices({client: Released(self.choice(client, request.models), 0.0) for client in clients})

    def rounds_of(self, kind: type[Train] | type[Select], release: str) -> list[int]:
        return [
            round for round, request in self.asked if isinstance(request, kind) and request.release == release
        ]


def facts_of(clients: int, parameters: int = 4, records: int = 100) -> PublicFacts:
    names = tuple(f"client-{index}" for index in range(clients))
    return PublicFacts(
        clients=names,
        records=dict.fromkeys(names, records),
        parameters=parameters,
        initialise=lambda seed: np.zeros(parameters, dtype=np.float32),
    )
