"""Published experiments as they are declared in YAML files, and the sweep of runs that each stands for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import resources
from typing import Any

from pydantic import Field, ValidationError

from coterie.errors import InputError
from coterie.experiment.experiment_file import override, parse_overrides, within
from coterie.experiment.sweep import Part, Sweep
from coterie.files import parse_yaml
from coterie.models.settings import NONE
from coterie.settings import Settings, explain

EPSILON = "privacy.epsilon"
ALGORITHM = "algorithm.name"
SEED = "seeds.simulation"


class ScaleName(StrEnum):
    """How much of the publication's experiment is run."""

    QUICK = "quick"
    PAPER = "paper"


class Source(Settings):
    """Where the printed numbers stand; `rows` has the publication's names of rows that we call otherwise."""

    source: str
    data: str
    shift: str
    rows: Mapping[str, str] = Field(default_factory=dict)


class Contender(Settings):
    """One algorithm of a reproduction."""

    name: str
    seeds: tuple[int, ...] = Field(min_length=1)
    label: str | None = None
    settings: Mapping[str, Any] = Field(default_factory=dict, alias="set")

    @property
    def row(self) -> str:
        return self.label or self.name


class OnFeatures(Settings):
    """What a size of an experiment is like where models see public features; what is empty is as without.

    Args:
        base: laid over the size's own, section by section.
    """

    base: Mapping[str, Mapping[str, Any]] = Field(default_factory=dict)
    vary: Mapping[str, tuple[Any, ...]] = Field(default_factory=dict)
    algorithms: tuple[Contender, ...] = ()
    differs: tuple[str, ...] = Field(min_length=1)


class ExperimentScale(Settings):
    """One size of a published experiment: its runs, and what differs from the publication.

    Args:
        best_of: a key that varies: of its values, each row shows the one with the best average accuracy.
        panels: rows that share a chart of accuracy and one of loss, by what the charts are called.
        matrices: rows of which the figure `leakage` draws who learns how much about whom; by default all.
        references: epochs of the central models for F_acc and F_loss; 0 trains none.
        features: with `--set model.features=...`, the schedule that suits a head on features.
    """

    base: Mapping[str, Mapping[str, Any]] = Field(default_factory=dict)
    vary: Mapping[str, tuple[Any, ...]] = Field(default_factory=dict)
    best_of: str | None = None
    algorithms: tuple[Contender, ...] = ()
    differs: tuple[str, ...] = ()
    panels: Mapping[str, tuple[str, ...]] = Field(default_factory=dict)
    matrices: tuple[str, ...] = ()
    references: int = Field(0, ge=0)
    features: OnFeatures | None = None

    def on_features(self) -> "ExperimentScale":
        """This size where models see public features."""
        own = self.features
        if own is None:
            return self
        changes = {
            "base": {
                name: {**self.base.get(name, {}), **own.base.get(name, {})}
                for name in {**self.base, **own.base}
            },
            "vary": own.vary or self.vary,
            "best_of": None if own.vary and self.best_of not in own.vary else self.best_of,
            "algorithms": own.algorithms or self.algorithms,
            "differs": own.differs,
            "references": 0,
            "features": None,
        }
        return self.model_copy(update=changes)


class PublishedExperiment(Settings):
    """A published experiment in all its sizes."""

    name: str
    title: str
    line: str
    publication: Source | None = None
    base: Mapping[str, Mapping[str, Any]] = Field(default_factory=dict)
    scales: Mapping[ScaleName, ExperimentScale]
    figures: tuple[str, ...] = ()

    def at(self, scale: ScaleName, overrides: Sequence[str] = ()) -> ExperimentScale:
        """One of its sizes, as these overrides want it."""
        found = self.scales[scale]
        return found.on_features() if sees_features(overrides) else found


def sees_features(overrides: Sequence[str]) -> bool:
    """Whether these overrides put public features before the models."""
    return bool(parse_overrides(overrides).get("model.features", NONE) != NONE)


@dataclass(frozen=True)
class Subset:
    """A part of a reproduction; what is empty is not narrowed."""

    epsilons: tuple[float, ...] = ()
    algorithms: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()


EVERYTHING = Subset()


def names() -> list[str]:
    """What can be reproduced."""
    return sorted(
        entry.name.removesuffix(".yaml")
        for entry in resources.files(__package__).iterdir()
        if entry.name.endswith(".yaml")
    )


def find(name: str) -> PublishedExperiment:
    """The published experiment of that name."""
    if name not in names():
        raise InputError(f"{name}: no such reproduction; allowed: {', '.join(names())}")
    text = resources.files(__package__).joinpath(f"{name}.yaml").read_text(encoding="utf-8")
    return parse(name, text)


def parse(name: str, text: str) -> PublishedExperiment:
    """A published experiment from the text of its file."""
    try:
        return PublishedExperiment.model_validate({**parse_yaml(text), "name": name})
    except ValidationError as mistakes:
        raise InputError(f"reproduction {name}: {explain(mistakes, PublishedExperiment)}") from None


def _refuse_in_vain(changes: Mapping[str, Any], selection: Subset, rows: Sequence[str]) -> None:
    """What an option of its own decides is not set twice."""
    for key, option, given in (
        (ALGORITHM, "--algorithms", True),
        (EPSILON, "--epsilon", bool(selection.epsilons)),
        (SEED, "--seeds", bool(selection.seeds)),
    ):
        if given and key in changes:
            allowed = f"; allowed: {', '.join(rows)}" if key == ALGORITHM else ""
            raise InputError(f"--set {key}: {option} says which{allowed}")


def _stronger(changes: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Overrides that in the base would be lost: an algorithm's own, and what a row sets otherwise."""
    return {
        key: value
        for key, value in changes.items()
        if key.startswith("algorithm.") or any(within(key, own) or within(own, key) for own in settings)
    }


def sweep_of(
    published: PublishedExperiment,
    scale: ScaleName,
    selection: Subset = EVERYTHING,
    overrides: Sequence[str] = (),
) -> Sweep | None:
    """The runs of a published experiment, or of a part of it; None where it has none."""
    chosen = published.at(scale, overrides)
    rows = [contender.row for contender in chosen.algorithms]
    if not rows:
        chosen_from = f"{published.name} has no runs to choose from or to change"
        InputError.when(selection != EVERYTHING or bool(overrides), chosen_from)
        return None
    for wanted in selection.algorithms:
        if wanted not in rows:
            raise InputError(
                f"--algorithms: '{wanted}' is not part of {published.name}; allowed: {', '.join(rows)}"
            )
    changes = parse_overrides(overrides)
    _refuse_in_vain(changes, selection, rows)
    vary = {
        key: [changes.pop(key)] if key in changes else list(values) for key, values in chosen.vary.items()
    }
    seeds = [changes.pop(SEED)] if SEED in changes else list(selection.seeds)
    if selection.epsilons:
        # 3.0 as 3, so that a budget is written alike wherever it comes from.
        vary[EPSILON] = [int(each) if float(each).is_integer() else each for each in selection.epsilons]
    labelled = any(contender.label for contender in chosen.algorithms)
    parts = [
        Part(
            {ALGORITHM: [each.name], **vary, SEED: seeds or list(each.seeds)},
            {**each.settings, **_stronger(changes, each.settings)},
            each.row if labelled else None,
        )
        for each in chosen.algorithms
        if not selection.algorithms or each.row in selection.algorithms
    ]
    sections = dict.fromkeys([*published.base, *chosen.base])
    base = {name: {**published.base.get(name, {}), **chosen.base.get(name, {})} for name in sections}
    return Sweep.of_parts(override(base, changes), parts)
