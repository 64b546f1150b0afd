"""Scores and clusters as terminal and tables tell them: errors for a regression, one word on clusters."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coterie.cli import run as command
from coterie.cli.run import cluster_figures, pooled_figures, private_figures, show
from coterie.errors import LedgerError
from coterie.experiment import comparison
from coterie.experiment.comparison import (
    CSV,
    POOLED,
    Row,
    _row,
    check_tables,
    table_columns,
    table_csv,
    table_markdown,
)
from coterie.experiment.result import Fairness, RunResult, Spread
from coterie.experiment.scores import PooledScore
from coterie.experiment.seal import Seal
from coterie.experiment.sweep import Sweep

CLIENTS = {"a": 0.9, "b": 0.7}
ERRORS = {
    "rmse": PooledScore(9.5, per_client={"a": 8.0, "b": 11.0}),
    "mae": PooledScore(7.0, per_client={"a": 6.0, "b": 8.0}),
    "r2": PooledScore(0.25),
}


def result(**changed: Any) -> RunResult:
    told: dict[str, Any] = {
        "folder": Path("run"),
        "algorithm": "r-dpcfl",
        "accuracy": Spread.of(CLIENTS),
        "loss": Spread.of(CLIENTS),
        "fairness": Fairness(0.2, 0.1, 0.1),
        "clusters": {"a": 0, "b": 1},
        "clusters_found": False,
        "guarantee": "a line",
        "guarantee_text": "a paragraph",
        "epsilon": 1.0,
        "delta": 1e-3,
        "noise_multiplier": 1.0,
        "rounds": 1,
        "seconds": 1.0,
        "sample_gradients_per_second": 1.0,
        "warnings": (),
        "scores": {"base_rate": PooledScore(0.55)},
    }
    return RunResult(**{**told, **changed})


REGRESSION = result(accuracy=None, bounded_score=Spread.of(CLIENTS), scores=ERRORS)


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    monkeypatch.setattr(command, "print_table", lambda headings, rows, **rest: found.extend(rows))
    monkeypatch.setattr(command, "say", lambda line: None)
    return found


def test_a_regression_is_told_by_its_errors_and_never_as_accuracy(printed: list[tuple[str, str]]) -> None:
    show(REGRESSION)
    told = dict(printed)
    assert (told["RMSE"], told["MAE"], told["R²"]) == ("9.5", "7", "0.250")
    assert told["RMSE of the worst client"] == "11"
    assert not [name for name in told if "accuracy" in name or "F_acc" in name or "disparity" in name]


def test_the_base_rate_stands_beside_the_accuracy(printed: list[tuple[str, str]]) -> None:
    show(result())
    names = [name for name, _ in printed]
    assert dict(printed)["base rate"] == "55.0%"
    assert names.index("mean accuracy") < names.index("base rate")
    row = _row({"algorithm.name": "r-dpcfl"}, [result()])
    headings, [cells] = table_columns([row], comparison.BRIEF)
    assert dict(zip(headings, cells, strict=True))["base rate"] == "55.0"
    assert "RMSE" not in headings


def test_private_scores_come_with_their_intervals() -> None:
    private = {"f1": PooledScore(0.5, "private", (0.25, 0.75)), "auc": PooledScore(None, "private")}
    told = pooled_figures(result(scores=private))
    assert told == [
        ("F1, private", "0.500"),
        ("  95 % interval of its noise", "0.250 to 0.750"),
        ("AUC, private", "–"),
    ]
    assert private_figures(replace(REGRESSION, scores={})) == []


def test_a_run_that_shows_no_clusters_says_so_once() -> None:
    [(name, text)] = cluster_figures(result(clusters_shown=False))
    assert (name, text) == ("clusters", "none shown; clients are served by 2 models, not as in truth")
    assert cluster_figures(result(clusters_shown=True)) == [("clusters", "2, not as in truth")]
    assert cluster_figures(result(clusters={})) == []


def test_rows_of_a_regression_have_errors_and_no_accuracy() -> None:
    row = _row({"algorithm.name": "local"}, [REGRESSION, REGRESSION])
    assert math.isnan(row.accuracy)
    figures = row.figures()
    assert (figures["worst_client"], figures["best_client"], figures["disparity"]) == (11.0, 8.0, 3.0)
    assert (figures["rmse"], figures["accuracy_std"], figures["f_acc"]) == (9.5, None, None)
    text = table_markdown([row], None)
    assert "| RMSE | MAE | R² |" in text
    assert "accuracy" not in text
    [line] = csv.DictReader(io.StringIO(table_csv([row])))
    assert (line["rmse"], line["accuracy"]) == ("9.5", "nan")


def test_a_table_made_before_there_were_scores_still_holds_and_a_changed_one_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[Row] = [_row({"algorithm.name": "local"}, [result()])]
    (tmp_path / "sweep.yaml").write_text(Sweep({}, {"algorithm.name": ["local"]}).to_yaml())
    Seal.create(tmp_path)
    monkeypatch.setattr(comparison, "_rows", lambda *arguments: rows)
    lines = list(csv.reader(io.StringIO(table_csv(rows))))
    old = "\n".join(",".join(f'"{cell}"' for cell in line[: -len(POOLED)]) for line in lines)
    for text in (table_csv(rows), old):
        (tmp_path / CSV).write_text(text)
        check_tables(tmp_path)
    for text in (table_csv(rows).replace("0.55", "0.65"), old.replace("0.8", "0.9")):
        (tmp_path / CSV).write_text(text)
        with pytest.raises(LedgerError, match="its rows are not those"):
            check_tables(tmp_path)
