"""Truth values are no numbers, however a file writes them."""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from pydantic import Field, ValidationError

from coterie.errors import InputError
from coterie.experiment.experiment_file import read_experiment
from coterie.experiment.schema import Experiment
from coterie.experiment.sweep import Sweep
from coterie.settings import Settings, explain


def subclasses(of: type[Settings]) -> Iterator[type[Settings]]:
    for cls in of.__subclasses__():
        yield cls
        yield from subclasses(cls)


CLASSES = sorted(
    {cls for cls in subclasses(Settings) if cls.__module__.startswith("coterie.")}, key=lambda cls: str(cls)
)


def mistakes(cls: type[Settings], key: str, value: object) -> list[Any]:
    try:
        cls.model_validate({key: value})
    except ValidationError as found:
        return [(error["loc"], error["type"]) for error in found.errors()]
    except InputError as found:
        return [str(found)]
    return []


def numeric(annotation: Any) -> bool:
    text = str(annotation)
    return ("int" in text or "float" in text) and "bool" not in text and "Any" not in text


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_no_number_of_any_section_takes_a_truth_value(cls: type[Settings]) -> None:
    if cls is Experiment:
        return  # holds sections alone
    for name, field in cls.model_fields.items():
        if numeric(field.annotation):
            for value in (True, False, *([[1, True], (False,)] if "tuple" in str(field.annotation) else ())):
                assert mistakes(cls, name, value) == [((name,), "truth")], (name, value)


def test_there_are_numbers_to_look_at() -> None:
    found = [name for cls in CLASSES for name, field in cls.model_fields.items() if numeric(field.annotation)]
    assert len(CLASSES) > 30
    assert {"noise", "clip", "lr", "rounds", "delta", "candidates", "missing_values", "workers"} <= set(found)


WILD = (None, True, 7, -1.5, "x", "", [], [1], ["x", ["y"]], [None], {}, {"x": 1}, [[{}]], 10**30, math.nan)
INTERNAL = re.compile(r"function-|constrained-|literal\[|tuple|valid |Value error|<class|Input|__\w+__")


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_no_mistake_is_told_in_the_words_of_the_library_that_found_it(cls: type[Settings]) -> None:
    for name in (*cls.model_fields, "bogus"):
        for value in WILD:
            try:
                cls.model_validate({name: value})
            except ValidationError as mistakes:
                told = explain(mistakes, cls)
            except InputError as mistake:
                told = str(mistake)
            else:
                continue
            assert not INTERNAL.search(told), told
            assert "\n" not in told
            assert told.count("did you mean") < 2


IN_A_FILE = {
    "seeds: {noise: false}": r"seeds.noise: False is not allowed, no truth value",
    "seeds: {noise: off}": r"seeds.noise: 'off' is not allowed",
    "seeds: {simulation: yes}": r"seeds.simulation: 'yes' is not allowed",
    "privacy: {delta: true}": r"privacy.delta: True is not allowed",
    "privacy: {budgets: {a: {epsilon: yes}}}": r"privacy.budgets.a.epsilon: 'yes' is not allowed",
    "schedule: {lr: on}": r"schedule.lr: 'on' is not allowed",
    "algorithm: {name: r-dpcfl, clusters: no}": r"algorithm.clusters: 'no' is not allowed",
    "algorithm: {name: r-dpcfl, first_round_noise: False}": r"algorithm.first_round_noise: False",
    "algorithm: {name: r-dpcfl, candidates: [2, true]}": r"algorithm.candidates: \[2, True\]",
    "federation: {kind: clusters, sizes: [true, 3]}": r"federation.sizes: \[True, 3\]",
    "engine: {workers: TRUE}": r"engine.workers: True",
    "evaluation: {references: yes}": r"evaluation.references: 'yes' is not allowed",
    "privacy: {unit: client}\nalgorithm: {name: dp-ifca, revive: off}": r"algorithm.revive: 'off'",
}


@pytest.mark.parametrize(("text", "line"), IN_A_FILE.items())
def test_a_truth_value_for_a_number_is_one_line_that_names_the_key(
    text: str, line: str, tmp_path: Path
) -> None:
    path = tmp_path / "experiment.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=line) as caught:
        read_experiment(path)
    assert "\n" not in str(caught.value)


def test_a_truth_value_on_the_command_line_is_no_seed() -> None:
    for text in ("seeds.noise=no", "seeds.noise=false", "schedule.rounds=yes"):
        with pytest.raises(InputError, match="is not allowed"):
            read_experiment(None, [text])
    assert read_experiment(None, ["seeds.noise=0"]).seeds.noise == 0
    assert read_experiment(None, ["seeds.noise=null"]).seeds.noise is None


def test_what_is_true_or_false_still_is() -> None:
    for value in (True, False, "auto"):
        assert Experiment.model_validate({"evaluation": {"references": value}}).evaluation.references == value
    chosen = Experiment.model_validate(
        {"privacy": {"unit": "client"}, "algorithm": {"name": "dp-ifca", "revive": False}}
    )
    assert chosen.algorithm.revive is False  # type: ignore[attr-defined]


def test_sections_inside_a_section_look_for_themselves() -> None:
    class Inner(Settings):
        flag: bool = False
        count: int = 1

    class Outer(Settings):
        inner: dict[str, Inner] = Field(default_factory=dict)
        several: tuple[Inner, ...] = ()
        choice: Literal[1, 2] | Inner = 1
        names: dict[str, str] = Field(default_factory=dict)
        numbers: dict[str, int] = Field(default_factory=dict)

    good = {"inner": {"a": {"flag": True}}, "several": [{"flag": True}], "choice": {"flag": True}}
    assert Outer.model_validate(good).inner["a"].flag
    for bad in (
        {"inner": {"a": {"count": True}}},
        {"several": [{"count": True}]},
        {"choice": True},
        {"choice": {"count": True}},
        {"numbers": {"a": True}},
    ):
        with pytest.raises(ValidationError, match="no truth value is meant"):
            Outer.model_validate(bad)


def test_a_grid_of_truth_values_is_no_grid_of_numbers(tmp_path: Path) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text(yaml.safe_dump({"base": {}, "grid": {"seeds.simulation": [0, True]}}))
    with pytest.raises(InputError, match=r"seeds.simulation: True is not allowed"):
        Sweep.read(path).cells()
