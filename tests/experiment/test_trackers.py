"""Trackers: real TensorBoard files, and the calls of MLflow's and W&B's documented interfaces."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coterie.errors import InputError
from coterie.experiment import local, trackers
from coterie.experiment.callbacks import Callbacks, RoundReport, RunStart, together
from coterie.experiment.schema import Experiment

TINY: dict[str, Any] = {
    "federation": {"kind": "clusters", "sizes": [2], "shift": "none", "records_per_client": 30},
    "algorithm": {"name": "global"},
    "schedule": {"rounds": 2, "batch": 10},
    "seeds": {"simulation": 1, "noise": 77},
    "evaluation": {"references": False},
}
OWN = Experiment.model_validate(
    {"data": {"name": "folder", "path": "/home/somebody"}, "federation": {"kind": "natural"}}
)


class Recorded:
    """What the documented functions of MLflow (its fluent interface) and W&B are called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.summary: dict[str, Any] = {}

    def mlflow(self) -> SimpleNamespace:
        def set_experiment(experiment_name: str | None = None, experiment_id: str | None = None) -> None:
            self.calls.append(("set_experiment", experiment_name))

        def start_run(run_id: str | None = None, *, run_name: str | None = None) -> None:
            self.calls.append(("start_run", run_name))

        def log_params(params: dict[str, Any], synchronous: bool | None = None) -> None:
            self.calls.append(("log_params", params))

        def log_metrics(metrics: dict[str, float], step: int | None = None) -> None:
            self.calls.append(("log_metrics", (step, metrics)))

        def set_tag(key: str, value: Any) -> None:
            self.calls.append(("set_tag", (key, value)))

        def end_run(status: str = "FINISHED") -> None:
            self.calls.append(("end_run", status))

        functions = (set_experiment, start_run, log_params, log_metrics, set_tag, end_run)
        return SimpleNamespace(**{each.__name__: each for each in functions})

    def wandb(self) -> SimpleNamespace:
        def log(data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
            self.calls.append(("log", (step, data)))

        def finish(exit_code: int | None = None) -> None:
            self.calls.append(("finish", exit_code))

        def init(*, project: str, name: str, config: dict[str, Any]) -> SimpleNamespace:
            self.calls.append(("init", (project, name, config)))
            return SimpleNamespace(log=log, finish=finish, summary=self.summary)

        return SimpleNamespace(init=init)

    def of(self, name: str) -> list[Any]:
        return [told for called, told in self.calls if called == name]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    fake = Recorded()
    for package in ("mlflow", "wandb"):
        monkeypatch.setitem(sys.modules, package, getattr(fake, package)())
    return fake


def test_one_run_is_told_to_all_three(recorded: Recorded, tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    every = [
        trackers.to_tensorboard(tmp_path / "logs"),
        trackers.to_mlflow("digits"),
        trackers.to_wandb("digits"),
    ]
    result = local.run(TINY, tmp_path / "mine", callbacks=together(every))
    assert result.accuracy is not None

    found = events.EventAccumulator(str(tmp_path / "logs")).Reload()
    assert [(event.step, event.value) for event in found.Scalars("accuracy")][-1] == (
        2,
        pytest.approx(result.accuracy.mean),
    )
    assert found.Scalars("epsilon")[-1].value == pytest.approx(result.epsilon, rel=1e-4)
    said = found.Tensors("guarantee/text_summary")[0].tensor_proto.string_val[0].decode()
    assert said == result.guarantee

    assert recorded.of("start_run") == ["mine"]
    assert recorded.of("set_experiment") == ["digits"]
    assert recorded.of("set_tag") == [("guarantee", result.guarantee)]
    steps = [step for step, _ in recorded.of("log_metrics")]
    assert steps == [step for step, _ in recorded.of("log")] == [1, 2]
    assert recorded.of("log_metrics")[-1][1]["accuracy"] == result.accuracy.mean
    assert recorded.of("end_run") == ["FINISHED"]

    [(project, name, config)] = recorded.of("init")
    assert (project, name) == ("digits", "mine")
    assert config["privacy.epsilon"] == 8.0
    assert recorded.summary["guarantee"] == result.guarantee
    assert recorded.of("finish") == [0]
    # With the seed, everybody could take the noise away again.
    for settings in (config, recorded.of("log_params")[0]):
        assert not {"seeds.noise", "data.path"} & settings.keys()
        assert "77" not in map(str, settings.values())


def test_a_run_that_breaks_is_told_as_broken(recorded: Recorded, tmp_path: Path) -> None:
    def broken(report: RoundReport) -> None:
        raise ZeroDivisionError

    every = [trackers.to_mlflow(), trackers.to_wandb("p"), Callbacks(on_round=broken)]
    with pytest.raises(ZeroDivisionError):
        local.run(TINY, tmp_path / "run", callbacks=together(every))
    assert recorded.of("end_run") == ["FAILED"]
    assert recorded.of("finish") == [1]
    assert recorded.of("set_experiment") == []


@pytest.mark.parametrize(
    ("outside", "is_exact", "told"),
    [
        (False, True, {"epsilon": 1.0}),
        (True, True, {"epsilon": 1.0, "accuracy": 0.5}),
        (False, False, {"epsilon": 1.0, "accuracy": 0.5}),
    ],
)
def test_exact_scores_of_own_records_stay_here_unless_asked_for(
    outside: bool, is_exact: bool, told: dict[str, float], recorded: Recorded, tmp_path: Path
) -> None:
    tracker = trackers.to_wandb("p", outside=outside)
    tracker.tell("on_start", RunStart(tmp_path, OWN, "a guarantee"))
    tracker.tell("on_round", RoundReport(1, 2, 0.5, 1.0, 3.0, is_exact=is_exact))
    tracker.tell("on_round", RoundReport(2, 2, None, float("inf"), 3.0))
    tracker.tell("on_end", None)
    assert recorded.of("log") == [(1, told)]
    assert "/home/somebody" not in str(recorded.calls)


@pytest.mark.parametrize("package", ["tensorboard", "mlflow", "wandb"])
def test_a_package_that_is_not_there_is_said_before_the_run(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InputError, match=rf"{package}: not installed; pip install 'coterie\[{package}\]'"):
        getattr(trackers, f"to_{package}")("somewhere")
