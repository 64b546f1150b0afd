"""Are two versions of the code the same to the byte? Equal seeds, two commits, every file compared.

    python benchmarks/identical.py BEFORE [AFTER] [--only TEXT]

Every algorithm of every privacy unit runs in short experiments, in one process and between sites in memory,
with either version of the package; plans and leakages are asked for on the command line. States, ledgers,
plans, contracts, guarantees, metrics and printed JSON must be equal to the byte, but for what a clock
measured (`seconds`, the seal over it) and for pages. Exit code 1 and one line for each file that differs.

BEFORE and AFTER are commits, or folders with a checkout; AFTER is the working tree unless given.
"""

import argparse
import contextlib
import io
import json
import os
import runpy
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

ROOT = Path(__file__).resolve().parents[1]

RECORD: dict[str, Any] = {
    "federation": {"kind": "clusters", "sizes": [2, 3], "shift": "rotation", "records_per_client": 60},
    "schedule": {"rounds": 4, "batch": 20},
    "privacy": {"epsilon": 8, "delta": 1e-3},
    "seeds": {"simulation": 3, "noise": 5},
    "evaluation": {"every": 2, "references": False},
}
CLIENT: dict[str, Any] = {
    "federation": {"kind": "clusters", "sizes": [5, 5], "shift": "rotation", "records_per_client": 30},
    "algorithm": {"rate": 0.5},
    "privacy": {"unit": "client", "epsilon": 8, "delta": 0.01, "clip": 0.5},
    "schedule": {"rounds": 4, "epochs": 1, "batch": 10, "lr": 0.1},
    "seeds": {"simulation": 1, "noise": 2},
    "evaluation": {"references": False, "every": 2},
}
WORKER: dict[str, Any] = {
    "federation": {
        "kind": "groups",
        "structure": "ring",
        "workers": 8,
        "groups": 4,
        "alpha": 1.0,
        "records_per_client": 20,
    },
    "algorithm": {"rate": 0.7, "noise": 2.0, "iterations": 2},
    "privacy": {"unit": "worker", "epsilon": 50.0, "delta": 1e-3, "clip": 0.5},
    "schedule": {"rounds": 4, "batch": 10},
    "seeds": {"simulation": 1, "noise": 2},
}
SMALL_CNN = {
    "federation": {"sizes": [2, 2], "shift": "label", "records_per_client": 30},
    "model": {"name": "cnn"},
}

RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "record global": (RECORD, {"algorithm": {"name": "global"}}),
    "record local": (RECORD, {"algorithm": {"name": "local"}}),
    "record oracle": (RECORD, {"algorithm": {"name": "oracle"}}),
    "record mr-mtl": (RECORD, {"algorithm": {"name": "mr-mtl"}}),
    "record dp-ifca": (RECORD, {"algorithm": {"name": "dp-ifca", "clusters": 2}}),
    "record dp-ifca random": (RECORD, {"algorithm": {"name": "dp-ifca", "clusters": 2, "start": "random"}}),
    "record dp-ifca paper": (
        RECORD,
        {"algorithm": {"name": "dp-ifca", "clusters": 2}, "privacy": {"mode": "paper"}},
    ),
    "record km-cdpfl": (RECORD, {"algorithm": {"name": "km-cdpfl", "clusters": 2}}),
    "record rc-dpfl": (
        RECORD,
        {"algorithm": {"name": "rc-dpfl", "clusters": 2}, "privacy": {"mode": "paper"}},
    ),
    "record r-dpcfl": (RECORD, {"algorithm": {"name": "r-dpcfl"}}),
    "record r-dpcfl update": (
        RECORD,
        {
            "algorithm": {
                "name": "r-dpcfl",
                "clusters": 2,
                "first_round_release": "update",
                "first_round_noise": "shared",
            }
        },
    ),
    "record r-dpcfl paper": (
        RECORD,
        {
            "algorithm": {"name": "r-dpcfl", "clusters": 2, "first_round_noise": "shared"},
            "privacy": {"mode": "paper"},
        },
    ),
    "record r-dpcfl pld": (
        RECORD,
        {"algorithm": {"name": "r-dpcfl", "clusters": 2}, "privacy": {"accountant": "pld"}},
    ),
    "record r-dpcfl replace-one": (
        RECORD,
        {"algorithm": {"name": "r-dpcfl", "clusters": 2}, "privacy": {"adjacency": "replace-one"}},
    ),
    "record r-dpcfl private scores": (
        RECORD,
        {"algorithm": {"name": "r-dpcfl", "clusters": 2}, "evaluation": {"kind": "private"}},
    ),
    "record r-dpcfl cnn": (RECORD, {"algorithm": {"name": "r-dpcfl", "clusters": 2}, **SMALL_CNN}),
    "record global averaged": (RECORD, {"algorithm": {"name": "global"}, "schedule": {"averaging": 0.5}}),
    "record global augmented": (
        RECORD,
        {
            "algorithm": {"name": "global"},
            "schedule": {"augmentation": {"copies": 2, "kinds": ["shift"], "pixels": 1}},
            **SMALL_CNN,
        },
    ),
    "record global unequal": (
        RECORD,
        {"algorithm": {"name": "global"}, "privacy": {"budgets": {"client-1": {"epsilon": 4}}}},
    ),
    "record global without privacy": (
        RECORD,
        {"algorithm": {"name": "global"}, "privacy": {"epsilon": float("inf")}},
    ),
    "record global references": (
        RECORD,
        {"algorithm": {"name": "global"}, "evaluation": {"references": True}},
    ),
    "client dp-fedavg": (CLIENT, {"algorithm": {"name": "dp-fedavg"}}),
    "client dp-fedavg adaptive": (CLIENT, {"algorithm": {"name": "dp-fedavg", "adaptive_clip": {}}}),
    "client dp-fedavg private scores": (
        CLIENT,
        {"algorithm": {"name": "dp-fedavg"}, "evaluation": {"kind": "private"}},
    ),
    "client dp-fedprox": (CLIENT, {"algorithm": {"name": "dp-fedprox", "momentum": 0.5}}),
    "client dp-ifca": (CLIENT, {"algorithm": {"name": "dp-ifca", "clusters": 2, "start": "random"}}),
    "client dp-ifca route": (
        CLIENT,
        {"algorithm": {"name": "dp-ifca", "clusters": 2, "rebalance": {"rule": "route", "minimum": 2}}},
    ),
    "client dp-ifca rebalance": (
        CLIENT,
        {"algorithm": {"name": "dp-ifca", "clusters": 2, "rebalance": {"rule": "rebalance", "minimum": 2}}},
    ),
    "client dp-ifca adaptive": (
        CLIENT,
        {"algorithm": {"name": "dp-ifca", "clusters": 2, "adaptive_clip": {}}},
    ),
    "client dp-fesem": (CLIENT, {"algorithm": {"name": "dp-fesem", "clusters": 2}}),
    "client dp-fedcam": (CLIENT, {"algorithm": {"name": "dp-fedcam", "clusters": 2}}),
    "client gmfsc": (CLIENT, {"algorithm": {"name": "gmfsc", "clusters": 2}}),
    "client gmfsc pld": (
        CLIENT,
        {"algorithm": {"name": "gmfsc", "clusters": 2}, "privacy": {"accountant": "pld"}},
    ),
    "client dp-fedper": (CLIENT, {"algorithm": {"name": "dp-fedper"}, **SMALL_CNN}),
    "worker dp-ogl": (WORKER, {"algorithm": {"name": "dp-ogl", "period": 2}}),
    "worker dp-ogl momentum": (
        WORKER,
        {"algorithm": {"name": "dp-ogl", "period": 2, "master": {"optimiser": "momentum"}}},
    ),
    "worker dp-ogl calibrated": (WORKER, {"algorithm": {"name": "dp-ogl", "period": 2, "noise": None}}),
    "worker dp-ogl-plus": (WORKER, {"algorithm": {"name": "dp-ogl-plus", "period": 2}}),
    "worker dp-fedavg": (WORKER, {"algorithm": {"name": "dp-fedavg"}}),
}

SERVED_BY_RECORD: dict[str, dict[str, Any]] = {
    "served record r-dpcfl": {"name": "r-dpcfl", "clusters": 2},
    "served record dp-ifca": {"name": "dp-ifca", "clusters": 2, "start": "random"},
    "served record global": {"name": "global"},
}
SERVED_BY_TRUST: dict[str, tuple[str, dict[str, Any]]] = {
    "served client dp-fedavg": ("client", {"name": "dp-fedavg"}),
    "served client dp-ifca route": (
        "client",
        {"name": "dp-ifca", "clusters": 2, "rebalance": {"rule": "route", "minimum": 1}},
    ),
    "served client gmfsc": ("client", {"name": "gmfsc", "clusters": 2}),
    "served worker dp-ogl": ("worker", {"name": "dp-ogl", "period": 2}),
}

