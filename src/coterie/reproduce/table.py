"""Our figures beside the printed ones, cell by cell, and what a folder holds of them."""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from coterie.errors import InputError
from coterie.experiment.experiment_file import read_yaml
from coterie.experiment.sweep import LABEL
from coterie.privacy import Unit
from coterie.report.grid import Comparison, Setting, read_comparison
from coterie.report.numbers import span
from coterie.reproduce.declared import (
    ALGORITHM,
    ExperimentScale,
    PublishedExperiment,
    ScaleName,
    Source,
    find,
)
from coterie.reproduce.printed import Printed, Publication, read_publication
from coterie.reproduce.runs import QUANTITIES, FinishedRun, Quantity
from coterie.table import NONE, csv_text

RECORD = "reproduction.yaml"
"""In the folder of a reproduction: which it is, at which scale, with which overrides."""
_NAMED = 8
"""So many missing runs are called by their names; more are counted."""


def is_no_worse(quantity: Quantity, ours: float, printed: float) -> bool:
    """Whether ours, rounded to the two decimals that publications print, is no worse than theirs."""
    gap = round(round(ours, 2) - printed, 6)
    return gap >= 0 if quantity.more_is_better else gap <= 0


@dataclass(frozen=True)
class Entry:
    """One cell: ours with its standard deviation over seeds, and the printed number where there is one.

    Args:
        base_rate: what needs no learning, where the figure is a score.
    """

    quantity: Quantity
    ours: float | None
    spread: float | None
    printed: Printed | None
    base_rate: float | None = None

    @property
    def verdict(self) -> str:
        """Ours against theirs, in words; empty where one of them is missing."""
        if self.ours is None or self.printed is None or self.printed.mean is None:
            return ""
        good = is_no_worse(self.quantity, self.ours, self.printed.mean)
        size = f"{abs(self.ours - self.printed.mean):.{self.quantity.digits}f}"
        if self.quantity.more_is_better:
            return "at least" if good else f"below by {size}"
        return "at most" if good else f"above by {size}"

    @property
    def is_no_worse(self) -> bool | None:
        return self.verdict.startswith("at") if self.verdict else None

    def text(self) -> str:
        return self.quantity.text(self.ours, self.spread)

    def printed_text(self) -> str:
        if self.printed is None:
            return ""
        mean = self.printed.mean
        return "unreadable" if mean is None else self.quantity.text(mean, self.printed.std)

    def both(self) -> str:
        """Ours, a stroke, theirs, and the verdict."""
        theirs = self.printed_text()
        return self.text() + (f" / {theirs} ({self.verdict or 'no verdict'})" if theirs else "")


@dataclass(frozen=True)
class Line:
    """One algorithm under one setting.

    Args:
        printed_as: what the publication calls it, if it has it.
        best: the setting that was best for this row, where several were tried.
    """

    row: str
    setting: Mapping[str, Any]
    runs: tuple[FinishedRun, ...]
    entries: tuple[Entry, ...]
    printed_as: str | None
    best: str = ""

    @property
    def name(self) -> str:
        return f"{self.row} ({self.best})" if self.best else self.row

    @property
    def heading(self) -> str:
        """The row and its setting."""
        return ", ".join(filter(None, [self.row, setting_text(self.setting)]))

    @property
    def clusters_found(self) -> str:
        """Runs that found all clusters; empty for an algorithm that looks for none."""
        return self._share([run.result.clusters_found for run in self.runs])

    @property
    def minority_found(self) -> str:
        return self._share([run.result.minority_found for run in self.runs])

    def _share(self, found: Sequence[bool | None]) -> str:
        first = self.runs[0].record
        if first.knows_truth:
            return "given"
        known = [value for value in found if value is not None]
        clustered = hasattr(first.experiment.algorithm, "clusters")
        return f"{sum(known)} of {len(known)}" if known and clustered else NONE

    @property
    def charged(self) -> str:
        return "; ".join(dict.fromkeys(str(run.charged) for run in self.runs))

    @property
    def guarantee(self) -> str:
        return max(self.runs, key=lambda run: run.result.epsilon).result.guarantee

    def to_json(self) -> dict[str, Any]:
        return {
            "algorithm": self.row,
            "best": self.best,
            "setting": dict(self.setting),
            "seeds": [run.record.experiment.seeds.simulation for run in self.runs],
            "figures": {
                entry.quantity.key: {
                    "ours": entry.ours,
                    "std": entry.spread,
                    "printed": entry.printed.mean if entry.printed else None,
                    "table": entry.printed.table if entry.printed else None,
                    "verdict": entry.verdict or None,
                }
                for entry in self.entries
            },
            "clusters_found": self.clusters_found,
            "minority_found": self.minority_found,
            "charged": [
                {"executed": run.charged.executed, "planned": run.charged.planned, "holds": run.charged.holds}
                for run in self.runs
            ],
            "guarantee": self.guarantee,
        }


