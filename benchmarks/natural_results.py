"""What `natural.py` runs, a row for each run, and the tables and sentences that the rows come to."""

import csv
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import combinations, product
from pathlib import Path
from typing import Any

from coterie.experiment.verdict import AHEAD, BEHIND, Contest, Reading, holm, paired
from coterie.table import Table

SEEDS, TRIED = (0, 1, 2), (10, 11)
ALGORITHMS = ("local", "mr-mtl", "global", "r-dpcfl", "oracle")
RECIPE = "recipe"
NEAR = 0.01
"""How far behind the best of nine the recipe may be: a point of accuracy, or of R^2."""


@dataclass(frozen=True)
class Natural:
    """A federation as the benchmark runs it.

    Args:
        clients: how many are drawn; None for all that have enough records.
        per_client: records of each at most, before a fifth is held out.
        known: whether clusters are known, so that `oracle` can be told.
    """

    clients: int | None = None
    per_client: int | None = None
    minimum: int = 10
    regression: bool = False
    known: bool = False

    def sections(self, name: str) -> dict[str, Any]:
        data = {"name": name} | ({"per_client": self.per_client} if self.per_client else {})
        clients = self.clients or "enough"
        return {
            "data": data,
            "federation": {"kind": "natural", "clients": clients, "minimum_records": self.minimum},
            "model": {"name": "linear" if self.regression else "softmax"},
        }


FEDERATIONS = {
    "heart-disease": Natural(),
    "flights": Natural(per_client=300, minimum=200),
    "insteval": Natural(per_client=300),
    "vietnam": Natural(clients=30, minimum=64),
    "school": Natural(clients=30, minimum=64, regression=True),
    "chem97": Natural(clients=24, per_client=200, minimum=100, regression=True),
    "star": Natural(clients=24, per_client=160, minimum=100, regression=True, known=True),
    "census2000": Natural(clients=20, per_client=200, minimum=100, regression=True),
    "hsb82": Natural(clients=40, minimum=32, regression=True, known=True),
}


@dataclass(frozen=True)
class Cell:
    federation: str
    epsilon: float
    algorithm: str

    @property
    def name(self) -> str:
        return f"{self.federation} eps {self.epsilon:g} {self.algorithm}"


@dataclass(frozen=True)
class Row:
    """One run."""

    federation: str
    epsilon: float
    algorithm: str
    setting: str
    seed: int
    score: float
    worst_client: float
    clusters: int
    clusters_found: str
    noise: float
    batch: int
    lr: float
    clip: float
    rounds: int
    clients: int
    records: int
    seconds: float

    @property
    def cell(self) -> Cell:
        return Cell(self.federation, self.epsilon, self.algorithm)

    @classmethod
    def read(cls, line: Mapping[str, str]) -> "Row":
        kinds = {own.name: own.type for own in fields(cls)}
        return cls(**{name: kinds[name](value) for name, value in line.items()})  # type: ignore[operator, arg-type]


def append(file: Path, row: Row) -> None:
    """One line, whole: whoever is killed in between leaves a line without an end, which is not read."""
    new = not file.exists()
    with file.open("a", newline="", encoding="utf-8") as stream:
        lines = csv.DictWriter(stream, [own.name for own in fields(Row)], lineterminator="\n")
        if new:
            lines.writeheader()
        lines.writerow(asdict(row))


def read_rows(files: Iterable[Path]) -> list[Row]:
    rows = []
    for file in files:
        if file.exists():
            lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
            whole = [line for line in lines if line.endswith("\n")]
            if len(whole) < len(lines):
                file.write_text("".join(whole), encoding="utf-8")
            rows += [Row.read(line) for line in csv.DictReader(whole)]
    return rows


