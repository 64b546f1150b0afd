"""`coterie`: the commands, and how mistakes are reported."""

import os
import signal
import sys
import threading
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from coterie import __version__
from coterie.cli.leakage import leakage
from coterie.cli.plan import RecordAdjacency, plan_app
from coterie.errors import CoterieError, InputError
from coterie.privacy import Adjacency

app = typer.Typer(
    name="coterie",
    help="Differentially private federated learning in clusters and groups, with guarantees that hold.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.add_typer(plan_app, name="plan")
app.command()(leakage)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue where an interrupted run stopped.")]
Out = Annotated[Path | None, typer.Option("--out", help="Folder to write; by default one under runs/.")]


class Scale(StrEnum):
    """How much of a published experiment is run."""

    quick = "quick"
    paper = "paper"


@app.command()
def run(
    experiment: Annotated[
        Path | None, typer.Argument(help="Experiment file (YAML); without one, the built-in default runs.")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a key, e.g. schedule.rounds=40."),
    ] = None,
    resume: Resume = False,
    out: Out = None,
    print_default: Annotated[
        bool, typer.Option("--print-default", help="Print the built-in experiment as a commented file.")
    ] = False,
    json: Json = False,
) -> None:
    """Train under differential privacy, find the clusters, print the guarantee, write a report."""
    from coterie.cli import run as command

    if print_default:
        command.print_default()
    else:
        command.run(experiment, overrides or [], resume=resume, out=out, json=json)


@app.command()
def compare(
    sweep: Annotated[
        Path | None, typer.Argument(help="Sweep file (base and grid); without one, the built-in comparison.")
    ] = None,
    resume: Resume = False,
    out: Out = None,
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, help="Runs at a time; by default one per core.")
    ] = None,
    json: Json = False,
) -> None:
    """Run a grid of experiments and put them side by side."""
    from coterie.cli import compare as command

    command.compare(sweep, resume=resume, out=out, workers=workers, json=json)


@app.command()
def reproduce(
    name: Annotated[
        str | None, typer.Argument(help="A published experiment; without one, the names are listed.")
    ] = None,
    scale: Annotated[
        Scale, typer.Option("--scale", help="quick: minutes on a CPU; paper: the publication's size.")
    ] = Scale.quick,
    epsilon: Annotated[
        list[float] | None, typer.Option("--epsilon", help="Only this budget (several times for more).")
    ] = None,
    algorithms: Annotated[
        list[str] | None, typer.Option("--algorithms", help="Only these, by name, separated by commas.")
    ] = None,
    seeds: Annotated[
        list[int] | None, typer.Option("--seeds", help="These seeds for all (several times for more).")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Override a key of every run, e.g. schedule.rounds=40."
        ),
    ] = None,
    resume: Resume = False,
    render: Annotated[
        bool,
        typer.Option("--render", help="Write tables and pages from the runs that are there; run nothing."),
    ] = False,
    out: Out = None,
    docs: Annotated[
        Path | None, typer.Option("--docs", help="A document whose table of this reproduction is replaced.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, help="Runs at a time; by default one per core.")
    ] = None,
    json: Json = False,
) -> None:
    """Run a published experiment and put its printed figures beside ours."""
    from coterie.cli import reproduce as command

    if name is None:
        command.show_names()
        return
    names = [each for text in algorithms or [] for each in text.split(",") if each]
    command.reproduce(
        name,
        scale.value,
        (tuple(epsilon or ()), tuple(names), tuple(seeds or ())),
        overrides or [],
        resume=resume,
        render=render,
        out=out,
        docs=docs,
        workers=workers,
        json=json,
    )


@app.command()
def bench(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer repetitions, no scaling.")] = False,
    json: Json = False,
) -> None:
    """Measure this machine: ours against the peers that are installed, on the same work in one run."""
    from coterie.cli import bench as command

    command.bench(quick, json)


@app.command()
def report(
    folder: Annotated[
        Path, typer.Argument(help="A run folder, or the folder of a comparison or reproduction.")
    ],
    show: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
    public: Annotated[
        bool,
        typer.Option("--public", help="Write public.html, without any figure outside the guarantee."),
    ] = False,
) -> None:
    """Write the self-contained HTML report of a finished run, comparison or reproduction anew."""
    from coterie.cli import report as command

    command.report(folder, show=show, public=public)


