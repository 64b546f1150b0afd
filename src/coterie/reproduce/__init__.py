"""Published experiments, declared so that one command runs them and sets our figures beside the printed ones.

Every YAML file in this folder is one reproduction; its file name is what `coterie reproduce` calls it. To add
one, add a file:

    title: what it reproduces, as a heading
    line: the same in one line, for the list of names
    publication:                    # optional: which printed numbers stand beside ours
      source: rc-dpfl-preprint      # a file of coterie.reproduce.published
      data: mnist
      shift: rotation
      rows: {r-dpcfl: rc-dpfl}      # our row: the publication's, where the names differ
    base: {...}                     # sections of an experiment, for both scales
    scales:
      quick:
        base: {...}                 # laid over the common base, section by section
        vary: {privacy.epsilon: [5, 10]}
        algorithms:                 # each with its own seeds, and settings where it needs them
        - {name: r-dpcfl, seeds: [0, 1]}
        - {name: global, seeds: [0], set: {privacy.clip: 0.5}, label: global with a small clip}
        best_of: privacy.clip       # of a key under vary: show each row at its best value only
        differs: [one sentence for everything that is not as in the publication]
        panels: {clips: [global, global with a small clip]}     # rows that the figure `panels` draws together
        matrices: [global]          # rows of which the figure `leakage` draws every pair; by default all
        references: 30              # epochs of the central models for F_acc and F_loss, one for each seed
      paper: {...}
    figures: [budgets, rounds]      # names of coterie.reproduce.figures.FIGURES

Nothing else has to be registered. Every cell is an ordinary run with its own ledger and guarantee; `table`
beside this file sets them beside the publication, `coterie.reproduce.page` makes the page.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import resources
from typing import Any

import yaml
from pydantic import Field, ValidationError

from coterie.errors import InputError
from coterie.experiment.explain import explain
from coterie.experiment.files import override, parse_override
from coterie.experiment.sweep import Part, Sweep
from coterie.settings import Settings

EPSILON = "privacy.epsilon"
ALGORITHM = "algorithm.name"
SEED = "seeds.simulation"


class ScaleName(StrEnum):
    """How much of the publication's experiment is run."""

    QUICK = "quick"
    PAPER = "paper"


class Source(Settings):
    """Where the printed numbers stand."""

    source: str
    data: str
    shift: str
    rows: Mapping[str, str] = Field(default_factory=dict)
    """The publication's algorithm for each of our rows that is called otherwise there."""


class Contender(Settings):
    """One algorithm of a reproduction."""

    name: str
    seeds: tuple[int, ...] = Field(min_length=1)
    label: str | None = None
    settings: Mapping[str, Any] = Field(default_factory=dict, alias="set")

    @property
    def row(self) -> str:
        return self.label or self.name


class Scale(Settings):
    """One size of a reproduction."""

    base: Mapping[str, Mapping[str, Any]] = Field(default_factory=dict)
    vary: Mapping[str, tuple[Any, ...]] = Field(default_factory=dict)
    best_of: str | None = None
    """A key that varies: of its values, each row shows the one with the best average accuracy."""
    algorithms: tuple[Contender, ...] = ()
    differs: tuple[str, ...] = ()
    panels: Mapping[str, tuple[str, ...]] = Field(default_factory=dict)
    """Rows that share a chart of accuracy and one of loss, by what the charts are called."""
    matrices: tuple[str, ...] = ()
    """Rows of which the figure `leakage` draws who learns how much about whom; by default all."""
    references: int = Field(0, ge=0)
    """Epochs of the central models for F_acc and F_loss; 0 trains none."""


class Reproduction(Settings):
    """A published experiment in all its sizes."""

    name: str
    title: str
    line: str
    publication: Source | None = None
    base: Mapping[str, Mapping[str, Any]] = Field(default_factory=dict)
    scales: Mapping[ScaleName, Scale]
    figures: tuple[str, ...] = ()

    def scale(self, name: ScaleName) -> Scale:
        return self.scales[name]


@dataclass(frozen=True)
class Selection:
    """A part of a reproduction; what is empty is not narrowed."""

    epsilons: Sequence[float] = ()
    algorithms: Sequence[str] = ()
    seeds: Sequence[int] = ()

    @property
    def is_all(self) -> bool:
        return not (self.epsilons or self.algorithms or self.seeds)


EVERYTHING = Selection()


def names() -> list[str]:
    """What can be reproduced."""
    return sorted(
        entry.name.removesuffix(".yaml")
        for entry in resources.files(__package__).iterdir()
        if entry.name.endswith(".yaml")
    )


def find(name: str) -> Reproduction:
    """The reproduction of that name."""
    if name not in names():
        raise InputError(f"{name}: no such reproduction; allowed: {', '.join(names())}")
    text = resources.files(__package__).joinpath(f"{name}.yaml").read_text(encoding="utf-8")
    return parse(name, text)


def parse(name: str, text: str) -> Reproduction:
    """A reproduction from the text of its file."""
    try:
        return Reproduction.model_validate({**yaml.safe_load(text), "name": name})
    except ValidationError as mistakes:
        raise InputError(f"reproduction {name}: {explain(mistakes, Reproduction)}") from None


def sweep_of(
    reproduction: Reproduction, scale: ScaleName, selection: Selection, overrides: Sequence[str] = ()
) -> Sweep | None:
    """The runs of a reproduction, or of a part of it; None where it has none."""
    chosen = reproduction.scale(scale)
    if not chosen.algorithms:
        return None
    rows = [contender.row for contender in chosen.algorithms]
    for wanted in selection.algorithms:
        if wanted not in rows:
            raise InputError(
                f"--algorithms: '{wanted}' is not part of {reproduction.name}; allowed: {', '.join(rows)}"
            )
    vary = {key: list(values) for key, values in chosen.vary.items()}
    if selection.epsilons:
        vary[EPSILON] = [_plain(epsilon) for epsilon in selection.epsilons]
    parts = [
        Part(
            {ALGORITHM: [each.name], **vary, SEED: list(selection.seeds or each.seeds)},
            each.settings,
            each.row if any(other.label for other in chosen.algorithms) else None,
        )
        for each in chosen.algorithms
        if not selection.algorithms or each.row in selection.algorithms
    ]
    base = _laid_over(reproduction.base, chosen.base)
    return Sweep.of_parts(override(base, dict(parse_override(text) for text in overrides)), parts)


def _plain(number: float) -> float | int:
    """3.0 as 3, so that a budget is written alike wherever it comes from."""
    return int(number) if number == int(number) else number


def _laid_over(
    below: Mapping[str, Mapping[str, Any]], above: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    sections = [*below, *(section for section in above if section not in below)]
    return {section: {**below.get(section, {}), **above.get(section, {})} for section in sections}
