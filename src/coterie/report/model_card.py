"""The card that travels with exported models: what they are, what is promised of them, how they are used."""

from typing import Any

from markupsafe import Markup

from coterie.experiment.shown import release_table
from coterie.experiment.usable import UsableModels
from coterie.files import Json, yaml_text
from coterie.privacy import Guarantee
from coterie.table import Table, plain

_PERSONAL = (
    "**This model holds a part that its client learnt without noise and keeps for itself. The guarantee does "
    "not cover it; it must not be given away.**"
)
_HUB_TASKS = ("tabular-classification", "tabular-regression", "text-classification", "image-classification")
"""Kinds of tasks that Hugging Face knows by name."""
_USE = {
    "safetensors": "Parameters by name, in safetensors; `signature.json` says how raw values become features "
    "and, under `layers`, how the network is put together.",
    "pt2": "Programs of `torch.export`, preprocessing included: "
    '`torch.export.load("cluster-0.pt2").module()(raw)`.',
    "onnx": "ONNX models, preprocessing included: "
    '`onnxruntime.InferenceSession("cluster-0.onnx").run(None, {"raw": raw})`.',
}


def model_card(run: UsableModels, signature: Json, *, personal: bool = False) -> str:
    """The card of exported models as Markdown.

    Args:
        personal: whether a model holds what a client keeps for itself.
    """
    promise = run.trained.promise
    files = [
        {
            "File": str(model["file"]),
            "Model of": f"client {model['client']}" if "client" in model else f"cluster {model['cluster']}",
            "Used by": ", ".join(model.get("clients", ())) or "–",
            "SHA-256": f"{model['sha256'][:16]}…",
        }
        for model in signature["models"]
    ]
    parts = [
        hub_header(signature),
        f"# Models of {plain(signature['run']['name'])}",
        f"{plain(promise.line)}",
        *([_PERSONAL] if personal else []),
        "## What is promised",
        plain(promise.text),
        releases_table(promise),
        "## What it takes and gives",
        _takes(signature["inputs"]),
        _gives(signature["outputs"]),
        "## Files",
        Table.of(files).markdown(),
        _USE[signature["format"]].replace("cluster-0", str(files[0]["File"]).rpartition(".")[0]),
        "Made by coterie {coterie} with torch {torch}.".format(**signature["versions"]),
    ]
    return "\n\n".join(parts) + "\n"


def hub_header(signature: Json) -> str:
    """The front matter of a model card, as Hugging Face reads it."""
    task = {"logits": "classification", "value": "regression"}[signature["outputs"]["kind"]]
    inputs = {"table": "tabular", "tokens": "text"}.get(signature["inputs"]["kind"], "image")
    tags = ("differential-privacy", "federated-learning", "coterie")
    tag = f"{inputs}-{task}"
    known = {
        "library_name": "coterie",
        **({"pipeline_tag": tag} if tag in _HUB_TASKS else {}),
        "tags": [*tags, tag],
    }
    return f"---\n{yaml_text(known, default_flow_style=False)}---\n"


def releases_table(promise: Guarantee) -> str:
    """The table of releases that reports show, as text."""
    told = release_table(promise)
    rows = [[cell.striptags() if isinstance(cell, Markup) else cell for cell in row] for row in told.rows]
    return Table(told.headings, [*rows, *([told.total] if told.total else [])]).markdown()


def _takes(inputs: dict[str, Any]) -> str:
    shape = " x ".join(map(str, inputs["shape"]))
    if inputs["kind"] == "table":
        rows = [
            {
                "Place": str(place),
                "Column": column["column"],
                "Raw value": _raw_value(column),
                "Missing": "NaN" if column["missing"] == "indicator" else "not allowed",
            }
            for place, column in enumerate(inputs["columns"])
        ]
        return f"Rows of numbers, {inputs['type']}, {shape}:\n\n{Table.of(rows).markdown()}"
    if inputs["kind"] == "tokens":
        return f"Windows of tokens, {inputs['type']}, {shape}, 0 to {inputs['vocabulary'] - 1}."
    steps = ", then ".join(f"{step['do']} {step['by']}" for step in inputs["steps"]) or "nothing"
    return f"Raw arrays, {inputs['type']}, {shape}; done to them inside: {steps}."


def _raw_value(column: dict[str, Any]) -> str:
    if "range" in column:
        return "a number from {:g} to {:g}; others are clipped".format(*column["range"])
    if "dates" in column:
        return "days since 0001-01-01, which is 1, of {} to {}; others are clipped".format(*column["dates"])
    named = ", ".join(f"{place} = {name}" for place, name in enumerate(column["categories"]))
    return f"a place among the categories: {named}"


def _gives(outputs: dict[str, Any]) -> str:
    if outputs["kind"] == "logits":
        names = ", ".join(map(str, outputs["classes"][:100]))
        return f"One logit for each class, softmax of which are probabilities: {plain(names)}."
    named = f" ({outputs['label']})" if outputs["label"] else ""
    return f"One value for each record, in the units of the label{plain(named)}."
