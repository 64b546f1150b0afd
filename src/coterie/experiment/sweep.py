"""A grid of experiments: a base, the values that vary, and the cells that they span.

Every cell is an ordinary run. `cells` runs them, `comparison` puts them side by side.
"""

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from pathlib import Path
from typing import Any, TypeAlias, Union

import numpy as np

from coterie.errors import InputError
from coterie.experiment.experiment_file import at_home, dropped_by, override, read_yaml, within, without
from coterie.experiment.folder import RunFolder
from coterie.experiment.schema import Experiment, refuse
from coterie.files import yaml_text
from coterie.settings import RECORDED, Settings, idle

SweepSource: TypeAlias = Union["Sweep", Mapping[str, Any], str, Path, None]
"""What a function takes for a sweep: itself, its content, its file, or nothing for the built-in one."""

LABEL = "label"
"""The key under which a cell holds the name of its part, where parts have names."""
LONGEST = 200
"""Letters in the name of a cell: file systems allow 255, with what stands around it."""

MOST_CELLS = 10_000
"""Cells of a sweep: forty times those of the largest published one."""

BUILT_IN = {"base": {}, "grid": {"algorithm.name": ["r-dpcfl", "oracle", "local", "global"]}}
"""The comparison that needs no file and no download."""


@dataclass(frozen=True)
class Cell:
    """One point of the grid."""

    name: str
    values: Mapping[str, Any]
    experiment: Experiment
    dropped: Mapping[str, str] = field(default_factory=dict)
    """Keys of the base that cannot act here and were left out, with the reason."""

    def files(self, out: Path) -> RunFolder:
        """Its run folder, inside that of the sweep."""
        return RunFolder(out / "cells" / self.name)


@dataclass(frozen=True)
class Part:
    """Values that vary together, and what else is set with them: one algorithm, its clip and its seeds.

    Args:
        settings: dotted keys that the base of the sweep does not decide for this part.
        label: what its rows are called where the grid alone does not tell them from those of another part.
    """

    grid: Mapping[str, Sequence[Any]]
    settings: Mapping[str, Any] = field(default_factory=dict)
    label: str | None = None

    @property
    def choices(self) -> dict[str, Sequence[Any]]:
        """The grid, with the label as a key that does not vary."""
        return {**({} if self.label is None else {LABEL: [self.label]}), **self.grid}

    def to_content(self) -> dict[str, Any]:
        content: dict[str, Any] = {"label": self.label} if self.label is not None else {}
        if self.settings:
            content["set"] = dict(self.settings)
        return {**content, "grid": {key: list(values) for key, values in self.grid.items()}}


