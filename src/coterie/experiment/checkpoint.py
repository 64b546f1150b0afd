"""A run's state on disk: safetensors for arrays, JSON for the rest, swapped in whole or not at all.

The JSON holds the digest of every file of arrays, where ledger, metrics and seal stood, and a hash of itself:
a checkpoint of which one bit was changed is not loaded.
"""

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from coterie.algorithms.protocol import State
from coterie.errors import InputError
from coterie.files import digest_file, hashed_text, read_hashed, regular, replacing, sync, writing
from coterie.privacy import ChainHead

T = TypeVar("T")
FORMAT = 2
STATE = "state.json"
PERSONAL = "personal.safetensors"
Personal = Mapping[str, NDArray[np.float32]]
"""What clients keep to themselves, never released."""


@dataclass(frozen=True)
class Checkpoint:
    """What is needed to continue after `state.round` rounds.

    Args:
        heads: where ledger, metrics and seal stood; with the seal, the digests of plan and experiment.
        personal: in a file that its owner alone reads.
    """

    state: State
    heads: Mapping[str, ChainHead]
    personal: Personal = field(default_factory=dict)


@dataclass(frozen=True)
class SavedRound:
    """What a checkpoint says of itself and of the chains beside it, whatever the algorithm.

    Args:
        digest: of the file that holds the digests of all others.
    """

    round: int
    heads: Mapping[str, ChainHead]
    digest: str


def save(folder: Path, checkpoint: Checkpoint) -> None:
    """Write the checkpoint beside the old one, then let it take its place: a crash leaves one whole."""
    with writing(folder):
        folder.mkdir(exist_ok=True)
    target = folder / f"round-{checkpoint.state.round:06d}"
    for leftover in folder.glob(".round-*"):
        shutil.rmtree(leftover)
    fields = {
        field.name: getattr(checkpoint.state, field.name) for field in dataclasses.fields(checkpoint.state)
    }
    arrays = {
        name: np.ascontiguousarray(value) for name, value in fields.items() if isinstance(value, np.ndarray)
    }
    with replacing(target, folder=True) as scratch:
        save_file(arrays, scratch / "state.safetensors")
        if checkpoint.personal:
            (scratch / PERSONAL).touch(mode=0o600)
            save_file(dict(checkpoint.personal), scratch / PERSONAL)
        content = {
            "format": FORMAT,
            "heads": {name: head.to_json() for name, head in checkpoint.heads.items()},
            "arrays": _digests(scratch),
            "state": {name: value for name, value in fields.items() if name not in arrays},
        }
        try:
            text = hashed_text(content)
        except (TypeError, ValueError) as problem:
            kind = type(checkpoint.state).__name__
            allowed = "numpy arrays and plain JSON values in its fields"
            raise InputError(f"{kind}: a state that cannot be kept ({problem}); allowed: {allowed}") from None
        (scratch / STATE).write_text(text, encoding="utf-8")
        for written in scratch.iterdir():
            sync(written)
        shutil.rmtree(target, ignore_errors=True)
    sync(folder)
    for older in sorted({*folder.glob("round-*")} - {target}):
        shutil.rmtree(older)


def load(folder: Path, state_type: type[State]) -> Checkpoint | None:
    """The newest checkpoint, or None before the first."""

    def read(newest: Path, content: dict[str, Any], heads: Mapping[str, ChainHead]) -> Checkpoint:
        fields = {**_frozen(content["state"]), **load_file(newest / "state.safetensors")}
        kept = load_file(newest / PERSONAL) if (newest / PERSONAL).exists() else {}
        return Checkpoint(state_type(**fields), heads, kept)

    return _read_newest(folder, read)


def stored(folder: Path) -> SavedRound | None:
    """What the newest checkpoint says of itself, checked to the last byte, or None before the first."""
    return _read_newest(
        folder,
        lambda newest, content, heads: SavedRound(
            int(content["state"]["round"]), heads, digest_file(newest / STATE)
        ),
    )


def _read_newest(
    folder: Path, read: Callable[[Path, dict[str, Any], Mapping[str, ChainHead]], T]
) -> T | None:
    """Whatever reading a damaged file may raise is one line."""
    newest = max(folder.glob("round-*"), default=None)
    if newest is None:
        return None
    try:
        content = _checked(newest)
        heads = {name: ChainHead.from_json(head) for name, head in content["heads"].items()}
        return read(newest, content, heads)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise InputError(f"{newest}: damaged checkpoint ({type(error).__name__}: {error})") from None


def _checked(checkpoint: Path) -> dict[str, Any]:
    """The content of a checkpoint whose files are all as they were saved."""
    path = checkpoint / STATE
    try:
        version = json.loads(regular(path).read_bytes())["format"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise InputError(f"{path}: damaged checkpoint (no JSON object with a format)") from None
    if version == 1:
        raise InputError(f"{path}: written by an earlier version (format 1, ours is {FORMAT})")
    content = read_hashed(path)
    if version != FORMAT:
        raise InputError(f"{path}: written by another version (format {version}, ours is {FORMAT})")
    for name, _ in sorted(_digests(checkpoint).items() ^ content["arrays"].items()):
        raise InputError(
            f"{checkpoint / name}: damaged checkpoint (not the file that was saved with {STATE})"
        )
    return content


def _digests(checkpoint: Path) -> dict[str, str]:
    return {path.name: digest_file(path) for path in sorted(checkpoint.glob("*.safetensors"))}


def _frozen(value: Any) -> Any:
    """JSON back to what a state holds: lists were tuples."""
    if isinstance(value, Mapping):
        return {key: _frozen(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return tuple(_frozen(inner) for inner in value)
    return value
