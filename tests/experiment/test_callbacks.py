"""What a run tells while it goes on, and what happens to it when somebody who is told breaks."""

import json
from pathlib import Path
from typing import Any

import pytest

from coterie.experiment import local
from coterie.experiment.callbacks import Callbacks, ReleaseReport, RoundReport, RunStart, together
from coterie.experiment.folder import RunFolder
from coterie.experiment.recorded import recount
from coterie.experiment.result import RunResult
from coterie.privacy import Unit
from coterie.privacy.plan import POPULATION

TINY: dict[str, Any] = {
    "federation": {"kind": "clusters", "sizes": [2, 2], "shift": "rotation", "records_per_client": 30},
    "algorithm": {"name": "r-dpcfl"},
    "schedule": {"rounds": 3, "batch": 10},
    "seeds": {"simulation": 3, "noise": 5},
}


def charged(folder: Path) -> list[dict[str, Any]]:
    lines = RunFolder(folder).ledger.read_text().splitlines()[1:]
    return [charge for line in lines for charge in json.loads(line)["charges"]]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunResult, list[Any]]:
    heard: list[Any] = []
    listen = Callbacks(
        on_start=heard.append, on_release=heard.append, on_round=heard.append, on_end=heard.append
    )
    return local.run(TINY, tmp_path_factory.mktemp("told") / "run", callbacks=listen), heard


def test_start_releases_rounds_and_end_come_in_their_order(told: tuple[RunResult, list[Any]]) -> None:
    result, heard = told
    kinds = [type(each) for each in heard]
    assert kinds[0] is RunStart
    assert kinds[-1] is RunResult
    assert kinds.count(RoundReport) == 3
    order = [(each.round, type(each)) for each in heard[1:-1]]
    assert order == sorted(order, key=lambda one: (one[0], one[1] is RoundReport))
    assert heard[0].guarantee == result.guarantee
    assert heard[-1] is result


def test_every_charge_of_the_ledger_is_told_once_with_the_epsilon_it_leads_to(
    told: tuple[RunResult, list[Any]],
) -> None:
    result, heard = told
    releases = [each for each in heard if isinstance(each, ReleaseReport)]
    flat = [(each.round, each.release, name) for each in releases for name in each.subjects]
    assert flat == [(one["round"], one["release"], one["subject"]) for one in charged(result.folder)]
    assert {each.unit for each in releases} == {Unit.RECORD}
    spent = [each.epsilon for each in heard[1:-1]]
    assert spent == sorted(spent)
    assert spent[-1] == pytest.approx(result.epsilon, rel=1e-6)
    assert str(releases[0]).startswith("round 1, ")


def test_where_who_was_sampled_is_a_secret_the_population_is_told_as_one(tmp_path: Path) -> None:
    heard: list[ReleaseReport] = []
    tree = {
        "privacy": {"unit": "client", "delta": 1e-2},
        "algorithm": {"name": "dp-fedavg", "rate": 0.5},
        "federation": {"kind": "clusters", "sizes": [6], "shift": "rotation", "records_per_client": 20},
        "schedule": {"rounds": 2},
    }
    local.run(tree, tmp_path / "run", callbacks=Callbacks(on_release=heard.append))
    assert {each.subjects for each in heard} == {(POPULATION,)}
    assert {each.unit for each in heard} == {Unit.CLIENT}


@pytest.mark.parametrize("where", ["on_start", "on_release", "on_round", "on_end"])
def test_a_callback_that_breaks_stops_the_run_and_resume_ends_as_if_it_had_not(
    where: str, told: tuple[RunResult, list[Any]], tmp_path: Path
) -> None:
    ends: list[Any] = []

    def broken(report: Any) -> None:
        if getattr(report, "round", 2) == 2:
            raise ZeroDivisionError("a mistake of the caller's")

    functions = {"on_end": ends.append} | {where: broken}
    try:
        local.run(TINY, tmp_path / "run", callbacks=Callbacks(**functions))
        pytest.fail("the mistake was swallowed")
    except ZeroDivisionError:
        # While the mistake is still held: nothing of the run may be open any more.
        again = local.run(TINY, tmp_path / "run", resume=True)
    if where != "on_end":
        assert ends == [None]
    straight = told[0]
    for name in ("ledger", "metrics"):
        one, other = (getattr(RunFolder(run.folder), name).read_bytes() for run in (straight, again))
        assert one == other
    assert again.accuracy == straight.accuracy
    assert recount(again.folder) is not None


def test_several_are_told_in_their_order_and_nobody_is_asked_for_what_none_wants() -> None:
    heard: list[str] = []
    first, second = (Callbacks(on_round=lambda report, n=name: heard.append(n)) for name in "ab")
    both = together([first, second])
    both.tell("on_round", None)
    assert heard == ["a", "b"]
    assert both.on_release is None
    assert together(None) == Callbacks()