@dataclass(frozen=True)
class Sweep:
    """A base experiment and the values that vary: one grid, or several parts with a grid each.

    Args:
        grid: every value of every varying key, over all parts.
        parts: empty where the grid is all there is.
        recorded: it was run, and is looked at again: no code is imported that it names.
    """

    base: Mapping[str, Any]
    grid: Mapping[str, Sequence[Any]]
    parts: tuple[Part, ...] = ()
    recorded: bool = field(default=False, compare=False)

    @classmethod
    def of_parts(cls, base: Mapping[str, Any], parts: Sequence[Part]) -> "Sweep":
        """A sweep over several grids with the same keys; cells that stand in two of them are one."""
        grid: dict[str, list[Any]] = {}
        for part in parts:
            for key, choices in part.choices.items():
                known = grid.setdefault(key, [])
                known += [choice for choice in choices if choice not in known]
        for part in parts:
            if missing := set(grid) - set(part.choices):
                raise InputError(f"parts: '{min(missing)}' varies in one part and is missing in another")
        return cls(base, grid, tuple(parts))

    @classmethod
    def read_recorded(cls, path: Path) -> "Sweep":
        """The sweep that a comparison was begun with, to be looked at."""
        return replace(cls.read(path), recorded=True)

    @classmethod
    def read(cls, source: SweepSource) -> "Sweep":
        """The sweep itself, the one in a file or a mapping, or the built-in comparison."""
        if isinstance(source, Sweep):
            return source
        given = BUILT_IN if source is None else source
        allowed = "a file, a dict with base and grid, or None"
        content = (
            _plain(given)
            if isinstance(given, Mapping)
            else read_yaml(InputError.path_of("sweep", given, allowed))
        )
        where = "sweep" if isinstance(given, Mapping) else given
        base, parts = content.get("base") or {}, content.get("parts")
        unknown = min(map(str, content.keys() - {"base", "grid", "parts"}), default=None)
        refuse(
            {
                f"{where}: unknown key '{unknown}'; a sweep has base and grid, or base and parts": (
                    unknown is not None
                ),
                f"{where}: base should hold sections of an experiment": not isinstance(base, dict),
            }
        )
        if not isinstance(given, Mapping):
            base = at_home(base, Path(given))
        if "parts" not in content:
            return cls(base, _read_grid(content.get("grid"), f"{where}: "))
        if "grid" in content or not isinstance(parts, list) or not parts:
            raise InputError(f"{where}: parts should be a list of grids, in place of grid")
        return cls.of_parts(
            base, [_read_part(part, f"{where}: parts.{number}.") for number, part in enumerate(parts)]
        )

    def cells(self) -> list[Cell]:
        """Every combination, validated before any of them runs."""
        return list(self._all)

    @cached_property
    def _all(self) -> tuple[Cell, ...]:
        found: dict[str, Cell] = {}
        parts = self.parts or (Part(self.grid),)
        count = sum(math.prod(map(len, part.choices.values())) for part in parts)
        refuse({f"grid: {count} cells; allowed: at most {MOST_CELLS}": count > MOST_CELLS})
        for part in parts:
            for cell in self._cells_of(part):
                if found.setdefault(cell.name, cell).experiment != cell.experiment:
                    raise InputError(f"parts: {cell.name} stands twice, with different settings")
        return tuple(found.values())

    def _cells_of(self, part: Part) -> Iterator[Cell]:
        seen: set[str] = set()
        runs: dict[str, str] = {}
        for combination in itertools.product(*part.choices.values()):
            values = dict(zip(part.choices, combination, strict=True))
            ordered = {key: values[key] for key in self.grid}
            name = _cell_name(ordered)
            long = f"grid: {name[:40]}... is too long for a folder; allowed: {LONGEST} letters"
            refuse({long: len(name) > LONGEST})
            values.pop(LABEL, None)
            own = {**part.settings, **values}
            tree = override(self.base, own)
            context = RECORDED if self.recorded else None
            experiment = Experiment.model_validate(tree, context=context)
            # What is set for the cell itself stays, to be refused where it cannot act.
            in_vain = dict(idle(experiment, experiment))
            dropped = {key: in_vain[key] for key in in_vain if not any(within(key, other) for other in own)}
            if dropped:
                experiment = Experiment.model_validate(reduce(without, dropped, tree), context=context)
            other = runs.setdefault(experiment.model_dump_json(), name)  # 1 and 1.0 have two names
            same = f"grid: {name} is the same run as {other}"
            refuse({f"grid: {name} stands twice": name in seen, same: other != name})
            seen.add(name)
            yield Cell(name, ordered, experiment, {**dropped_by(self.base, own), **dropped})

    def checked(self) -> list[Cell]:
        """The cells of a sweep that is about to run, in which nothing is set in vain."""
        return list(self._all_acting)

    @cached_property
    def _all_acting(self) -> tuple[Cell, ...]:
        cells = self._all
        for cell in cells:
            cell.experiment.check_all_acts()
        for key, reason in cells[0].dropped.items():
            if all(key in cell.dropped for cell in cells):
                raise InputError(f"base: {reason}")
        return cells

    @property
    def notes(self) -> list[str]:
        """What of the base is left out of some cells, where it could not act."""
        cells = self.cells()
        left_out = Counter(key for cell in cells for key in cell.dropped)
        return [
            f"{key} has no effect in {count} of {len(cells)} cells and is left out there"
            for key, count in sorted(left_out.items())
        ]

    def contains(self, other: "Sweep") -> bool:
        """Whether every cell of the other sweep is one of this, setting for setting."""
        mine = {cell.name: cell.experiment for cell in self.cells()}
        return all(mine.get(cell.name) == cell.experiment for cell in other.cells())

    def joined(self, other: "Sweep") -> "Sweep":
        """The cells of both, which must share their base and what varies."""
        if other.base != self.base:
            raise InputError("two sweeps with different bases cannot be one")
        if self.contains(other):
            return self
        return Sweep.of_parts(
            self.base, [*(self.parts or (Part(self.grid),)), *(other.parts or (Part(other.grid),))]
        )

    @property
    def varying(self) -> list[str]:
        """Keys of the grid that make a row of their own: all but the seeds."""
        return [key for key in self.grid if not key.startswith("seeds.")]

    @property
    def leading(self) -> str | None:
        """What is compared: the name of a part, the algorithm, else the first key with a choice."""
        choices = [key for key in self.varying if len(self.grid[key]) > 1]
        return next((key for key in (LABEL, "algorithm.name", *choices) if key in choices), None)

    def setting(self, cell: Cell) -> dict[str, Any]:
        """The cell's values of those keys."""
        return {key: cell.values[key] for key in self.varying}

    def to_yaml(self) -> str:
        content: dict[str, Any] = {"base": dict(self.base)}
        if self.parts:
            content["parts"] = [part.to_content() for part in self.parts]
        else:
            content["grid"] = {key: list(values) for key, values in self.grid.items()}
        return yaml_text(content)


