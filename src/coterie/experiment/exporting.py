"""Models for other programs: files with preprocessing inside, and a description that needs no coterie."""

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from coterie import __version__
from coterie.data.preprocessing import ArrayInputs, TableInputs
from coterie.errors import InputError, one_line
from coterie.experiment.folder import new_folder
from coterie.experiment.usable import UsableModels
from coterie.files import Json, check_place, digest_file, write_json, write_text
from coterie.models.preprocessed import PreprocessedModel

FORMAT = 1
SIGNATURE = "signature.json"
CARD = "CARD.md"
_INPUT, _OUTPUT = "raw", "outputs"
_EXAMPLES = 3
"""Records in the example that a program is traced with; any number goes through it afterwards."""
_LAYERS: dict[type[nn.Module], tuple[str, ...]] = {
    nn.Linear: ("in_features", "out_features"),
    nn.Conv2d: ("in_channels", "out_channels", "kernel_size", "stride", "padding"),
    nn.MaxPool2d: ("kernel_size",),
    nn.ReLU: (),
    nn.Flatten: (),
}
"""Layers of which a network can be put together again by a few lines, and what each is made with."""


@dataclass(frozen=True)
class Exported:
    """What was written.

    Args:
        models: the files of the models.
    """

    folder: Path
    models: tuple[Path, ...]
    signature: Json


def export(
    run: UsableModels,
    out: Path,
    kind: str = "safetensors",
    client: str | None = None,
    cluster: int | None = None,
    *,
    card: Callable[[Json], str],
) -> Exported:
    """Write the models of a run, all clusters' or one, into a new folder, with a signature and a card.

    Args:
        card: writes the card for a signature.
    """
    write = WRITERS.get(kind)
    if write is None:
        raise InputError(f"--format: {kind!r}; allowed: {', '.join(WRITERS)}")
    check_place(out, "--out")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"--out: {out} exists and is not empty; name another folder")
    chosen = run.to_export(client, cluster)
    first, _ = next(iter(chosen.values()))
    with new_folder(out) as draft:
        files = []
        for name, (model, used_by) in chosen.items():
            path = draft / f"{name}.{kind}"
            _carefully(write, model, path, kind)
            files.append({"file": path.name, "sha256": digest_file(path), **used_by})
        described = signature(run, first, kind, files)
        write_json(draft / SIGNATURE, described)
        write_text(draft / CARD, card(described))
    return Exported(out, tuple(out / f"{name}.{kind}" for name in chosen), described)


# --- files -------------------------------------------------------------------------------------------


def example(model: PreprocessedModel) -> torch.Tensor:
    """Raw records that are nobody's."""
    shape = (_EXAMPLES, *model.preprocessing.inputs.raw_shape)
    return torch.zeros(shape, dtype=model.raw_type)


def _save_tensors(model: PreprocessedModel, path: Path) -> None:
    tensors = {name: value.contiguous().clone() for name, value in model.network.state_dict().items()}
    save_file(tensors, path)


def _save_program(model: PreprocessedModel, path: Path) -> None:
    torch.export.save(torch.export.export(model, (example(model),), dynamic_shapes=_any_number()), path)


def _any_number() -> tuple[dict[int, Any]]:
    """Any number of records may go through a program."""
    return ({0: torch.export.Dim("records")},)


def _save_onnx(model: PreprocessedModel, path: Path) -> None:
    try:
        import onnxscript  # noqa: F401
    except ImportError:
        raise InputError("--format: onnx needs onnxscript; pip install 'coterie[onnx]'") from None
    torch.onnx.export(
        model,
        (example(model),),
        path,
        dynamo=True,
        external_data=False,
        verbose=False,
        input_names=[_INPUT],
        output_names=[_OUTPUT],
        dynamic_shapes=_any_number(),
    )


WRITERS: dict[str, Callable[[PreprocessedModel, Path], None]] = {
    "safetensors": _save_tensors,
    "pt2": _save_program,
    "onnx": _save_onnx,
}
"""How each format is written."""


