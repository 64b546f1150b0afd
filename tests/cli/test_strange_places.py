"""Strange paths and disks: refused before anything is spent, named in one line, nothing left behind."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from command import Printed, coterie

Run = Callable[..., Printed]
EXPERIMENT = """
federation: {sizes: [2, 2], records_per_client: 40}
algorithm: {name: global}
schedule: {rounds: 2, batch: 20}
seeds: {noise: 1}
evaluation: {references: false}
"""
SWEEP = """
base: {federation: {sizes: [2], records_per_client: 40}, schedule: {rounds: 1, batch: 20}}
grid: {algorithm.name: [local]}
"""
NOT_TEXT = os.fsdecode(b"\xff")


@pytest.fixture(autouse=True)
def _no_hang() -> Iterator[None]:
    def hangs(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(200)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    (tmp_path / "e.yaml").write_text(EXPERIMENT)
    (tmp_path / "sweep.yaml").write_text(SWEEP)
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    return lambda *arguments: coterie(capsys, monkeypatch, *arguments)


def one_line(printed: Printed, code: int, *words: str) -> None:
    assert (printed.code, printed.out) == (code, ""), printed
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1, printed.err
    for word in words:
        assert word in printed.err, printed.err


@pytest.mark.parametrize(
    "out", [".", "", "../empty", NOT_TEXT, "x" * 250, "../file", "../file/run", "/proc/x"]
)
@pytest.mark.parametrize(
    "command",
    [("run", "../e.yaml"), ("compare", "../sweep.yaml"), ("reproduce", "rdpcfl-mnist"), ("run", "--resume")],
    ids=lambda command: " ".join(command),
)
def test_where_nothing_can_be_written_nothing_begins(
    run: Run, command: tuple[str, ...], out: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("load_federation", "calibrate"):
        monkeypatch.setattr(f"coterie.experiment.local.{name}", lambda *_: pytest.fail("data were read"))
    monkeypatch.setattr("coterie.experiment.cells.run_cells", lambda *_: pytest.fail("cells were run"))
    before = sorted(tmp_path.iterdir())
    one_line(run(*command, "--out", out), 2, "--out" if command[1] != "--resume" else "")
    assert os.listdir(tmp_path / "empty") == []
    assert sorted(tmp_path.iterdir()) == before


def test_a_sweep_file_whose_name_is_no_text_is_refused_before_its_folder_is_named_so(
    run: Run, tmp_path: Path
) -> None:
    (tmp_path / f"{NOT_TEXT}.yaml").write_text(SWEEP)
    one_line(run("compare", f"../{NOT_TEXT}.yaml"), 2, "not UTF-8")
    assert os.listdir(tmp_path / "empty") == []


def test_a_run_is_gone_on_with_from_inside_its_folder(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("run", "../e.yaml", "--out", "r", "--json").code == 0
    monkeypatch.chdir(tmp_path / "empty" / "r")
    assert run("run", "--resume", "--out", ".", "--json").code == 0


def test_other_folders_and_files_to_write_are_checked_first(run: Run, tmp_path: Path) -> None:
    assert run("run", "../e.yaml", "--out", "r", "--json").code == 0
    page = tmp_path / "empty" / "r" / "report.html"
    page.unlink()
    one_line(run("report", "r", "--figures", "../file/figures"), 2, "--figures")
    assert not page.exists()
    ring = ["--structure", "ring", "--workers", "4", "--groups", "4", "--epochs", "3"]
    ring += ["--rate", "0.5", "--noise", "2", "--delta", "1e-5"]
    for plot in ("/proc/x.png", "x" * 300 + ".png", f"{NOT_TEXT}/x.png", "../file/x.png"):
        one_line(run("leakage", *ring, "--plot", plot), 2, "--plot")


@pytest.mark.parametrize("docs", ["../file/doc.md", "../empty", "../nothing.md", "../e.yaml", "/proc/x"])
def test_a_document_that_cannot_take_the_summary_is_refused_before_anything_is_written(
    run: Run, docs: str, tmp_path: Path
) -> None:
    one_line(run("reproduce", "--all", "--render", "--out", "pages", "--docs", docs), 2, docs)
    assert os.listdir(tmp_path / "empty") == []


@pytest.mark.parametrize("store", ["../file/kept", "/proc/x"])
def test_results_that_cannot_be_stored_are_refused_before_anything_is_run(
    run: Run, store: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("coterie.reproduce.running.reproduce", lambda *_, **__: pytest.fail("it was run"))
    one_line(run("reproduce", "rdpcfl-mnist", "--store", store), 2, "--store")
    assert os.listdir(tmp_path / "empty") == []


@pytest.mark.parametrize("state", ["/proc/x", "../file", "x" * 300])
def test_a_site_checks_where_its_books_will_be_before_its_records_are_read(
    run: Run, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coterie.engines.flower.joining.read_folder", lambda *_: pytest.fail("it was read"))
    joining = ["--data", ".", "--server", "127.0.0.1:1", "--plaintext", "--epsilon", "1"]
    one_line(run("join", *joining, "--state", state), 2, "--state")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    (folder / "e.yaml").write_text(EXPERIMENT)
    command = [sys.executable, "-m", "coterie", "run", "e.yaml", "--out", "run"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder / "run"


NAMES = ["experiment.yaml", "federation.json", "plan.json", "guarantee.json", "ledger.jsonl", "seal.jsonl"]
NAMES += ["metrics.jsonl", "result.json", "checkpoint/round-000002/state.json"]
NAMES += ["checkpoint/round-000002/state.safetensors"]


@pytest.mark.parametrize("name", [*NAMES, "report.html"])
def test_a_pipe_in_a_run_folder_is_named_and_waited_for_by_nobody(
    run: Run, finished: Path, name: str, tmp_path: Path
) -> None:
    copy = tmp_path / "empty" / "copy"
    subprocess.run(["cp", "-r", str(finished), str(copy)], check=True)
    (copy / name).unlink()
    os.mkfifo(copy / name)
    printed = run("verify", "copy")
    assert printed.code in (2, 4), printed
    assert name in printed.err
    if name == "report.html":
        return
    for command in (("report", "copy"), ("run", "--resume", "--out", "copy")):
        printed = run(*command)
        assert printed.code in (2, 4), printed
        assert name in printed.err
        assert printed.err.count("\n") == 1


LIMITED = """
import resource, sys
from coterie.cli.main import main
from coterie.experiment import loop

