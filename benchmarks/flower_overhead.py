"""What a request over Flower costs in seconds, bytes and memory, beside what it did and Flower's own FedAvg.

    python benchmarks/flower_overhead.py [--rounds 10] [--sites 4] [--before COMMIT] [--many 50] [--ours-only]

All run for real on this machine, one after the other: TLS, node keys, the same sites. `--before` does the
same with the code of an older commit, `--many` once more with so many sites. The plain one starts a process
for every message, which is how Flower runs an app by itself.

A round of `global` asks every site once, for training that takes a few hundredths of a second here: the
seconds of a request (`participation.jsonl`) are its overhead. *Joined* is from the start of the sites'
commands until the server knows the facts of all. Memory is the proportional set size that the kernel counts
(Pss in /proc/PID/smaps_rollup), of a site and whatever it started: while it waits, before it has a contract,
and in its last round. Bytes are bodies of requests and answers, both ways, heartbeats and polls included.
"""

import argparse
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import httpx
import numpy as np
import yaml
from identical import checkout

from coterie.data import DataSettings, Task, load_dataset
from coterie.engines.flower import internals, messages, runtime
from coterie.engines.flower.keys import KeyFolder, make_keys
from coterie.engines.flower.messages import (
    FinalModels,
    RequestId,
    SiteFacts,
    SiteRequest,
)
from coterie.engines.flower.processes import Child, Upstream, environment, free_port, wait_until_healthy
from coterie.engines.flower.proxy import AllowlistProxy, listening
from coterie.models import ModelSettings, build_model
from coterie.privacy import HeldOut
from coterie.training.parameters import flatten

DECLARATION = "task: classification\nlabel: {classes: 10}\nfeatures: {shape: [1, 8, 8], range: [0, 1]}\n"
HERE = Path(__file__).resolve().parent
SECONDS = 1800.0
"""After which a run is broken."""
LOOKS = 0.05


@dataclass
class Measured:
    """What was measured of a run.

    Args:
        requests: seconds of each.
        joined: seconds until all sites were known.
        waiting, trained: MB of each site, before it has a contract and in the last round.
        alone: MB that a site would take on a machine of its own: everything it maps, shared or not.
        server, link: MB of the server's own process and of Flower's beside it.
        bytes: of a round, in the middle.
        idle_cpu: share of a processor that a site uses while it waits.
    """

    requests: list[float] = field(default_factory=list)
    joined: float = 0.0
    waiting: list[float] = field(default_factory=list)
    trained: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    server: float | None = None
    link: float | None = None
    bytes: float | None = None
    idle_cpu: float | None = None


# --- processes --------------------------------------------------------------------------------------


def memory(process: int, kind: str = "Pss") -> float:
    """MB of a process, as the kernel counts it; 0 where it has ended meanwhile."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{kind}:")), 0) / 1024


def family(process: int) -> list[int]:
    """A process and all that it started."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        parents.setdefault(parent, []).append(int(stat.parent.name))
    found = [process]
    for each in found:
        found += parents.get(each, [])
    return found


def memory_of_all(process: int, kind: str = "Pss") -> float:
    return sum(memory(each, kind) for each in family(process))