COMMANDS: dict[str, str] = {
    "plan sample": "plan sample --records 239 --batch 24 --rounds 30 --delta 4e-4 --epsilon 8 --selections 4"
    " --selection-epsilon 0.24 --first-round full --first-round-noise auto --json",
    "plan sample noise": "plan sample --records 239 --batch 24 --rounds 30 --delta 4e-4 --noise 1.2 --json",
    "plan sample pld": "plan sample --records 239 --batch 24 --rounds 30 --delta 4e-4 --epsilon 8"
    " --accountant pld --json",
    "plan sample paper": "plan sample --records 239 --batch 24 --rounds 30 --delta 4e-4 --epsilon 8"
    " --mode paper --sampling shuffle --json",
    "plan client route": "plan client --clients 100 --rate 0.1 --rounds 50 --delta 1e-3 --epsilon 4 --json",
    "plan client rebalance": "plan client --clients 100 --rate 0.1 --rounds 50 --delta 1e-3 --noise 1.5"
    " --mechanism rebalance --json",
    "plan client paper": "plan client --clients 100 --rate 0.1 --rounds 50 --delta 1e-3 --epsilon 4"
    " --mechanism paper --json",
    "plan client fedavg": "plan client --clients 100 --rate 0.1 --rounds 50 --delta 1e-3 --epsilon 4"
    " --mechanism fedavg --accountant pld --json",
    "leakage ring": "leakage --structure ring --workers 12 --groups 4 --period 5 --epochs 21 --rate 0.5"
    " --noise 3 --delta 1e-3 --json",
    "leakage plus": "leakage --structure clustered --workers 12 --groups 4 --period 5 --epochs 21 --rate 0.5"
    " --noise 3 --delta 1e-3 --algorithm dp-ogl-plus --coalition 1,2 --json",
    "leakage target": "leakage --structure string --workers 9 --groups 3 --period 5 --epochs 11 --rate 0.5"
    " --noise 3 --delta 1e-3 --target-pair 0,5 --epsilon 1 --json",
    "leakage paper": "leakage --structure ring --workers 12 --groups 4 --period 5 --epochs 21 --rate 0.5"
    " --noise 3 --delta 1e-3 --mode paper --json",
}

MEASURED = ("seconds", "sample_gradients_per_second", "folder", "report", "key")
"""What a clock, the place of a folder or a site's own random key puts into JSON."""
SKIPPED = ("report.html", "timing.jsonl", "seal.jsonl")
"""Pages, times, and hashes over times."""