@dataclass(frozen=True)
class Reproduction:
    """A published table beside ours: what the folder of a reproduction holds now.

    Args:
        compared: its runs side by side; None where figures need no runs.
        source: the publication, where it prints numbers.
        missing: cells that have not finished.
    """

    folder: Path
    experiment: PublishedExperiment
    scale_name: ScaleName
    overrides: tuple[str, ...]
    compared: Comparison | None = None
    lines: tuple[Line, ...] = ()
    source: str | None = None
    missing: tuple[str, ...] = ()

    @classmethod
    def load(cls, path: Path) -> "Reproduction":
        """Read the runs that have finished and set them beside the publication."""
        content = read_yaml(path / RECORD) if (path / RECORD).exists() else None
        if content is None:
            raise InputError(f"{path}: not the folder of a reproduction, {RECORD} is missing")
        try:
            experiment, scale = find(str(content["name"])), ScaleName(str(content["scale"]))
            overrides = tuple(str(text) for text in content.get("set") or ())
        except (KeyError, ValueError, TypeError) as mistake:
            raise InputError(f"{path / RECORD}: not written by this version ({mistake!r})") from None
        begun = cls(path, experiment, scale, overrides)
        if not (begun.sweep_folder / "sweep.yaml").exists():
            return begun
        compared, source = read_comparison(begun.sweep_folder), experiment.publication
        publication = read_publication(source.source) if source else None
        lines = [_line(setting, path, source, publication) for setting in compared.settings]
        order = list(dict.fromkeys(line.row for line in lines))
        best_of = begun.scale.best_of
        if best_of in compared.sweep.varying:
            lines = best_lines(lines, best_of)
        lines.sort(key=lambda line: ([_sortable(v) for v in line.setting.values()], order.index(line.row)))
        missing = tuple(failure.cell.name for failure in compared.failures)
        printed = publication.source if publication else None
        return replace(begun, compared=compared, lines=tuple(lines), source=printed, missing=missing)

    @property
    def scale(self) -> ExperimentScale:
        return self.experiment.at(self.scale_name, self.overrides)

    @property
    def report(self) -> Path:
        return self.folder / "report.html"

    @property
    def sweep_folder(self) -> Path:
        return self.folder / "runs"

    @property
    def settings(self) -> Sequence[Setting]:
        """The rows of its comparison, if any of them has run."""
        return self.compared.settings if self.compared else ()

    @property
    def runs(self) -> list[FinishedRun]:
        return [run for line in self.lines for run in line.runs]

    @property
    def is_sound(self) -> bool:
        """Whether no run spent more than it promised."""
        return all(run.charged.holds for run in self.runs)

    @property
    def not_finished(self) -> str:
        """What is missing, by name while it is little."""
        if len(self.missing) <= _NAMED:
            return f"Not finished: {', '.join(self.missing)}."
        return f"Not finished: {len(self.missing)} runs."

    def by_setting(self) -> list[tuple[dict[str, Any], list[Line]]]:
        """Every setting, in order, with its lines."""
        groups = itertools.groupby(self.lines, key=lambda line: line.setting)
        return [(dict(setting), list(lines)) for setting, lines in groups]

    @property
    def quantities(self) -> list[Quantity]:
        """Those that any run has, or the publication."""
        entries = [entry for line in self.lines for entry in line.entries]
        shown = {each.quantity.key for each in entries if (each.ours, each.printed) != (None, None)}
        return [quantity for quantity in QUANTITIES if quantity.key in shown]

    def tables(self, quantity: Quantity | None = None) -> str:
        """The numbers of the printed tables beside which ours stand, of one quantity or of all."""
        found = {
            entry.printed.table
            for line in self.lines
            for entry in line.entries
            if entry.printed is not None and quantity in (None, entry.quantity)
        }
        return ", ".join(map(str, sorted(found)))

    @property
    def has_clusters(self) -> bool:
        """Whether any row looks for clusters, or is given them."""
        return any(line.clusters_found != NONE for line in self.lines)

    def notes(self) -> Iterator[str]:
        """What a reader of the table must know."""
        if self.source is not None:
            named = (f"{line.row} beside {line.printed_as}" for line in self.lines if line.printed_as)
            beside = ", ".join(dict.fromkeys(named))
            yield f"Printed numbers: {self.source}; tables {self.tables() or 'none'}; {beside}."
        held = sum(run.charged.holds for run in self.runs)
        yield (
            f"Ledger against plan: {held} of {len(self.runs)} runs charged "
            f"no more than planned, {sum(run.charged.exact for run in self.runs)} exactly what was planned."
        )
        # What a best or worst client is measured on, where whole clients are compared.
        records = [run.record for run in self.runs if run.record.plan.unit is Unit.CLIENT]
        held_out = [[client.test_records or 0 for client in record.clients] for record in records]
        for least, most in sorted({(min(sizes), max(sizes)) for sizes in held_out}):
            yield f"A client has {span([least, most])} held-out records."
        if self.missing:
            yield self.not_finished

    def to_json(self) -> dict[str, Any]:
        return {
            "reproduction": self.experiment.name,
            "scale": self.scale_name.value,
            "folder": str(self.folder),
            "report": str(self.report),
            "sound": self.is_sound,
            "table": [line.to_json() for line in self.lines],
            "missing": list(self.missing),
        }


