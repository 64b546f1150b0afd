"""No option is read and then ignored: changed alone, each changes the plan, the run or the refusal."""

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import numpy as np
import pytest
from pydantic.fields import FieldInfo
from safetensors.numpy import load_file

from coterie.algorithms import algorithm_names, find_algorithm
from coterie.data import Federation
from coterie.errors import CoterieError, InputError
from coterie.experiment import local
from coterie.experiment.evaluator import wants_references
from coterie.experiment.experiment_file import override, read_experiment, to_yaml
from coterie.experiment.schema import Experiment
from coterie.experiment.sweep import Sweep
from coterie.files import parse_yaml
from coterie.privacy import Unit, calibration
from coterie.settings import Settings

FOLDER = Path(tempfile.mkdtemp()) / "clinics"
"""Four clients with files of their own, of which the last has few records."""


@pytest.fixture(scope="module", autouse=True)
def _clinics() -> Iterator[None]:
    FOLDER.mkdir()
    (FOLDER / "federation.yaml").write_text(
        "task: classification\nlabel: {column: ill, classes: 2}\nfeatures: [{column: age, range: [0, 90]}]\n"
        "person: who\n"
    )
    for number, records in enumerate((60, 60, 60, 40)):
        rows = (
            f"{index % 2},{(7 * index + number) % 90},{number} {index if index % 3 else 0}"
            for index in range(records)
        )
        (FOLDER / f"clinic-{number}.csv").write_text("\n".join(["ill,age,who", *rows]) + "\n")
    yield
    shutil.rmtree(FOLDER.parent)


