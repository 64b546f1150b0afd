"""Files are replaced in one step or not at all; what is no file is never opened; a full disk is one line."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from coterie.errors import CoterieError, InputError
from coterie.files import (
    append_line,
    check_place,
    digest_file,
    read_arrays,
    read_json,
    read_lines,
    regular,
    replacing,
    write_arrays,
    write_text,
)

KILLED = """
import os, signal, sys
from pathlib import Path
from coterie.files import replacing
with replacing(Path(sys.argv[1]), folder=sys.argv[2] == "folder"):
    os.kill(os.getpid(), int(sys.argv[3]))
"""


def start(path: Path, kind: str, end: signal.Signals) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", KILLED, str(path), kind, str(int(end))])


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_a_killed_process_left_goes_with_the_next_writing(tmp_path: Path, kind: str) -> None:
    start(tmp_path / "page", kind, signal.SIGKILL).wait()
    assert len(list(tmp_path.iterdir())) == 1
    (tmp_path / ".page.draft").write_text("mine")
    (tmp_path / ".pages.draft-0").write_text("of something else")
    with replacing(tmp_path / "page"):
        pass
    assert sorted(os.listdir(tmp_path)) == [".page.draft", ".pages.draft-0", "page"]


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_the_draft_of_a_process_that_lives_stays(tmp_path: Path, kind: str) -> None:
    process = start(tmp_path / "page", kind, signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    write_text(tmp_path / "page", "ours")
    assert len(list(tmp_path.iterdir())) == 2
    process.kill()
    process.wait()
    write_text(tmp_path / "page", "ours again")
    assert os.listdir(tmp_path) == ["page"]


def test_drafts_of_several_that_were_killed_together_all_go(tmp_path: Path) -> None:
    together = [start(tmp_path / "page", "file", signal.SIGSTOP) for _ in range(3)]
    for process in together:
        os.waitpid(process.pid, os.WUNTRACED)
    assert len(os.listdir(tmp_path)) == 3
    together[0].kill()
    together[0].wait()
    write_text(tmp_path / "page", "ours")
    assert len(os.listdir(tmp_path)) == 3
    for process in together[1:]:
        process.kill()
        process.wait()
    write_text(tmp_path / "page", "ours again")
    assert os.listdir(tmp_path) == ["page"]


def test_many_write_one_file_at_once_and_it_is_always_whole(tmp_path: Path) -> None:
    path, texts = tmp_path / "page", [f"{number}" * 5_000 for number in range(6)]

    def write(text: str) -> None:
        for _ in range(30):
            write_text(path, text)
            assert path.read_text() in texts

    with ThreadPoolExecutor(len(texts)) as pool:
        list(pool.map(write, texts))
    assert os.listdir(tmp_path) == ["page"]


def test_a_draft_that_goes_while_it_is_looked_at_is_nobodys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look whether it is there and the look what it is, another may take it away."""
    lstat, taken = Path.lstat, []

    def vanishing(path: Path) -> os.stat_result:
        if not taken:
            taken.append(path)
            path.unlink()
        return lstat(path)

    monkeypatch.setattr(Path, "lstat", vanishing)
    write_text(tmp_path / "page", "new")
    assert taken
    assert (tmp_path / "page").read_text() == "new"
    assert os.listdir(tmp_path) == ["page"]


def test_a_file_is_written_without_a_look_at_all_others_of_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, lambda *_: pytest.fail("the folder was listed"))
    write_text(tmp_path / "page", "new")
    write_arrays(tmp_path / "arrays", {"x": np.zeros(1)})
    assert (tmp_path / "page").read_text() == "new"


def test_a_link_or_a_pipe_in_the_place_of_a_draft_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("kept")
    (tmp_path / ".page.draft-0").symlink_to(tmp_path / "kept")
    os.mkfifo(tmp_path / ".page.draft-1")
    (tmp_path / ".page.draft-2").symlink_to(tmp_path / "nowhere")
    write_text(tmp_path / "page", "new")
    assert (tmp_path / "page").read_text() == "new"
    assert (tmp_path / "kept").read_text() == "kept"
    assert not (tmp_path / "nowhere").exists()


