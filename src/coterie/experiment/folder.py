"""The run folder: which file holds what, written so that a crash leaves nothing half-done."""

import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.errors import InputError
from coterie.privacy import SecretKey

Json = Mapping[str, Any]


@dataclass(frozen=True)
class RunFolder:
    """Paths inside `runs/<name>/`."""

    path: Path

    @property
    def experiment(self) -> Path:
        return self.path / "experiment.yaml"

    @property
    def federation(self) -> Path:
        return self.path / "federation.json"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def guarantee(self) -> Path:
        return self.path / "guarantee.json"

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.jsonl"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def timing(self) -> Path:
        """Wall-clock seconds of each round, apart from the metrics, which repeat exactly."""
        return self.path / "timing.jsonl"

    @property
    def findings(self) -> Path:
        return self.path / "findings.json"

    @property
    def leakage(self) -> Path:
        """Who learns how much about whom, where workers watch each other."""
        return self.path / "leakage.json"

    @property
    def checkpoint(self) -> Path:
        return self.path / "checkpoint"

    @property
    def result(self) -> Path:
        return self.path / "result.json"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def secret(self) -> Path:
        return self.path / "noise.key"

    @property
    def exists(self) -> bool:
        return self.experiment.exists()

    @property
    def finished(self) -> bool:
        return self.result.exists()


def next_free(base: Path, name: str) -> Path:
    """`base/name-1`, or the first number that is not taken."""
    number = 1
    while (base / f"{name}-{number}").exists():
        number += 1
    return base / f"{name}-{number}"


def newest_first(paths: Iterable[Path]) -> list[Path]:
    return sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder that appears under its name with all its first files in it, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        yield scratch
        scratch.chmod(0o777 & ~_umask())
        scratch.rename(path)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


def write_text(path: Path, text: str) -> None:
    """Replace a file's content in one step."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    with scratch.open("w", encoding="utf-8") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())
    scratch.replace(path)


def write_json(path: Path, content: Json) -> None:
    write_text(path, json.dumps(finite(content), indent=1, allow_nan=False) + "\n")


def finite(value: Any) -> Any:
    """JSON has no infinities and no NaN: a figure that is none (a diverged loss) is null."""
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: not readable as JSON ({type(error).__name__})") from None
    if not isinstance(content, dict):
        raise InputError(f"{path}: should hold a JSON object")
    return content


def append_line(path: Path, content: Json) -> None:
    with path.open("a", encoding="utf-8") as handle:
        handle.write(json.dumps(finite(content), allow_nan=False) + "\n")


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """JSON lines of a file; a last line torn by a crash is not one."""
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if not line.endswith("\n"):
            return
        try:
            yield json.loads(line)
        except ValueError:
            raise InputError(f"{path}: not readable as JSON lines") from None


def keep_rounds(path: Path, last: int) -> None:
    """Drop lines of rounds after `last`: those will run again."""
    kept = [json.dumps(line) + "\n" for line in read_lines(path) if line["round"] <= last]
    if path.exists():
        write_text(path, "".join(kept))


@dataclass(frozen=True)
class RunSecret:
    """What must not leave the machine while a run can still be resumed: its noise key, and what it is for.

    The same noise on other data, or at another scale, would cancel in the difference: a run resumes on the
    same data and under the same plan, or never.
    """

    key: SecretKey
    data: str
    plan: str

    def save(self, path: Path) -> None:
        content = json.dumps({"key": self.key.to_hex(), "data": self.data, "plan": self.plan})
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def load(cls, path: Path) -> "RunSecret":
        if not path.exists():
            raise InputError(f"{path}: the noise key is gone, so the run cannot be resumed; start a new one")
        content = read_json(path)
        key = SecretKey.from_hex(str(content.get("key")))
        return cls(key, str(content.get("data")), str(content.get("plan")))
