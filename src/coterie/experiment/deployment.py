"""Serving an experiment to real sites: the link, its sites, the run, and going on after a crash."""

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flwr.serverapp import Grid

from coterie.engines.flower import server
from coterie.engines.flower.keys import KeyFolder
from coterie.engines.flower.network import open_link
from coterie.engines.flower.transport import Timeouts, Transport
from coterie.errors import InputError
from coterie.experiment.folder import RunFolder
from coterie.experiment.local import finished
from coterie.experiment.result import Callbacks, RunResult
from coterie.experiment.schema import Experiment
from coterie.experiment.serving import ServedRun
from coterie.experiment.sites import check_servable, trusts_server

APP = Path(__file__).parent / "flower_app"
"""The Flower app under whose name runs go; for `flwr run`, also its code: two imports."""


@dataclass(frozen=True)
class Serving:
    """How to serve.

    Args:
        out: the run folder; the link's own state lies beside, in `link/`.
        keys: certificates and the sites' public keys; None is the plaintext mode, on loopback only.
        sites: how many sites to wait for where no keys name them.
        wait: seconds until all sites must be there.
        truth: the true clusters, for `oracle`; its guarantee says that it was told.
        opened: is told the port that sites can come to.
    """

    out: Path
    keys: KeyFolder | None
    host: str = "127.0.0.1"
    port: int = 0
    sites: int = 0
    wait: float = 600.0
    timeouts: Timeouts = field(default_factory=Timeouts)
    truth: Mapping[str, int] | None = None
    resume: bool = False
    opened: Callable[[int, Sequence[str]], None] = lambda port, sites: None


def serve(experiment: Experiment, serving: Serving, callbacks: Callbacks) -> RunResult:
    """Serve an experiment from its first round, or from where it stopped, to its end."""
    check_servable(experiment)
    if experiment.seeds.noise is not None and not trusts_server(experiment):
        raise InputError(
            "seeds.noise: noise is the sites' own (coterie join --noise-seed); allowed here: null"
        )
    if finished(experiment, serving.out, resume=serving.resume) is not None:
        raise InputError(f"{RunFolder(serving.out).result}: the run is finished")
    if serving.keys is None and serving.sites < 1:
        raise InputError("--sites: how many to wait for is needed where no keys name them")
    folder = serving.out.with_name(f"{serving.out.name}.link")
    with open_link(folder, serving.keys, serving.host, serving.port, APP) as link:
        serving.opened(link.port, list(link.nodes))
        with link.grid() as grid:
            nodes = link.nodes or discover(grid, serving.sites, serving.wait, serving.timeouts)
            result = on_grid(experiment, grid, nodes, serving, callbacks, sent=link.proxy.expect)
    if trusts_server(experiment):
        shutil.rmtree(folder)  # what the link remembers of messages tells who was sampled
    return result


def on_grid(
    experiment: Experiment,
    grid: Grid,
    nodes: Mapping[str, int],
    serving: Serving,
    callbacks: Callbacks,
    *,
    sent: Callable[[int], None] = lambda size: None,
) -> RunResult:
    """The run itself, once the sites' nodes are known.

    Args:
        sent: is told how large messages are, so that answers need be no larger.
    """
    transport = Transport(grid, nodes, serving.timeouts, sent)
    files = RunFolder(serving.out)
    wait_for(transport, serving.wait, everyone=not files.exists)
    return ServedRun(experiment, files, transport, truth=serving.truth, callbacks=callbacks).finish()


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
    return server.names_of(grid, list(grid.get_node_ids()), timeouts)


def _wait(arrived: Callable[[], bool], seconds: float, timeouts: Timeouts) -> bool:
    """Whether they came in time."""
    until = time.monotonic() + seconds
    while not (there := arrived()) and time.monotonic() < until:
        time.sleep(timeouts.poll)
    return there