@pytest.fixture(autouse=True)
def _rough_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise within a factor of two is enough to see what acts, and far quicker to find."""

    def doubled(cost: Callable[[float], float], target: float, *_: float) -> float | None:
        return next((2.0**power for power in range(-2, 20) if cost(2.0**power) <= target), None)

    monkeypatch.setattr(calibration, "smallest_noise", doubled)


SAME_FOR_ALL: dict[str, Any] = {
    "federation": {"sizes": [2, 2], "records_per_client": 40, "test_per_client": 10},
    "schedule": {"rounds": 3, "batch": 20},
    "evaluation": {"references": False},
    "engine": {"workers": 1},
    "privacy": {"delta": 1e-3},
    "seeds": {"noise": 5},
}
OF_UNIT: dict[Unit, dict[str, Any]] = {
    Unit.RECORD: {"algorithm": {"name": "global"}},
    Unit.PERSON: {
        "data": {"name": "folder", "path": str(FOLDER)},
        "federation": {"kind": "natural"},
        "privacy": {"unit": "person"},
        "evaluation": {"kind": "none"},
        "algorithm": {"name": "global"},
    },
    Unit.CLIENT: {
        "federation": {"sizes": [5, 5], "records_per_client": 20, "test_per_client": 5},
        "privacy": {"unit": "client", "delta": 1e-2},
        "algorithm": {"name": "dp-fedavg", "rate": 0.8},
    },
    Unit.WORKER: {
        "federation": {"kind": "groups", "workers": 4, "groups": 2, "records_per_client": 20, "alpha": 1.0},
        "privacy": {"unit": "worker", "delta": 1e-2, "epsilon": 50.0},
        "algorithm": {"name": "dp-ogl", "period": 2, "noise": 9.0},
    },
}
REBALANCED = {"clusters": 2, "rate": 0.8}
ALGORITHMS: dict[tuple[Unit, str], list[dict[str, Any]]] = {
    (Unit.RECORD, "r-dpcfl"): [{}, {"clusters": 2}, {"first_round_release": "update"}],
    (Unit.RECORD, "dp-ifca"): [{"clusters": 2}, {"clusters": 2, "start": "random"}],
    (Unit.RECORD, "km-cdpfl"): [{"clusters": 2}],
    (Unit.RECORD, "rc-dpfl"): [{"clusters": 2}],
    (Unit.CLIENT, "dp-fedavg"): [{"adaptive_clip": {}}],
    (Unit.CLIENT, "dp-ifca"): [
        REBALANCED,
        {**REBALANCED, "rebalance": {"minimum": 2}},
        {**REBALANCED, "rebalance": {"rule": "rebalance", "minimum": 2}},
    ],
    (Unit.CLIENT, "dp-sketch-cluster"): [{"rate": 0.8}, {"rate": 0.8, "rebalance": {"minimum": 2}}],
    (Unit.CLIENT, "gmfsc"): [REBALANCED],
    (Unit.CLIENT, "dp-fesem"): [],  # has the options of dp-ifca
    (Unit.CLIENT, "dp-fedcam"): [],
    (Unit.CLIENT, "dp-fedper"): [],  # has those of dp-fedavg
    (Unit.WORKER, "dp-ogl"): [{"master": {"optimiser": "momentum"}, "noise": 9.0}],
    (Unit.WORKER, "dp-ogl-plus"): [{"period": 2, "noise": 9.0}],
    (Unit.WORKER, "dp-fedavg"): [{"noise": 9.0, "master": {"optimiser": "momentum"}}],
}
"""What the options of an algorithm are changed in; all others begin with none of theirs."""

FEDERATIONS: dict[str, dict[str, Any]] = {
    "clusters": {"sizes": [2, 2], "test_per_client": 10},
    "dirichlet": {"kind": "dirichlet", "clients": 4, "alpha": 1.0},
    "natural": {"kind": "natural", "clients": "enough"},
    "groups": OF_UNIT[Unit.WORKER]["federation"],
}
OTHERS: dict[str, Any] = {
    "privacy.budgets": {"client-0": {"epsilon": 2.0}},
    "privacy.epsilon": 1.0,
    "privacy.adjacency": "replace-one",
    "federation.sizes": [2, 3],
    "federation.structure": "string",
    "federation.clients": 3,
    "federation.minimum_records": 35,
    "federation.records_per_client": 30,
    "model.name": "cnn",
    "model.hidden": 64,
    "model.features": "scattering",
    "algorithm.adaptive_clip": {"count_ratio": 4.0},
    "algorithm.candidates": [2],
    "algorithm.first_round_batch": 5,
    "algorithm.first_round_noise": "shared",
    "algorithm.master": {"lr": 0.5},
    "algorithm.rate": 0.9,
    "algorithm.rebalance": {"minimum": 1},
    "evaluation.scores": ["accuracy", "f1"],
    "schedule.augmentation": {"copies": 2},
    "schedule.augmentation.kinds": ["shift", "flip"],
}
"""Values of keys for which the schema alone names none that fits."""

LISTED: dict[str, str] = {
    "engine.name": "has one value",
    "engine.device": "who executes changes nothing that is released",
    "engine.workers": "who executes changes nothing that is released",
    "engine.max_memory": "who executes changes nothing that is released",
    "data.path": "names the folder that is read",
    "data.pixels": "of data whose files are not here",
    "data.split": "of data whose files are not here",
    "data.length": "of data whose files are not here",
    "data.stride": "of data whose files are not here",
    "data.per_client": "of tables whose package may not be here",
    "model.hidden": "of models for data whose files are not here",
    "model.embedding": "of a model for data whose files are not here",
    "model.layers": "of a model for data whose files are not here",
    "model.order": "of a model for data whose files are not here",
}


def tree(unit: Unit, *changes: Mapping[str, Any]) -> dict[str, Any]:
    found = {**SAME_FOR_ALL}
    for change in (OF_UNIT[unit], *changes):
        for section, keys in change.items():
            fresh = section in ("federation", "algorithm") or section not in found
            found[section] = dict(keys) if fresh else {**found[section], **keys}
    return found


def bases() -> Iterator[tuple[str, dict[str, Any], str]]:
    """A name, an experiment, and the section whose keys are changed in it."""
    for unit in Unit:
        for section in ("privacy", "schedule"):
            yield f"{unit} {section}", tree(unit), section
        # Algorithms for records are those for persons.
        for name in algorithm_names(unit) if unit is not Unit.PERSON else ():
            for own in ALGORITHMS.get((unit, name), [{}]):
                mode = {"privacy": {"mode": "paper"}} if name == "rc-dpfl" else {}
                content = tree(unit, {"algorithm": {"name": name, **own}, **mode})
                yield f"{unit} {name} {own}", content, "algorithm"
    views = {"augmentation": {"copies": 2, "pixels": 1}}
    yield "record views", tree(Unit.RECORD, {"schedule": views}), "schedule"
    for section in ("data", "model", "seeds", "evaluation", "engine"):
        yield f"record {section}", tree(Unit.RECORD), section
    yield "private scores", tree(Unit.RECORD, {"evaluation": {"kind": "private"}}), "evaluation"
    yield "images", tree(Unit.RECORD, {"data": {"name": "glyphs", "size": 600}}), "model"
    yield "glyphs", tree(Unit.RECORD, {"data": {"name": "glyphs", "size": 600}}), "data"
    lines = {"data": {"name": "lines"}, "model": {"name": "linear"}}
    yield "lines", tree(Unit.RECORD, {**lines, "federation": {"kind": "natural"}}), "data"
    for kind, federation in FEDERATIONS.items():
        unit = Unit.WORKER if kind == "groups" else Unit.RECORD
        own = {"data": {"name": "folder", "path": str(FOLDER)}, "evaluation": {"kind": "none"}}
        data = own if kind == "natural" else {}
        yield f"federation {kind}", tree(unit, {"federation": federation, **data}), "federation"


def keys_of(section: Settings, inside: str) -> Iterator[tuple[str, FieldInfo, Any]]:
    """Every key of a section and of the sections inside it, with its value."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        yield f"{inside}{name}", field, value
        if isinstance(value, Settings):
            yield from keys_of(value, f"{inside}{name}.")


