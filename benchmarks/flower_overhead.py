"""What a round over Flower costs in bytes, seconds and memory, beside Flower's own FedAvg.

    python benchmarks/flower_overhead.py [--rounds 6] [--sites 4] [--ours-only]

Both run for real on this machine: TLS, node keys, as many sites, through the same counting proxy. Bytes are
bodies of requests and answers as they pass it, both ways, heartbeats and polls included; seconds are wall
time. The plain one starts a process for every message, which is how Flower runs an app by itself.

A round of `global` asks every site once, for training that takes a few hundredths of a second here: its
seconds are the overhead of one request. Memory is the proportional set size that the kernel counts for a
process (Pss in /proc/PID/smaps_rollup): while it waits, before it has a contract, and after its last round.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import yaml

from coterie.data import DataSettings, Task, load_dataset
from coterie.engines.flower import messages, runtime
from coterie.engines.flower.keys import KeyFolder, make_keys
from coterie.engines.flower.messages import (
    FinalModels,
    RequestId,
    SiteFacts,
    SiteRequest,
)
from coterie.engines.flower.network import open_link
from coterie.engines.flower.processes import Child, Upstream, environment, free_port, wait_until_healthy
from coterie.engines.flower.proxy import AllowlistProxy, listening
from coterie.engines.flower.transport import Timeouts
from coterie.experiment.callbacks import Callbacks, RoundReport
from coterie.experiment.experiment_file import read_experiment
from coterie.experiment.serving import APP, Serving, on_grid
from coterie.models import ModelSettings, build_model
from coterie.privacy import HeldOut
from coterie.training.parameters import flatten

DECLARATION = "task: classification\nlabel: {classes: 10}\nfeatures: {shape: [1, 8, 8], range: [0, 1]}\n"
HERE = Path(__file__).parent
Rounds = list[tuple[float, int]]
"""Seconds and bytes of each round."""


@dataclass
class Ours:
    """What was measured of `coterie serve` and `coterie join`.

    Args:
        joined: seconds from the start of the sites' commands until the server knows the facts of all.
        waiting, trained: MB of each site, before it has a contract and after the last round.
        alone: MB that a site would take on a machine of its own: everything it maps, shared or not.
        server: MB of the server's own process, beside its link.
        idle_cpu: share of a processor that a site uses while it waits.
    """

    rounds: Rounds = field(default_factory=list)
    joined: float = 0.0
    waiting: list[float] = field(default_factory=list)
    trained: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    server: float = 0.0
    idle_cpu: float | None = None


def memory(process: int | str, kind: str = "Pss") -> float:
    """MB of a process, as the kernel counts it."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{kind}:")) / 1024


def cpu_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def write_sites(folder: Path, count: int) -> dict[str, Path]:
    """Folders of so many sites, with 300 digits each (of 1,437: several sites have the same)."""
    images = load_dataset(DataSettings(name="digits"), 0).train
    found = {}
    for index in range(count):
        name = f"site-{index + 1:02d}"
        found[name] = folder / name
        found[name].mkdir(parents=True)
        (found[name] / "federation.yaml").write_text(DECLARATION)
        part = images.take((np.arange(300) + 300 * index) % len(images))
        np.savez(found[name] / f"{name}.npz", x=part.features, y=part.targets)
    return found


# --- the two contestants ----------------------------------------------------------------------------


