"""Curves that are kept: accuracy and loss of a reproduction's rows after the rounds that were scored.

A file is called `NAME-rounds.csv` and stands beside the tables of `stored.py`. It is of the paper's scale; a
row that is stored again replaces its curve.
"""

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from coterie.errors import InputError
from coterie.files import regular, write_text
from coterie.report.grid import mean_curve
from coterie.reproduce.declared import EPSILON, names
from coterie.reproduce.stored import RESULTS
from coterie.reproduce.table import Reproduction
from coterie.table import csv_text

SCORES = ("accuracy", "loss")
Points = Mapping[str, Sequence[tuple[float, float]]]


@dataclass(frozen=True)
class StoredCurve:
    """One row under one setting: the mean over seeds of each score, by round."""

    row: str
    setting: Mapping[str, str]
    seeds: str
    points: Points

    @property
    def key(self) -> tuple[str, ...]:
        return (self.row, *self.setting.values())

    @property
    def epsilon(self) -> float | None:
        return float(self.setting[EPSILON]) if EPSILON in self.setting else None


def curves_of(result: Reproduction) -> Iterator[StoredCurve]:
    """The curve of every row of a folder that was scored more than once."""
    for line in result.lines:
        records = [run.record for run in line.runs]
        points = {score: mean_curve(records, score) for score in SCORES}
        if len(points[SCORES[0]]) > 1:
            seeds = " ".join(str(record.experiment.seeds.simulation) for record in records)
            setting = {key: str(value) for key, value in line.setting.items()}
            yield StoredCurve(line.row, setting, seeds, points)


def store_curves(result: Reproduction, folder: Path) -> Path | None:
    """Keep the curves of a folder with those that are there; returns the file, if there are any."""
    path = _path(folder, result.experiment.name)
    known = {curve.key: curve for curve in (_read(path) if path.exists() else ())}
    known.update({curve.key: curve for curve in curves_of(result)})
    if not known:
        return None
    settings = list(dict.fromkeys(key for curve in known.values() for key in curve.setting))
    lines: list[Sequence[object]] = [["algorithm", *settings, "seeds", "round", *SCORES]]
    for curve in known.values():
        own = curve.row, *(curve.setting.get(key) for key in settings), curve.seeds
        scores = [dict(curve.points[score]) for score in SCORES]
        lines += [[*own, int(at), *(each.get(at) for each in scores)] for at in scores[0]]
    write_text(path, csv_text(lines))
    return path


def read_curves(folder: Path = RESULTS) -> dict[str, tuple[StoredCurve, ...]]:
    """The stored curves of every reproduction that has some."""
    return {name: _read(path) for name in names() if (path := _path(folder, name)).exists()}


def _path(folder: Path, name: str) -> Path:
    return folder / f"{name}-rounds.csv"


def _read(path: Path) -> tuple[StoredCurve, ...]:
    grouped: dict[tuple[str, ...], list[dict[str, str]]] = {}
    try:
        for line in csv.DictReader(io.StringIO(regular(path).read_text(encoding="utf-8"))):
            setting = [value for key, value in line.items() if "." in key]
            grouped.setdefault((line["algorithm"], *setting), []).append(line)
        return tuple(_curve(group) for group in grouped.values())
    except (OSError, UnicodeDecodeError, KeyError, ValueError, csv.Error) as mistake:
        raise InputError(f"{path}: not a table of curves ({mistake!r})") from None


def _curve(lines: Sequence[Mapping[str, str]]) -> StoredCurve:
    first = lines[0]
    points = {
        score: [(float(line["round"]), float(line[score])) for line in lines if line[score]]
        for score in SCORES
    }
    setting = {key: value for key, value in first.items() if "." in key}
    return StoredCurve(first["algorithm"], setting, first["seeds"], points)
