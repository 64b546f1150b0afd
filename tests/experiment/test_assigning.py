"""A newcomer's choice: of the right cluster, by bounded counts, charged before it is made."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits
from trained_runs import Runs, runs

from coterie.data import Records
from coterie.errors import BudgetError, InputError
from coterie.experiment import assigning
from coterie.experiment.assigning import LEDGER, STATE, assign, newcomer, scores
from coterie.experiment.budgets import account_of, set_lifetime
from coterie.experiment.trained import TrainedRun
from coterie.privacy import Budget, SecretKey
from coterie.register import DataSet, RegisterView

__all__ = ["runs"]


def holder(folder: Path, turns: int = 0, records: int = 40) -> Path:
    """A folder with the digits of a newcomer, turned by so many quarters."""
    folder.mkdir()
    digits = load_digits()
    images = np.rot90(digits.images[-records:], turns, axes=(1, 2))
    np.savez(folder / "east.npz", x=images[:, None], y=digits.target[-records:])
    return folder


@pytest.mark.parametrize("turns", [0, 1])
def test_without_noise_the_model_that_gets_most_records_right_is_chosen(
    turns: int, runs: Runs, tmp_path: Path
) -> None:
    run, data = runs("oracle"), holder(tmp_path / "data", turns, records=200)
    content = np.load(data / "east.npz")
    right = [int((run.predict(content["x"], cluster=row) == content["y"]).sum()) for row in (0, 1)]
    assert right[0] != right[1]
    found = assign(TrainedRun.open(run.folder), data, 1e6)
    assert found.cluster == int(np.argmax(right))
    assert (found.candidates, found.records, found.calls) == (2, 200, 1)


def test_neighbours_with_the_same_coins_differ_only_where_the_choice_was_close(
    runs: Runs, tmp_path: Path
) -> None:
    """A record less lowers every count by at most 1: a lead of more than 1 after noise stays a lead."""
    run, data = TrainedRun.open(runs("oracle").folder), holder(tmp_path / "data")
    _, records = newcomer(run, data)
    selection, whole = assigning.ChargedChoice(0.5, "0", 2, 40).selection, scores(run, records)
    differed = 0
    for left_out in range(0, 40, 10):
        kept = np.arange(40) != left_out
        less = scores(run, Records(records.features[kept], records.targets[kept]))
        moved = whole[:, 0] - less[:, 0]
        assert ((moved >= 0) & (moved <= 1)).all()
        for seed in range(100):
            given = {"subject": "east", "round": 1, "release": "choice", "input_hash": "0"}
            coins = [SecretKey.from_seed(seed).stream("selection", **given) for _ in range(3)]
            chosen = [
                selection.choose(sums[:, 0], sums[:, 1], noise)
                for sums, noise in zip((whole, less), coins, strict=False)
            ]
            noisy = whole[:, 0] + selection.gumbel_scale * coins[2].gumbel(2)
            assert chosen[0] == np.argmax(noisy)
            if chosen[0] != chosen[1]:
                differed += 1
                assert np.ptp(noisy) <= 1
    assert differed < 40  # of 400: some are close, few are


def test_a_choice_is_paid_for_before_a_record_is_looked_at(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = holder(tmp_path / "data")

    def crash(*given: object) -> None:
        assert len((data / STATE / LEDGER).read_text().splitlines()) == 2
        raise KeyboardInterrupt

    monkeypatch.setattr(assigning, "scores", crash)
    run = TrainedRun.open(runs("oracle").folder)
    with pytest.raises(KeyboardInterrupt):
        assign(run, data, 0.5)
    monkeypatch.undo()
    found = assign(run, data, 0.5)
    assert found.calls == 2
    assert found.guarantee.epsilon > 0.9  # of both, whatever became of the first
    told = found.to_json()
    assert {"cluster", "epsilon", "guarantee"} <= told.keys()
    assert "one record of east" in told["guarantee"]
    assert "simulation" not in told["guarantee"]


def test_seeded_coins_are_called_a_simulation(runs: Runs, tmp_path: Path) -> None:
    run, data = TrainedRun.open(runs("oracle").folder), holder(tmp_path / "data")
    assert "simulation" in assign(run, data, 0.5, SecretKey.from_seed(1)).guarantee.line


@pytest.mark.parametrize(
    ("name", "epsilon", "files", "said"),
    [
        ("oracle", 0.0, 1, "--epsilon: 0.0"),
        ("oracle", float("inf"), 1, "--epsilon: inf"),
        ("oracle", float("nan"), 1, "--epsilon: nan"),
        ("oracle", 1.0, 2, "holds 2 files of records"),
    ],
)
def test_what_cannot_be_chosen_is_one_line_and_costs_nothing(
    name: str, epsilon: float, files: int, said: str, runs: Runs, tmp_path: Path
) -> None:
    data = holder(tmp_path / "data")
    if files > 1:
        (data / "west.npz").write_bytes((data / "east.npz").read_bytes())
    with pytest.raises(InputError, match=said) as refused:
        assign(TrainedRun.open(runs(name).folder), data, epsilon)
    assert "\n" not in str(refused.value)
    assert not (data / STATE).exists()


def test_records_without_labels_choose_nothing(runs: Runs, tmp_path: Path) -> None:
    data = holder(tmp_path / "data")
    np.savez(data / "east.npz", x=np.load(data / "east.npz")["x"])
    with pytest.raises(InputError, match="no array 'y'"):
        assign(TrainedRun.open(runs("oracle").folder), data, 1.0)
    with pytest.raises(InputError, match="allowed: a folder"):
        assign(TrainedRun.open(runs("oracle").folder), data / "east.npz", 1.0)


def test_a_choice_counts_against_the_lifetime_of_the_records(
    runs: Runs, tmp_path: Path, register: Path
) -> None:
    run, data = TrainedRun.open(runs("oracle").folder), holder(tmp_path / "data")
    set_lifetime(str(data), Budget(1.2, 1e-3))
    assign(run, data, 0.5)
    account = account_of_folder(data)
    assert 0 < account <= 0.5
    with pytest.raises(BudgetError, match="composed with this choice"):
        assign(run, data, 1.5)
    assert account_of_folder(data) == account


def test_choices_whose_file_is_gone_stay_in_the_history(runs: Runs, tmp_path: Path, register: Path) -> None:
    run, data = TrainedRun.open(runs("oracle").folder), holder(tmp_path / "data")
    first = assign(run, data, 0.5)
    assert first.history.line.startswith("this choice alone: (eps=")
    shutil.rmtree(data / STATE)
    again = assign(run, data, 0.5)
    assert again.calls == 1
    assert again.history.line.startswith("all 2 experiments on these records together: (eps=")
    told = again.to_json()["history"]
    assert told["experiments"] == 2
    assert told["total_epsilon"] > first.to_json()["history"]["total_epsilon"]
    assert told["total_epsilon"] == account_of_folder(data)
    shown = account_of(str(data)).to_json()
    assert (shown["spent_epsilon"], len(shown["experiments"])) == (told["total_epsilon"], 2)


def account_of_folder(data: Path) -> float:
    found = RegisterView.read()
    spent = None if found is None else found.spent(DataSet.of_folder(data))
    return 0.0 if spent is None else spent.epsilon
