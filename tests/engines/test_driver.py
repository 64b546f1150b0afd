"""Works side by side: each ends with its own result, or with its own failure."""

from collections.abc import Generator
from typing import Any

import numpy as np
import pytest

from coterie.algorithms.protocol import Choices, Select
from coterie.engines.computing import Computing, PendingJobs
from coterie.engines.driver import addressed, answer_together
from coterie.engines.local import LocalEngine


class Breaking:
    """An engine that answers, or breaks in some way."""

    waited, personal = 0.0, {}

    def __init__(self, mistake: Exception | None) -> None:
        self.mistake = mistake

    def answer(self, request: Any, round: int) -> Choices:
        if self.mistake is not None:
            raise self.mistake
        return Choices({})


def asking() -> Generator[Any, Any, str]:
    for _ in range(2):
        yield Select("selection", (), np.zeros((1, 1), dtype=np.float32))
    return "done"


@pytest.mark.parametrize("mistake", [ValueError("odd"), StopIteration("as if all were done")])
def test_an_engine_that_breaks_is_a_failure_of_its_own_work_and_never_a_result(mistake: Exception) -> None:
    engines = {"breaks": Breaking(mistake), "answers": Breaking(None)}
    found = answer_together({name: addressed(asking(), engine, 1) for name, engine in engines.items()})
    assert found.results == {"answers": "done"}
    assert set(found.failures) == {"breaks"}


class Programs:
    """A trainer of one program for all, in which a mistake is found when it runs."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def portions(self, asked: Any) -> list[list[int]]:
        return [list(range(len(asked)))]

    def train(self, jobs: Any) -> Any:
        self.sizes.append(len(jobs))
        for job in jobs:
            if isinstance(job, Exception):
                raise job
        return list(jobs)


class Waiting(LocalEngine):
    """An engine whose answers wait for the trainer."""

    def __init__(self, trainer: Programs, *jobs: Any) -> None:
        self.stacks, self.waited, self.jobs, self.found = False, 0.0, (trainer, jobs), list[Any]()

    def begin(self, request: Any, round: int) -> Computing[Choices]:
        self.found += yield PendingJobs(*self.jobs)
        return Choices({})


@pytest.mark.parametrize("mistake", [ValueError("odd"), StopIteration("as if all were done")])
def test_jobs_that_break_a_program_of_many_are_a_failure_of_their_own_work(mistake: Exception) -> None:
    trainer = Programs()
    engines = {
        "first": Waiting(trainer, 1, 2),
        "breaks": Waiting(trainer, mistake),
        "last": Waiting(trainer, 3),
    }
    found = answer_together({name: addressed(asking(), engine, 1) for name, engine in engines.items()})
    assert found.results == {"first": "done", "last": "done"}
    assert found.failures == {"breaks": mistake}
    assert engines["first"].found == [1, 2, 1, 2]
    assert engines["last"].found == [3, 3]
    assert trainer.sizes == [4, 2, 1, 1, 3]  # together, each alone, and together again