def best_of(rows: Sequence[Row]) -> str:
    """The setting of the highest mean on the seeds on which settings are tried."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if row.setting != RECIPE and row.seed in TRIED:
            found.setdefault(row.setting, []).append(row.score)
    return max(found, key=lambda setting: statistics.mean(found[setting]), default="")


QUESTIONS = {
    "federating pays (global, mr-mtl or r-dpcfl is ahead of local)": [
        {("global", "local")},
        {("mr-mtl", "local")},
        {("r-dpcfl", "local")},
    ],
    "clustering pays (r-dpcfl is ahead of local and of global)": [
        {("r-dpcfl", "local"), ("r-dpcfl", "global")}
    ],
    "clustering costs (global is ahead of r-dpcfl)": [{("global", "r-dpcfl")}],
    "local is best (ahead of global and of r-dpcfl)": [{("local", "global"), ("local", "r-dpcfl")}],
}
"""Answered with yes where, of any of these sets, the first of every pair is ahead of the second."""
HIGHEST = {
    "highest mean, tested or not, of r-dpcfl or oracle": ("r-dpcfl", "oracle"),
    "of local or mr-mtl": ("local", "mr-mtl"),
    "of global": ("global",),
}


def _ahead(contest: Contest) -> set[tuple[str, str]]:
    """Pairs of which the first is ahead of the second."""
    found = {(pair.one, pair.other) for pair in contest.pairs if pair.status == AHEAD}
    return found | {(pair.other, pair.one) for pair in contest.pairs if pair.status == BEHIND}


def _listed(places: Sequence[str]) -> str:
    return f" ({', '.join(places)})" if places else ""


class Results:
    """Rows by cell, and the tables and sentences that they come to."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.cells: dict[Cell, list[Row]] = {}
        for row in rows:
            self.cells.setdefault(row.cell, []).append(row)
        self.federations = [
            name for name in FEDERATIONS if any(cell.federation == name for cell in self.cells)
        ]
        every = product(self.federations, sorted({cell.epsilon for cell in self.cells}))
        self.places = [own for own in every if len(self._finished(*own)) > 1]

    def _finished(self, federation: str, epsilon: float) -> list[str]:
        """Algorithms that ran with the recipe."""
        return [own for own in ALGORITHMS if self.scores(Cell(federation, epsilon, own), RECIPE)]

    def scores(self, cell: Cell, setting: str) -> dict[int, float]:
        """By seed, of those on which settings are compared."""
        rows = self.cells.get(cell, [])
        return {row.seed: row.score for row in rows if row.setting == setting and row.seed in SEEDS}

    def contest(self, federation: str, epsilon: float) -> Contest:
        """The algorithms of one federation and epsilon, seed by seed."""
        scale = 1.0 if FEDERATIONS[federation].regression else 100.0
        read = {}
        for algorithm in self._finished(federation, epsilon):
            found = self.scores(Cell(federation, epsilon, algorithm), RECIPE)
            read[algorithm] = {seed: Reading(scale * score) for seed, score in found.items()}
        means = {name: statistics.mean(own.value for own in found.values()) for name, found in read.items()}
        pairs = [
            paired(
                one, other, [(read[one][seed], read[other][seed]) for seed in {*read[one]} & {*read[other]}]
            )
            for one, other in combinations(read, 2)
            if {*read[one]} & {*read[other]}
        ]
        measure = "of R²" if scale == 1.0 else "points"
        best = max(means, key=lambda name: means[name])
        return Contest(f"{federation}, epsilon {epsilon:g}", measure, best, means, tuple(holm(pairs)))

    def sizes(self) -> Table:
        body = []
        for name in self.federations:
            rows = [row for cell, found in self.cells.items() if cell.federation == name for row in found]
            kind = "regression, R²" if FEDERATIONS[name].regression else "classes, accuracy"
            counts = sorted({row.clients for row in rows}), [row.records for row in rows]
            body.append([name, kind, " to ".join(map(str, counts[0])), f"{statistics.mean(counts[1]):,.0f}"])
        return Table(["federation", "task", "clients", "training records"], body)

    def table(self) -> Table:
        """Scores of every algorithm with the recipe; the highest of those that know no clusters is bold."""
        body = []
        for name, epsilon in self.places:
            contest, rows = self.contest(name, epsilon), self.cells.get(Cell(name, epsilon, "r-dpcfl"), [])
            regular = {own: mean for own, mean in contest.means.items() if own != "oracle"}
            highest = max(regular, key=lambda own: regular[own])
            line = [name, f"{epsilon:g}"]
            for algorithm in ALGORITHMS:
                found = list(self.scores(Cell(name, epsilon, algorithm), RECIPE).values())
                line.append(_shown(name, found, bold=algorithm == highest))
            found_clusters = sorted(row.clusters for row in rows if row.setting == RECIPE)
            body.append([*line, ", ".join(map(str, found_clusters))])
        return Table(["federation", "epsilon", *ALGORITHMS, "models of r-dpcfl"], body)

    def verdicts(self) -> list[str]:
        """The questions, each with where the answer is yes by a corrected test; then all that can be told."""
        contests = {f"{name} at {own:g}": self.contest(name, own) for name, own in self.places}
        told = []
        for question, pairs in QUESTIONS.items():
            places = [
                place for place, contest in contests.items() if any(map(_ahead(contest).issuperset, pairs))
            ]
            told.append(f"- {question}: {len(places)} of {len(contests)}{_listed(places)}")
        for question, algorithms in HIGHEST.items():
            places = [place for place, contest in contests.items() if contest.best in algorithms]
            told.append(f"- {question}: {len(places)} of {len(contests)}{_listed(places)}")
        return [*told, "", *(f"- {line}" for contest in contests.values() for line in contest.lines)]

    def recipe(self) -> tuple[Table, list[str]]:
        """The recipe beside the best of nine, and the cells in which it is not near it."""
        algorithms = [own for own in ALGORITHMS if own != "oracle"]
        body, gaps = [], {}
        for name, epsilon in self.places:
            line = [name, f"{epsilon:g}"]
            for algorithm in algorithms:
                cell = Cell(name, epsilon, algorithm)
                best = best_of(self.cells[cell]) if cell in self.cells else ""
                ours, theirs = self.scores(cell, RECIPE), self.scores(cell, best)
                shared = [seed for seed in ours if seed in theirs]
                if len(shared) < max(1, len(ours)):  # not finished
                    line.append("")
                    continue
                gaps[cell] = statistics.mean(theirs[seed] - ours[seed] for seed in shared)
                mean = statistics.mean(ours.values()), statistics.mean(theirs.values())
                missed = gaps[cell] > NEAR
                text = f"{_number(name, mean[0])} / {_number(name, mean[1])}"
                line.append(f"**{text}**" if missed else text)
            body.append(line)
        far = {cell: gap for cell, gap in gaps.items() if gap > NEAR}
        near = len(gaps) - len(far)
        told = [
            f"Within {NEAR} of the best of nine, or ahead of it: {near} of {len(gaps)} cells "
            f"({near / max(1, len(gaps)):.0%}); ahead in {sum(gap < 0 for gap in gaps.values())}; on average "
            f"{statistics.mean(gaps.values() or [0.0]):+.4f} behind.",
            "",
            *(
                f"- not within: {cell.name}, by {gap:.3f}"
                for cell, gap in sorted(far.items(), key=lambda own: -own[1])
            ),
        ]
        return Table(["federation", "epsilon", *algorithms], body), told


def _number(name: str, value: float) -> str:
    return f"{value:.3f}" if FEDERATIONS[name].regression else f"{100 * value:.1f}"


def _shown(name: str, found: Sequence[float], *, bold: bool) -> str:
    if not found:
        return ""
    mean = _number(name, statistics.mean(found))
    spread = f" ± {_number(name, statistics.stdev(found))}" if len(found) > 1 else ""
    return f"**{mean}**{spread}" if bold else f"{mean}{spread}"


def render(rows: Sequence[Row]) -> Iterator[str]:
    results = Results(rows)
    yield from (results.sizes().markdown(), "")
    yield "With the recipe; mean and deviation over seeds, the highest without known clusters in bold:"
    yield from ("", results.table().markdown(), "", *results.verdicts(), "")
    table, told = results.recipe()
    yield "The recipe / the best of nine settings; bold where the recipe is more than 0.01 behind:"
    yield from ("", table.markdown(), "", *told)
