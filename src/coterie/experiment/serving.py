"""Serving an experiment to real sites: the link, those who come to it, going on after a crash."""

import logging
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from coterie.engines.flower.agreement import names_of
from coterie.engines.flower.keys import KeyFolder, check_host
from coterie.engines.flower.network import open_link
from coterie.engines.flower.proxy import AllowlistProxy
from coterie.engines.flower.runtime import Patience
from coterie.engines.flower.transport import (
    PATIENCE,
    Timeouts,
    Transport,
)
from coterie.errors import InputError
from coterie.experiment.callbacks import Callbacks, RoundReport
from coterie.experiment.experiment_file import read_experiment
from coterie.experiment.folder import RunFolder, check_out
from coterie.experiment.schema import Experiment, refuse
from coterie.experiment.serving_status import RunStatus
from coterie.experiment.sites import (
    Sites,
    check_servable,
    left_to_sites,
    trusts_server,
)
from coterie.privacy.ranges import CLIENTS, RECORDS

if TYPE_CHECKING:
    from coterie.experiment.result import RunResult

log = logging.getLogger(__name__)
APP = Path(__file__).parent / "flower_app"
"""The Flower app under whose name runs go; for `flwr run`, also its code: two imports."""


# --- the link and those who come to it ----------------------------------------------------------------------


@dataclass(frozen=True)
class Serving:
    """How to serve.

    Args:
        out: the run folder; the link's own state lies beside, in `link/`.
        keys: certificates and the sites' public keys; None is the plaintext mode, on loopback only.
        sites: how many sites to wait for where no keys name them.
        wait: seconds until all sites must be there.
        truth: the true clusters, for `oracle`; its guarantee says that it was told.
        most_records: that a site may claim to have; None: any number.
        opened: is told the port that sites can come to.
        watched: goes along with the run, and may look at how far it is at any time.
    """

    out: Path
    keys: KeyFolder | None
    host: str = "127.0.0.1"
    port: int = 0
    sites: int = 0
    wait: float = 600.0
    timeouts: Timeouts = field(default_factory=Timeouts)
    truth: Mapping[str, int] | None = None
    most_records: int | None = None
    resume: bool = False
    opened: Callable[[int, Sequence[str]], None] = lambda port, sites: None
    watched: Callable[[RunStatus], AbstractContextManager[None]] = lambda status: nullcontext()

    def __post_init__(self) -> None:
        check_host(self.host, "--host")
        InputError.unless_within(PATIENCE, "--wait", self.wait)
        InputError.unless_within(replace(CLIENTS, least=0), "--sites", self.sites)
        InputError.unless_within(RECORDS, "--most-records", self.most_records)
        named = "--sites: with --keys the sites are those whose keys are there; it acts with --plaintext"
        InputError.when(self.keys is not None and self.sites > 0, named)


def serve(experiment: Experiment, serving: Serving, callbacks: Callbacks) -> "RunResult":
    """Serve an experiment from its first round, or from where it stopped, to its end."""
    check_servable(experiment)
    refuse(
        {
            "seeds.noise: noise is the sites' own (coterie join --noise-seed); allowed here: null": (
                experiment.seeds.noise is not None and not trusts_server(experiment)
            ),
            f"--sites: {serving.sites} is not allowed where no keys name the sites, {CLIENTS} is": (
                serving.keys is None and serving.sites < 1
            ),
        }
    )
    folder = serving.out.with_name(f"{serving.out.name}.link")
    files = RunFolder(serving.out)
    done, waiting = _already_done(experiment, serving)
    if done and (serving.keys is None or not waiting):
        _forget_link(experiment, folder)  # a crash may have come between result and deletion
        raise InputError(f"{files.result}: the run is finished")
    try:
        with open_link(folder, serving.keys, serving.host, serving.port, APP) as link:
            serving.opened(link.port, list(link.nodes))
            with link.grid() as grid:
                nodes = link.nodes or discover(grid, serving.sites, serving.wait, serving.timeouts)
                if done:
                    nodes = {name: node for name, node in nodes.items() if name in waiting}
                result = on_grid(experiment, grid, nodes, serving, callbacks, proxy=link.proxy)
    except InputError:
        if not files.exists:  # nothing has begun that the link must remember
            shutil.rmtree(folder, ignore_errors=True)
        raise
    _forget_link(experiment, folder)
    return result


def _already_done(experiment: Experiment, serving: Serving) -> tuple[bool, set[str]]:
    """Whether the run is finished, and who has not got its model yet."""
    files = RunFolder(serving.out)
    check_out(serving.out)
    if not serving.out.exists():
        return False, set()
    from coterie.experiment.local import finished
    from coterie.experiment.served_run import without_models

    if finished(experiment, serving.out, resume=serving.resume) is None:
        return False, set()
    return True, set(without_models(files, Sites.load(files.sites).records))