def others(annotation: Any, value: Any) -> Iterator[Any]:
    """Values that a key of this type may have instead."""
    for part in get_args(annotation):
        yield from others(part, value)
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
    elif annotation is bool:
        yield not value
    elif annotation is int:
        yield from (value + 1, value - 1) if isinstance(value, int) else (2, 3)
    elif annotation is float:
        yield from (value / 2, value + 0.1) if isinstance(value, float | int) else (0.5, 2.0)
    elif isinstance(annotation, type) and issubclass(annotation, str) and hasattr(annotation, "__members__"):
        yield from (member.value for member in annotation)
    elif annotation is NoneType:
        yield None


def changed(content: Mapping[str, Any], key: str, field: FieldInfo, value: Any) -> Iterator[Experiment]:
    """The experiment with other values of the key, as far as there may be any."""
    for other in [OTHERS[key]] if key in OTHERS else others(field.annotation, value):
        with suppress(InputError):
            experiment = Experiment.model_validate(override(content, {key: other}))
            if experiment != Experiment.model_validate(content):
                yield experiment


DEALT: dict[str, Federation] = {}


@cache
def planned(text: str) -> str:
    """Everything that is known of an experiment before its first round, or why there is none."""
    experiment = Experiment.model_validate(parse_yaml(text))
    dealt = repr(
        (experiment.data, experiment.federation, experiment.seeds.simulation, experiment.privacy.persons)
    )
    try:
        experiment.check_all_acts()
        if dealt not in DEALT:
            DEALT[dealt] = local.load_federation(experiment)
        calibrated = local.calibrate(experiment, DEALT[dealt])
    except CoterieError as mistake:
        return f"refused: {mistake}"
    known = (
        calibrated.plan.digest(),
        calibrated.budgets,
        calibrated.guarantee.to_json(),
        calibrated.context(),
        calibrated.algorithm.local_training(),
        DEALT[dealt].fingerprint(),
        experiment.evaluation_kind,
        experiment.evaluation.due(experiment.evaluation_kind, experiment.schedule.rounds),
        wants_references(experiment, DEALT[dealt], calibrated.facts.parameters),
        [value.tobytes() for value in vars(calibrated.start()).values() if isinstance(value, np.ndarray)],
    )
    return repr(known)


@cache
def ran(text: str) -> str:
    """What a run leaves of its state."""
    with tempfile.TemporaryDirectory() as scratch:
        local.run(Experiment.model_validate(parse_yaml(text)), Path(scratch) / "run")
        [arrays] = Path(scratch).rglob("state.safetensors")
        state = [*arrays.parent.glob("*.json")]
        found = {name: value.tobytes() for name, value in sorted(load_file(arrays).items())}
        return repr((found, [path.read_text() for path in state]))


