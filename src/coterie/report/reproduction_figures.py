"""Figures of reproductions by name: each from the runs in the folder, none from anywhere else."""

from collections.abc import Callable, Iterator, Mapping

from coterie.experiment.folder import RunFolder
from coterie.experiment.reproductions.running import Reproduced
from coterie.report import grid_figures, leakage, words
from coterie.report.figures import Figure
from coterie.report.grid import Comparison
from coterie.report.leakage import read_leakage

Draw = Callable[[Comparison], Iterator[Figure]]


def figures_of(result: Reproduced, runs: Comparison | None) -> Iterator[Figure]:
    """What the reproduction asks for, as far as its runs allow."""
    for name in result.reproduction.figures:
        if runs is not None and runs.settings:
            yield from FIGURES[name](runs)


def _budgets(runs: Comparison) -> Iterator[Figure]:
    yield from grid_figures.accuracy_against_epsilon(runs)


def _rounds(runs: Comparison) -> Iterator[Figure]:
    yield from grid_figures.curves(runs)


def _leakage(runs: Comparison) -> Iterator[Figure]:
    """Figure 4 of the publication: epsilon of workers against epoch, and the matrix of every setting."""
    found = [
        (words.setting(setting.values), record)
        for setting in runs.settings
        if setting.runs
        and (record := read_leakage(RunFolder(setting.runs[0].result.folder).leakage)) is not None
    ]
    if not found:
        return
    yield leakage.growths(found)
    top = max(record.largest for _, record in found)
    for name, record in found:
        yield leakage.matrix(record, name=name, top=top)


FIGURES: Mapping[str, Draw] = {"budgets": _budgets, "rounds": _rounds, "leakage": _leakage}
