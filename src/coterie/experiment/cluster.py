"""Cells of a sweep as tasks of a Ray cluster, whose machines need not share a disk.

The folder of the sweep stays on the machine that compares. A task works in a folder of its own and sends all
of it back whenever a round begins, before anything of that round is released, and when the run has ended. So
what is lost with a machine is one round that nobody saw: its task runs again elsewhere and goes on from what
came back, with the same noise. Noise keys travel between the machines with the rest, over Ray's own
transport: the cluster is one operator's, and its machines trust each other.

Every machine needs this package in the same version, the data under the same path, and the user's own code
where cells name some: the same, as its hash says.
"""

import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from coterie import __version__
from coterie.errors import CoterieError, InputError
from coterie.experiment.experiment_file import to_yaml
from coterie.experiment.keeper import Keeper, pack, unpack
from coterie.experiment.local import log_failure, reason_of, run_together
from coterie.experiment.own_code import check_same_code, code_of
from coterie.experiment.schema import Experiment
from coterie.experiment.sweep import Cell
from coterie.files import Json, beside, parse_yaml

CONNECT_SECONDS = 30.0
MOST_TASKS = 1000
"""That are handed to Ray at a time, which runs as many of them as it has room for."""


class RayCluster:
    """Cells as tasks of a Ray cluster that this machine belongs to."""

    def __init__(self, address: str, cells: Sequence[Cell], workers: int | None) -> None:
        self._ray = ray = connect(address)
        wanted = all(cell.experiment.engine.device != "cpu" for cell in cells)
        self.gpu = wanted and ray.cluster_resources().get("GPU", 0.0) >= 1
        self.workers = workers or MOST_TASKS
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        )
        self._keeper = ray.remote(num_cpus=0, scheduling_strategy=here)(Keeper).remote()
        # A process for each task, as on one machine; Ray gives it as many threads as it has cores.
        resources = {"num_cpus": 1, "num_gpus": int(self.gpu), "scheduling_strategy": "SPREAD"}
        self._task = ray.remote(max_calls=1, **resources)(run_elsewhere)

    def start(self, runs: Mapping[Path, Experiment]) -> Callable[[], bool]:
        for path in runs:
            beside(path, ".log").write_bytes(b"")
        texts = {str(path.resolve()): to_yaml(experiment) for path, experiment in runs.items()}
        codes = {str(path.resolve()): code_of(experiment) for path, experiment in runs.items()}
        task = self._task.remote(self._keeper, texts, __version__, os.getcwd(), codes)
        return lambda: self._ended(task, list(runs))

    def _ended(self, task: Any, paths: Sequence[Path]) -> bool:
        if not self._ray.wait([task], timeout=0)[0]:
            return False
        try:
            failures = self._ray.get(task)
        except self._ray.exceptions.RayError as failure:
            failures = {str(path.resolve()): reason_of(failure) for path in paths}
        for path, reason in failures.items():
            log_failure(Path(path), reason)
        return True

    def close(self) -> None:
        self._ray.shutdown()


def connect(address: str) -> Any:
    """Ray, connected to the cluster, within bounded time."""
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError:
        raise InputError("--ray: Ray is not installed; pip install 'coterie[ray]' brings it") from None
    if address != "auto":
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
        except (OSError, ValueError) as failure:
            raise InputError(
                f"--ray: nobody answers at {address} ({failure}); allowed: HOST:PORT of a Ray cluster that "
                "this machine belongs to, or auto"
            ) from None
    # In a process of its own first: where nobody answers, Ray itself waits for minutes.
    attempt = [sys.executable, "-c", "import ray, sys; ray.init(sys.argv[1], log_to_driver=False)", address]
    try:
        subprocess.run(attempt, check=True, capture_output=True, timeout=CONNECT_SECONDS)
    except subprocess.TimeoutExpired:
        raise InputError(f"--ray: what answers at {address} is not a Ray cluster, or too slow") from None
    except subprocess.CalledProcessError as failure:
        said = failure.stderr.decode(errors="replace").strip().splitlines() or ["no reason given"]
        raise InputError(f"--ray: no connection to {address} ({said[-1]})") from None
    handler = signal.getsignal(signal.SIGTERM)
    ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)  # Ray puts its own there
    return ray


def run_elsewhere(
    keeper: Any, texts: Mapping[str, str], version: str, directory: str, codes: Mapping[str, Json | None]
) -> dict[str, str]:
    """Begin or resume runs on a machine of the cluster; what stopped those that did not finish.

    Args:
        texts: the experiments by their run folders where the sweep is.
        directory: the working directory there, to which paths in experiments are relative.
        codes: which code of the user's own each of them names there.
    """
    import ray

    if version != __version__:
        wrong = f"coterie {__version__} is installed on {os.uname().nodename}; the comparison runs {version}"
        return dict.fromkeys(texts, wrong)
    with suppress(OSError):
        os.chdir(directory)
    with tempfile.TemporaryDirectory(prefix="coterie-") as scratch:
        runs: dict[Path, Experiment] = {}
        wrong_code: dict[str, str] = {}
        homes: dict[Path, tuple[str, int]] = {}
        for home, text in texts.items():
            path = Path(scratch) / Path(home).name
            experiment, failure = _with_code(text, codes.get(home))
            if experiment is None:
                wrong_code[home] = failure
                continue
            packed, attempt = ray.get(keeper.begin.remote(home))
            homes[path] = home, attempt
            if packed is not None:
                unpack(packed, path)
            runs[path] = experiment

        def keep(path: Path) -> None:
            ray.get(keeper.keep.remote(*homes[path], pack(path)))

        failures = run_together(runs, keep).failures
        stopped = {homes[path][0]: reason_of(failure) for path, failure in failures.items()}
        return {**wrong_code, **stopped}


def _with_code(text: str, code: Json | None) -> tuple[Experiment | None, str]:
    """The experiment, if the user's own code that it names is here what it is where the sweep is."""
    try:
        experiment = Experiment.model_validate(parse_yaml(text))
        check_same_code(code, code_of(experiment), f"the comparison runs; this is {os.uname().nodename}")
    except CoterieError as mistake:
        return None, reason_of(mistake)
    return experiment, ""
