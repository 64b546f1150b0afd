"""Runs side by side in one process: each as if it were alone, their clients trained as one program."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from coterie.errors import InputError
from coterie.experiment import local
from coterie.experiment.experiment_file import to_yaml
from coterie.experiment.folder import RunFolder
from coterie.experiment.local import fit_together, reason_of, run, run_together
from coterie.experiment.result import RunResult
from coterie.experiment.schema import Experiment
from coterie.files import beside, read_lines
from coterie.training.stacked import StackedTrainer

BASE: dict[str, Any] = {
    "federation": {"sizes": [2, 2], "records_per_client": 60},
    "model": {"name": "softmax"},
    "schedule": {"rounds": 4, "batch": 20},
    "evaluation": {"references": False},
}


def cell(name: str, epsilon: float, **schedule: float) -> Experiment:
    algorithm: dict[str, Any] = {"name": name}
    if name == "r-dpcfl":
        algorithm |= {"clusters": 2, "first_round_release": "update"}
    changes = {"algorithm": algorithm, "privacy": {"epsilon": epsilon}, "seeds": {"noise": 1}}
    return Experiment.model_validate({**BASE, **changes, "schedule": {**BASE["schedule"], **schedule}})


CELLS = {
    "r-dpcfl": cell("r-dpcfl", 8.0),
    "ifca": cell("dp-ifca", 4.0, lr=0.1),
    "mr-mtl": cell("mr-mtl", 8.0, batch=15),
    "local": cell("local", 4.0, rounds=6),
}


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Stacked programs on a CPU; how many clients each of them trained."""
    monkeypatch.setattr("coterie.engines.local.stacks", lambda learner: True)
    sizes: list[int] = []
    program = StackedTrainer._program

    def counted(self: StackedTrainer, jobs: Any) -> Any:
        sizes.append(len(jobs))
        return program(self, jobs)

    monkeypatch.setattr(StackedTrainer, "_program", counted)
    return sizes


def charges(path: Path) -> str:
    """What was charged, in which order; inputs may differ in their last bits."""
    lines = json.dumps([line.get("charges") for line in read_lines(RunFolder(path).ledger)])
    return re.sub(r"[0-9a-f]{64}", "", lines)


def assert_same_run(one: Path, other: Path) -> None:
    """The same releases charged in the same order; figures equal but for rounding."""
    assert charges(one) == charges(other)
    first, second = RunResult.load(one), RunResult.load(other)
    assert first.guarantee == second.guarantee
    assert first.clusters == second.clusters
    assert second.loss.per_client == pytest.approx(first.loss.per_client, rel=1e-4)


def test_cells_end_where_each_would_end_alone(tmp_path: Path, programs: list[int]) -> None:
    for name, experiment in CELLS.items():
        run(experiment, tmp_path / "alone" / name)
    assert set(programs) == {4}
    programs.clear()
    outcomes = run_together({tmp_path / "both" / name: experiment for name, experiment in CELLS.items()})
    assert not outcomes.failures
    # Round 1 of r-dpcfl is a full batch, a program of its own; the longest run ends alone.
    assert sorted(programs) == [4, 4, 4, 12, 16, 16, 16]
    for name in CELLS:
        assert_same_run(tmp_path / "alone" / name, tmp_path / "both" / name)


def test_a_cell_that_fails_stops_no_other_and_resumes_later(
    tmp_path: Path, programs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from coterie.algorithms.record.mr_mtl import MRMTL

    rounds = MRMTL.round

    def breaking(self: MRMTL, state: Any) -> Any:
        if state.round == 2:
            raise RuntimeError("the sky fell")
        return rounds(self, state)

    monkeypatch.setattr(MRMTL, "round", breaking)
    paths = {tmp_path / name: experiment for name, experiment in CELLS.items()}
    crowd = CELLS["r-dpcfl"].algorithm.model_copy(update={"clusters": 9})
    paths[tmp_path / "crowd"] = CELLS["r-dpcfl"].model_copy(update={"algorithm": crowd})
    outcomes = run_together(paths)
    assert {path.name for path in outcomes.results} == {"r-dpcfl", "ifca", "local"}
    assert {path.name for path in outcomes.failures} == {"mr-mtl", "crowd"}
    assert str(outcomes.failures[tmp_path / "mr-mtl"]) == "the sky fell"
    monkeypatch.setattr(MRMTL, "round", rounds)
    again = run_together({path: paths[path] for path in (tmp_path / "mr-mtl", tmp_path / "local")})
    assert not again.failures
    run(CELLS["mr-mtl"], tmp_path / "unbroken")
    assert_same_run(tmp_path / "unbroken", tmp_path / "mr-mtl")


def test_the_process_writes_what_stopped_a_run_beside_its_folder(tmp_path: Path) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    for path in (good, bad):
        beside(path, ".yaml").write_text(to_yaml(CELLS["local"]))
    bad.write_text("in the way")
    assert local.main([str(good), str(bad)]) == 1
    assert RunFolder(good).finished
    assert "is no folder" in beside(bad, ".log").read_text()
    assert beside(bad, ".log").read_text().count("\n") == 1


def test_what_stopped_a_run_is_one_line_with_what_went_wrong_after_it() -> None:
    failure = ValueError("odd\nand more")
    failure.add_note("and where it ended, OSError: no space left")
    assert reason_of(failure) == "ValueError: odd and more; and where it ended, OSError: no space left"
    assert reason_of(KeyError()) == "KeyError: KeyError"


def test_only_cells_with_one_network_and_device_fit_together() -> None:
    same = {fit_together(experiment) for experiment in CELLS.values()}
    other = CELLS["local"].model_dump(mode="json") | {"model": {"name": "cnn"}}
    assert len(same) == 1
    assert fit_together(Experiment.model_validate(other)) not in same


def test_a_finished_run_of_another_experiment_is_left_alone(tmp_path: Path) -> None:
    run(CELLS["local"], tmp_path / "run")
    failures = run_together({tmp_path / "run": CELLS["mr-mtl"]}).failures
    assert isinstance(failures[tmp_path / "run"], InputError)