def _plain(value: Any) -> Any:
    """What Python code writes, as a file would: lists for tuples and ranges, sections for an experiment."""
    if isinstance(value, Settings):
        return value.model_dump(mode="json")
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | range | np.ndarray):
        return [_plain(inner) for inner in value]
    if isinstance(value, np.generic):
        return value.item()
    return str(value) if isinstance(value, Path) else value


def _read_grid(grid: Any, where: str) -> dict[str, list[Any]]:
    if not isinstance(grid, dict) or not grid:
        raise InputError(f"{where}grid should map keys such as algorithm.name to lists of values")
    for key, values in grid.items():
        if not isinstance(values, list) or not values:
            raise InputError(f"{where}grid.{key}: {values!r} is not allowed; allowed: a list of values")
        if len(values) > MOST_CELLS:
            raise InputError(f"{where}grid.{key}: {len(values)} values; allowed: at most {MOST_CELLS}")
        if outer := next((other for other in grid if other != key and within(key, other)), None):
            raise InputError(f"{where}grid.{key}: stands inside {outer}, which varies, too; allowed: one")
    return grid


def _read_part(part: Any, where: str) -> Part:
    if not isinstance(part, dict) or set(part) - {"label", "set", "grid"}:
        raise InputError(f"{where.rstrip('.')}: {part!r} is not allowed; allowed: label, set and grid")
    settings, label = part.get("set") or {}, part.get("label")
    if not isinstance(settings, dict):
        raise InputError(f"{where}set: {settings!r} is not allowed; allowed: keys such as privacy.clip")
    name, grid = None if label is None else " ".join(str(label).split()), _read_grid(part.get("grid"), where)
    for key in settings:
        if any(within(key, varying) for varying in grid):
            raise InputError(f"{where}set.{key}: the grid decides it; allowed: in one of them")
    return Part(grid, settings, name)


def _cell_name(values: Mapping[str, Any]) -> str:
    parts = (f"{key.rpartition('.')[2]}={value}" for key, value in values.items())
    return re.sub(r"[^A-Za-z0-9.=_+-]+", "-", ",".join(parts).replace(",", "+")).strip("-")
