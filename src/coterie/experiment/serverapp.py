"""The server as an ordinary Flower `ServerApp`: `flwr run` with an experiment file in its configuration.

flwr run src/coterie/experiment/flower_app LINK -c 'experiment="/srv/heart.yaml" out="/srv/run" clients=4'
"""

import logging
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from coterie.engines.flower.transport import Timeouts
from coterie.errors import InputError
from coterie.experiment.deployment import Serving, discover, on_grid
from coterie.experiment.experiment_file import read_experiment
from coterie.experiment.folder import RunFolder
from coterie.experiment.result import Callbacks, RoundReport

log = logging.getLogger(__name__)


def main(grid: Grid, context: Context) -> None:
    """One run, or the rest of one: a folder that holds a run is continued."""
    config = context.run_config
    for key in ("experiment", "out", "clients"):
        if not config.get(key):
            raise InputError(f"run config: {key} is needed")
    experiment = read_experiment(Path(str(config["experiment"])))
    timeouts = Timeouts()
    wait = float(config["wait"])
    nodes = discover(grid, int(config["clients"]), wait, timeouts)
    serving = Serving(Path(str(config["out"])), None, wait=wait, timeouts=timeouts, resume=True)
    if not RunFolder(serving.out).finished:
        on_grid(experiment, grid, nodes, serving, Callbacks(agreed=log.info, round=_tell))


def _tell(report: RoundReport) -> None:
    log.info(
        "round %d of %d, missing: %s", report.round, report.rounds, ", ".join(report.missing) or "nobody"
    )


app = ServerApp()
app.main()(main)
