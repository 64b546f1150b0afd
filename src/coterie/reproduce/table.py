"""Our figures beside the printed ones, cell by cell, and whether every run charged what its plan says."""

import csv
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from coterie.algorithms import AnyAlgorithm, find_algorithm
from coterie.errors import InputError
from coterie.experiment.composition import ALONE
from coterie.experiment.folder import RunFolder, read_json, read_lines
from coterie.experiment.metrics import Fairness, Scores, Spread, fairness
from coterie.experiment.result import RunResult
from coterie.experiment.sweep import LABEL, Cell, Sweep
from coterie.privacy import LedgerView, PrivacyPlan, Unit
from coterie.privacy.units import number_from_json, round_up
from coterie.reproduce import ALGORITHM, SEED, Reproduction, Source, central, published
from coterie.reproduce.published import Printed, Publication
from coterie.training.scoring import Score

NONE = "–"
"""Where a row has no such figure."""


_NAMED = 8
"""So many missing runs are called by their names; more are counted."""


@dataclass(frozen=True)
class Run:
    """A finished cell and what its ledger says."""

    cell: Cell
    result: RunResult
    fairness: Fairness
    charged: "Charged"
    test_records: tuple[int, int]
    """Held-out records of the client with fewest, and of the one with most: how fine its accuracy can be."""


@dataclass(frozen=True)
class Charged:
    """What a run executed, from its ledger, against what its plan declared."""

    planned: int
    executed: int
    exact: bool
    """Every release of every client exactly as often as planned."""
    within: bool
    """None more often than planned."""
    spent: float
    promised: float

    @property
    def holds(self) -> bool:
        return self.within and self.spent <= self.promised * (1 + 1e-9)

    def __str__(self) -> str:
        if not self.holds:
            spent = f"spent {self.spent:.4g} of {self.promised:.4g}"
            return f"BROKEN: {self.executed:,} of {self.planned:,}, {spent}"
        return f"{self.executed:,} of {self.planned:,}" + ("" if self.exact else ", fewer than planned")


@dataclass(frozen=True)
class Measure:
    """A figure of the table."""

    key: str
    heading: str
    of: Callable[[Run], float | None]
    more_is_better: bool
    scale: float = 100.0
    digits: int = 1
    is_promise: bool = False
    """An epsilon: never to be rounded down."""

    def text(self, value: float | None, spread: float | None = None) -> str:
        if value is None:
            return NONE
        if self.is_promise:
            return round_up(value)
        return f"{value:.{self.digits}f}" + ("" if spread is None else f" ± {spread:.{self.digits}f}")


MEASURES = (
    Measure("mean", "average", lambda run: _accuracy(run.result).mean, more_is_better=True),
    Measure("majority", "majority", lambda run: _group(run, "majority"), more_is_better=True),
    Measure("minority", "minority", lambda run: _group(run, "minority"), more_is_better=True),
    Measure("min", "worst client", lambda run: _accuracy(run.result).min, more_is_better=True),
    Measure("disparity", "disparity", lambda run: run.fairness.disparity, more_is_better=False),
    Measure("f_acc", "F_acc", lambda run: run.fairness.f_acc, more_is_better=False),
    Measure("f_loss", "F_loss", lambda run: run.fairness.f_loss, more_is_better=False, scale=1.0, digits=2),
    Measure(
        "max", "best client", lambda run: _of_clients(run, _accuracy(run.result).max), more_is_better=True
    ),
    Measure("worst_cluster", "worst cluster, whole test set", lambda run: _worst(run), more_is_better=True),
    Measure(
        "clustering",
        "clustered right",
        lambda run: _of_clients(run, run.result.clustering_accuracy),
        more_is_better=True,
    ),
    Measure(
        "live",
        "live clusters",
        lambda run: _of_clients(run, run.result.live_clusters),
        more_is_better=True,
        scale=1.0,
    ),
    Measure(
        "loss",
        "loss",
        lambda run: _of_workers(run, run.result.loss.mean if run.result.loss else None),
        more_is_better=False,
        scale=1.0,
        digits=3,
    ),
    Measure(
        "epsilon",
        "epsilon of the worst pair",
        lambda run: _of_workers(run, run.result.epsilon),
        more_is_better=False,
        scale=1.0,
        is_promise=True,
    ),
    Measure(
        "mean_epsilon",
        "of workers on average",
        lambda run: _of_workers(run, _mean_of_workers(run.result)),
        more_is_better=False,
        scale=1.0,
        is_promise=True,
    ),
)


