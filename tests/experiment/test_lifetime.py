"""Budgets that last: several runs on the same records, in different folders, under one lifetime budget."""

import shutil
from pathlib import Path
from typing import Any

import dp_accounting as dp
import numpy as np
import pytest
from dp_accounting import rdp

import coterie as ct
from coterie.algorithms.protocol import TrainJob
from coterie.algorithms.record.global_model import Global, GlobalState
from coterie.errors import BudgetError, InputError, LedgerError
from coterie.experiment import local, registered
from coterie.experiment.budgets import account_of, set_lifetime
from coterie.experiment.folder import RunFolder
from coterie.experiment.loop import OpenRunFolder
from coterie.experiment.verify import verify
from coterie.files import read_json
from coterie.privacy import Budget, PrivacyPlan
from coterie.privacy.divergences import INTEGER_ORDERS
from coterie.register import RegisterView, place

ROWS = 40
NOTHING_HELD_OUT: dict[str, Any] = {
    "evaluation": {"kind": "none"},
    "federation": {"kind": "natural", "test_share": 0},
}


def write_clients(folder: Path, first: int, clients: str = "ab") -> Path:
    """Clients with rows of a made-up population, numbered from `first`."""
    folder.mkdir()
    (folder / "federation.yaml").write_text(
        "task: classification\nlabel: {column: y, classes: ['no', 'yes']}\n"
        "features: [{column: x, range: [0, 999]}]\n"
    )
    for place_, name in enumerate(clients):
        numbers = range(first + place_ * ROWS, first + (place_ + 1) * ROWS)
        rows = "\n".join(f"{number},{'yes' if number % 3 else 'no'}" for number in numbers)
        (folder / f"{name}.csv").write_text(f"x,y\n{rows}\n")
    return folder


def experiment(data: Path, **sections: Any) -> dict[str, Any]:
    plain = {
        "data": {"name": "folder", "path": str(data)},
        "federation": {"kind": "natural"},
        "algorithm": {"name": "global"},
        "privacy": {"epsilon": 2.0, "delta": 1e-3},
        "schedule": {"rounds": 2, "batch": 10, "lr": 0.1},
        "engine": {"device": "cpu", "workers": 1},
    }
    return {**plain, **sections}


def run(data: Path, out: Path, **sections: Any) -> None:
    local.run(experiment(data, **sections), out)


@pytest.fixture
def mine(register: Path, tmp_path: Path) -> Path:
    return write_clients(tmp_path / "mine", 0)


def composed(plans: list[PrivacyPlan], delta: float) -> float:
    """What the training of the first client costs in all of them, by dp-accounting at integer orders."""
    account = rdp.RdpAccountant(list(map(int, INTEGER_ORDERS)), dp.NeighboringRelation.REPLACE_SPECIAL)
    for plan in plans:
        account.compose(plan.units[0].event)
    return float(account.get_epsilon(delta))


def test_the_third_experiment_in_a_third_folder_is_refused_before_anything_is_written(
    mine: Path, tmp_path: Path
) -> None:
    planned = local.calibrate(ct.Experiment.model_validate(experiment(mine)))
    three, alone = composed([planned.plan] * 3, 1e-3), planned.guarantee.epsilon
    assert three < 3 * alone
    registered.prepare([planned.experiment], Budget(three - 0.2, 1e-3))
    run(mine, tmp_path / "one")
    run(mine, tmp_path / "two")
    shown = f"would have spent epsilon {np.ceil(three * 100) / 100:.2f}"
    with pytest.raises(BudgetError, match=shown):
        run(mine, tmp_path / "three")
    assert not (tmp_path / "three").exists()
    shutil.rmtree(tmp_path / "one")  # deleting what was run resets nothing
    with pytest.raises(BudgetError, match=shown):
        run(mine, tmp_path / "one")
    account = account_of(str(mine))
    assert account.spent is not None
    assert account.spent.epsilon == pytest.approx(composed([planned.plan] * 2, 1e-3), abs=1e-6)
    assert [each.finished for each in account.experiments] == [True, True]


def test_half_overlapping_folders_compose_for_the_shared_records_only(mine: Path, tmp_path: Path) -> None:
    other = write_clients(tmp_path / "other", ROWS, "bc")  # b is in both
    run(mine, tmp_path / "one", **NOTHING_HELD_OUT)
    run(other, tmp_path / "two", privacy={"epsilon": 1.0, "delta": 1e-3}, **NOTHING_HELD_OUT)
    plans = [ct.load(tmp_path / name).folder for name in ("one", "two")]
    read = [PrivacyPlan.from_json(read_json(each / "plan.json")) for each in plans]
    both = composed(read, 1e-3)
    for folder in (mine, other):
        found = account_of(str(folder)).spent
        assert found is not None
        assert found.epsilon == pytest.approx(both, abs=1e-6)
    apart = account_of(str(write_clients(tmp_path / "apart", 2 * ROWS, "c"))).spent  # c alone: the second
    assert apart is not None
    assert apart.epsilon == pytest.approx(composed(read[1:], 1e-3), abs=1e-6)
    outside = account_of(str(mine)).to_json(outside=True)
    assert [each["name"] for each in outside["experiments"]] == ["one"]
    assert str(tmp_path) not in str(outside)