def best_lines(lines: Sequence[Line], key: str) -> list[Line]:
    """Of the lines that differ in this key alone, the one with the best average over clients."""
    alike: dict[str, list[Line]] = defaultdict(list)
    for line in lines:
        rest = {name: value for name, value in line.setting.items() if name != key}
        named = replace(line, setting=rest, best=f"{key.rpartition('.')[2]} {line.setting[key]}")
        alike[repr((line.row, rest))].append(named)
    return [max(group, key=lambda line: line.entries[0].ours or 0.0) for group in alike.values()]


def _sortable(value: Any) -> tuple[int, float, str]:
    return (0, float(value), "") if isinstance(value, int | float) else (1, 0.0, str(value))


def _line(setting: Setting, out: Path, source: Source | None, publication: Publication | None) -> Line:
    runs = tuple(FinishedRun.read(run, out) for run in setting.runs)
    values = dict(setting.values)
    label, algorithm = values.pop(LABEL, None), values.pop(ALGORITHM)
    row = str(label or algorithm)
    theirs = source.rows.get(row, row) if source else row
    entries = []
    for quantity in QUANTITIES:
        known = [value for run in runs if (value := quantity.value(run)) is not None]
        whole = len(known) == len(runs)
        mean = float(np.mean(known)) if whole else None
        std = float(np.std(known, ddof=1)) if whole and len(known) > 1 else None
        printed = None
        if source is not None and publication is not None:
            epsilon = runs[0].record.experiment.privacy.epsilon
            printed = publication.printed(source.data, source.shift, theirs, quantity.key, epsilon)
        rates = [rate for run in runs if (rate := quantity.base_rate(run)) is not None]
        rate = float(np.mean(rates)) if rates else None
        entries.append(Entry(quantity, mean, std, printed, rate))
    name = publication.algorithms.get(theirs) if publication else None
    return Line(row, values, runs, tuple(entries), name)


def setting_text(setting: Mapping[str, Any]) -> str:
    """`epsilon 3`, or all keys that vary."""
    return ", ".join(f"{key.rpartition('.')[2].replace('_', ' ')} {value}" for key, value in setting.items())


def to_csv(reproduction: Reproduction) -> str:
    """A line for each number, with full precision, for machines."""
    rows = [_csv_row(line, entry) for line in reproduction.lines for entry in line.entries]
    return csv_text([list(rows[0]) if rows else ["algorithm"], *(row.values() for row in rows)])


def _csv_row(line: Line, entry: Entry) -> dict[str, Any]:
    printed = entry.printed or Printed(None, None, 0)
    return {
        "algorithm": line.row,
        "best": line.best,
        **line.setting,
        "figure": entry.quantity.key,
        "runs": len(line.runs),
        "seeds": " ".join(str(run.record.experiment.seeds.simulation) for run in line.runs),
        "rounds": min(run.result.rounds for run in line.runs),
        "base_rate": entry.base_rate,
        "ours": entry.ours,
        "ours_std": entry.spread,
        "printed": printed.mean,
        "printed_std": printed.std,
        "table": printed.table or None,
        "verdict": entry.verdict,
        "clusters_found": line.clusters_found,
        "minority_found": line.minority_found,
        "executed": sum(run.charged.executed for run in line.runs),
        "planned": sum(run.charged.planned for run in line.runs),
        "noise_multiplier": max(run.result.noise_multiplier for run in line.runs),
    }
