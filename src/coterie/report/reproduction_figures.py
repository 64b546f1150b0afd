"""Figures of reproductions by name: each from the runs in the folder, none from anywhere else."""

from collections.abc import Callable, Iterator, Mapping

from coterie.experiment.reproductions.running import Reproduced
from coterie.report import grid_figures
from coterie.report.figures import Figure
from coterie.report.grid import Comparison

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


FIGURES: Mapping[str, Draw] = {"budgets": _budgets, "rounds": _rounds}
