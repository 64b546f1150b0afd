"""Works side by side: each ends with its own result, or with its own failure."""

import math
import weakref
from collections.abc import Generator
from typing import Any

import numpy as np
import pytest

from coterie.algorithms.protocol import Choices, Select
from coterie.engines import driver
from coterie.engines.computing import Computing, PendingJobs, at_once
from coterie.engines.driver import addressed, answer_together, drive
from coterie.engines.local import LocalEngine
from coterie.errors import where


class Breaking:
    """An engine that answers, or breaks in some way."""

    waited, personal = 0.0, {}

    def __init__(self, mistake: Exception | None) -> None:
        self.mistake = mistake

    def answer(self, request: Any, round: int) -> Choices:
        if self.mistake is not None:
            raise self.mistake
        return Choices({})


def asking(times: int = 2) -> Generator[Any, Any, str]:
    for _ in range(times):
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
    assert trainer.sizes == [4, 2, 2, 1, 1, 3]  # together, each half, whose second fails, and together again


def test_a_mistake_of_an_engine_or_a_trainer_is_never_a_result() -> None:
    """A StopIteration looks as if the work were done."""
    mistake = StopIteration("as if all were done")
    with pytest.raises(StopIteration, match="as if"):
        drive(asking(), Breaking(mistake), 1)
    with pytest.raises(StopIteration, match="as if"):
        at_once(Waiting(Programs(), mistake).begin(None, 1))


class Limited(Programs):
    """A trainer whose programs fit the memory with so many jobs."""

    most = 2

    def train(self, jobs: Any) -> Any:
        found = super().train(jobs)
        if len(jobs) > self.most:
            raise MemoryError("too many")
        return found


class Shrinking(Waiting):
    """An engine that has a job less in every round."""

    def begin(self, request: Any, round: int) -> Computing[Choices]:
        found = yield from super().begin(request, round)
        self.jobs = (self.jobs[0], self.jobs[1][1:])
        return found


def test_what_fails_together_for_its_size_is_not_tried_together_again() -> None:
    trainer = Limited()
    rounds = {"a": 4, "b": 2, "c": 4}
    works = {name: addressed(asking(times), Waiting(trainer, 1), 1) for name, times in rounds.items()}
    assert not answer_together(works).failures
    first, second, two_fit = [3, 1, 2], [1, 2], [2, 2]
    assert trainer.sizes == [*first, *second, *two_fit]
    trainer = Limited()
    works = {
        "same": addressed(asking(3), Waiting(trainer, 1), 1),
        "less": addressed(asking(2), Shrinking(trainer, 1, 2), 1),
    }
    assert not answer_together(works).failures
    first, fewer_fit, last = [3, 1, 2], [2], [1]
    assert trainer.sizes == [*first, *fewer_fit, *last]


@pytest.mark.parametrize("runs", [2, 7, 32])
def test_one_failure_among_many_leaves_the_others_in_large_programs(runs: int) -> None:
    for place in range(runs):
        trainer = Programs()
        jobs = [ValueError("odd") if place == at else at for at in range(runs)]
        works = {at: addressed(asking(), Waiting(trainer, job), 1) for at, job in enumerate(jobs)}
        outcomes = answer_together(works)
        assert set(outcomes.failures) == {place}
        assert set(outcomes.results) == set(range(runs)) - {place}
        *tried, after = trainer.sizes
        assert len(tried) <= 1 + 2 * math.ceil(math.log2(runs))
        assert after == runs - 1


def test_runs_train_alone_where_nobody_can_say_who_fits_together(caplog: pytest.LogCaptureFixture) -> None:
    class Unsure(Programs):
        def portions(self, asked: Any) -> list[list[int]]:
            raise MemoryError("cannot count")

    trainer = Unsure()
    works = {key: addressed(asking(1), Waiting(trainer, key), 1) for key in range(3)}
    assert set(answer_together(works).results) == {0, 1, 2}
    assert trainer.sizes == [1, 1, 1]
    assert "who fits the memory together could not be made out: MemoryError: cannot count" in caplog.text


def test_a_failure_keeps_its_place_and_no_tensor_of_its_program() -> None:
    """The others need the memory."""
    tensors: list[weakref.ref[Any]] = []

    class Heavy(Programs):
        def train(self, jobs: Any) -> Any:
            held = np.zeros(3)
            if any(isinstance(job, Exception) for job in jobs):
                tensors.append(weakref.ref(held))
                try:
                    super().train(jobs)
                except ValueError as reason:
                    raise RuntimeError("cannot go on") from reason
            assert not any(tensor() is not None for tensor in tensors)
            return list(jobs)

    trainer = Heavy()
    jobs = {"breaks": ValueError("odd"), "first": 1, "last": 2}
    engines = {name: Waiting(trainer, job) for name, job in jobs.items()}
    found = answer_together({name: addressed(asking(), engine, 1) for name, engine in engines.items()})
    assert set(found.results) == {"first", "last"}
    assert len(tensors) == 2  # together and alone
    assert f"RuntimeError at {__file__}:" in where(found.failures["breaks"])


@pytest.mark.parametrize("stubborn", [False, True])
def test_a_mistake_at_the_end_of_a_run_that_failed_is_its_own(stubborn: bool) -> None:
    def rude(engine: Waiting) -> Generator[Any, Any, str]:
        try:
            return (yield from addressed(asking(), engine, 1))
        finally:
            if stubborn:
                yield
            raise OSError("no space left")

    trainer = Programs()
    works: dict[str, Any] = {name: addressed(asking(), Waiting(trainer, 1), 1) for name in ("first", "last")}
    works["breaks"] = rude(Waiting(trainer, ValueError("odd")))
    found = answer_together(works)
    assert found.results == {"first": "done", "last": "done"}
    assert str(found.failures["breaks"]) == "odd"
    kind = "RuntimeError: generator ignored" if stubborn else "OSError: no space left"
    assert found.failures["breaks"].__notes__[0].startswith(f"and where it ended, {kind}")


def test_runs_go_on_where_several_cannot_share_a_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their trainer's memory may lack for all of them together, and not for each."""

    class Large(Waiting):
        network = "large"

        def __init__(self, trainer: Programs, *jobs: Any) -> None:
            super().__init__(trainer, *jobs)
            self.stacks = True

    def full(engines: object) -> None:
        raise MemoryError("not for two")

    monkeypatch.setattr(driver, "share_trainer", full)
    trainer = Programs()
    works = {key: addressed(asking(), Large(trainer, key), 1) for key in (1, 2)}
    outcomes = answer_together({**works, 3: addressed(asking(), Breaking(ValueError("its own")), 1)})
    assert set(outcomes.results) == {1, 2}
    assert set(outcomes.failures) == {3}


def test_a_run_that_waits_outlives_a_failure_that_it_had_seen_before() -> None:
    """Clearing the frames of an error that is raised again would end it, without a result."""
    failure = ValueError("raised for two")

    def careful() -> Generator[Any, Any, str]:
        with pytest.raises(ValueError, match="raised for two"):
            Breaking(failure).answer(None, 1)
        yield from addressed(asking(1), Waiting(Programs(), 1), 1)
        return "fine"

    outcomes = answer_together({"careful": careful(), "broken": addressed(asking(), Breaking(failure), 1)})
    assert outcomes.results == {"careful": "fine"}
    assert set(outcomes.failures) == {"broken"}