def test_a_run_that_is_killed_counts_whole_and_once(
    mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = [0]

    def killed(self: OpenRunFolder, *arguments: Any) -> None:
        saved[0] += 1
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(OpenRunFolder, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            run(mine, tmp_path / "one")
    before = account_of(str(mine))
    assert [each.finished for each in before.experiments] == [False]
    local.run(experiment(mine), tmp_path / "one", resume=True)
    after = account_of(str(mine))
    assert len(after.experiments) == 1
    assert after.experiments[0].finished
    assert before.spent is not None
    assert after.spent is not None
    assert after.spent.epsilon == before.spent.epsilon  # all of it was executed in the end


def test_what_a_plan_allowed_and_nobody_asked_for_is_returned(
    mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An algorithm that asks half of the clients in a round leaves the other half their budget."""
    monkeypatch.setattr(Global, "jobs", lambda self, state: [job(state, client) for client in ["a"]])
    run(mine, tmp_path / "one", **NOTHING_HELD_OUT)
    register = RegisterView.read()
    assert register is not None
    [plan] = register.reserved.values()
    [reserved], settled = plan.groups, register.settled[plan.id].groups
    assert sorted(map(str, (event for group in settled for event in group.events))) == sorted(
        map(str, (reserved.events[0], dp.NoOpDpEvent()))
    )
    assert [group.count for group in settled] == [ROWS, ROWS]


def job(state: GlobalState, client: str) -> TrainJob:
    return TrainJob(client, state.model)


def test_held_out_records_pay_for_scores_and_exact_ones_leave_nothing(mine: Path, tmp_path: Path) -> None:
    run(mine, tmp_path / "one")
    register = RegisterView.read()
    assert register is not None
    [plan] = register.reserved.values()
    assert sorted(group.count for group in plan.groups) == [16, 64]
    run(mine, tmp_path / "two", evaluation={"kind": "exact"})
    found = account_of(str(mine)).spent
    assert found is not None
    assert found.epsilon == np.inf
    set_lifetime(str(mine), Budget(50.0, 1e-3))
    with pytest.raises(BudgetError, match="no bound"):
        run(mine, tmp_path / "three")


def test_clients_and_workers_pay_with_all_their_records(mine: Path, tmp_path: Path) -> None:
    unit = {"unit": "client", "epsilon": 5.0, "delta": 1e-2}
    algorithm = {"name": "dp-fedavg", "rate": 0.5}
    run(mine, tmp_path / "one", privacy=unit, algorithm=algorithm)
    register = RegisterView.read()
    assert register is not None
    [plan] = register.reserved.values()
    assert [group.count for group in plan.groups] == [80]
    history = registered.history_of(RunFolder(tmp_path / "one"))
    assert history is not None
    assert "for one client, add-remove" in history.line


def test_published_records_are_not_entered(register: Path, tmp_path: Path) -> None:
    small = {
        "federation": {"sizes": [2], "records_per_client": 60},
        "schedule": {"rounds": 1, "batch": 20},
        "algorithm": {"name": "local"},
        "evaluation": {"references": False},
    }
    result = local.run(small, tmp_path / "one")
    assert not place().exists()
    assert not RunFolder(result.folder).register.exists()
    assert registered.history_of(RunFolder(result.folder)) is None
    with pytest.raises(InputError, match="--lifetime-epsilon: digits has published records"):
        ct.run(small, lifetime=Budget(8.0, 1e-5), out=tmp_path / "two")


def test_a_register_that_was_put_back_or_exchanged_stops_a_run_that_goes_on(
    mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, register: Path
) -> None:
    run(mine, tmp_path / "one")
    files = RunFolder(tmp_path / "one")
    assert verify(files.path).verdict == "holds"
    lines = (register / "register.jsonl").read_bytes().splitlines(keepends=True)
    (register / "register.jsonl").write_bytes(b"".join(lines[:2]))
    found = verify(files.path)
    assert found.verdict == "broken"
    assert "register.jsonl: line 3 is missing" in found.problems[0]
    monkeypatch.setenv("COTERIE_REGISTER", str(tmp_path / "another"))
    assert verify(files.path).verdict == "holds"  # on a machine that has no such register
    history = registered.history_of(files)
    assert history is not None
    assert history.line.startswith("unknown")


def test_a_run_that_goes_on_needs_the_register_that_it_was_entered_in(
    mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(OpenRunFolder, "finish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            run(mine, tmp_path / "one")
    monkeypatch.setenv("COTERIE_REGISTER", str(tmp_path / "another"))
    with pytest.raises(LedgerError, match=r"register\.json: the run was entered in register"):
        local.run(experiment(mine), tmp_path / "one", resume=True)


def test_new_rows_are_known_unless_they_are_said_to_be_new(mine: Path, tmp_path: Path) -> None:
    ct.run(experiment(mine), tmp_path / "one", lifetime=Budget(2.2, 1e-3))
    shutil.rmtree(mine)
    write_clients(mine, 500)
    with pytest.raises(BudgetError):
        run(mine, tmp_path / "two")
    ct.run(experiment(mine), tmp_path / "three", new_records=True)