def _of_clients(run: Run, value: float | None) -> float | None:
    """A figure that only papers on client-level privacy print."""
    return value if run.cell.experiment.privacy.unit is Unit.CLIENT else None


def _of_workers(run: Run, value: float | None) -> float | None:
    """A figure that only papers on workers in groups print."""
    return value if run.cell.experiment.privacy.unit is Unit.WORKER else None


def _mean_of_workers(result: RunResult) -> float | None:
    """Mean epsilon of workers, each against the one that learns most about it."""
    known = [value for value in (result.per_worker or {}).values() if value is not None]
    return float(np.mean(known)) if known else None


def _worst(run: Run) -> float | None:
    """None where clients keep parts of their own: a cluster then has no model to be tested."""
    if not run.result.whole_tests or _algorithm(run.cell).personal:
        return None
    return min(run.result.whole_tests.values())


def _algorithm(cell: Cell) -> type[AnyAlgorithm]:
    return find_algorithm(cell.experiment.privacy.unit, cell.experiment.algorithm.name)


def _group(run: Run, name: str) -> float | None:
    groups = run.result.groups
    value: float | None = getattr(groups, name) if groups is not None else None
    return value


@dataclass(frozen=True)
class Entry:
    """One cell: ours, and the printed number where there is one."""

    measure: Measure
    ours: float | None
    spread: float | None
    """Standard deviation over our seeds."""
    printed: Printed | None

    @property
    def verdict(self) -> str:
        """Ours against theirs, in words; empty where one of them is missing."""
        if self.ours is None or self.printed is None or self.printed.cell is None:
            return ""
        gap = self.ours - self.printed.cell.mean
        size = f"{abs(gap):.{self.measure.digits}f}"
        if self.measure.more_is_better:
            return "at least" if gap >= 0 else f"below by {size}"
        return "at most" if gap <= 0 else f"above by {size}"

    @property
    def is_no_worse(self) -> bool | None:
        return self.verdict.startswith("at") if self.verdict else None

    def text(self) -> str:
        return self.measure.text(self.ours, self.spread)

    def printed_text(self) -> str:
        if self.printed is None:
            return ""
        cell = self.printed.cell
        return "unreadable" if cell is None else self.measure.text(cell.mean, cell.std)


@dataclass(frozen=True)
class Line:
    """One algorithm under one setting."""

    row: str
    setting: Mapping[str, Any]
    runs: tuple[Run, ...]
    entries: tuple[Entry, ...]
    printed_as: str | None
    """What the publication calls it, if it has it."""
    best: str = ""
    """The setting that was best for this row, where several were tried."""

    @property
    def name(self) -> str:
        return f"{self.row} ({self.best})" if self.best else self.row

    @property
    def clusters_found(self) -> str:
        """Runs that found all clusters; empty for an algorithm that looks for none."""
        return _share(self.runs, lambda result: result.clusters_found)

    @property
    def minority_found(self) -> str:
        return _share(self.runs, lambda result: result.minority_found)

    @property
    def charged(self) -> str:
        return "; ".join(dict.fromkeys(str(run.charged) for run in self.runs))

    @property
    def guarantee(self) -> str:
        return max(self.runs, key=lambda run: run.result.epsilon).result.guarantee

    @property
    def noise(self) -> float:
        return max(run.result.noise_multiplier for run in self.runs)


