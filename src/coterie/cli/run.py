"""`coterie run`: progress while it goes, a table and the guarantee when it is done."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coterie.cli.console import complain, print_result, print_table, progress_of, say
from coterie.cli.options import Json, Out, Overrides, Resume
from coterie.errors import InputError
from coterie.files import finite
from coterie.privacy.units import round_up

if TYPE_CHECKING:
    from coterie.experiment.callbacks import RoundReport
    from coterie.experiment.result import RunResult, Spread


def run(
    experiment: Annotated[
        Path | None, typer.Argument(help="Experiment file (YAML); without one, the built-in default runs.")
    ] = None,
    overrides: Overrides = None,
    resume: Resume = False,
    out: Out = None,
    print_default: Annotated[
        bool, typer.Option("--print-default", help="Print the built-in experiment as a commented file.")
    ] = False,
    json: Json = False,
) -> None:
    if print_default:
        if experiment or overrides or resume or out or json:
            raise InputError("--print-default: prints the built-in experiment as it is; allowed: alone")
        from coterie.experiment.experiment_file import commented_default

        print(commented_default(), end="")
        return
    with progress_of("run", quiet=json) as progress:
        from coterie import api  # takes seconds
        from coterie.experiment.callbacks import Callbacks
        from coterie.experiment.experiment_file import read_experiment
        from coterie.experiment.folder import RunFolder

        if experiment is None and not overrides and resume and out is not None:
            experiment = RunFolder(out).experiment
            if not experiment.exists():
                raise InputError(f"--resume: {out} holds no run to go on with; allowed: the folder of one")
        chosen = read_experiment(experiment, overrides or [])
        progress.begin(chosen.algorithm.name, chosen.schedule.rounds)

        def show_round(report: RoundReport) -> None:
            accuracy = f"accuracy {report.accuracy:.1%}, " if report.accuracy is not None else ""
            status = f"{accuracy}epsilon spent {round_up(report.epsilon)}"
            progress.update(report.round, status)

        result = api.run(chosen, out, resume=resume, callbacks=Callbacks(on_round=show_round))
    print_result(finite(result.to_json()), json, lambda: show(result))


def private_figures(reached: Spread) -> list[tuple[str, str]]:
    """A private score with how far noise, and the choice of held-out records, may have moved it."""
    figures = [("mean accuracy, private", f"{reached.mean:.1%}")]
    if reached.interval is not None:
        figures.append(("  95 % interval of its noise", "{:.1%} to {:.1%}".format(*reached.interval)))
    if reached.sampling_error is not None:
        figures.append(("  error of sampling, beside it", f"± {reached.sampling_error:.1%}"))
    return figures


def show(result: RunResult) -> None:
    """The result as a person wants to read it."""
    from coterie.experiment.comparison import OUTSIDE

    figures, reached, fairness = [], result.accuracy, result.fairness
    if reached is not None and reached.is_private:
        figures += private_figures(reached)
    elif reached is not None:
        ends = (("mean accuracy", reached.mean), ("worst client", reached.min), ("best client", reached.max))
        figures += [(name, f"{value:.1%}") for name, value in ends if value is not None]
    if fairness is not None:
        figures.append(("disparity", f"{fairness.disparity:.1%}"))
    if fairness is not None and fairness.f_acc is not None and fairness.f_loss is not None:
        figures += [("F_acc", f"{fairness.f_acc:.1%}"), ("F_loss", f"{fairness.f_loss:.3f}")]
    figures += [(f"true cluster {k}", f"{v:.1%}") for k, v in (result.cluster_accuracy or {}).items()]
    clusters = len(set(result.clusters.values()))
    found = {True: ", as in truth", False: ", not as in truth", None: ""}[result.clusters_found]
    if clusters:
        figures.append(("models" if result.per_worker else "clusters", f"{clusters}{found}"))
    figures += [
        ("noise multiplier", f"{result.noise_multiplier:.3f}"),
        ("seconds", f"{result.seconds:.1f}"),
        ("sample gradients / s", f"{result.sample_gradients_per_second:,.0f}"),
    ]
    print_table(["figure", "value"], figures, title=f"{result.algorithm}, {result.rounds} rounds")
    if reached is not None and not reached.is_private:
        say(OUTSIDE)
    for warning in result.warnings:
        complain(f"warning: {warning}", style="yellow")
    say(f"guarantee: {result.guarantee}")
    say(f"report: {result.report}")
