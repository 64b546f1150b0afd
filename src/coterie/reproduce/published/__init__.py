"""Numbers that publications print, as data with their source, to set ours beside.

Example:
    >>> from coterie.reproduce.published import rc_dpfl_preprint
    >>> rc_dpfl_preprint().cell("mnist", "rotation", "rc-dpfl", "mean", 3)
    Cell(mean=89.0, std=0.44)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import yaml

from coterie.errors import InputError


@dataclass(frozen=True)
class Cell:
    """One printed number: mean and, where it can be read, standard deviation over seeds."""

    mean: float
    std: float | None = None


@dataclass(frozen=True)
class Printed:
    """A number and the table it stands in; no cell where it is unreadable."""

    cell: Cell | None
    table: int


@dataclass(frozen=True)
class Table:
    """One printed table: for each algorithm and figure a cell per epsilon, None where it is unreadable."""

    number: int
    data: str
    shift: str
    cells: Mapping[str, Mapping[str, tuple[Cell | None, ...]]]
    epsilons: tuple[float, ...]
    """Of its columns, in their order."""


@dataclass(frozen=True)
class Publication:
    """The tables of one publication and what their rows and columns mean."""

    source: str
    epsilons: tuple[float, ...]
    """Of all tables that say nothing else."""
    algorithms: Mapping[str, str]
    """Our name of each algorithm, and the publication's."""
    figures: Mapping[str, str]
    """What each figure is; all but f_loss in percent."""
    tables: tuple[Table, ...]

    def cell(self, data: str, shift: str, algorithm: str, figure: str, epsilon: float) -> Cell | None:
        """The printed number, or None if it is unreadable; an error if the publication has no such cell."""
        printed = self.printed(data, shift, algorithm, figure, epsilon)
        if printed is not None:
            return printed.cell
        asked = f"{figure} of {algorithm} on {data} with {shift} shift at epsilon {epsilon:g}"
        raise InputError(f"{self.source}: prints no {asked}; epsilons are {_listed(self.epsilons)}")

    def printed(self, data: str, shift: str, algorithm: str, figure: str, epsilon: float) -> Printed | None:
        """The number with its table, or None if the publication prints none for this."""
        for table in self.tables:
            row = table.cells.get(algorithm, {}).get(figure)
            if (table.data, table.shift) == (data, shift) and row is not None and epsilon in table.epsilons:
                return Printed(row[table.epsilons.index(epsilon)], table.number)
        return None


@cache
def rc_dpfl_preprint() -> Publication:
    """Tables 3 to 10 of the preprint of R-DPCFL (2024)."""
    return read("rc-dpfl-preprint.yaml")


def read(name: str) -> Publication:
    """A publication in this folder, checked to have a cell for every epsilon in every row."""
    content = yaml.safe_load(resources.files(__package__).joinpath(name).read_text(encoding="utf-8"))
    source, epsilons = content["source"], tuple(float(epsilon) for epsilon in content["epsilons"])
    return Publication(
        source=f"{source['authors']}, {source['title']} ({source['year']}), {source['part']}",
        epsilons=epsilons,
        algorithms=content["algorithms"],
        figures=content["figures"],
        tables=tuple(_table(table, epsilons) for table in content["tables"]),
    )


def _table(content: Mapping[str, Any], common: tuple[float, ...]) -> Table:
    epsilons = tuple(float(epsilon) for epsilon in content.get("epsilons", common))
    cells = {
        algorithm: {figure: _row(row, len(epsilons)) for figure, row in figures.items()}
        for algorithm, figures in content["cells"].items()
    }
    return Table(content["number"], content["data"], content["shift"], cells, epsilons)


def _row(row: Sequence[Any], length: int) -> tuple[Cell | None, ...]:
    if len(row) != length:
        raise ValueError(f"a row has {len(row)} cells for {length} epsilons")
    return tuple(None if cell is None else Cell(*cell) for cell in row)


def _listed(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:g}" for number in numbers)