def _forget_link(experiment: Experiment, folder: Path) -> None:
    """What the link remembers of messages tells who was sampled, which a trusted server keeps to itself."""
    if trusts_server(experiment) and folder.exists():
        shutil.rmtree(folder)


def on_grid(
    experiment: Experiment,
    grid: Grid,
    nodes: Mapping[str, int],
    serving: Serving,
    callbacks: Callbacks,
    *,
    proxy: AllowlistProxy | None = None,
) -> "RunResult":
    """The run itself, once the sites' nodes are known.

    Args:
        proxy: is told how large messages are, so that answers need be no larger, and how far the run is.
    """
    transport = Transport(grid, nodes, serving.timeouts, proxy.expect if proxy is not None else _nobody)
    if proxy is None:
        return _run(experiment, transport, serving, callbacks)
    status = RunStatus()
    status.attach(transport, proxy.status)
    with serving.watched(status), status.ending():
        return _run(experiment, transport, serving, status.watching(callbacks))


def _run(experiment: Experiment, transport: Transport, serving: Serving, callbacks: Callbacks) -> "RunResult":
    """Wait for the sites, and go on to the end."""
    files = RunFolder(serving.out)
    wait_for(transport, serving.wait, everyone=not files.exists)
    # What a model is made of, and torch with it, is not needed before.
    from coterie.experiment.result import RunResult
    from coterie.experiment.served_run import ServedRun

    run = ServedRun(
        experiment,
        files,
        transport,
        truth=serving.truth,
        callbacks=callbacks,
        most_records=serving.most_records,
    )
    if not files.finished:
        return run.finish()
    run.hand_out_rest()
    return RunResult.load(files.path)


def _nobody(size: int) -> None:
    """Nobody is told how large messages are."""


def wait_for(transport: Transport, seconds: float, *, everyone: bool) -> None:
    """Wait for all sites (or, in a run that goes on, for as many as come in time)."""
    sites = set(transport.nodes)
    if not _wait(lambda: sites <= transport.online(), seconds, transport.timeouts):
        missing = sites - transport.online()
        if missing and (everyone or missing == sites):
            raise InputError(f"--wait: after {seconds:g} seconds {', '.join(sorted(missing))} did not join")


def discover(grid: Grid, sites: int, seconds: float, timeouts: Timeouts) -> dict[str, int]:
    """Nodes by the names that they give themselves, where no keys say who they are."""
    if not _wait(lambda: len(list(grid.get_node_ids())) >= sites, seconds, timeouts):
        there = len(list(grid.get_node_ids()))
        raise InputError(f"--wait: after {seconds:g} seconds {there} of {sites} sites have joined")
    return names_of(grid, list(grid.get_node_ids()), timeouts)


def _wait(arrived: Callable[[], bool], seconds: float, timeouts: Timeouts) -> bool:
    """Whether they came in time."""
    until = time.monotonic() + seconds
    while not (there := arrived()) and time.monotonic() < until:
        time.sleep(timeouts.poll)
    return there


# --- the server as an ordinary Flower app ---------------------------------------------------------------


def main(grid: Grid, context: Context) -> None:
    """One run, or the rest of one: a folder that holds a run is continued.

    flwr run src/coterie/experiment/flower_app LINK -c 'experiment="/srv/heart.yaml" out="/srv/run" clients=4'
    """
    config = context.run_config
    needed = ("experiment", "out", "clients")
    refuse({f"run config: {key} is needed": not config.get(key) for key in needed})
    for key in ("wait", "clients"):
        odd = isinstance(config[key], bool) or not isinstance(config[key], int | float)
        InputError.when(odd, f"run config: {key}: {config[key]!r} is not allowed, a number is")
    experiment = read_experiment(Path(str(config["experiment"])))
    for line in left_to_sites(experiment):
        log.info("%s", line)
    clients, wait = int(config["clients"]), float(config["wait"])
    serving = Serving(Path(str(config["out"])), None, sites=clients, wait=wait, resume=True)
    Patience().of_grid(grid)
    nodes = discover(grid, serving.sites, serving.wait, serving.timeouts)
    if not RunFolder(serving.out).finished:
        on_grid(experiment, grid, nodes, serving, Callbacks(on_start=log.info, on_round=_tell))


def _tell(report: RoundReport) -> None:
    missing = ", ".join(report.missing) or "nobody"
    log.info("round %d of %d, missing: %s", report.round, report.rounds, missing)


app = ServerApp()
app.main()(main)
