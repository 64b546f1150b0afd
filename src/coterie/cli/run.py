"""`coterie run`: progress while it goes, a table and the guarantee when it is done."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coterie.cli.console import complain, print_result, print_table, progress_of, say
from coterie.cli.options import Json, LifetimeDelta, LifetimeEpsilon, NewRecords, Out, Overrides, Resume
from coterie.errors import InputError
from coterie.files import finite
from coterie.privacy.units import round_up

if TYPE_CHECKING:
    from coterie.experiment.callbacks import RoundReport
    from coterie.experiment.result import RunResult


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
    lifetime_epsilon: LifetimeEpsilon = None,
    lifetime_delta: LifetimeDelta = None,
    new_records: NewRecords = False,
    json: Json = False,
) -> None:
    if print_default:
        options = (lifetime_epsilon, lifetime_delta)
        if experiment or overrides or resume or out or json or new_records or any(options):
            raise InputError("--print-default: prints the built-in experiment as it is; allowed: alone")
        from coterie.experiment.experiment_file import commented_default

        print(commented_default(), end="")
        return
    with progress_of("run", quiet=json) as progress:
        from coterie import api  # takes seconds
        from coterie.experiment.budgets import lifetime_of
        from coterie.experiment.callbacks import Callbacks
        from coterie.experiment.experiment_file import read_experiment
        from coterie.experiment.folder import RunFolder
        from coterie.experiment.registered import history_of

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

        result = api.run(
            chosen,
            out,
            resume=resume,
            callbacks=Callbacks(on_round=show_round),
            lifetime=lifetime_of(lifetime_epsilon, lifetime_delta),
            new_records=new_records,
        )
        history = history_of(RunFolder(result.folder))
    content = result.to_json() if history is None else {**result.to_json(), "history": history.to_json()}

    def tell() -> None:
        show(result)
        if history is not None:
            say(f"history: {history.line}")

    print_result(finite(content), json, tell)


def private_figures(result: RunResult) -> list[tuple[str, str]]:
    """Private scores with how far noise, and the choice of held-out records, may have moved them."""
    reached = result.accuracy
    figures = [] if reached is None else [("mean accuracy, private", f"{reached.mean:.1%}")]
    if reached is not None and reached.interval is not None:
        figures.append(("  95 % interval of its noise", "{:.1%} to {:.1%}".format(*reached.interval)))
    if reached is not None and reached.sampling_error is not None:
        figures.append(("  error of sampling, beside it", f"± {reached.sampling_error:.1%}"))
    return [*figures, *pooled_figures(result)]


def pooled_figures(result: RunResult) -> list[tuple[str, str]]:
    """The scores of all held-out records together, in the order in which they are shown."""
    from coterie.experiment.scores import SCORES

    figures = []
    for name, words in SCORES.items():
        score = result.scores.get(name)
        if score is None:
            continue
        private = ", private" if score.kind == "private" else ""
        figures.append((f"{words.name}{private}", words.text(score.value)))
        if score.interval is not None:
            figures.append(("  95 % interval of its noise", words.interval(score.interval)))
    return figures


def cluster_figures(result: RunResult) -> list[tuple[str, str]]:
    """How many clusters were found; or, where what was released shows none, how many models there are."""
    models = len(set(result.clusters.values()))
    found = {True: ", as in truth", False: ", not as in truth", None: ""}[result.clusters_found]
    if not models:
        return []
    if result.clusters_shown is False:
        kept = "one for all" if models == 1 else f"by {models} models{found}"
        return [("clusters", f"none shown; clients are served {kept}")]
    return [("models" if result.per_worker else "clusters", f"{models}{found}")]


def show(result: RunResult) -> None:
    """The result as a person wants to read it."""
    from coterie.experiment.comparison import OUTSIDE

    figures, reached, accuracy, fairness = [], result.reached, result.accuracy, result.fairness
    if reached is not None and reached.is_private:
        figures += private_figures(result)
    elif reached is not None:
        ends = (("mean accuracy", reached.mean), ("worst client", reached.min), ("best client", reached.max))
        figures += [(name, f"{value:.1%}") for name, value in ends if value is not None and accuracy]
        figures += [*pooled_figures(result), *_ends_of_rmse(result)]
    if accuracy is None:  # fairness of a regression compares bounded scores, which nobody reads
        fairness = None
    if fairness is not None:
        figures.append(("disparity", f"{fairness.disparity:.1%}"))
    if fairness is not None and fairness.f_acc is not None and fairness.f_loss is not None:
        figures += [("F_acc", f"{fairness.f_acc:.1%}"), ("F_loss", f"{fairness.f_loss:.3f}")]
    figures += [(f"true cluster {k}", f"{v:.1%}") for k, v in (result.cluster_accuracy or {}).items()]
    figures += [
        *cluster_figures(result),
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


def _ends_of_rmse(result: RunResult) -> list[tuple[str, str]]:
    """The worst and the best client of a regression."""
    from coterie.experiment.scores import SCORES

    found = result.scores["rmse"].per_client if "rmse" in result.scores else {}
    known = [value for value in found.values() if value is not None]
    ends = (("worst client", max(known)), ("best client", min(known))) if known else ()
    return [(f"RMSE of the {name}", SCORES["rmse"].text(value)) for name, value in ends]