def measure_ours(
    folder: Path, sites: dict[str, Path], keys: KeyFolder, rounds: int, idle: float = 0.0
) -> Ours:
    """`global` over `coterie serve` and `coterie join`.

    Args:
        idle: seconds for which all sites wait for the server, before it asks for anything.
    """
    experiment = folder / "experiment.yaml"
    experiment.write_text(
        yaml.safe_dump({"algorithm": {"name": "global"}, "schedule": {"rounds": rounds, "batch": 40}})
    )
    found, pids = Ours(), list[int]()
    with ExitStack() as stack:
        link = stack.enter_context(open_link(folder / "link", keys, "127.0.0.1", 0, APP))
        for name, data in sites.items():
            join = ["join", "--data", str(data), "--server", f"127.0.0.1:{link.port}", "--epsilon", "8"]
            secure = ["--ca", str(keys.authority), "--key", str(keys.sites / f"{name}.key")]
            log = stack.enter_context((folder / f"{name}.log").open("wb"))
            process = subprocess.Popen(
                [sys.executable, "-m", "coterie", *join, *secure], stdout=log, stderr=log
            )
            stack.callback(process.wait)
            stack.callback(process.terminate)
            pids.append(process.pid)
        began = time.monotonic()
        if idle:
            while len(link.proxy.status.last_polls) < len(sites):
                time.sleep(0.2)
            time.sleep(40)  # until they ask once a second
            before = sum(map(cpu_seconds, pids))
            time.sleep(idle)
            found.idle_cpu = (sum(map(cpu_seconds, pids)) - before) / idle / len(pids)
        grid = stack.enter_context(link.grid())
        last = [0]

        def note(report: RoundReport) -> None:
            now = link.proxy.passed
            found.rounds.append((report.seconds, now - last[0]))
            last[0] = now
            if report.round == rounds:
                found.trained = [memory(pid) for pid in pids]
                found.alone = [memory(pid, "Rss") for pid in pids]
                found.server = memory("self")

        def joined(records: object) -> None:
            found.joined = time.monotonic() - began
            found.waiting = [memory(pid) for pid in pids]

        def start(told: object) -> None:
            last[0] = link.proxy.passed

        serving = Serving(folder / "run", keys, timeouts=Timeouts(), wait=600)
        callbacks = Callbacks(on_joined=joined, on_start=start, on_round=note)
        on_grid(read_experiment(experiment), grid, link.nodes, serving, callbacks, proxy=link.proxy)
    return found


def measure_plain(folder: Path, sites: dict[str, Path], keys: KeyFolder, rounds: int) -> Rounds:
    """The same of Flower's own FedAvg, started as its guides say."""
    folder.mkdir()
    address = f"127.0.0.1:{free_port()}"
    home = folder / "flwr"
    with ExitStack() as stack:
        link = Child(
            "flower-superlink",
            [
                *("--host", "127.0.0.1", "--port", address.rpartition(":")[2]),
                *("--ssl-ca-certfile", str(keys.authority), "--ssl-certfile", str(keys.certificate)),
                *("--ssl-keyfile", str(keys.key), "--enable-supernode-auth"),
                *("--database", str(folder / "link.db"), "--disable-runtime-dependency-installation"),
            ],
            home,
            folder / "link.log",
        )
        stack.callback(link.close)
        wait_until_healthy(link, Upstream(address, keys.authority))
        with runtime.Caller(address, keys.authority.read_bytes()).control() as control:
            runtime.register(control, keys.public_keys())
        door = AllowlistProxy(Upstream(address, keys.authority))
        port = stack.enter_context(listening(door, "127.0.0.1", 0, keys.certificate, keys.key))
        for name, data in sites.items():
            node = Child(
                "flower-supernode",
                [
                    *("--superlink", f"127.0.0.1:{port}", "--root-certificates", str(keys.authority)),
                    *("--auth-supernode-private-key", str(keys.sites / f"{name}.key")),
                    *("--port", str(free_port()), "--node-config", f'file="{data / f"{name}.npz"}"'),
                ],
                folder / name,
                folder / f"{name}.log",
            )
            stack.callback(node.close)
        home.mkdir(exist_ok=True)
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "{address}"\n'
            f'root-certificates = "{keys.authority}"\n'
        )
        times = folder / "times"
        config = f'rounds={rounds} times="{times}"'
        flwr = Path(sys.executable).parent / "flwr"
        subprocess.run(
            [flwr, "run", HERE / "fedavg_app", "here", "-c", config],
            env=environment(home),
            check=True,
            stdout=subprocess.DEVNULL,
        )
        marks: list[tuple[float, int]] = []
        until = time.monotonic() + 900
        while len(marks) < rounds + 1:
            lines = times.read_text().split() if times.exists() else []
            if len(lines) > len(marks):
                marks.append((float(lines[len(marks)]), door.passed))
            if time.monotonic() > until:
                raise SystemExit(f"plain FedAvg did not finish; see {folder}")
            time.sleep(0.05)
    return [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(marks)]