@app.command()
def verify(
    path: Annotated[Path, typer.Argument(help="A run folder, the folder of a comparison, or a report.html.")],
    json: Json = False,
) -> None:
    """Check that every file is as it was written and that epsilon follows from what was charged."""
    from coterie.cli import verify as command

    command.show(path, json=json)


@app.command()
def serve(
    experiment: Annotated[Path, typer.Argument(help="Experiment file (YAML); data are the sites' own.")],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a key, e.g. schedule.rounds=40."),
    ] = None,
    keys: Annotated[
        Path | None,
        typer.Option("--keys", help="Folder with ca.crt, server.crt, server.key, sites/*.pub."),
    ] = None,
    host: Annotated[str, typer.Option("--host", help="Where sites come in.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any free one.")] = 9443,
    wait: Annotated[float, typer.Option("--wait", help="Seconds until all sites must be there.")] = 600.0,
    answer: Annotated[
        float, typer.Option("--answer", help="Seconds for an answer; then the site is missing.")
    ] = 600.0,
    rejoin: Annotated[
        float, typer.Option("--rejoin", help="Seconds to wait for a site that was there and is gone.")
    ] = 120.0,
    truth: Annotated[
        Path | None, typer.Option("--truth", help="JSON file with the true cluster of each site, for oracle.")
    ] = None,
    plaintext: Annotated[
        bool, typer.Option("--plaintext", help="No TLS and no keys: for a trial, on loopback only.")
    ] = False,
    sites: Annotated[int, typer.Option("--sites", help="With --plaintext: how many to wait for.")] = 0,
    resume: Resume = False,
    out: Out = None,
    json: Json = False,
) -> None:
    """Serve an experiment to sites that keep their records, ledgers and noise to themselves (over Flower)."""
    from coterie.engines.flower import require_flower

    require_flower()
    from coterie.cli import flower as command

    command.serve(
        experiment,
        overrides or [],
        keys=keys,
        plaintext=plaintext,
        host=host,
        port=port,
        sites=sites,
        wait=wait,
        answer=answer,
        rejoin=rejoin,
        truth=truth,
        resume=resume,
        folder=out,
        json=json,
    )


@app.command()
def join(
    data: Annotated[Path, typer.Option("--data", help="Folder with federation.yaml and one data file.")],
    server: Annotated[str, typer.Option("--server", metavar="HOST:PORT", help="Where the server listens.")],
    epsilon: Annotated[float, typer.Option("--epsilon", help="The most that may be spent of these records.")],
    delta: Annotated[
        float | None, typer.Option("--delta", help="By default a fifth of one over the number of records.")
    ] = None,
    ca: Annotated[
        Path | None, typer.Option("--ca", help="Certificate of the authority that signed the server's.")
    ] = None,
    key: Annotated[Path | None, typer.Option("--key", help="This site's private key.")] = None,
    name: Annotated[str | None, typer.Option("--name", help="By default that of the file.")] = None,
    state: Annotated[
        Path | None,
        typer.Option("--state", help="Ledger, noise key, contract; by default with the data."),
    ] = None,
    allow_model: Annotated[
        list[str] | None,
        typer.Option("--allow-model", metavar="MODULE:FUNCTION", help="A model whose code may run here."),
    ] = None,
    held_out: Annotated[
        float | None,
        typer.Option("--held-out", help="Share of the records that is never trained on; by default none."),
    ] = None,
    split: Annotated[
        str, typer.Option("--split", metavar="SEED[:PLACE]", help="Which those are, by position alone.")
    ] = "0",
    evaluation_epsilon: Annotated[
        float | None,
        typer.Option("--evaluation-epsilon", help="Let held-out records score models, noisily, for this."),
    ] = None,
    evaluation_reports: Annotated[
        int, typer.Option("--evaluation-reports", help="How often they may, for all of it.")
    ] = 1,
    trust_server: Annotated[
        bool,
        typer.Option("--trust-server", help="Units client, worker: let it see clipped updates in the clear."),
    ] = False,
    adjacency: Annotated[
        RecordAdjacency | None,
        typer.Option("--adjacency", help="Neighbours for whom --epsilon must hold; by default the plan's."),
    ] = None,
    noise_seed: Annotated[
        int | None, typer.Option("--noise-seed", help="For tests: repeatable noise, private against nobody.")
    ] = None,
    plaintext: Annotated[
        bool, typer.Option("--plaintext", help="No TLS and no key: for a trial, on loopback only.")
    ] = False,
) -> None:
    """Take part with the records of one folder, spending at most what is allowed here (over Flower)."""
    from coterie.engines.flower import require_flower

    require_flower()
    from coterie.cli import flower as command
    from coterie.engines.flower.joining import Joining, parse_split
    from coterie.engines.flower.node import Connection

    if plaintext != (ca is None and key is None):
        raise InputError("--ca and --key: needed, unless --plaintext asks for a trial without any")
    joining = Joining(
        data,
        epsilon,
        delta,
        name,
        state,
        tuple(allow_model or ()),
        held_out,
        parse_split(split),
        evaluation_epsilon,
        evaluation_reports,
        noise_seed,
        trust_server,
        None if adjacency is None else Adjacency(adjacency.value),
    )
    command.join(joining, Connection(server, ca, key))


