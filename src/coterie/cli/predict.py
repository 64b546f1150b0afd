"""`coterie predict`: what the models of a finished run say of new records."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coterie.cli.console import complain, print_result, print_table, say
from coterie.cli.options import Client, Cluster, Json, Run
from coterie.errors import InputError
from coterie.files import check_place, write_text

if TYPE_CHECKING:
    from coterie.experiment.predicting import Prediction


def predict(
    run: Run,
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            help="Records: a .csv, .parquet or .npz file as the run was trained on, or a folder of them.",
        ),
    ] = None,
    client: Client = None,
    cluster: Cluster = None,
    held_out: Annotated[
        bool,
        typer.Option("--held-out", help="Instead of --data: the records that the run's clients held out."),
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write a .csv file, one line for each record.")
    ] = None,
    json: Json = False,
) -> None:
    if (data is None) != held_out:
        raise InputError("--data: a file or a folder of records is needed; or --held-out instead of it")
    if held_out and cluster is not None:
        raise InputError("--cluster: held-out records are judged by what each client uses; allowed: --client")
    if out is not None:
        check_place(out, "--out", file=True)
    from coterie.experiment.predicting import predict_files, predict_held_out
    from coterie.experiment.site_models import open_models
    from coterie.experiment.trained import TrainedRun

    if data is None:
        found = predict_held_out(TrainedRun.open(run), client)
    else:
        found = predict_files(open_models(run), data, client, cluster)
    if out is not None:
        write_text(out, found.to_csv())
    print_result(found.to_json(), json, lambda: show(found, out))


def show(found: Prediction, out: Path | None) -> None:
    """The result as a person wants to read it."""
    from coterie.experiment.predicting import OUTSIDE

    names = list(found.metrics or ())
    rows = []
    for part in found.parts:
        figures = [f"{part.metrics[name]:.4f}" if part.metrics else "" for name in names]
        rows.append([part.name, f"{len(part.answers):,}", str(part.answers.cluster), *figures])
    print_table(["records of", "records", "cluster", *names], rows)
    for part in found.parts[:1]:
        first = [str(label) for label in part.answers.labels[:10].tolist()]
        say(f"predictions: {', '.join(first)}{', ...' if found.records > 10 else ''}")
    if found.metrics:
        complain(OUTSIDE, style="yellow")
    if out is not None:
        say(f"written: {out}")
