"""Cells as tasks of a Ray cluster: the same bytes as on one machine, whatever dies on the way."""

from __future__ import annotations

import csv
import os
import shutil
import socket
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from coterie.errors import CoterieError, InputError
from coterie.experiment import cluster
from coterie.experiment.cells import Progress, compare
from coterie.experiment.comparison import SweepResult
from coterie.experiment.folder import RunFolder
from coterie.experiment.keeper import Keeper, pack, settle, unpack
from coterie.experiment.sweep import Sweep
from coterie.experiment.verify import verify
from coterie.files import beside
from own_package import EXAMPLE, forget, put_on_path

ROUNDS = 60
SWEEP = Sweep(
    {
        "federation": {"kind": "clusters", "sizes": [1, 2], "records_per_client": 60},
        "schedule": {"rounds": ROUNDS, "batch": 20},
        "evaluation": {"references": False},
        "seeds": {"noise": 1},
    },
    {"algorithm.name": ["local", "global"]},
)


@pytest.fixture(scope="module")
def ray_head() -> Iterator[Any]:
    """A cluster of one node with one core."""
    pytest.importorskip("ray", reason="the extra 'ray' is not installed")
    from ray.cluster_utils import Cluster

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    yield nodes
    nodes.shutdown()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> SweepResult:
    return compare(SWEEP, tmp_path_factory.mktemp("alone") / "out")


def assert_same_runs(one: SweepResult, other: SweepResult) -> None:
    """Ledgers, states, guarantees and metrics to the byte, and the same table but for seconds."""
    assert not other.failed
    for name, folder in one.cells.items():
        assert contents(folder) == contents(other.cells[name])
        assert not RunFolder(other.cells[name]).secret.exists()
    assert table(one) == table(other)
    assert verify(other.folder).verdict == "holds"


def contents(folder: Path) -> dict[str, bytes]:
    """All files but those in which wall-clock times are."""
    timed = {"timing.jsonl", "result.json", "seal.jsonl", "report.html"}
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name not in timed]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def table(result: SweepResult) -> list[dict[str, str]]:
    with (result.folder / "table.csv").open() as handle:
        return [
            {key: cell for key, cell in row.items() if key != "seconds"} for row in csv.DictReader(handle)
        ]


@pytest.mark.deployment
def test_cells_of_a_node_that_is_killed_go_on_elsewhere_to_the_same_bytes(
    ray_head: Any, alone: SweepResult, tmp_path: Path
) -> None:
    node = ray_head.add_node(num_cpus=1)
    seen: list[Progress] = []

    def watch(reached: Progress) -> None:
        nonlocal node
        seen.append(reached)
        if node is not None and min(reached.done.values()) >= 3:
            assert max(reached.done.values()) < ROUNDS
            ray_head.remove_node(node, allow_graceful=False)
            node = None

    assert_same_runs(alone, compare(SWEEP, tmp_path / "out", ray=ray_head.address, progress=watch))
    assert node is None
    for name in alone.cells:
        done = [progress.done[name] for progress in seen]
        assert done == sorted(done)  # resumed: a cell that began anew would have fewer rounds


@pytest.mark.deployment
def test_what_was_begun_on_a_cluster_is_resumed_on_one_machine(
    ray_head: Any, alone: SweepResult, tmp_path: Path
) -> None:
    def interrupt(progress: Progress) -> None:
        if max(progress.done.values()) >= 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare(SWEEP, tmp_path / "out", ray=ray_head.address, progress=interrupt)
    begun = [path for path in (tmp_path / "out" / "cells").iterdir() if path.is_dir()]
    assert begun
    assert not any(RunFolder(path).finished for path in begun)
    assert_same_runs(alone, compare(SWEEP, tmp_path / "out", resume=True))


@pytest.mark.deployment
def test_a_cell_that_cannot_run_says_why_and_the_others_finish(ray_head: Any, tmp_path: Path) -> None:
    base = {**SWEEP.base, "schedule": {"rounds": 2, "batch": 20}}
    sweep = Sweep(base, {"algorithm.name": ["global"], "federation.records_per_client": [60, 10**6]})
    result = compare(sweep, tmp_path / "out", ray=ray_head.address)
    assert len(result.cells) == 1
    [(name, reason)] = result.failed.items()
    assert "1000000" in name
    assert "records_per_client" in reason


@pytest.mark.deployment
def test_cells_with_code_of_ones_own_run_on_a_cluster_that_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray", reason="the extra 'ray' is not installed")
    from ray.cluster_utils import Cluster

    put_on_path(monkeypatch, EXAMPLE)
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    try:
        read = Sweep.read(EXAMPLE / "sweep.yaml")
        sweep = Sweep({**read.base, "seeds": {"noise": 1}}, read.grid)
        here = compare(sweep, tmp_path / "here")
        assert not here.failed
        assert_same_runs(here, compare(sweep, tmp_path / "there", ray=nodes.address))
    finally:
        nodes.shutdown()
        forget()