READERS: dict[str, Callable[[Path], object]] = {
    "json": read_json,
    "lines": lambda path: list(read_lines(path)),
    "digest": digest_file,
    "bytes": lambda path: regular(path).read_bytes(),
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_file_is_refused_unopened(
    tmp_path: Path, read: Callable[[Path], object], make: Callable[[Path], None]
) -> None:
    make(tmp_path / "it")
    with pytest.raises(InputError, match=r"it: a folder, a pipe or a device; allowed: a file"):
        read(tmp_path / "it")
    assert read_arrays(tmp_path / "it") is None


@pytest.mark.parametrize("line", ["[1]", "3", "{", "[" * 100_000])
def test_a_line_that_is_no_object_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "lines").write_text('{"round": 1}\n' + line + "\n")
    with pytest.raises(InputError, match=r"lines: line 2 is not a JSON object"):
        list(read_lines(tmp_path / "lines"))


FULL = """
import resource, sys
from pathlib import Path
import numpy as np
from coterie.files import append_line, write_arrays, write_text
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
how = {
    "text": lambda path: write_text(path, "x" * 2000),
    "line": lambda path: append_line(path, {"x": "x" * 2000}),
    "arrays": lambda path: write_arrays(path, {"x": np.zeros(1000)}),
}
try:
    how[sys.argv[2]](Path(sys.argv[1]))
except Exception as mistake:
    print(type(mistake).__name__, mistake)
"""


@pytest.mark.parametrize("how", ["text", "line", "arrays"])
def test_a_file_that_cannot_be_written_is_named_and_the_old_one_stays(tmp_path: Path, how: str) -> None:
    write_text(tmp_path / "it", "old\n")
    command = [sys.executable, "-c", FULL, str(tmp_path / "it"), how]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.startswith(f"CoterieError {tmp_path / 'it'}: cannot be written (")
    assert "File too large" in said
    assert os.listdir(tmp_path) == ["it"]
    assert (tmp_path / "it").read_text().startswith("old\n")


def test_every_writer_says_which_file_it_could_not_write(tmp_path: Path) -> None:
    for write in (
        lambda path: write_text(path, ""),
        lambda path: append_line(path, {}),
        lambda path: write_arrays(path, {"x": np.zeros(1)}),
    ):
        with pytest.raises(CoterieError, match=r"no/it: cannot be written \(No such file or directory\)"):
            write(tmp_path / "no" / "it")


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (os.fsdecode(b"run-\xff"), "its name is not UTF-8"),
        ("x" * 300, "at most 239 bytes"),
        ("x" * 245, "at most 239 bytes"),
        ("x" * 245 + "/a", "at most 239 bytes"),
        ("a/" * 1990 + "a", "3896 in all"),
        ("file", "file is no folder"),
        ("file/run", "file is no folder"),
        ("loop", "loop is no folder"),
        ("/proc/run", "No such file or directory"),
        ("a\0b", "null byte"),
    ],
)
def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, name: str, problem: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(InputError, match=rf"--out: .* cannot be written \(.*{problem}") as refused:
        check_place(tmp_path / name, "--out")
    assert "\n" not in str(refused.value)
    assert sorted(os.listdir(tmp_path)) == ["file", "loop"]


@pytest.mark.parametrize(
    ("name", "problem"),
    [("folder", "it is a folder"), ("no/it", "no is no folder"), ("old/it", "is no folder")],
)
def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path, name: str, problem: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "old").touch()
    check_place(tmp_path / "old", "--plot", file=True)
    check_place(tmp_path / "new", "--plot", file=True)
    with pytest.raises(InputError, match=rf"--plot: .* cannot be written \(.*{problem}"):
        check_place(tmp_path / name, "--plot", file=True)


@pytest.mark.parametrize("name", ["new", "a/b/c", "x" * 239, "link", "."])
def test_a_folder_that_can_be_written_is_left_as_it_is(tmp_path: Path, name: str) -> None:
    (tmp_path / "link").symlink_to("elsewhere")
    check_place(tmp_path / name, "--out")
    assert os.listdir(tmp_path) == ["link"]
