"""A run's state on disk: safetensors for arrays, JSON for the rest, swapped in whole or not at all."""

import dataclasses
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from coterie.algorithms.protocol import State
from coterie.errors import InputError
from coterie.files import sync
from coterie.privacy import LedgerHead

FORMAT = 1
PERSONAL = "personal.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """What is needed to continue after `state.round` rounds."""

    state: State
    ledger: LedgerHead
    personal: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    """What clients keep to themselves, never released: in a file that its owner alone reads."""


def save(folder: Path, checkpoint: Checkpoint) -> None:
    """Write the checkpoint beside the old one, then let it take its place: a crash leaves one whole."""
    folder.mkdir(exist_ok=True)
    target = folder / f"round-{checkpoint.state.round:06d}"
    scratch = folder / f".{target.name}.{os.getpid()}"
    for leftover in folder.glob(".round-*"):
        shutil.rmtree(leftover)
    scratch.mkdir()
    fields = {
        field.name: getattr(checkpoint.state, field.name) for field in dataclasses.fields(checkpoint.state)
    }
    arrays = {
        name: np.ascontiguousarray(value) for name, value in fields.items() if isinstance(value, np.ndarray)
    }
    save_file(arrays, scratch / "state.safetensors")
    content = {
        "format": FORMAT,
        "ledger": dataclasses.asdict(checkpoint.ledger),
        "state": {name: value for name, value in fields.items() if name not in arrays},
    }
    (scratch / "state.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
    if checkpoint.personal:
        (scratch / PERSONAL).touch(mode=0o600)
        save_file(dict(checkpoint.personal), scratch / PERSONAL)
    for written in scratch.iterdir():
        sync(written)
    if target.exists():
        shutil.rmtree(target)
    scratch.rename(target)
    sync(folder)
    for older in sorted(folder.glob("round-*")):
        if older != target:
            shutil.rmtree(older)


def load(folder: Path, state_type: type[State]) -> Checkpoint | None:
    """The newest checkpoint, or None before the first."""
    newest = _newest(folder)
    if newest is None:
        return None
    with _damage_named(newest):
        content = _content(newest)
        if content["format"] != FORMAT:
            raise InputError(
                f"{newest}: written by another version (format {content['format']}, ours is {FORMAT})"
            )
        fields: dict[str, Any] = {
            **_frozen(content["state"]),
            **load_file(newest / "state.safetensors"),
        }
        kept = load_file(newest / PERSONAL) if (newest / PERSONAL).exists() else {}
        return Checkpoint(state_type(**fields), LedgerHead(**content["ledger"]), kept)


def ledger_head(folder: Path) -> LedgerHead | None:
    """Where the ledger stood at the newest checkpoint, or None before the first."""
    newest = _newest(folder)
    if newest is None:
        return None
    with _damage_named(newest):
        return LedgerHead.from_json(_content(newest)["ledger"])


def _newest(folder: Path) -> Path | None:
    return max(folder.glob("round-*"), default=None)


def _content(checkpoint: Path) -> Any:
    return json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))


@contextmanager
def _damage_named(checkpoint: Path) -> Iterator[None]:
    """Whatever reading a damaged file may raise, as one line."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise InputError(f"{checkpoint}: damaged checkpoint ({type(error).__name__}: {error})") from None


def _frozen(value: Any) -> Any:
    """JSON back to what a state holds: lists were tuples."""
    if isinstance(value, Mapping):
        return {key: _frozen(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return tuple(_frozen(inner) for inner in value)
    return value