def the_same(base: Experiment, other: Experiment) -> bool:
    texts = to_yaml(base), to_yaml(other)
    if planned(texts[0]) != planned(texts[1]):
        return False
    return planned(texts[0]).startswith("refused") or ran(texts[0]) == ran(texts[1])


CASES = {name: (content, section) for name, content, section in bases()}
SELECTORS = ("algorithm.name", "data.name", "federation.kind", "privacy.unit")
"""They decide which keys there are."""


@cache
def places() -> dict[str, list[tuple[str, FieldInfo, Any]]]:
    """Where each key of each kind of section can be changed: by the experiment, its field and its value."""
    found: dict[str, list[tuple[str, FieldInfo, Any]]] = {}
    for name, (content, section) in CASES.items():
        own = getattr(Experiment.model_validate(content), section)
        for key, field, value in keys_of(own, f"{section}."):
            if key not in SELECTORS:
                found.setdefault(f"{type(own).__name__} {key}", []).append((name, field, value))
    return found


@pytest.mark.parametrize("place", [place for place in places() if place.split()[1] not in LISTED])
def test_a_key_that_is_changed_alone_changes_something(place: str) -> None:
    key, acted = place.split()[1], False
    for name, field, value in places()[place]:
        base = Experiment.model_validate(CASES[name][0])
        assert not planned(to_yaml(base)).startswith("refused"), planned(to_yaml(base))
        tried = list(changed(CASES[name][0], key, field, value))
        different = [other for other in tried[:3] if not the_same(base, other)]
        assert different or not tried, f"{key} changes nothing in: {name}"
        acted = acted or any(not planned(to_yaml(other)).startswith("refused") for other in different)
    assert acted, f"{key}: refused wherever it was tried"


def test_few_keys_change_nothing_and_each_for_a_reason() -> None:
    known = {place.split()[1] for place in places()}
    assert set(LISTED) <= known
    assert len(LISTED) <= 15
    assert {key.partition(".")[0] for key in known} == set(Experiment.model_fields)
    for unit in Unit:
        for name in algorithm_names(unit):
            settings = find_algorithm(unit, name).settings_type
            keys = (f"{settings.__name__} algorithm.{key}" for key in settings.model_fields if key != "name")
            assert set(keys) <= set(places())