def fill(*arguments):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    return original(*arguments)

size = int(sys.argv[1])
place = loop if hasattr(loop, sys.argv[2]) else loop.Run
original = getattr(place, sys.argv[2])
setattr(place, sys.argv[2], fill)
sys.argv = ["coterie", *sys.argv[3:]]
main()
"""


@pytest.mark.parametrize(
    ("since", "size", "name"),
    [
        ("create_folder", 100, "noise.key"),
        ("rounds", 700, "ledger.jsonl"),
        ("rounds", 2_000, "round-000001"),
    ],
)
def test_a_full_disk_is_one_line_that_names_the_file_and_the_run_goes_on_later(
    run: Run, finished: Path, since: str, size: int, name: str, tmp_path: Path
) -> None:
    arguments = ["run", "../e.yaml", "--out", "r", "--resume"]
    command = [sys.executable, "-c", LIMITED, str(size), since, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done
    *_, said = done.stderr.splitlines()  # on a slow machine, progress before it
    assert re.fullmatch(rf"error: \S*r\S*/{name}: .*File too large.*", said), said
    assert run(*arguments).code == 0
    for name in ("ledger.jsonl", "metrics.jsonl", "checkpoint/round-000002/state.safetensors"):
        assert (tmp_path / "empty" / "r" / name).read_bytes() == (finished / name).read_bytes()
    assert left_over(tmp_path) == []


def left_over(folder: Path) -> list[Path]:
    return [path for path in folder.rglob(".*") if path.name.startswith(".")]


KILLED = """
import os, signal, sys
from pathlib import Path
where, replace = sys.argv[1], Path.replace
def killed(self, target):
    if Path(target).name == where: os.kill(os.getpid(), signal.SIGKILL)
    return replace(self, target)
Path.replace = killed
from coterie.cli.main import main
sys.argv = ["coterie", *sys.argv[2:]]
main()
"""


@pytest.mark.parametrize("where", ["r", "report.html"])
def test_what_a_killed_run_leaves_goes_when_it_is_resumed(run: Run, where: str, tmp_path: Path) -> None:
    arguments = ["run", "../e.yaml", "--out", "r", "--resume"]
    command = [sys.executable, "-c", KILLED, where, *arguments]
    assert subprocess.run(command, capture_output=True, check=False).returncode == -signal.SIGKILL
    assert left_over(tmp_path) != []
    assert run(*arguments).code == 0
    assert left_over(tmp_path) == []


def test_folders_made_for_a_run_that_cannot_begin_are_removed(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("coterie.experiment.seal.sync", full)
    one_line(run("run", "../e.yaml", "--out", "a/b/r"), 1, "seal.jsonl", "No space left on device")
    assert os.listdir(tmp_path / "empty") == []


def test_a_full_standard_output_is_one_line() -> None:
    for arguments in (["run", "--print-default"], ["reproduce"]):
        with Path("/dev/full").open("w") as full:
            command = [sys.executable, "-m", "coterie", *arguments]
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
        assert (done.returncode, done.stderr) == (1, "error: standard output: No space left on device\n")