def cpu_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def running(arguments: list[str], log: Path, tree: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A command of coterie, of the code in a folder; ended in the end."""
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "coterie", *arguments], stdout=out, stderr=out, env=environment
        )
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


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


# --- the contestants --------------------------------------------------------------------------------


def measure_coterie(
    folder: Path, sites: dict[str, Path], keys: KeyFolder, rounds: int, tree: Path, idle: float = 0.0
) -> Measured:
    """`global` over `coterie serve` and `coterie join`, of the code in a folder.

    Args:
        idle: seconds for which all sites wait for one that is late, before anything is asked.
    """
    folder.mkdir()
    experiment = folder / "experiment.yaml"
    schedule = {"rounds": rounds, "batch": 40}
    experiment.write_text(yaml.safe_dump({"algorithm": {"name": "global"}, "schedule": schedule}))
    found, port, log = Measured(), free_port(), folder / "server.log"
    metrics, participation = folder / "run" / "metrics.jsonl", folder / "run" / "participation.jsonl"
    serve = ["serve", str(experiment), "--keys", str(keys.path), "--port", str(port), "--wait", "900"]
    with ExitStack() as stack:
        server = stack.enter_context(running([*serve, "--out", str(folder / "run")], log, tree))

        def until(what: str, reached: Callable[[], bool]) -> None:
            end = time.monotonic() + SECONDS
            while not reached():
                if server.poll() is not None or time.monotonic() > end:
                    sys.exit(f"never: {what}: {log.read_text()[-2000:]}")
                time.sleep(LOOKS)

        until("serving", lambda: "serving on" in log.read_text())
        pids, began = [], time.monotonic()
        for number, (name, data) in enumerate(sites.items()):
            if idle and number == len(sites) - 1:
                time.sleep(60)  # until the others are there, and nothing has come for a while
                before = sum(map(cpu_seconds, pids))
                time.sleep(idle)
                found.idle_cpu = (sum(map(cpu_seconds, pids)) - before) / idle / len(pids)
                began = time.monotonic()
            state = ["--state", str(folder / f"{name}.state"), "--epsilon", "8"]
            where = ["--data", str(data), "--server", f"127.0.0.1:{port}", "--ca", str(keys.authority)]
            join = ["join", *where, "--key", str(keys.sites / f"{name}.key"), *state]
            pids.append(stack.enter_context(running(join, folder / f"{name}.log", tree)).pid)
        until("joined", lambda: "joined: " in log.read_text())
        found.joined = time.monotonic() - began
        found.waiting = [memory_of_all(pid) for pid in pids]
        passed = []
        for number in (1, rounds - 1):
            until(f"round {number}", lambda least=number: lines_in(metrics) >= least)
            passed.append(passed_bytes(port, keys))
        found.trained = [memory_of_all(pid) for pid in pids]
        found.alone = [memory_of_all(pid, "Rss") for pid in pids]
        found.server = memory(server.pid)
        found.link = memory_of_all(server.pid) - found.server
        until("the end", lambda: lines_in(metrics) >= rounds)
        if passed[0] is not None and passed[1] is not None and rounds > 2:
            found.bytes = (passed[1] - passed[0]) / (rounds - 2)
    found.requests = [json.loads(line)["seconds"] for line in participation.read_text().splitlines()]
    return found


def lines_in(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def passed_bytes(port: int, keys: KeyFolder) -> float | None:
    """What has passed the proxy so far, where it tells."""
    upstream = Upstream(f"127.0.0.1:{port}", keys.authority)
    with httpx.Client(verify=upstream.verify, trust_env=False, timeout=30) as client:
        told = re.search(r"coterie_passed_bytes_total (\S+)", client.get(f"{upstream.url}/metrics").text)
    return None if told is None else float(told[1])


def measure_plain(folder: Path, sites: dict[str, Path], keys: KeyFolder, rounds: int) -> Measured:
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
        nodes, found, began = [], Measured(), time.monotonic()
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
            nodes.append(node.process.pid)
        with runtime.Caller(address, keys.authority.read_bytes()).control() as control:
            while online(control) < len(sites):
                time.sleep(LOOKS)
        found.joined = time.monotonic() - began
        found.waiting = [memory_of_all(pid) for pid in nodes]
        home.mkdir(exist_ok=True)
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "{address}"\n'
            f'root-certificates = "{keys.authority}"\n'
        )
        times = folder / "times"
        config = f'rounds={rounds} sites={len(sites)} times="{times}"'
        flwr = Path(sys.executable).parent / "flwr"
        subprocess.run(
            [flwr, "run", HERE / "fedavg_app", "here", "-c", config],
            env=environment(home),
            check=True,
            stdout=subprocess.DEVNULL,
        )
        marks: list[tuple[float, int]] = []
        until, found.trained = time.monotonic() + SECONDS, [0.0] * len(nodes)
        while len(marks) < rounds + 1:
            lines = times.read_text().split() if times.exists() else []
            if len(lines) > len(marks):
                marks.append((float(lines[len(marks)]), door.passed))
            if time.monotonic() > until:
                raise SystemExit(f"plain FedAvg did not finish; see {folder}")
            most = zip(found.trained, [memory_of_all(pid) for pid in nodes], strict=True)
            found.trained = [max(pair) for pair in most]
            time.sleep(4 * LOOKS)
    found.requests = [b[0] - a[0] for a, b in itertools.pairwise(marks)]
    found.bytes = statistics.median(b[1] - a[1] for a, b in itertools.pairwise(marks))
    return found


def online(control: object) -> int:
    """How many nodes Flower's link has heard of."""
    nodes = control.ListNodes(internals.ListNodesRequest()).nodes_info
    return sum(node.status == "online" for node in nodes)


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


def shown(name: str, found: Measured) -> str:
    """A row of the table."""

    def number(value: float | None, form: str) -> str:
        return "–" if value is None else format(value, form)

    cells = [
        number(found.joined, ".1f"),
        number(statistics.median(found.requests), ".2f"),
        number(min(found.requests), ".2f"),
        number(found.bytes, ",.0f"),
        number(max(found.waiting), ".0f"),
        number(max(found.trained), ".0f"),
        number(max(found.alone) if found.alone else None, ".0f"),
        number(found.server, ".0f"),
        number(found.link, ".0f"),
    ]
    return f"| {name} | {' | '.join(cells)} |"


COLUMNS = (
    *("who", "joined, s", "a request, s, median", "fastest", "bytes a round", "MB of a site that waits"),
    *("that trains", "all it maps", "MB of the server", "of Flower's link"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--sites", type=int, default=4)
    parser.add_argument("--before", metavar="COMMIT", help="also with the code of this commit")
    parser.add_argument("--many", type=int, default=0, help="also with so many sites")
    parser.add_argument("--many-rounds", type=int, default=5)
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
    found: dict[str, Measured] = {}
    print(
        f"\n{options.sites} sites, {options.rounds} rounds of softmax; the model itself, both ways, is "
        f"{2 * 4 * parameters * options.sites:,} bytes a round; load {os.getloadavg()[0]:.1f} on "
        f"{os.cpu_count()} cores\n| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}",
        flush=True,
    )

    def note(name: str, measured: Measured) -> None:
        found[name] = measured
        print(shown(name, measured), flush=True)

    with tempfile.TemporaryDirectory(prefix="coterie-overhead-") as scratch:
        folder, here = Path(scratch), HERE.parent
        os.environ["COTERIE_REGISTER"] = str(folder / "register")
        sites = write_sites(folder / "data", max(options.sites, options.many))
        keys = make_keys(folder / "keys", [], list(few := dict(list(sites.items())[: options.sites])))
        rounds = options.rounds
        note("coterie", measure_coterie(folder / "ours", few, keys, rounds, here, options.idle))
        if options.before:
            with checkout(options.before) as tree:
                measured = measure_coterie(folder / "before", few, keys, rounds, tree)
                note(f"coterie at {options.before}", measured)
        if not options.ours_only:
            note("Flower's FedAvg, not private", measure_plain(folder / "plain", few, keys, rounds))
        if options.many:
            all_keys = make_keys(folder / "all-keys", [], list(sites))
            measured = measure_coterie(folder / "many", sites, all_keys, options.many_rounds, here)
            note(f"coterie, {options.many} sites", measured)
    if (share := found["coterie"].idle_cpu) is not None:
        print(f"a site that waits uses {share:.2%} of a processor")
    print(json.dumps({name: asdict(measured) for name, measured in found.items()}))


if __name__ == "__main__":
    main()
