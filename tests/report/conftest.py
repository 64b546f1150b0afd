"""Run and comparison folders, written with the runner's own types but without training anything."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from coterie import __version__
from coterie.algorithms.protocol import Findings
from coterie.experiment.comparison import Row, table_csv, table_markdown
from coterie.experiment.experiment_file import to_yaml
from coterie.experiment.folder import RunFolder
from coterie.experiment.result import Fairness, RunResult, Spread
from coterie.experiment.schema import Experiment
from coterie.experiment.sweep import Sweep
from coterie.files import append_line, write_json, write_text
from coterie.privacy import (
    Adjacency,
    Budget,
    Custody,
    Guarantee,
    Ledger,
    PlannedRelease,
    PoissonSteps,
    PrivacyPlan,
    PrivateSelection,
    Unit,
    UnitPlan,
    guarantee,
)
from coterie.privacy.threats import THREATS

DELTA = 4e-4


@dataclass
class Story:
    """What a run is to look like."""

    clients: Sequence[str] = ("ada", "ben", "cleo", "dan", "eve", "finn")
    truth: Sequence[int] | None = (0, 0, 0, 1, 1, 1)
    found: Sequence[int] = (1, 1, 1, 0, 0, 0)
    rounds: int = 6
    done: int = 6
    every: int = 1
    task: str = "classification"
    level: float = 0.9
    finished: bool = True
    findings: bool = True
    warnings: tuple[str, ...] = ()
    experiment: Mapping[str, Any] = field(default_factory=dict)


def write_run(path: Path, story: Story) -> Path:
    """Write everything that a run of this story leaves behind, except its report."""
    files = RunFolder(path)
    path.mkdir(parents=True)
    experiment = _experiment(story)
    write_text(files.experiment, to_yaml(experiment))
    write_json(files.federation, _federation(story))
    plan = _plan(story, experiment.privacy.unit)
    budget = Budget(experiment.privacy.epsilon, DELTA)
    promise = guarantee(
        plan,
        budget=budget,
        caveats=("measured outside the guarantee",),
        held_by=Custody.ONE_PROCESS,
    )
    write_json(files.plan, plan.to_json())
    write_json(files.guarantee, promise.to_json())
    with Ledger.open(files.ledger, plan, budget=budget, accountant="rdp"):
        pass
    for number in range(1, story.done + 1):
        append_line(files.metrics, _metrics(story, number, promise))
        append_line(files.timing, {"round": number, "train": 0.2, "evaluate": 0.1})
    if story.findings:
        write_json(files.findings, dataclasses.asdict(_findings(story)))
    if story.finished:
        write_json(files.result, _result(path, story, experiment, promise).to_json())
    return path


def _experiment(story: Story) -> Experiment:
    return Experiment.model_validate(
        {
            "federation": {"kind": "clusters", "sizes": [3, 3], "shift": "rotation"},
            "algorithm": {"name": "r-dpcfl"},
            "schedule": {"rounds": story.rounds},
            "evaluation": {"every": story.every},
            **story.experiment,
        }
    )


def _federation(story: Story) -> dict[str, Any]:
    truth: Sequence[int | None] = story.truth or [None] * len(story.clients)
    return {
        "coterie": __version__,
        "task": story.task,
        "classes": 10 if story.task == "classification" else 0,
        "parameters": 650,
        "clients": [
            {"name": name, "records": 239, "test_records": 59, "true_cluster": own}
            for name, own in zip(story.clients, truth, strict=True)
        ],
    }


def _plan(story: Story, unit: Unit) -> PrivacyPlan:
    steps = PoissonSteps(
        clip=1.0, noise_multiplier=1.2, records=239, batch=24, epochs=1, adjacency=Adjacency.ZERO_OUT
    )
    choice = PrivateSelection(epsilon=0.24, adjacency=Adjacency.ZERO_OUT)
    releases = (PlannedRelease("training", steps, story.rounds), PlannedRelease("selection", choice, 2))
    return PrivacyPlan(
        unit=unit,
        adjacency=Adjacency.ZERO_OUT,
        threat=THREATS[Unit.RECORD],
        units=tuple(UnitPlan(name, releases) for name in story.clients),
    )


def _accuracy(story: Story, number: int) -> Spread:
    share = number / story.rounds
    return Spread.of({name: story.level * share - 0.01 * index for index, name in enumerate(story.clients)})


def _metrics(story: Story, number: int, promise: Guarantee) -> dict[str, Any]:
    measured = number % story.every == 0 or number == story.rounds
    accuracy = dataclasses.asdict(_accuracy(story, number))
    return {
        "round": number,
        "accuracy": accuracy if measured else None,
        "loss": accuracy if measured else None,
        "clusters": dict(zip(story.clients, story.found, strict=True)),
        "epsilon": promise.epsilon * math.sqrt(number / story.rounds),
    }


def _findings(story: Story) -> Findings:
    return Findings(
        clients=tuple(story.clients),
        points=tuple((0.1 * own + 0.003 * index, 0.02 * index) for index, own in enumerate(story.found)),
        centres=((0.01, 0.08), (0.11, 0.02)),
        spread=0.01,
        responsibilities=tuple((0.02, 0.98) if own else (0.98, 0.02) for own in story.found),
        separation=4.5,
        overlap=1e-5,
        scores={"2": 4.5, "3": 1.5, "4": 1.25},
        switch_round=3,
        warnings=story.warnings,
    )


def _result(path: Path, story: Story, experiment: Experiment, promise: Guarantee) -> RunResult:
    accuracy = _accuracy(story, story.rounds)
    assert accuracy.max is not None
    assert accuracy.min is not None
    return RunResult(
        folder=path,
        algorithm=experiment.algorithm.name,
        accuracy=accuracy,
        cluster_accuracy={"0": 0.89, "1": 0.86} if story.truth else None,
        loss=accuracy,
        fairness=Fairness(disparity=accuracy.max - accuracy.min, f_acc=0.11, f_loss=0.25),
        clusters=dict(zip(story.clients, story.found, strict=True)),
        clusters_found=True if story.truth else None,
        guarantee=promise.line,
        guarantee_text=promise.text,
        epsilon=promise.epsilon,
        delta=DELTA,
        noise_multiplier=1.2,
        rounds=story.rounds,
        seconds=1.8,
        sample_gradients_per_second=31000.0,
        warnings=story.warnings,
        per_client=promise.per_client_json(),
    )


def write_comparison(path: Path, sweep: Sweep, failed: Mapping[str, str], **story: Any) -> Path:
    """Write a comparison in which the named cells broke with the given last words."""
    path.mkdir(parents=True)
    write_text(path / "sweep.yaml", sweep.to_yaml())
    (path / "cells").mkdir()
    groups: dict[str, list[tuple[Mapping[str, Any], RunResult]]] = {}
    for place, cell in enumerate(sweep.cells()):
        target = path / "cells" / cell.name
        if cell.name in failed:
            target.with_name(f"{cell.name}.log").write_text(f"noise\nerror: {failed[cell.name]}\n")
            continue
        experiment = yaml.safe_load(to_yaml(cell.experiment))
        told = Story(experiment=experiment, level=0.9 - 0.05 * place, **story)
        write_run(target, told)
        RunFolder(target).report.write_text("its own report")
        values = {key: value for key, value in cell.values.items() if not key.startswith("seeds.")}
        groups.setdefault(repr(values), []).append((values, RunResult.load(target)))
    rows = [_row(members) for members in groups.values()]
    write_text(path / "table.csv", table_csv(rows))
    write_text(path / "table.md", table_markdown(rows, None))
    return path


def _row(members: Sequence[tuple[Mapping[str, Any], RunResult]]) -> Row:
    values, first = members[0]
    means = [result.accuracy.mean for _, result in members if result.accuracy is not None]
    reached, fairness = first.accuracy, first.fairness
    assert fairness is not None
    assert reached is not None
    assert reached.min is not None
    assert reached.max is not None
    return Row(
        values=values,
        runs=len(means),
        reached=sum(means) / len(means),
        reached_std=max(means) - min(means) if len(means) > 1 else None,
        worst_client=reached.min,
        best_client=reached.max,
        worst_cluster=None,
        disparity=fairness.disparity,
        f_acc=fairness.f_acc,
        f_loss=fairness.f_loss,
        clusters_found=len(means),
        kind="exact",
        epsilon=first.epsilon,
        noise_multiplier=first.noise_multiplier,
        seconds=first.seconds,
        guarantee=first.guarantee,
        guarantee_text=first.guarantee_text,
    )


@pytest.fixture
def run_folder(tmp_path: Path) -> Callable[..., Path]:
    """A function that writes a run folder of the given story."""

    def write(name: str = "run", **story: Any) -> Path:
        return write_run(tmp_path / name, Story(**story))

    return write


@pytest.fixture
def comparison_folder(tmp_path: Path) -> Callable[..., Path]:
    """A function that writes the folder of a comparison over a grid."""

    def write(
        grid: Mapping[str, list[Any]],
        failed: Mapping[str, str] | None = None,
        base: Mapping[str, Any] | None = None,
        sweep: Sweep | None = None,
        **story: Any,
    ) -> Path:
        sweep = sweep or Sweep({"schedule": {"rounds": 6}, **(base or {})}, grid)
        return write_comparison(tmp_path / "comparison", sweep, failed or {}, **story)

    return write
