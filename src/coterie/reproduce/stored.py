"""Results that are kept: the tables of finished reproductions as CSV files, one number a line.

A file is called `NAME-KIND.csv`, where NAME is the reproduction and KIND its scale, or `features` for the
paper's scale on public features. It has the lines of a folder's `table.csv` less the printed numbers, which
stand in `published/` alone.
"""

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from coterie.errors import InputError
from coterie.files import regular, write_text
from coterie.reproduce.declared import EPSILON, names
from coterie.table import csv_text

KINDS = ("paper", "quick", "features")
RESULTS = Path(__file__).parent / "results"
"""Those that come with the package."""
OWN = ("algorithm", "best", "figure", "runs", "seeds", "rounds", "base_rate", "ours", "ours_std")
LAST = ("clusters_found", "minority_found", "executed", "planned", "noise_multiplier")


@dataclass(frozen=True)
class StoredNumber:
    """One of our numbers: the mean over seeds, and how it came about.

    Args:
        spread: standard deviation over seeds, where there are several.
        base_rate: what needs no learning, where the number is a score.
    """

    ours: float
    spread: float | None
    seeds: tuple[int, ...]
    rounds: int
    base_rate: float | None

    def joined(self, other: "StoredNumber") -> "StoredNumber":
        """Both together, where they are of other seeds; the other alone where it has all seeds of this."""
        if set(self.seeds) <= set(other.seeds):
            return other
        if set(self.seeds) & set(other.seeds) or self.rounds != other.rounds:
            raise InputError(
                f"seeds {_words(self.seeds)} of {self.rounds} rounds are stored; seeds {_words(other.seeds)} "
                f"of {other.rounds} cannot be added; allowed: other seeds of as many rounds, or all of them"
            )
        one, two = len(self.seeds), len(other.seeds)
        mean = (one * self.ours + two * other.ours) / (one + two)
        squares = sum(
            (len(each.seeds) - 1) * (each.spread or 0.0) ** 2 + len(each.seeds) * (each.ours - mean) ** 2
            for each in (self, other)
        )
        spread = math.sqrt(squares / (one + two - 1))
        rates = [each.base_rate for each in (self, other) for _ in each.seeds if each.base_rate is not None]
        rate = float(np.mean(rates)) if rates else None
        seeds = tuple(sorted((*self.seeds, *other.seeds)))
        return StoredNumber(mean, spread, seeds, self.rounds, rate)


@dataclass(frozen=True)
class StoredRow:
    """One algorithm under one setting.

    Args:
        best: the setting that was best for this row, where several were tried.
        executed, planned: releases, from the ledgers of all runs; None where that was not kept.
    """

    row: str
    best: str
    setting: Mapping[str, str]
    numbers: Mapping[str, StoredNumber]
    clusters_found: str
    minority_found: str
    executed: int | None
    planned: int | None
    noise: str

    @property
    def key(self) -> tuple[str, ...]:
        return (self.row, *self.setting.values())

    @property
    def epsilon(self) -> float | None:
        return float(self.setting[EPSILON]) if EPSILON in self.setting else None

    @property
    def seeds(self) -> tuple[int, ...]:
        return max((number.seeds for number in self.numbers.values()), key=len)

    @property
    def rounds(self) -> int:
        return min(number.rounds for number in self.numbers.values())

    def joined(self, other: "StoredRow") -> "StoredRow":
        numbers = dict(self.numbers)
        for figure, number in other.numbers.items():
            known = numbers.get(figure)
            try:
                numbers[figure] = number if known is None else known.joined(number)
            except InputError as mistake:
                raise InputError(f"{', '.join(self.key)}, {figure}: {mistake}") from None
        if set(self.seeds) <= set(other.seeds):
            return replace(other, numbers=numbers)
        return replace(
            self,
            numbers=numbers,
            clusters_found=_added(self.clusters_found, other.clusters_found),
            minority_found=_added(self.minority_found, other.minority_found),
            executed=_sum(self.executed, other.executed),
            planned=_sum(self.planned, other.planned),
        )


