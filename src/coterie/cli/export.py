"""`coterie export`: the models of a finished run, for programs that know nothing of coterie."""

from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.console import print_result, say
from coterie.cli.options import Client, Cluster, Json, Run
from coterie.errors import InputError

FORMATS = ("safetensors", "pt2", "onnx")


def export(
    run: Run,
    out: Annotated[Path, typer.Option("--out", help="Folder to write, new or empty.")],
    kind: Annotated[
        str,
        typer.Option(
            "--format",
            help="safetensors (parameters) | pt2 (torch.export) | onnx (needs the extra coterie[onnx]).",
        ),
    ] = "safetensors",
    client: Client = None,
    cluster: Cluster = None,
    json: Json = False,
) -> None:
    if kind not in FORMATS:
        raise InputError(f"--format: {kind!r}; allowed: {', '.join(FORMATS)}")
    from coterie.experiment import exporting
    from coterie.experiment.site_models import open_models
    from coterie.report.model_card import model_card

    trained = open_models(run)
    personal = trained.personal_parts is not None
    done = exporting.export(
        *(trained, out, kind, client, cluster),
        card=lambda signature: model_card(trained, signature, personal=personal),
    )
    told = {
        "folder": str(done.folder),
        "models": [str(path) for path in done.models],
        "signature": str(done.folder / exporting.SIGNATURE),
        "card": str(done.folder / exporting.CARD),
        "guarantee": done.signature["guarantee"]["line"],
    }

    def show() -> None:
        for name, value in told.items():
            say(f"{name}: {', '.join(value) if isinstance(value, list) else value}")

    print_result(told, json, show)