def _share(runs: Sequence[Run], of: Callable[[RunResult], bool | None]) -> str:
    cell = runs[0].cell
    if _algorithm(cell).needs_truth:
        return "given"
    known = [value for run in runs if (value := of(run.result)) is not None]
    clustered = hasattr(cell.experiment.algorithm, "clusters")
    return f"{sum(known)} of {len(known)}" if known and clustered else NONE


@dataclass(frozen=True)
class Comparison:
    """The whole table of a reproduction."""

    varying: tuple[str, ...]
    lines: tuple[Line, ...]
    source: str | None
    missing: tuple[str, ...]
    """Cells that have not finished."""

    @property
    def not_finished(self) -> str:
        """What is missing, by name while it is little."""
        if len(self.missing) <= _NAMED:
            return f"Not finished: {', '.join(self.missing)}."
        return f"Not finished: {len(self.missing)} runs."

    @property
    def settings(self) -> list[dict[str, Any]]:
        """Every setting, in order, each once."""
        found: dict[str, dict[str, Any]] = {}
        for line in self.lines:
            found.setdefault(repr(dict(line.setting)), dict(line.setting))
        return list(found.values())

    @property
    def runs(self) -> list[Run]:
        return [run for line in self.lines for run in line.runs]

    @property
    def measures(self) -> list[Measure]:
        """Those that any run has, or the publication."""
        shown = {
            entry.measure.key
            for line in self.lines
            for entry in line.entries
            if entry.ours is not None or entry.printed is not None
        }
        return [measure for measure in MEASURES if measure.key in shown]

    @property
    def has_clusters(self) -> bool:
        """Whether any row looks for clusters, or is given them."""
        return any(line.clusters_found != NONE for line in self.lines)


def compare_with_published(
    reproduction: Reproduction, sweep: Sweep, out: Path, best_of: str | None = None
) -> Comparison:
    """Read the finished runs under `out` and set them beside the publication.

    Args:
        best_of: a key that varies, of whose values each row shows the best alone, and says which.
    """
    source = reproduction.publication
    publication = published.read(f"{source.source}.yaml") if source else None
    varying = tuple(key for key in sweep.varying if key not in (ALGORITHM, LABEL))
    groups: dict[str, list[Run]] = {}
    missing = []
    for cell in sweep.cells():
        path = out / "runs" / "cells" / cell.name
        if not RunFolder(path).finished:
            missing.append(cell.name)
            continue
        key = repr((_row(cell), [cell.values[name] for name in varying]))
        groups.setdefault(key, []).append(_read(cell, path, out))
    lines = [_line(runs, varying, source, publication) for runs in groups.values()]
    order = {row: place for place, row in enumerate(dict.fromkeys(line.row for line in lines))}
    if best_of in varying:
        assert best_of is not None
        lines = best_lines(lines, best_of)
        varying = tuple(key for key in varying if key != best_of)
    lines.sort(key=lambda line: ([_sortable(value) for value in line.setting.values()], order[line.row]))
    return Comparison(varying, tuple(lines), publication.source if publication else None, tuple(missing))


def best_lines(lines: Sequence[Line], key: str) -> list[Line]:
    """Of the lines that differ in this key alone, the one with the best average over clients."""
    best: dict[str, Line] = {}
    for line in lines:
        rest = {name: value for name, value in line.setting.items() if name != key}
        named = replace(line, setting=rest, best=f"{key.rpartition('.')[2]} {line.setting[key]}")
        known = best.setdefault(repr((line.row, rest)), named)
        if (line.entries[0].ours or 0.0) > (known.entries[0].ours or 0.0):
            best[repr((line.row, rest))] = named
    return list(best.values())


def _row(cell: Cell) -> str:
    return str(cell.values.get(LABEL) or cell.values[ALGORITHM])


