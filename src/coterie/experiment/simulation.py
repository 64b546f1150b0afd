"""The same run over Flower's simulation: virtual sites on Ray, on one machine or a cluster of them.

`coterie run` simulates in one process and is what a laptop or a GPU wants. This is for clusters of machines
that Ray already manages: every message travels as it would between real sites, and each site keeps its
books in a folder that all machines can reach.
"""

import importlib.util
import os
import threading
from functools import lru_cache
from pathlib import Path

import yaml
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from coterie.data import Federation
from coterie.engines.flower import messages
from coterie.engines.flower.clientapp import app_answering
from coterie.engines.flower.contract import Limits
from coterie.engines.flower.site import Site, one_client
from coterie.engines.flower.transport import Timeouts
from coterie.errors import CoterieError, InputError
from coterie.experiment.deployment import Serving, discover, on_grid
from coterie.experiment.evaluation import evaluation_epsilon
from coterie.experiment.files import to_yaml
from coterie.experiment.folder import RunFolder
from coterie.experiment.proposal import default_delta
from coterie.experiment.runner import load_federation, truth_of
from coterie.experiment.schema import EvaluationKind, Experiment
from coterie.experiment.serving import Callbacks, ServedResult, check_servable, trusts_server
from coterie.privacy import Budget, HeldOut


@lru_cache(maxsize=2)
def _loaded(text: str) -> tuple[Experiment, Federation]:
    """The federation of an experiment, once in each process of Ray's."""
    experiment = Experiment.model_validate(yaml.safe_load(text))
    return experiment, load_federation(experiment)


def virtual_site(text: str, folder: Path, position: int) -> Site:
    """A client of the experiment's own federation, as a site."""
    experiment, federation = _loaded(text)
    client = federation.clients[position]
    privacy = experiment.privacy
    trusted = trusts_server(experiment)
    units = len(federation.clients) if trusted else len(client.train)
    budget = Budget(privacy.epsilon_of(client.name), privacy.delta_of(client.name, default_delta(units)))
    reports = experiment.evaluation.times(EvaluationKind.PRIVATE, experiment.schedule.rounds)
    reported = HeldOut(len(client.test), evaluation_epsilon(experiment, budget.epsilon), reports)
    limits = Limits(budget, (experiment.model.name,), reported, trust_server=trusted)
    return Site(
        client.name,
        lambda: one_client(client.name, federation),
        folder / client.name,
        limits,
        noise_seed=experiment.seeds.noise,
    )


def client_app(text: str, folder: Path) -> ClientApp:
    """All virtual sites; which of them is asked, Flower says in the node's configuration."""

    def answer(message: Message, context: Context) -> Message:
        try:
            site = virtual_site(text, folder, int(context.node_config["partition-id"]))
        except Exception:  # its text may name records
            return Message(messages.refusal("failed"), reply_to=message)
        try:
            return Message(site.handle(message), reply_to=message)
        finally:
            site.close()

    return app_answering(answer)


def simulate(experiment: Experiment, out: Path, watch: Callbacks) -> ServedResult:
    """One run with all clients of the experiment's federation as virtual sites on Ray."""
    if importlib.util.find_spec("ray") is None:
        raise InputError("--simulate: Ray is not installed; pip install 'coterie[simulation]'")
    from flwr.simulation import run_simulation

    check_servable(experiment)
    files = RunFolder(out)
    if files.exists:
        raise InputError(f"{out}: holds a run; --out names another")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
    text = to_yaml(experiment)
    _, federation = _loaded(text)
    sites = out.with_name(f"{out.name}.sites").resolve()
    results: list[ServedResult] = []
    failures: list[BaseException] = []
    done = threading.Event()

    def main(grid: Grid, context: Context) -> None:
        timeouts = Timeouts(poll=0.05)
        try:
            nodes = discover(grid, len(federation.clients), 600.0, timeouts)
            serving = Serving(out, None, timeouts=timeouts, truth=truth_of(federation), simulated=True)
            results.append(on_grid(experiment, grid, nodes, serving, watch))
        except BaseException as mistake:
            failures.append(mistake)
            raise
        finally:
            done.set()

    server = ServerApp()
    server.main()(main)
    try:
        run_simulation(
            server_app=server,
            client_app=client_app(text, sites),
            num_supernodes=len(federation.clients),
            backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
        )
    finally:
        done.wait(timeout=1)
    if failures:
        raise failures[0]
    if not results:
        raise CoterieError("Flower's simulation ended without a result; its log says why")
    return results[0]
