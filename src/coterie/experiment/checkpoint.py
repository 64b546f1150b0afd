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
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

from coterie.algorithms.protocol import State
from coterie.errors import InputError
from coterie.files import digest_file, hashed_text, read_hashed, regular, replacing, sync, writing
from coterie.privacy import ChainHead

T = TypeVar("T")
FORMAT = 2
STATE = "state.json"
ARRAYS = "state.safetensors"
PERSONAL = "personal.safetensors"
_ANYTHING = ConfigDict(arbitrary_types_allowed=True)
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
    fields = {
        field.name: getattr(checkpoint.state, field.name) for field in dataclasses.fields(checkpoint.state)
    }
    arrays = {
        name: np.ascontiguousarray(value) for name, value in fields.items() if isinstance(value, np.ndarray)
    }
    with replacing(target, folder=True) as scratch:
        save_file(arrays, scratch / ARRAYS)
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
    sweep(folder)


def sweep(folder: Path) -> None:
    """Remove all but the newest checkpoint, and drafts: a kill may have come before they went."""
    for leftover in (*folder.glob(".round-*"), *sorted(folder.glob("round-*"))[:-1]):
        shutil.rmtree(leftover)


def load(folder: Path, state_type: type[State], start: State | None = None) -> Checkpoint | None:
    """The newest checkpoint, or None before the first.

    Args:
        start: the state before the first round, where it is known: what is loaded must be of the same shape.
    """

    def read(newest: Path, content: dict[str, Any], heads: Mapping[str, ChainHead]) -> Checkpoint:
        fields = {**_frozen(content["state"]), **load_file(newest / ARRAYS)}
        kept = load_file(newest / PERSONAL) if (newest / PERSONAL).exists() else {}
        state = state_type(**fields)
        _check_types(state)
        if start is not None:
            _check_shapes(state, start)
            _check_personal(kept, state)
        state.check()
        return Checkpoint(state, heads, kept)

    return _read_newest(folder, read)


def stored(folder: Path) -> SavedRound | None:
    """What the newest checkpoint says of itself, checked to the last byte, or None before the first."""
    return _read_newest(
        folder,
        lambda newest, content, heads: SavedRound(
            int(content["state"]["round"]), heads, digest_file(newest / STATE)
        ),
    )


def check_size(folder: Path, parameters: int) -> None:
    """Refuse models of the newest checkpoint that have another number of parameters than the run's."""

    def read(newest: Path, content: dict[str, Any], heads: Mapping[str, ChainHead]) -> None:
        with safe_open(newest / ARRAYS, framework="numpy") as file:
            for name in {"model", "models"} & set(file.keys()):
                shape = file.get_slice(name).get_shape()
                if shape[-1:] != [parameters]:
                    raise ValueError(f"{name} has the shape {shape}, and the run {parameters} parameters")

    _read_newest(folder, read)


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


# --- what whoever wrote the hashes anew may have put in -----------------------------------------------------


def _check_types(state: State) -> None:
    """Refuse plain values of another type than the state's field has, and values in the place of arrays."""
    hints = get_type_hints(type(state))
    for name in (each.name for each in dataclasses.fields(state)):
        # Of one that may also be something else, an algorithm of somebody's own knows more.
        kinds = {get_origin(kind) for kind in (hints[name], *get_args(hints[name]))}
        is_array = isinstance(value := getattr(state, name), np.ndarray)
        if (is_array and np.ndarray not in kinds) or (not is_array and get_origin(hints[name]) is np.ndarray):
            raise ValueError(f"{name} is {'an' if is_array else 'no'} array")
        if np.ndarray not in kinds:
            try:
                TypeAdapter(hints[name], config=_ANYTHING).validate_python(value, strict=True)
            except ValidationError:
                raise ValueError(f"{name} is of another type than a state has") from None


def _check_shapes(state: State, start: State) -> None:
    """Refuse arrays of another shape or type than rounds make of those of the start."""
    lengths: set[int] = set()
    for name in (each.name for each in dataclasses.fields(start)):
        now, then = getattr(state, name), getattr(start, name)
        if name in state.fixed and now != then:
            raise ValueError(f"{name} is not that of this run")
        if not (isinstance(now, np.ndarray) and isinstance(then, np.ndarray)):
            continue
        shape, wanted = list(now.shape), list(then.shape)
        if now.ndim == then.ndim and (axis := state.growing.get(name)) is not None:
            lengths.add(shape[axis])
            wanted[axis] = shape[axis]
        if (now.dtype, shape) != (then.dtype, wanted) or len(lengths) > 1:
            raise ValueError(f"{name} has the shape {shape} of {now.dtype}, not one of this run")


def _check_personal(kept: Personal, state: State) -> None:
    """Refuse what no client of the run could have kept to itself."""
    parts = getattr(state, "parts", None)
    size = 0 if parts is None else int(parts.personal.sum())
    for name, own in kept.items():
        if name not in state.clients or own.dtype != np.float32 or not size or own.shape != (size,):
            raise ValueError(f"{PERSONAL} has what {name} of this run cannot have kept")


def _frozen(value: Any) -> Any:
    """JSON back to what a state holds: lists were tuples."""
    if isinstance(value, Mapping):
        return {key: _frozen(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return tuple(_frozen(inner) for inner in value)
    return value