def _carefully(
    write: Callable[[PreprocessedModel, Path], None], model: PreprocessedModel, path: Path, kind: str
) -> None:
    """Nothing that a library prints reaches stdout, and what it cannot trace is one line."""
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(), _quiet("torch.onnx"):
            warnings.simplefilter("ignore")
            write(model, path)
    except (OSError, InputError):
        raise
    except Exception as mistake:  # a user's own network may do what no tracer follows
        raise InputError(f"--format: {kind} cannot hold this network: {one_line(mistake)}") from mistake


@contextlib.contextmanager
def _quiet(library: str) -> Iterator[None]:
    """What a library tells of what is not installed concerns nobody here."""
    logger = logging.getLogger(library)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


# --- the signature -------------------------------------------------------------------------------------


def signature(run: UsableModels, model: PreprocessedModel, kind: str, files: list[dict[str, Any]]) -> Json:
    """All that a program needs to know to use the files, and what is promised of them."""
    trained, network = run.trained, run.trained.model
    return {
        "signature": FORMAT,
        "format": kind,
        "inputs": _inputs(model),
        "outputs": _outputs(model),
        "network": {
            "name": network.name,
            "options": network.given(),
            **({} if model.public is None else {"features": model.public.identity}),
            "parameters": int(run.rows.shape[1]),
            "layers": layers(model.network),
        },
        "models": files,
        "run": {
            "name": run.path.resolve().name,
            "algorithm": trained.algorithm,
            "rounds": trained.rounds,
            "checkpoint": dict(run.digests()),
        },
        "guarantee": {
            "line": trained.promise.line,
            "epsilon": trained.promise.epsilon,
            "delta": trained.promise.delta,
        },
        "versions": {"coterie": __version__, "torch": torch.__version__},
    }


def _inputs(model: PreprocessedModel) -> Json:
    inputs = model.preprocessing.inputs
    common = {
        "name": _INPUT,
        "kind": inputs.kind,
        "type": str(model.raw_type).removeprefix("torch."),
        "shape": ["records", *inputs.raw_shape],
    }
    if isinstance(inputs, TableInputs):
        columns = [column.model_dump(mode="json", exclude_none=True) for column in inputs.columns]
        return {**common, "columns": columns, "features": list(_features(inputs))}
    if isinstance(inputs, ArrayInputs):
        return {**common, "steps": [step.model_dump(mode="json") for step in inputs.steps]}
    return {**common, "vocabulary": inputs.vocabulary, "alphabet": inputs.alphabet}


def _features(inputs: TableInputs) -> Iterator[dict[str, Any]]:
    """What each feature of the network is made of: a column of the raw rows, and how."""
    for place, column in enumerate(inputs.columns):
        none = {"missing_values": list(column.missing_values)} if column.missing_values else {}
        if column.limits is not None:
            yield {"column": place, "range": list(column.limits), **none}
        for position in range(len(column.categories or ())):
            yield {"column": place, "equals": position}
        if column.missing == "indicator":
            yield {"column": place, "is_missing": True, **(none if column.limits is not None else {})}


def _outputs(model: PreprocessedModel) -> Json:
    label, described = model.preprocessing.label, {"name": _OUTPUT, "label": model.preprocessing.label.column}
    if model.task.kind == "classification":
        return {
            **described,
            "kind": "logits",
            "shape": ["records", model.task.classes],
            "classes": label.names,
        }
    return {
        **described,
        "kind": "value",
        "shape": ["records"],
        "range": None if label.range is None else list(label.range),
        "units": "those of the label; the network itself says its place in the range, from 0 to 1",
    }


def layers(network: nn.Module) -> list[dict[str, Any]] | None:
    """The layers of a network one after the other, by torch's names; None where it is not put together so."""
    if type(network) is not nn.Sequential:
        return None
    found = []
    for name, layer in network.named_children():
        if type(layer) not in _LAYERS:
            return None
        made_with = {option: getattr(layer, option) for option in _LAYERS[type(layer)]}
        found.append({"name": name, "layer": type(layer).__name__, "options": made_with})
    return found
