"""Runs cases, stops those that hang, and says what became of each."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from case import Case, Outcome

SECONDS = 20.0
"""A command over tiny files that takes longer hangs."""
BARE = re.compile(
    r"(?:^|: )[A-Za-z.]*(?:Error|Exception|Warning)\b|COTERIE_DEBUG|<class '"
    r"|function-(?:before|after|wrap)\[|\bconstrained-\w+|type=\w+_type\b"
)
"""Names of Python's or of a library's own in place of words; a sentence may have one in brackets."""
OWN_CODE = re.compile(r"error: (?:model\.name|algorithm\.name|data\.name|federation\.kind): \S+:\S+: ")
"""How a line begins that says what went wrong in a user's own code, by the name that it has there."""
LEFT_OVER = re.compile(r"(?:^|/)\.(?!coterie-register\.json$)[^/]+")
"""Names under which something is written before it gets its own: hidden ones, but for a folder's mark."""
SEVERAL = ("broken: ", "failed: ")
"""How the lines begin that may be many: every claim that does not hold, every run of a grid that failed."""
LEARNT = re.compile(r"(?:^|/)(?:metrics\.jsonl|findings\.json|leakage\.json|checkpoint/.*)$")
"""Files of a run that say what was learnt, and nothing of how long it took or how it was asked for."""


@dataclass(frozen=True)
class Seen:
    """What a command did.

    Args:
        code: its exit code; None: it had to be killed.
        before: names and sizes of the files before.
        after: the same afterwards.
        learnt: digests of the files that say what a run has learnt.
    """

    code: int | None
    out: str
    err: str
    before: Mapping[str, int]
    after: Mapping[str, int]
    seconds: float = 0.0
    learnt: Mapping[str, str] = field(default_factory=dict)

    @property
    def new(self) -> list[str]:
        return sorted(set(self.after) - set(self.before))


def judge(case: Case, seen: Seen) -> Outcome:
    """What became of a case: the worst that can be said of it."""
    if seen.code is None:
        return Outcome.HANG
    if "Traceback (most recent call last)" in seen.err + seen.out:
        return Outcome.TRACEBACK
    if seen.code not in (0, 1, 2, 3, 4):
        return Outcome.OTHER_CODE
    if any(BARE.search(line) for line in seen.err.splitlines() if not OWN_CODE.match(line)):
        return Outcome.BARE_NAME
    if _half_written(case, seen):
        return Outcome.HALF_WRITTEN
    if seen.code and not _one_line(seen):
        return Outcome.NOT_ONE_LINE
    if "--json" in case.arguments and "--help" not in case.arguments and not _one_object(seen):
        return Outcome.NOT_JSON
    if seen.code == 0 and case.broken:
        return Outcome.UNSEEN
    return {0: Outcome.ACCEPTED, 1: Outcome.FAILED}.get(seen.code, Outcome.REFUSED)


def _half_written(case: Case, seen: Seen) -> bool:
    """Whether a refusal wrote anything, or anything unfinished is left."""
    if any(LEFT_OVER.search(name) for name in seen.new):
        return True
    if seen.code in (2, 3):
        return seen.before != seen.after
    if case.arguments[:1] == ("init",):
        return False  # it writes an experiment for others to run
    runs = {name.removesuffix("experiment.yaml") for name in seen.new if name.endswith("/experiment.yaml")}
    files = ("result.json", "report.html")
    return seen.code == 0 and any(run + file not in seen.after for run in runs for file in files)


def _one_line(seen: Seen) -> bool:
    lines = seen.err.splitlines()
    return len(lines) == 1 or (bool(lines) and all(line.startswith(SEVERAL) for line in lines))


def _one_object(seen: Seen) -> bool:
    """Whether a command that was to print one object did, or refused without one."""
    if seen.code and not seen.out:
        return True
    try:
        return isinstance(json.loads(seen.out), dict) and seen.out.count("\n") == 1
    except ValueError:
        return False


class Watcher:
    """Puts cases to a server, one after another; a new server takes the place of one that broke."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._server: subprocess.Popen[str] | None = None
        self._known: dict[tuple[tuple[str, ...], tuple[tuple[str, object], ...]], Seen] = {}

    def known(self, case: Case) -> Seen:
        """What a case did, from memory where it ran before: many changes are made to few experiments."""
        same = case.arguments, tuple(sorted(case.files.items()))
        if same not in self._known:
            self._known[same] = self.run(case)
        return self._known[same]

    def run(self, case: Case) -> Seen:
        folder = Path(tempfile.mkdtemp(dir=self._root))
        work = folder / "work"
        work.mkdir()
        try:
            case.lay_out(work)
            before = _sizes(work)
            code, took = self._answer(case, folder, SECONDS)
            out, err = (_text(folder / name) for name in ("out", "err"))
            return Seen(code, out, err, before, _sizes(work), took, _learnt(work))
        finally:
            _remove(folder)

    def write(self, case: Case, folder: Path) -> None:
        """Run a case that works, in a folder that stays."""
        with tempfile.TemporaryDirectory(dir=self._root) as scratch:
            work = Path(scratch, "work")
            work.mkdir()
            case.lay_out(work)
            code, _ = self._answer(case, Path(scratch), 10 * SECONDS)
            if code != 0:
                raise RuntimeError(f"{' '.join(case.arguments)}: {_text(Path(scratch, 'err'))}")
            folder.parent.mkdir(parents=True, exist_ok=True)
            work.rename(folder)

    def close(self) -> None:
        if self._server is not None:
            self._server.kill()
            self._server.communicate()
            self._server = None

    def _answer(self, case: Case, folder: Path, seconds: float) -> tuple[int | None, float]:
        server = self._ready()
        assert server.stdin is not None
        assert server.stdout is not None
        asked = {"arguments": case.arguments, "room": case.room, "folder": str(folder), "seconds": seconds}
        server.stdin.write(json.dumps(asked) + "\n")
        server.stdin.flush()
        line = server.stdout.readline()
        if not line:
            self.close()
            raise RuntimeError(f"the server broke at {case.arguments!r}")
        answer = json.loads(line)
        return answer["code"], answer["seconds"]

    def _ready(self) -> subprocess.Popen[str]:
        if self._server is None:
            command = [sys.executable, str(Path(__file__).with_name("server.py"))]
            self._server = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=self._root
            )
            assert self._server.stdout is not None
            if self._server.stdout.readline() != "ready\n":
                raise RuntimeError("the server that runs cases does not start")
        return self._server


def _sizes(folder: Path) -> dict[str, int]:
    """Everything in a folder by its name, files with their size."""
    found = {}
    for here, folders, files in os.walk(folder):
        inside = os.path.relpath(here, folder).removeprefix(".").removeprefix("/")
        found.update({os.path.join(inside, name) + "/": 0 for name in folders})
        found.update(
            {(path := os.path.join(inside, name)): os.lstat(folder / path).st_size for name in files}
        )
    return found


def _learnt(folder: Path) -> dict[str, str]:
    return {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest()
        for name in _sizes(folder)
        if LEARNT.search(name) and (folder / name).is_file()
    }


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _remove(folder: Path) -> None:
    for here, folders, _ in os.walk(folder):
        for name in folders:
            with suppress(OSError):
                os.chmod(os.path.join(here, name), 0o700)
    shutil.rmtree(os.fsencode(folder), ignore_errors=True)