# --- what is in a message ---------------------------------------------------------------------------


def message_sizes(parameters: int, clusters: int) -> list[tuple[str, str, int]]:
    """Bytes of the content of every message for a model of so many parameters."""
    model = np.zeros(parameters, np.float32)
    several = np.tile(model, (clusters, 1))
    wanted = RequestId("0" * 64, 10, "training")
    one, k = SiteRequest(wanted, model[None], order=1), SiteRequest(wanted, several, order=1)
    task = Task("classification", (1, 8, 8), 10)
    facts = SiteFacts("hospital", 240, 60, HeldOut(60, 1.0, 1), task, False)
    contents = [
        ("query.facts", "to a site", messages.pack({})),
        ("query.facts", "back", facts.to_content()),
        ("train", "to a site", one.to_content(messages.TRAIN)),
        ("train", "back", messages.answer(wanted, value=model)),
        ("query.select", "to a site", k.to_content(messages.SELECT)),
        ("query.select", "back", messages.answer(wanted, {"value": 1})),
        ("train.contribute", "one model", one.to_content(messages.CONTRIBUTE)),
        ("train.contribute", "k models", k.to_content(messages.CONTRIBUTE)),
        ("train.contribute", "back", messages.answer(wanted, {"choice": 1}, model, "float64")),
        ("evaluate", "one model", one.to_content(messages.EVALUATE)),
        ("evaluate", "back", messages.answer(wanted, {"value": 57.3})),
        ("query.finished", "there", FinalModels("0" * 64, model[None], 0).to_content()),
        ("query.finished", "back", messages.pack({"closed": "0" * 64})),
        ("refusal", "back", messages.refusal("over budget")),
    ]
    return [(kind, way, size_of(content)) for kind, way, content in contents]


def size_of(content: object) -> int:
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

    return sum(len(part.deflate()) for part in get_all_nested_objects(content).values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--sites", type=int, default=4)
    parser.add_argument("--sizes-only", action="store_true")
    parser.add_argument("--ours-only", action="store_true", help="without Flower's FedAvg")
    parser.add_argument("--idle", type=float, default=0.0, help="seconds to watch sites that wait")
    options = parser.parse_args()
    task = Task("classification", (1, 8, 8), 10)
    parameters = len(flatten(build_model(ModelSettings(name="softmax"), task, 0)))
    print(f"content of messages in bytes, {parameters} parameters, 2 models in a selection")
    for kind, way, size in message_sizes(parameters, 2):
        print(f"  {kind:<18}{way:<12}{size:>8}")
    if options.sizes_only:
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        sites = write_sites(folder / "data", options.sites)
        keys = make_keys(folder / "keys", [], list(sites))
        (folder / "ours").mkdir()
        ours = measure_ours(folder / "ours", sites, keys, options.rounds, options.idle)
        found = {"coterie, private": ours.rounds}
        if not options.ours_only:
            plain = measure_plain(folder / "plain", sites, keys, options.rounds)
            found["Flower FedAvg, not private"] = plain
    payload = 2 * 4 * parameters * options.sites
    print(
        f"\n{options.sites} sites, {options.rounds} rounds; the model itself, both ways, is {payload} bytes"
    )
    print(f"load of this machine now: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print(f"{'':<28}{'bytes a round':>15}{'seconds a round, median':>26}{'fastest':>9}")
    for name, rounds in found.items():
        seconds = [second for second, _ in rounds]
        size = statistics.median(size for _, size in rounds)
        print(f"{name:<28}{size:>15,.0f}{statistics.median(seconds):>26.2f}{min(seconds):>9.2f}")
    print(f"joined in {ours.joined:.1f} s; MB (proportional set size, the largest of all sites):")
    print(f"  a site that waits {max(ours.waiting):.0f}, after training {max(ours.trained):.0f}; server")
    print(
        f"  {ours.server:.0f}; a site with all that it maps, shared with others or not: {max(ours.alone):.0f}"
    )
    if ours.idle_cpu is not None:
        print(f"a site that waits uses {ours.idle_cpu:.2%} of a processor")
    print(json.dumps({"payload": payload, "rounds": found, "ours": asdict(ours)}))


if __name__ == "__main__":
    main()
