"""`coterie audit`: attack every release of a plan through the engine that runs, before anyone trusts its
epsilon."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coterie.cli.console import complain, print_result, print_table, progress_of, say
from coterie.cli.options import Json, Out, Overrides
from coterie.errors import InputError, LedgerError
from coterie.privacy.units import round_up, short_number

if TYPE_CHECKING:
    from coterie.audit.result import AuditResult, ReleaseAudit


def audit(
    experiment: Annotated[
        Path | None,
        typer.Argument(
            help="Experiment file (YAML) or the folder of a run; without one, the built-in default."
        ),
    ] = None,
    overrides: Overrides = None,
    data: Annotated[
        Path | None, typer.Option("--data", help="At a site: its folder, of which records are counted alone.")
    ] = None,
    contract: Annotated[
        Path | None, typer.Option("--contract", help="At a site: the contract that it is asked to sign.")
    ] = None,
    allow_model: Annotated[
        list[str] | None,
        typer.Option("--allow-model", metavar="MODULE:FUNCTION", help="A model whose code may run here."),
    ] = None,
    release: Annotated[
        str | None, typer.Option("--release", help="Attack this release alone, by its name in the plan.")
    ] = None,
    trials: Annotated[
        int | None,
        typer.Option("--trials", min=400, max=10**8, help="Trials of each release, instead of --seconds."),
    ] = None,
    seconds: Annotated[
        float | None, typer.Option("--seconds", min=1.0, help="What all games may take, about (60).")
    ] = None,
    out: Out = None,
    json: Json = False,
) -> None:
    if trials is not None and seconds is not None:
        raise InputError("--trials: says how long it takes, and so does --seconds; allowed: one of them")
    if contract is None and allow_model:
        raise InputError("--allow-model: is about the model of a --contract; allowed: with one")
    if (data is None) != (contract is None):
        raise InputError("--data and --contract: a site gives both; allowed: both, or an experiment")
    if contract is not None and (experiment is not None or overrides):
        raise InputError("--contract: says all that an experiment would; allowed: one of them")
    with progress_of("audit", quiet=json) as progress:
        from coterie.audit.auditing import audit as audit_experiment  # takes seconds
        from coterie.experiment.experiment_file import read_experiment
        from coterie.experiment.folder import RunFolder, check_out

        folder = None
        if experiment is not None and experiment.is_dir():
            folder = RunFolder(experiment)
            if not folder.exists:
                raise InputError(
                    f"{experiment}: not the folder of a run; allowed: an experiment file, or one"
                )
            experiment = folder.experiment
        target = out or (None if folder is None else folder.path)
        if out is not None:
            check_out(out)
        chosen = None if contract is not None else read_experiment(experiment, overrides or [])
        result = audit_experiment(
            chosen,
            data=data,
            contract=contract,
            allow_models=tuple(allow_model or ()),
            release=release,
            trials=trials,
            **({} if seconds is None else {"seconds": seconds}),
            out=target,
            tell=progress.step,
        )
    content = result.to_json()
    for each in content["releases"]:  # for figures, which the file and the page have
        del each["curve"], each["claimed_curve"]
    print_result({**content, "folder": str(result.folder)}, json, lambda: show(result))
    for broken in (each for each in result.releases if each.verdict == "violated"):
        complain(
            f"violated: {broken.name}: epsilon is at least {broken.lower_bound:.3g} at delta "
            f"{short_number(broken.delta)}, {broken.claimed_epsilon:.3g} is claimed"
        )
    if result.verdict == "violated":
        raise typer.Exit(LedgerError.exit_code)


def show(result: AuditResult) -> None:
    """The result as a person wants to read it."""
    headings = ["release", "claimed", "at least", "delta", "trials", "verdict"]
    print_table(
        headings, [_row(release) for release in result.releases], title=f"Audit of {result.experiment}"
    )
    for name, why in result.not_audited:
        say(f"not attacked: {name}: {why}")
    for release in result.releases:
        if release.trials_needed is not None:
            needed = f"about {release.trials_needed:,} trials would show half of the claim"
            say(f"{release.name}: {needed} to the best attack that it allows")
    say(f"verdict: {result.verdict} (confidence {result.confidence:.0%}, {result.correction})")
    say("an audit finds the lack of privacy, it never proves that there is any")
    say(f"report: {result.page}")


def _row(release: ReleaseAudit) -> list[str]:
    return [
        f"{release.name} ({release.canary})",
        round_up(release.claimed_epsilon),
        f"{release.lower_bound:.3f}",
        short_number(release.delta),
        f"{release.trials:,}",
        str(release.verdict),
    ]
