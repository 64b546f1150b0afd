"""A grid of runs: cells are ordinary runs, a broken one breaks nothing else, finished ones are kept."""

import csv
import fcntl
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import yaml

from coterie.engines.secret import RunSecret
from coterie.errors import InputError
from coterie.experiment.cells import CELLS_AT_ONCE, LocalProcesses, compare, shares
from coterie.experiment.comparison import SweepResult
from coterie.experiment.folder import RunFolder
from coterie.experiment.result import RunResult
from coterie.experiment.schema import Experiment
from coterie.experiment.sweep import Part, Sweep
from coterie.privacy import SecretKey
from coterie.report.words import key_name

SWEEP = """
base:
  federation: {kind: clusters, sizes: [2, 3], records_per_client: 60}
  algorithm: {name: r-dpcfl, clusters: 2}
  schedule: {rounds: 2, batch: 20}
  evaluation: {references: false}
  seeds: {noise: 1}
grid:
  algorithm.name: [r-dpcfl, global]
  algorithm.selection_share: [0.03, 0.9]
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "sweep.yaml"
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> SweepResult:
    """Three settings of the budget, one of which is impossible, two seeds each."""
    folder = tmp_path_factory.mktemp("sweep")
    text = SWEEP.replace("  algorithm.name: [r-dpcfl, global]\n", "  seeds.simulation: [1, 2]\n")
    # Three selections of 0.9 * 8 each cannot fit a budget of 8; two of 0.03 * 8 can.
    return compare(Sweep.read(written(folder, text.replace("rounds: 2", "rounds: 20"))), folder / "out")


def test_every_combination_is_a_cell_and_options_follow_their_algorithm(tmp_path: Path) -> None:
    text = SWEEP.replace("  algorithm.selection_share: [0.03, 0.9]\n", "  privacy.epsilon: [4, 8]\n")
    cells = Sweep.read(written(tmp_path, text)).cells()
    assert [cell.values for cell in cells] == [
        {"algorithm.name": name, "privacy.epsilon": epsilon}
        for name in ("r-dpcfl", "global")
        for epsilon in (4, 8)
    ]
    assert cells[0].experiment.algorithm.model_dump()["clusters"] == 2
    assert cells[2].experiment.algorithm.model_dump() == {"name": "global"}
    assert len({cell.name for cell in cells}) == 4


def test_cells_are_made_and_checked_once_however_often_they_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = SWEEP.replace("  algorithm.selection_share: [0.03, 0.9]\n", "")
    calls: list[str] = []
    for owner, name in ((Experiment, "check_all_acts"), (Sweep, "_cells_of")):
        original = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda *arguments, o=original, n=name: (calls.append(n), o(*arguments))[1]
        )
    sweep = Sweep.read(written(tmp_path, text))
    assert sweep.checked() == sweep.cells() == sweep.checked()
    assert sweep.contains(sweep)
    assert sweep.notes == ["algorithm.clusters has no effect in 1 of 2 cells and is left out there"]
    sweep.cells().clear()
    assert len(sweep.cells()) == 2
    assert calls == ["_cells_of", "check_all_acts", "check_all_acts"]


PARTS = """
base:
  federation: {kind: clusters, sizes: [2, 3], records_per_client: 60}
  schedule: {rounds: 2, batch: 20}
parts:
- grid: {algorithm.name: [r-dpcfl, oracle], seeds.simulation: [1, 2]}
- set: {privacy.clip: 3.0}
  grid: {algorithm.name: [global], seeds.simulation: [1]}
"""


def test_parts_have_their_own_seeds_and_settings(tmp_path: Path) -> None:
    sweep = Sweep.read(written(tmp_path, PARTS))
    cells = sweep.cells()
    assert [(cell.values["algorithm.name"], cell.values["seeds.simulation"]) for cell in cells] == [
        ("r-dpcfl", 1), ("r-dpcfl", 2), ("oracle", 1), ("oracle", 2), ("global", 1),
    ]  # fmt: skip
    assert [cell.experiment.privacy.clip for cell in cells] == [1.0, 1.0, 1.0, 1.0, 3.0]
    assert sweep.grid == {"algorithm.name": ["r-dpcfl", "oracle", "global"], "seeds.simulation": [1, 2]}
    (tmp_path / "again").mkdir()
    assert Sweep.read(written(tmp_path / "again", sweep.to_yaml())) == sweep


def test_labels_tell_two_settings_of_one_algorithm_apart(tmp_path: Path) -> None:
    text = """