@pytest.mark.deployment
def test_what_answers_and_is_not_ray_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="the extra 'ray' is not installed")
    monkeypatch.setattr(cluster, "CONNECT_SECONDS", 5.0)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(InputError, match="not a Ray cluster"):
            cluster.connect(address)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "somewhere", "ray://127.0.0.1:1", "127.0.0.1:port"])
def test_a_wrong_address_is_refused_before_anything_is_written(address: str, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="the extra 'ray' is not installed")
    with pytest.raises(InputError, match=r"--ray: .* allowed: HOST:PORT"):
        compare(SWEEP, tmp_path / "out", ray=address)
    assert not (tmp_path / "out").exists()


def test_without_ray_it_is_said_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"--ray: .* pip install 'coterie\[ray\]'"):
        compare(SWEEP, tmp_path / "out", ray="auto")


# --- what arrives -----------------------------------------------------------------------------------


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A run's folder as it was kept, and as it is a round later elsewhere."""
    kept, later = tmp_path / "kept", tmp_path / "later"
    for folder, round in ((kept, 1), (later, 2)):
        (folder / f"round-{round}").mkdir(parents=True)
        (folder / f"round-{round}" / "state").write_text(str(round))
        (folder / "ledger.jsonl").write_text("charged\n" * round)
    (kept / "noise.key").write_text("secret")
    (kept / "noise.key").chmod(0o600)
    return kept, later


def test_a_folder_travels_with_the_modes_of_its_files(folders: tuple[Path, Path], tmp_path: Path) -> None:
    kept, _ = folders
    unpack(pack(kept), tmp_path / "there")
    assert contents(tmp_path / "there") == contents(kept)
    assert (tmp_path / "there" / "noise.key").stat().st_mode & 0o777 == 0o600


def test_what_arrives_takes_the_place_of_all_that_was_there(folders: tuple[Path, Path]) -> None:
    kept, later = folders
    keeper = Keeper()
    packed, attempt = keeper.begin(str(kept))
    assert packed is not None
    keeper.keep(str(kept), attempt, pack(later))
    assert contents(kept) == contents(later)
    assert sorted(path.name for path in kept.iterdir()) == ["ledger.jsonl", "round-2"]
    assert sorted(path.name for path in kept.parent.iterdir()) == ["kept", "later"]


def test_a_crash_while_it_takes_its_place_is_made_good(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, later = folders
    later.rename(beside(kept, ".arrived"))
    wanted, copied = contents(beside(kept, ".arrived")), []
    copy = shutil.copyfile

    def fill_the_disk(source: Path, target: Path) -> None:
        if copied:
            raise OSError("full")
        copied.append(copy(source, target))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", fill_the_disk)
        with pytest.raises(CoterieError, match="full"):
            settle(kept)
    assert copied
    settle(kept)
    assert contents(kept) == wanted


def test_a_noise_key_that_arrives_is_never_readable_by_others(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, later = folders
    (kept / "noise.key").rename(later / "noise.key")
    seen: dict[str, list[int]] = {}

    def modes(path: str | Path) -> list[int]:
        """Of a file and the folder around it: others need both to read it."""
        return [os.stat(each).st_mode & 0o077 for each in (path, os.path.dirname(path))]

    def watched(module: Any, name: str, target: Callable[..., str | Path]) -> None:
        original = getattr(module, name)

        def watch(*arguments: Any) -> None:
            original(*arguments)
            if "noise.key" in (path := str(target(*arguments))):
                seen[name] = modes(path)

        monkeypatch.setattr(module, name, watch)

    watched(tarfile.TarFile, "makefile", lambda archive, member, target: target)
    watched(shutil, "copyfile", lambda source, target: target)
    keeper = Keeper()
    _, attempt = keeper.begin(str(kept))
    keeper.keep(str(kept), attempt, pack(later))
    assert seen.keys() == {"makefile", "copyfile"}
    assert all(0 in closed for closed in seen.values()), seen
    assert (kept / "noise.key").stat().st_mode & 0o777 == 0o600
    assert (kept / "ledger.jsonl").stat().st_mode & 0o044 == 0o044


def test_a_machine_that_was_taken_for_lost_overwrites_nothing(folders: tuple[Path, Path]) -> None:
    kept, later = folders
    keeper = Keeper()
    _, lost = keeper.begin(str(kept))
    keeper.begin(str(kept))
    before = contents(kept)
    with pytest.raises(Exception, match="elsewhere"):
        keeper.keep(str(kept), lost, pack(later))
    assert contents(kept) == before