@dataclass(frozen=True)
class StoredTable:
    """All that is kept of a reproduction at one size."""

    name: str
    kind: str
    rows: tuple[StoredRow, ...]

    @classmethod
    def read(cls, path: Path, name: str, kind: str) -> "StoredTable":
        """A stored file, or the `table.csv` of a reproduction's folder."""
        try:
            lines = list(csv.DictReader(io.StringIO(regular(path).read_text(encoding="utf-8"))))
            return cls(name, kind, tuple(_rows(lines)))
        except (OSError, UnicodeDecodeError, KeyError, ValueError, csv.Error) as mistake:
            raise InputError(f"{path}: not a table of results ({mistake!r})") from None

    def find(self, row: str, epsilon: float) -> StoredRow | None:
        """The row of that name and budget."""
        return next((each for each in self.rows if each.row == row and each.epsilon == epsilon), None)

    def joined(self, other: "StoredTable") -> "StoredTable":
        """With the rows of another, pooled over seeds where both have a row."""
        rows = {row.key: row for row in self.rows}
        for row in other.rows:
            rows[row.key] = rows[row.key].joined(row) if row.key in rows else row
        return replace(self, rows=tuple(rows.values()))

    def write(self, folder: Path) -> Path:
        """Keep it; returns the file."""
        path = folder / f"{self.name}-{self.kind}.csv"
        settings = list(dict.fromkeys(key for row in self.rows for key in row.setting))
        lines: list[Sequence[object]] = [[*OWN[:2], *settings, *OWN[2:], *LAST]]
        for row in self.rows:
            found = row.clusters_found, row.minority_found, row.executed, row.planned, row.noise
            for figure, number in row.numbers.items():
                own = row.row, row.best, *(row.setting.get(key) for key in settings)
                told = len(number.seeds), _words(number.seeds), number.rounds, number.base_rate
                lines.append([*own, figure, *told, number.ours, number.spread, *found])
        write_text(path, csv_text(lines))
        return path


def read_results(folder: Path = RESULTS) -> dict[tuple[str, str], StoredTable]:
    """Every stored table by its name and kind."""
    found = {}
    for name in names():
        for kind in KINDS:
            path = folder / f"{name}-{kind}.csv"
            if path.exists():
                found[name, kind] = StoredTable.read(path, name, kind)
    return found


def store(table: StoredTable, folder: Path) -> Path:
    """Add a table to what is kept of the same reproduction; returns the file."""
    path = folder / f"{table.name}-{table.kind}.csv"
    known = StoredTable.read(path, table.name, table.kind) if path.exists() else None
    return (known.joined(table) if known else table).write(folder)


def _rows(lines: Sequence[Mapping[str, str]]) -> Iterator[StoredRow]:
    grouped: dict[tuple[str, ...], list[Mapping[str, str]]] = {}
    for line in lines:
        setting = {key: value for key, value in line.items() if "." in key}
        grouped.setdefault((line["algorithm"], *setting.values()), []).append(line)
    for group in grouped.values():
        numbers = {line["figure"]: _number(line) for line in group if line["ours"]}
        if numbers:
            first = group[0]
            yield StoredRow(
                first["algorithm"],
                first["best"],
                {key: value for key, value in first.items() if "." in key},
                numbers,
                first["clusters_found"],
                first["minority_found"],
                int(first["executed"]) if first["executed"] else None,
                int(first["planned"]) if first["planned"] else None,
                first["noise_multiplier"],
            )


def _number(line: Mapping[str, str]) -> StoredNumber:
    seeds = tuple(map(int, line["seeds"].split()))
    if len(seeds) != int(line["runs"]):
        raise ValueError(f"{line['runs']} runs of seeds {line['seeds']}")
    return StoredNumber(
        float(line["ours"]),
        float(line["ours_std"]) if line["ours_std"] else None,
        seeds,
        int(line["rounds"]),
        float(line["base_rate"]) if line["base_rate"] else None,
    )


def _words(seeds: Sequence[int]) -> str:
    return " ".join(map(str, seeds))


def _sum(one: int | None, two: int | None) -> int | None:
    return None if one is None or two is None else one + two


def _added(one: str, two: str) -> str:
    """`1 of 1` and `1 of 2` as `2 of 3`."""
    if " of " not in one or " of " not in two:
        return one
    pairs = [each.split(" of ") for each in (one, two)]
    return " of ".join(str(sum(int(pair[place]) for pair in pairs)) for place in (0, 1))