@app.command()
def keys(
    folder: Annotated[Path, typer.Argument(help="Folder to write.")],
    host: Annotated[
        list[str] | None, typer.Option("--host", help="Name or address of the server, for its certificate.")
    ] = None,
    sites: Annotated[
        str, typer.Option("--sites", help="Names of sites to make keys for, with commas; for trials.")
    ] = "",
    site: Annotated[
        str | None, typer.Option("--site", help="Make this site's own key pair and nothing else.")
    ] = None,
) -> None:
    """Make a test authority, the server's certificate and sites' keys, or one site's own pair."""
    from coterie.engines.flower import require_flower

    require_flower()
    from coterie.cli import flower as command

    names = [name.strip() for name in sites.split(",") if name.strip()]
    command.keys(folder, hosts=host or [], sites=names, site=site)


def _version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit()


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of every command."""


class _Ended(BaseException):
    """Somebody asked this process to end; not an error, so that nobody takes it for one on its way up."""


def _end(signum: int, frame: object) -> None:
    raise _Ended


_UsageError: type[Exception] = typer.BadParameter.__bases__[0]
"""What typer raises for an unknown command or option; in some versions click's, in others its own copy."""


def _usage_line(mistake: Exception) -> str:
    """A mistake on the command line in one line; empty where typer has printed the help instead."""
    text = " ".join(getattr(mistake, "format_message", lambda: str(mistake))().split()).rstrip(".")
    if not text:
        return ""
    command = getattr(getattr(mistake, "ctx", None), "command_path", "coterie")
    return f"error: {text}; {command} --help says what is allowed"


def main() -> None:
    """Entry point: a mistake is one line on stderr and the exit code of its kind."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _end)
    try:
        code = app(prog_name="coterie", standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except _UsageError as mistake:
        if line := _usage_line(mistake):
            print(line, file=sys.stderr)
        sys.exit(2)
    except CoterieError as mistake:
        if "COTERIE_DEBUG" in os.environ and mistake.__cause__ is not None:
            raise
        print(f"error: {' '.join(str(mistake).split())}", file=sys.stderr)
        sys.exit(mistake.exit_code)
    except OSError as trouble:
        where = f"{trouble.filename}: " if trouble.filename else ""
        print(f"error: {where}{trouble.strerror or trouble}", file=sys.stderr)
        sys.exit(1)
    except Exception as trouble:
        if "COTERIE_DEBUG" in os.environ:
            raise
        reason = " ".join(str(trouble).split())[:300]
        print(f"error: {type(trouble).__name__}: {reason} (COTERIE_DEBUG=1 shows where)", file=sys.stderr)
        sys.exit(1)
    except (KeyboardInterrupt, _Ended):
        print("stopped; --resume continues", file=sys.stderr)
        sys.exit(1)