parts:
- {label: tight, set: {privacy.clip: 0.1}, grid: {algorithm.name: [global], seeds.simulation: [1, 2]}}
- {label: loose, set: {privacy.clip: 9.0}, grid: {algorithm.name: [global], seeds.simulation: [1, 2]}}
"""
    sweep = Sweep.read(written(tmp_path, text))
    cells = sweep.cells()
    assert {(cell.values["label"], cell.experiment.privacy.clip) for cell in cells} == {
        ("tight", 0.1),
        ("loose", 9.0),
    }
    assert len({cell.name for cell in cells}) == 4
    assert sweep.varying == ["label", "algorithm.name"]
    assert Sweep.read(written(tmp_path, sweep.to_yaml())) == sweep


def test_a_sweep_grows_by_cells_but_never_changes_them(tmp_path: Path) -> None:
    small = Sweep.read(written(tmp_path, PARTS))
    more = Sweep.of_parts(
        small.base, [Part({"algorithm.name": ["local", "oracle"], "seeds.simulation": [1]})]
    )
    both = small.joined(more)
    assert both.contains(small)
    assert both.contains(more)
    assert not small.contains(both)
    assert len(both.cells()) == 6
    assert both.joined(small) == both
    with pytest.raises(InputError, match="different bases"):
        small.joined(Sweep({}, small.grid))
    changed = Sweep.of_parts({**small.base, "schedule": {"rounds": 3, "batch": 20}}, small.parts)
    assert not changed.contains(small)


def test_a_mistake_in_any_cell_is_found_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"algorithm.selection_share: unknown key"):
        Sweep.read(written(tmp_path, SWEEP)).cells()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("grid: {}", "grid should map"),
        ("grid: {schedule.rounds: 3}", r"grid.schedule.rounds: 3 is not allowed"),
        ("grid: {schedule.rounds: [3]}\nbases: {}", "unknown key 'bases'"),
        ("grid: {schedule.rounds: [3, 3]}", "stands twice"),
        ("grid: {schedule.lr: [1, 1.0]}", "lr=1.0 is the same run as lr=1"),
        ("grid: {seeds: [{noise: 1}], seeds.noise: [1]}", r"grid.seeds.noise: stands inside seeds"),
        ("parts: [{set: {schedule.lr: 1}, grid: {schedule.lr: [2]}}]", r"parts.0.set.schedule.lr: the grid"),
        ("parts: [{set: {seeds.noise: 1}, grid: {seeds: [{}]}}]", r"parts.0.set.seeds.noise: the grid"),
        (f"parts: [{{grid: {{seeds.noise: {list(range(10_001))}}}}}]", r"seeds.noise: 10001 values; allowed"),
        ("base: 3\ngrid: {schedule.rounds: [3]}", "base should hold sections"),
        ("grid: {schedule.rounds: [3]}\nparts: []", "in place of grid"),
        ("parts: [{grid: {schedule.rounds: [3]}, sets: {}}]", r"parts.0: .* allowed: label, set and grid"),
        ("parts: [{grid: {schedule.rounds: 3}}]", r"parts.0.grid.schedule.rounds: 3 is not allowed"),
        ("parts: [{grid: {schedule.rounds: [3]}, set: 4}]", r"parts.0.set: 4 is not allowed"),
        (
            "parts: [{grid: {schedule.rounds: [3]}}, {grid: {schedule.lr: [1]}}]",
            r"'schedule.\w+' varies in one part and is missing in another",
        ),
        (
            "parts: [{grid: {schedule.rounds: [3]}}, {grid: {schedule.rounds: [3]}, set: {schedule.lr: 9}}]",
            "stands twice, with different settings",
        ),
    ],
)
def test_a_malformed_sweep_is_one_line(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        Sweep.read(written(tmp_path, text)).cells()


def test_more_cells_than_anybody_runs_are_counted_and_not_made(tmp_path: Path) -> None:
    many = list(range(1000))
    sweep = Sweep({}, {"seeds.simulation": many, "seeds.noise": many, "schedule.batch": many[1:]})
    with pytest.raises(InputError, match="grid: 999000000 cells; allowed: at most 10000"):
        sweep.cells()
    assert len(Sweep({}, {"seeds.simulation": many}).cells()) == 1000


def test_a_broken_cell_is_reported_and_the_rest_finish(finished: SweepResult) -> None:
    assert len(finished.cells) == 2
    assert len(finished.failed) == 2
    for name, reason in finished.failed.items():
        assert "selection_share=0.9" in name
        assert "budget" in reason or "epsilon" in reason


def test_cells_are_ordinary_run_folders(finished: SweepResult) -> None:
    for path in finished.cells.values():
        assert RunFolder(path).finished
        assert RunResult.load(path).rounds == 20
        assert RunFolder(path).report.exists()


def test_the_table_has_means_and_spreads_over_seeds(finished: SweepResult) -> None:
    (row,) = finished.rows
    results = [RunResult.load(path) for path in finished.cells.values()]
    means = [result.accuracy.mean for result in results]
    assert row.runs == 2
    assert row.accuracy == pytest.approx(sum(means) / 2)
    assert row.reached_std == pytest.approx(abs(means[0] - means[1]) / 2**0.5)
    with (finished.folder / "table.csv").open() as handle:
        (line,) = csv.DictReader(handle)
    assert float(line["accuracy"]) == row.accuracy
    markdown = (finished.folder / "table.md").read_text()
    assert row.guarantee in markdown
    assert "±" in markdown


def test_resuming_skips_finished_cells(finished: SweepResult, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    start = LocalProcesses.start

    def watch(self: LocalProcesses, runs: Mapping[Path, Experiment]) -> Callable[[], bool]:
        started.extend(path.name for path in runs)
        return start(self, runs)

    monkeypatch.setattr(LocalProcesses, "start", watch)
    again = compare(Sweep.read(finished.folder / "sweep.yaml"), finished.folder, resume=True)
    assert again.rows == finished.rows
    assert set(started) == set(finished.failed)


def test_resuming_removes_a_noise_key_that_a_kill_left_in_a_finished_cell(finished: SweepResult) -> None:
    secret = RunFolder(next(iter(finished.cells.values()))).secret
    RunSecret(SecretKey.from_seed(1), "data", "plan").save(secret)
    compare(Sweep.read(finished.folder / "sweep.yaml"), finished.folder, resume=True)
    assert not secret.exists()


def test_a_comparison_is_never_overwritten_nor_resumed_as_another(
    finished: SweepResult, tmp_path: Path
) -> None:
    sweep = Sweep.read(finished.folder / "sweep.yaml")
    with pytest.raises(InputError, match="exists already"):
        compare(sweep, finished.folder)
    other = Sweep(sweep.base, {"seeds.simulation": [9]})
    with pytest.raises(InputError, match="another sweep"):
        compare(other, finished.folder, resume=True)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="not a comparison"):
        compare(sweep, tmp_path, resume=True)


def test_two_comparisons_do_not_work_in_one_folder(finished: SweepResult) -> None:
    with (finished.folder / "seal.jsonl").open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(InputError, match="another comparison is at work"):
            compare(Sweep.read(finished.folder / "sweep.yaml"), finished.folder, resume=True)


def test_cells_that_share_a_process_fail_and_finish_each_for_itself(
    finished: SweepResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)  # not in the processes of cells
    shared = compare(Sweep.read(finished.folder / "sweep.yaml"), tmp_path / "out")
    assert shared.failed == finished.failed
    assert [row.accuracy for row in shared.rows] == [row.accuracy for row in finished.rows]


def test_on_a_gpu_cells_share_a_process_whatever_their_unit_and_on_a_processor_none() -> None:
    federation = {"kind": "groups", "structure": "ring", "workers": 8, "groups": 2}
    grouped = {
        "federation": federation,
        "algorithm": {"name": "dp-ogl", "noise": 2.0},
        "privacy": {"unit": "worker", "epsilon": math.inf},
    }
    for base in ({}, grouped):
        cells = Sweep(base, {"seeds.simulation": [0, 1, 2]}).cells()
        assert [len(share) for share in shares(cells, gpu=True)] == [3]
        assert [len(share) for share in shares(cells, gpu=False)] == [1, 1, 1]
    both = [*cells, *Sweep({}, {"seeds.simulation": [0, 1]}).cells()]
    assert [len(share) for share in shares(both, gpu=True)] == [3, 2]


def test_a_process_has_as_many_cells_as_any_other() -> None:
    cells = Sweep({}, {"seeds.simulation": list(range(2 * CELLS_AT_ONCE + 4))}).cells()
    found = shares(cells, gpu=True)
    assert [len(share) for share in found] == [12, 12, 12]
    assert [cell for share in found for cell in share] == cells


def test_a_label_is_one_line_and_no_longer_than_a_folders_name(tmp_path: Path) -> None:
    path = tmp_path / "sweep.yaml"
    for label, cells in (("two\nlines", 1), ("long " * 60, 0)):
        part = {"label": label, "grid": {"algorithm.name": ["local"]}}
        path.write_text(yaml.safe_dump({"parts": [part]}), encoding="utf-8")
        sweep = Sweep.read(path)
        if cells:
            assert [cell.values["label"] for cell in sweep.cells()] == ["two lines"]
        else:
            with pytest.raises(InputError, match="too long for a folder"):
                sweep.cells()


def test_every_key_that_varies_has_a_heading() -> None:
    headings = [key_name(key) for key in ("label", "privacy.epsilon", "model.name", "algorithm.name")]
    assert headings == ["Label", "Epsilon", "Model name", "Algorithm"]


@pytest.mark.parametrize(
    "base",
    [{"server_step": 3}, {"name": "dp-fesem", "server_step": 3}],
    ids=["beside no name", "beside another name"],
)
def test_what_the_base_sets_for_an_algorithm_that_no_cell_has_is_refused(base: dict[str, object]) -> None:
    """It would be lost with that algorithm, without a word."""
    whole = {
        "base": {"privacy": {"unit": "client"}, "algorithm": base},
        "grid": {"algorithm.name": ["dp-ifca"]},
    }
    with pytest.raises(
        InputError, match=r"^base: algorithm\.server_step stands beside algorithm\.name .*lost"
    ):
        Sweep.read(whole).checked()
    part = {"grid": whole["grid"], "set": {"algorithm.server_step": 2}}
    again = {"base": whole["base"], "parts": [part]}
    (cell,) = Sweep.read(again).checked()
    assert cell.experiment.algorithm.model_dump()["server_step"] == 2
    assert not cell.dropped