def _sortable(value: Any) -> tuple[int, float, str]:
    return (0, float(value), "") if isinstance(value, int | float) else (1, 0.0, str(value))


def _read(cell: Cell, path: Path, out: Path) -> Run:
    result = RunResult.load(path)
    fair = result.fairness or Fairness(math.nan, None, None)
    best = central.read(out, cell.experiment) if fair.f_acc is None else None
    if best is not None:
        fair = fairness(_scores(result), best)
    held_out = [client["test_records"] for client in read_json(RunFolder(path).federation)["clients"]]
    return Run(cell, result, fair, charged_in(path, result), (min(held_out), max(held_out)))


def _scores(result: RunResult) -> Scores:
    assert result.loss is not None
    losses, reached = result.loss.per_client, _accuracy(result).per_client
    return {client: Score(value, losses[client]) for client, value in reached.items()}


def _accuracy(result: RunResult) -> Spread:
    """Published experiments are on published records, and judged exactly."""
    if result.accuracy is None:
        raise InputError(f"{result.folder}: was not evaluated; allowed here: evaluation.kind exact")
    return result.accuracy


def charged_in(path: Path, result: RunResult) -> Charged:
    """The ledger of a run folder against its plan."""
    files = RunFolder(path)
    plan = PrivacyPlan.from_json(read_json(files.plan))
    books = LedgerView.read(files.ledger, plan)
    pairs = [
        (release.times, books.executed(unit.subject)[release.name])
        for unit in plan.units
        for release in unit.releases
    ]
    *_, last = read_lines(files.metrics)
    return Charged(
        planned=sum(times for times, _ in pairs),
        executed=sum(done for _, done in pairs),
        exact=all(times == done for times, done in pairs),
        within=all(done <= times for times, done in pairs),
        spent=number_from_json(last["epsilon"]),
        promised=result.epsilon,
    )


def _line(
    runs: Sequence[Run], varying: Sequence[str], source: Source | None, publication: Publication | None
) -> Line:
    cell = runs[0].cell
    row = _row(cell)
    name, entries = None, []
    for measure in MEASURES:
        values = [measure.of(run) for run in runs]
        known = [measure.scale * value for value in values if value is not None]
        whole = len(known) == len(values)
        printed = None
        if source is not None and publication is not None:
            theirs = source.rows.get(row, row)
            epsilon = cell.experiment.privacy.epsilon
            printed = publication.printed(source.data, source.shift, theirs, measure.key, epsilon)
            name = publication.algorithms.get(theirs)
        entries.append(
            Entry(
                measure,
                float(np.mean(known)) if whole else None,
                float(np.std(known, ddof=1)) if whole and len(known) > 1 else None,
                printed,
            )
        )
    return Line(row, {key: cell.values[key] for key in varying}, tuple(runs), tuple(entries), name)


# --- as text ----------------------------------------------------------------------------------------


def setting_text(setting: Mapping[str, Any]) -> str:
    """`epsilon 3`, or all keys that vary."""
    return ", ".join(f"{key.rpartition('.')[2].replace('_', ' ')} {value}" for key, value in setting.items())


def markdown(comparison: Comparison) -> str:
    """One table for each setting: ours, and after the stroke what is printed, with the verdict in words."""
    parts = []
    headings = [
        "algorithm",
        "runs",
        *(m.heading for m in comparison.measures),
        *(["clusters found"] if comparison.has_clusters else []),
        "charged of planned",
    ]
    for setting in comparison.settings:
        rows = [
            [
                line.name,
                str(len(line.runs)),
                *(_both(entry) for entry in line.entries if entry.measure in comparison.measures),
                *([line.clusters_found] if comparison.has_clusters else []),
                line.charged,
            ]
            for line in comparison.lines
            if dict(line.setting) == setting
        ]
        parts += [f"### {setting_text(setting)}", ""] if setting else []
        parts += ["| " + " | ".join(cells) + " |" for cells in [headings, ["---"] * len(headings), *rows]]
        parts.append("")
    parts += [*notes(comparison), "", ALONE, ""]
    for line in comparison.lines:
        where = f", {setting_text(line.setting)}" if line.setting else ""
        parts.append(f"- {line.row}{where}: {line.guarantee}")
    return "\n".join(parts) + "\n"