CLIENTS = "privacy: {unit: client}\nalgorithm: {name: dp-ifca, clusters: 2, %s}"
WORKERS = "privacy: {unit: worker, clip: %s}\nalgorithm: {name: dp-ogl, %s}\nschedule: {epochs: %s}\n"
WORKERS += "federation: {kind: groups, workers: 4, groups: 2}"
IN_VAIN = {
    CLIENTS % "rebalance: {rule: rebalance}": r"algorithm.rebalance.rule: rebalance.*minimum above 0",
    CLIENTS % "rebalance: {rule: none, minimum: 5}": r"algorithm.rebalance.minimum: 5.*rule route or",
    CLIENTS
    % "rebalance: {minimum: 0, histogram_ratio: 9}": r"algorithm.rebalance.histogram_ratio: 9.0 has no",
    CLIENTS % "rebalance: {memory: 0.5}": r"algorithm.rebalance.memory: 0.5 has no effect here; it acts with",
    CLIENTS
    % "rebalance: {minimum: 2, identifier_ratio: 3}": r"algorithm.rebalance.identifier_ratio: 3.0 has no",
    CLIENTS % "revive: false": r"algorithm.revive: False has no effect here",
    CLIENTS % "start: random, perturbation: 0.1": r"algorithm.perturbation: 0.1.*algorithm.start near",
    WORKERS
    % (1, "master: {optimiser: plain, momentum: 0.5}", 1): r"algorithm.master.momentum: 0.5 has no effect",
    WORKERS % (3, "clip: 2", 1): r"privacy.clip: 3.0 has no effect here; it acts with algorithm.clip null",
    WORKERS % (1, "iterations: 2", 3): r"schedule.epochs: 3.*algorithm.iterations null",
    "algorithm: {clusters: 2, candidates: [2, 3]}": r"algorithm.candidates: \[2, 3\].*clusters auto",
    "algorithm: {first_round_batch: 5}": r"algorithm.first_round_batch: 5.*first_round_release update",
    "algorithm: {first_round_release: update, sketch_dimensions: 9}": r"sketch_dimensions: 9 has no effect",
    "algorithm: {selection_share: 0.1}\nprivacy: {epsilon: .inf}": r"selection_share: 0.1.*below .inf",
    "federation: {records_per_client: 40, test_share: 0.4}": r"test_share: 0.4.*records_per_client null",
    "federation: {test_share: 0.4}\ndata: {name: mnist}": r"federation.test_share: 0.4.*data that have no",
    "federation: {sizes: [4], shift: label}": r"federation.shift: label has no effect here; it acts with two",
    "federation: {kind: groups, workers: 4, groups: 2}": r"federation.groups: 2.*privacy.unit worker",
    "evaluation: {epsilon: 0.5}": r"evaluation.epsilon: 0.5.*evaluation.kind private",
    "evaluation: {scores: [accuracy, f1]}": r"evaluation.scores: \['accuracy', 'f1'\].*evaluation.kind priv",
    "evaluation: {kind: none, every: 2}": r"evaluation.every: 2 has no effect here",
    "schedule: {augmentation: {kinds: [flip], pixels: 1}}": r"schedule.augmentation.pixels: 1.*kinds shift",
    "schedule: {rounds: 1, averaging: 3}\nalgorithm: {name: global}": r"schedule.averaging: 3.0.*rounds 2 or",
    "engine: {device: cuda, workers: 2}": r"engine.workers: 2 has no effect here",
    "privacy: {records_per_person: 2}": r"privacy.records_per_person: 2.*privacy.unit person",
    "privacy: {clients_per_person: 2}": r"privacy.clients_per_person: 2.*privacy.unit person",
}


@pytest.mark.parametrize("text", IN_VAIN, ids=lambda text: text.replace("\n", " ")[-70:])
def test_what_cannot_act_is_one_line_that_says_what_would_make_it(text: str, tmp_path: Path) -> None:
    path = tmp_path / "experiment.yaml"
    path.write_text(text)
    stored = read_experiment(path)  # what a run was begun with stays readable
    with pytest.raises(InputError, match=IN_VAIN[text]) as caught:
        local.calibrate(stored)
    assert "\n" not in str(caught.value)
    assert " has no effect here; it acts with " in str(caught.value)


def test_defaults_never_err() -> None:
    Experiment().check_all_acts()
    for unit in Unit:
        for name in algorithm_names(unit):
            settings = find_algorithm(unit, name).settings_type(name=name)
            Experiment.model_validate(
                {"privacy": {"unit": unit}, "algorithm": settings.model_dump()}
            ).check_all_acts()


SWEEP = """
base: {algorithm: {name: r-dpcfl, %s}}
grid: {algorithm.clusters: [%s], seeds.simulation: [1, 2]}
"""


def test_a_base_key_that_cannot_act_in_a_cell_is_left_out_there_with_one_note(tmp_path: Path) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text(SWEEP % ("candidates: [2, 3]", "auto, 3"))
    sweep = Sweep.read(path)
    tried = [cell.experiment.algorithm.model_dump()["candidates"] for cell in sweep.checked()]
    assert tried == [(2, 3), (2, 3), tuple(range(2, 11)), tuple(range(2, 11))]
    assert sweep.notes == ["algorithm.candidates has no effect in 2 of 4 cells and is left out there"]
    path.write_text(SWEEP % ("candidates: [2, 3]", "3"))
    with pytest.raises(InputError, match=r"base: algorithm.candidates: \[2, 3\] has no effect here"):
        Sweep.read(path).checked()
    path.write_text((SWEEP % ("", "3")).replace("[1, 2]", "[1], algorithm.candidates: [[2, 3]]"))
    with pytest.raises(InputError, match=r"algorithm.candidates: \[2, 3\] has no effect here"):
        Sweep.read(path).checked()
    assert len(Sweep.read(path).cells()) == 1  # of a comparison that was begun before
