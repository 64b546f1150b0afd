"""Runs shown by what people watch runs with: TensorBoard, MLflow, Weights & Biases.

Each function returns `Callbacks`; the package behind it is an extra of its name. Told are the settings (but
for paths and for a seed of the noise), the guarantee and, after each round, epsilon and accuracy. An accuracy
outside the guarantee is told of published records only, or where `outside=True` asks for it: others may read
what is tracked. Times are not told.

Example:
    >>> import coterie as ct
    >>> ct.run("experiment.yaml", callbacks=ct.trackers.to_tensorboard("logs"))  # doctest: +SKIP
"""

import math
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from coterie.errors import InputError
from coterie.experiment.callbacks import Callbacks, RoundReport, RunStart

if TYPE_CHECKING:
    from coterie.experiment.result import RunResult

_UNTOLD = {"data.path", "seeds.noise"}
"""Settings that are nobody's business: whoever knows a seed of the noise can take the noise away."""
Setting: TypeAlias = str | int | float | bool | None


def to_tensorboard(folder: str | Path, *, outside: bool = False) -> Callbacks:
    """Write what TensorBoard shows into a folder.

    Args:
        outside: tell exact accuracies of your own records, too, which the guarantee does not cover.

    Example:
        >>> import coterie as ct
        >>> ct.run("experiment.yaml", callbacks=ct.trackers.to_tensorboard("logs/mine"))  # doctest: +SKIP
    """
    _imported("tensorboard")
    writers: list[Any] = []

    def start(told: RunStart) -> None:
        writer = import_module("torch.utils.tensorboard").SummaryWriter(
            str(folder), purge_step=told.done + 1 if told.done else None
        )
        writers.append(writer)
        writer.add_text("guarantee", told.guarantee, told.done)
        lines = (f"    {key}: {value}" for key, value in settings_of(told).items())
        writer.add_text("settings", "\n".join(lines), told.done)

    def log(round: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            writers[-1].add_scalar(name, value, round)
        writers[-1].flush()

    return _tracking(start, log, lambda result: writers.pop().close(), outside=outside)


def to_mlflow(experiment: str | None = None, *, outside: bool = False) -> Callbacks:
    """Log to MLflow, where its tracking address says; one MLflow run for each time that the run goes on.

    Args:
        experiment: MLflow's name for what runs have in common; None: the one that is set.
        outside: tell exact accuracies of your own records, too, which the guarantee does not cover.

    Example:
        >>> import coterie as ct
        >>> ct.run("experiment.yaml", callbacks=ct.trackers.to_mlflow("heart disease"))  # doctest: +SKIP
    """
    mlflow = _imported("mlflow")

    def start(told: RunStart) -> None:
        if experiment is not None:
            mlflow.set_experiment(experiment)
        mlflow.start_run(run_name=told.folder.name)
        mlflow.log_params({key: str(value) for key, value in settings_of(told).items()})
        mlflow.set_tag("guarantee", told.guarantee)

    def log(round: int, figures: Mapping[str, float]) -> None:
        mlflow.log_metrics(dict(figures), step=round)

    def end(result: "RunResult | None") -> None:
        mlflow.end_run(status="FAILED" if result is None else "FINISHED")

    return _tracking(start, log, end, outside=outside)


def to_wandb(project: str, *, outside: bool = False) -> Callbacks:
    """Log to a project of Weights & Biases.

    Args:
        outside: tell exact accuracies of your own records, too, which the guarantee does not cover.

    Example:
        >>> import coterie as ct
        >>> ct.run("experiment.yaml", callbacks=ct.trackers.to_wandb("heart-disease"))  # doctest: +SKIP
    """
    wandb = _imported("wandb")
    runs: list[Any] = []

    def start(told: RunStart) -> None:
        runs.append(wandb.init(project=project, name=told.folder.name, config=settings_of(told)))
        runs[-1].summary["guarantee"] = told.guarantee

    def log(round: int, figures: Mapping[str, float]) -> None:
        runs[-1].log(dict(figures), step=round)

    def end(result: "RunResult | None") -> None:
        runs.pop().finish(exit_code=int(result is None))

    return _tracking(start, log, end, outside=outside)


def settings_of(told: RunStart) -> dict[str, Setting]:
    """Every setting that is told, by its dotted key."""
    whole = told.experiment.model_dump(mode="json")
    return {key: value for key, value in _flat(whole) if key not in _UNTOLD}


def _flat(section: Mapping[str, Any], inside: str = "") -> Iterator[tuple[str, Setting]]:
    for key, value in section.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{inside}{key}.")
        else:
            plain = isinstance(value, str | int | float) or value is None
            yield f"{inside}{key}", value if plain else str(value)


def _tracking(
    start: Callable[[RunStart], None],
    log: Callable[[int, Mapping[str, float]], None],
    end: Callable[["RunResult | None"], None],
    *,
    outside: bool,
) -> Callbacks:
    begun: list[RunStart] = []

    def on_start(told: RunStart) -> None:
        start(told)
        begun.append(told)

    def on_round(report: RoundReport) -> None:
        figures = {"epsilon": report.epsilon} if math.isfinite(report.epsilon) else {}
        covered = not report.is_exact or not begun[-1].experiment.own_records
        if report.accuracy is not None and (covered or outside):
            figures["accuracy"] = report.accuracy
        if figures:
            log(report.round, figures)

    def on_end(result: "RunResult | None") -> None:
        if begun:  # a run that is refused has nothing to end
            begun.pop()
            end(result)

    return Callbacks(on_start=on_start, on_round=on_round, on_end=on_end)


def _imported(package: str) -> Any:
    """The package behind a tracker; before a run begins, it is there or that is said."""
    try:
        return import_module(package)
    except ImportError:
        raise InputError(f"{package}: not installed; pip install 'coterie[{package}]'") from None