def merged(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """The base with every section's keys replaced by those of the change."""
    return {
        section: {**base.get(section, {}), **change.get(section, {})} for section in sorted({*base, *change})
    }


def cases() -> list[str]:
    return [*RUNS, *SERVED_BY_RECORD, *SERVED_BY_TRUST, *COMMANDS]


def produce(out: Path, only: str) -> None:
    """Run every case with the package that is importable; each leaves its files in a folder of its name."""
    # Noise is bound to the version's name, and two versions have two: here they have the same.
    import coterie

    coterie.__version__ = "compared"
    sys.path.insert(0, str(Path.cwd() / "tests" / "engines" / "flower"))
    for name in (name for name in cases() if only in name):
        folder = out / name.replace(" ", "-")
        folder.mkdir(parents=True)
        try:
            if name in RUNS:
                file = folder / "given.yaml"
                file.write_text(yaml.safe_dump(merged(*RUNS[name])))
                printed = call(["run", str(file), "--out", str(folder / "run"), "--json"])
            elif name in COMMANDS:
                printed = call(COMMANDS[name].split())
            else:
                printed = ""
                serve(name, folder)
        except Exception as failure:
            # A case that a version refuses is a difference to report, not the end of the comparison.
            printed = f"{type(failure).__name__}: {failure}"
        (folder / "printed.json").write_text(printed)
        print(name, file=sys.stderr, flush=True)


def call(arguments: list[str]) -> str:
    """What the command prints on stdout, with its exit code where it is not 0."""
    printed = io.StringIO()
    code: object = 0
    with contextlib.redirect_stdout(printed):
        before, sys.argv = sys.argv, ["coterie", *arguments]
        try:
            runpy.run_module("coterie", run_name="__main__")
        except SystemExit as exit:
            code = exit.code
        finally:
            sys.argv = before
    return printed.getvalue() + ("" if code in (0, None) else f"exit code {code}\n")


def serve(name: str, folder: Path) -> None:
    """A run between sites in memory, by the helpers that the tests of that version have."""
    import memory_federation  # type: ignore[import-not-found]
    import trusting  # type: ignore[import-not-found]

    if name in SERVED_BY_RECORD:
        chosen = memory_federation.experiment(algorithm=SERVED_BY_RECORD[name])
        made = memory_federation.MemoryFederation(chosen, folder / "sites")
    else:
        made = trusting.sites_of(trusting.trusting(*SERVED_BY_TRUST[name]), folder / "sites")
    # The name under which sites keep an experiment is drawn afresh in every run; here it is the same.
    with mock.patch.object(secrets, "token_hex", lambda size: "5a" * size):
        made.serve(folder / "run")
    made.close()


def contents(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Every file that must not change, with what was measured taken out."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name not in SKIPPED:
            content = path.read_bytes()
            if path.name in ("result.json", "printed.json", "contract.json"):
                content = without_measurements(content)
            elif path.name == "participation.jsonl":
                content = b"".join(map(without_measurements, content.splitlines()))
            elif path.suffix == ".safetensors":
                # The library writes the entries of its header in any order.
                size = 8 + int.from_bytes(content[:8], "little")
                content = json.dumps(json.loads(content[8:size]), sort_keys=True).encode() + content[size:]
            yield str(path.relative_to(folder)), content


def without_measurements(content: bytes) -> bytes:
    try:
        data = json.loads(content)
    except ValueError:
        return content
    if isinstance(data, dict):
        data = {key: value for key, value in data.items() if key not in MEASURED}
    return json.dumps(data).encode()


@contextlib.contextmanager
def checkout(version: str) -> Iterator[Path]:
    """A folder with that version: itself, or a worktree of a commit that is removed afterwards."""
    if Path(version).is_dir():
        yield Path(version).resolve()
        return
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "tree"
        subprocess.run(["git", "worktree", "add", "-q", "--detach", folder, version], cwd=ROOT, check=True)
        try:
            yield folder
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", folder], cwd=ROOT, check=True)


def start(tree: Path, out: Path, only: str) -> subprocess.Popen[bytes]:
    environment = os.environ | {"PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).resolve()), "--produce", str(out), "--only", only]
    return subprocess.Popen(command, cwd=tree, env=environment)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", nargs="?")
    parser.add_argument("after", nargs="?", default=str(ROOT))
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--produce", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.produce is not None:
        produce(given.produce, given.only)
        return 0
    if given.before is None:
        parser.error("BEFORE is missing: a commit or a folder")
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
        out = [Path(place) / side for side in ("before", "after")]
        trees = [stack.enter_context(checkout(version)) for version in (given.before, given.after)]
        running = [start(tree, folder, given.only) for tree, folder in zip(trees, out, strict=True)]
        codes = [process.wait() for process in running]
        if any(codes):
            print("a version did not get through its cases; see above")
            return 1
        before, after = (dict(contents(folder)) for folder in out)
    differing = [name for name in sorted({*before, *after}) if before.get(name) != after.get(name)]
    for name in differing:
        kind = (
            "differs"
            if name in before and name in after
            else "only before"
            if name in before
            else "only after"
        )
        print(f"{name}: {kind}")
        if kind == "differs":
            pairs = zip(before[name], after[name], strict=False)
            at = next((place for place, (one, other) in enumerate(pairs) if one != other), 0)
            around = slice(max(0, at - 60), at + 120)
            print(f"  before {before[name][around]!r}\n  after  {after[name][around]!r}")
    failed = sorted(name for name, content in after.items() if b"Error: " in content[:60])
    print(
        f"{len(before)} files of {len(cases())} cases, {len(differing)} differ; not run: {failed or 'none'}"
    )
    return 1 if differing or failed else 0


if __name__ == "__main__":
    sys.exit(main())