def _both(entry: Entry) -> str:
    theirs = entry.printed_text()
    return entry.text() + (f" / {theirs} ({entry.verdict or 'no verdict'})" if theirs else "")


def notes(comparison: Comparison) -> list[str]:
    """What a reader of the table must know."""
    lines = []
    if comparison.source is not None:
        numbers = sorted(
            {
                entry.printed.table
                for line in comparison.lines
                for entry in line.entries
                if entry.printed is not None
            }
        )
        tables = ", ".join(str(number) for number in numbers)
        beside = ", ".join(
            dict.fromkeys(
                f"{line.row} beside {line.printed_as}" for line in comparison.lines if line.printed_as
            )
        )
        lines.append(f"Printed numbers: {comparison.source}; tables {tables or 'none'}; {beside}.")
    broken = [run.cell.name for run in comparison.runs if not run.charged.holds]
    lines.append(
        f"Ledger against plan: {len(comparison.runs) - len(broken)} of {len(comparison.runs)} runs charged "
        f"no more than planned, {sum(run.charged.exact for run in comparison.runs)} exactly what was planned."
    )
    lines += [f"A client has {records} held-out records." for records in _held_out(comparison)]
    if comparison.missing:
        lines.append(comparison.not_finished)
    return lines


def _held_out(comparison: Comparison) -> list[str]:
    """What a best or worst client is measured on, where whole clients are compared."""
    runs = [run for run in comparison.runs if run.cell.experiment.privacy.unit is Unit.CLIENT]
    spans = sorted({run.test_records for run in runs})
    return [f"{least:,}" if least == most else f"{least:,} to {most:,}" for least, most in spans]


def to_csv(comparison: Comparison) -> str:
    """A line for each number, with full precision, for machines."""
    rows = [_csv_row(line, entry) for line in comparison.lines for entry in line.entries]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else ["algorithm"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _csv_row(line: Line, entry: Entry) -> dict[str, Any]:
    cell = entry.printed.cell if entry.printed else None
    return {
        "algorithm": line.row,
        "best": line.best,
        **line.setting,
        "figure": entry.measure.key,
        "runs": len(line.runs),
        "ours": entry.ours,
        "ours_std": entry.spread,
        "printed": cell.mean if cell else None,
        "printed_std": cell.std if cell else None,
        "table": entry.printed.table if entry.printed else None,
        "verdict": entry.verdict,
        "clusters_found": line.clusters_found,
        "minority_found": line.minority_found,
        "executed": sum(run.charged.executed for run in line.runs),
        "planned": sum(run.charged.planned for run in line.runs),
        "noise_multiplier": line.noise,
    }


def to_json(comparison: Comparison) -> list[dict[str, Any]]:
    """Every line with its figures."""
    return [
        {
            "algorithm": line.row,
            "best": line.best,
            "setting": dict(line.setting),
            "seeds": [run.cell.values[SEED] for run in line.runs],
            "figures": {
                entry.measure.key: {
                    "ours": entry.ours,
                    "std": entry.spread,
                    "printed": entry.printed.cell.mean if entry.printed and entry.printed.cell else None,
                    "table": entry.printed.table if entry.printed else None,
                    "verdict": entry.verdict or None,
                }
                for entry in line.entries
            },
            "clusters_found": line.clusters_found,
            "minority_found": line.minority_found,
            "charged": [
                {"executed": run.charged.executed, "planned": run.charged.planned, "holds": run.charged.holds}
                for run in line.runs
            ],
            "guarantee": line.guarantee,
        }
        for line in comparison.lines
    ]
