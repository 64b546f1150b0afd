"""Users' own algorithms, data, federations and models: found by name, checked, charged, written down."""

from __future__ import annotations

import json
import shutil
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import own_package
from coterie.algorithms.record.global_model import Global
from coterie.algorithms.worker.dp_ogl import DPOGL
from coterie.data import Client, Dataset, Federation, Records, Task
from coterie.errors import DataError, InputError, LedgerError, PlanError
from coterie.experiment import local
from coterie.experiment.callbacks import Callbacks
from coterie.experiment.experiment_file import read_recorded, to_yaml
from coterie.experiment.own_code import EVERYONE_SEES, OWN_ALGORITHM, OWN_DATA, OWN_FEDERATION
from coterie.experiment.recorded import recount
from coterie.experiment.schema import EvaluationKind, Experiment
from coterie.experiment.verify import verify
from coterie.files import parse_yaml
from coterie.models import OWN_CODE
from coterie.plugins import ALGORITHM
from coterie.privacy import Guarantee, PlannedRelease, PoissonSteps
from coterie.privacy.plans import plan_of
from own_package import EXAMPLE

SHORT = {
    "algorithm": {"name": "half"},
    "data": {"name": "sensors", "readings": 240, "published": True},
    "federation": {"kind": "sites", "clients": 3},
    "model": {"name": "narrow"},
}
LONG = {
    "algorithm": {"name": "own_algorithm.algorithm:Half"},
    "data": {**SHORT["data"], "name": "own_algorithm.data:sensors"},
    "federation": {**SHORT["federation"], "kind": "own_algorithm.federation:sites"},
    "model": {"name": "own_algorithm.model:narrow"},
}
QUICK = {"schedule": {"rounds": 2, "batch": 20}, "privacy": {"delta": 1e-3}, "engine": {"device": "cpu"}}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The example's package as if it were installed."""
    own_package.put_on_path(monkeypatch, EXAMPLE, own_package.announce(EXAMPLE, tmp_path / "installed"))
    yield
    own_package.forget()


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module of somebody's, to put things into."""
    made = types.ModuleType("somebodys")
    monkeypatch.setitem(sys.modules, "somebodys", made)
    return made


def experiment(**sections: Any) -> Experiment:
    return Experiment.model_validate({**QUICK, **sections})


# --- names ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("installed")
def test_short_names_and_places_are_the_same_code() -> None:
    ran = [local.calibrate(experiment(**sections)) for sections in (SHORT, LONG)]
    assert ran[0].plan.digest() == ran[1].plan.digest()
    assert type(ran[0].algorithm) is type(ran[1].algorithm)
    assert ran[0].population.records == {f"site-{number}": 60 for number in range(3)}
    caveats = {OWN_ALGORITHM, OWN_DATA, OWN_FEDERATION, OWN_CODE}
    assert all(caveats <= set(run.guarantee.caveats) for run in ran)


def test_what_nobody_announces_is_refused_with_all_that_is_allowed(installed: None) -> None:
    for section, text in (
        ({"algorithm": {"name": "halv"}}, r"algorithm.name: 'halv' .*did you mean half\?.*, half or package"),
        (
            {"data": {"name": "sensor"}},
            r"data.name: 'sensor' \(did you mean sensors\?\); allowed: digits, .*",
        ),
        ({"federation": {"kind": "site"}}, r"federation.kind: 'site' \(did you mean sites\?\); allowed: clu"),
        ({"model": {"name": "narow"}}, r"model.name: 'narow' \(did you mean narrow\?\); allowed: softmax"),
    ):
        with pytest.raises(InputError, match=text):
            experiment(**section)


@pytest.mark.usefixtures("installed")
def test_a_name_that_two_packages_announce_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    info = tmp_path / "other-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[coterie.algorithms]\nhalf = other:Half\nglobal = other:Half\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(InputError, match="'half' is announced by several packages, as other:Half and as own"):
        experiment(algorithm={"name": "half"})
    assert not experiment(algorithm={"name": "global"}).own_algorithm


WRONG = {
    "nowhere:Half": r"algorithm.name: nowhere:Half: ModuleNotFoundError: No module named 'nowhere'",
    "somebodys:Gone": r"algorithm.name: somebodys:Gone: AttributeError",
    "somebodys:": r"algorithm.name: 'somebodys:' is not known for unit 'record'; allowed: dp-ifca",
    "somebodys:number": r"not a subclass of coterie.algorithms.protocol.Algorithm",
    "somebodys:DPOGL": r"it is for privacy.unit worker, the experiment says record",
    "coterie.algorithms.protocol:Algorithm": r"it lacks models, plan, round, start",
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_algorithm_is_one_line(module: types.ModuleType, name: str) -> None:
    module.number, module.DPOGL = 3, DPOGL  # type: ignore[attr-defined]
    with pytest.raises(InputError, match=WRONG[name]):
        experiment(algorithm={"name": name})


def test_an_algorithm_outside_the_package_is_not_known_by_its_class_name_alone() -> None:
    type("Half", (Global,), {"name": "somebodys-half", "__module__": "somebodys"})
    with pytest.raises(InputError, match="'somebodys-half' is not known for unit 'record'"):
        experiment(algorithm={"name": "somebodys-half"})


def returning(kind: type, function: Any) -> Any:
    """The function, annotated to return that."""
    function.__annotations__["return"] = kind
    return function


# --- options -------------------------------------------------------------------------------------------

MISTAKES = {
    "data: {name: sensors, colour: red}": r"data.colour: unknown key; known here: readings, width",
    "data: {name: sensors, reading: 3}": r"data.reading: unknown key; did you mean 'readings'\?",
    "data: {name: sensors, readings: many}": r"data.readings: 'many' is not allowed, should be an integer",
    "data: {name: sensors, width: true}": r"data.width: True is not allowed, no truth value",
    "data: {name: sensors, seed: 3}": r"data.seed: unknown key",
    "data: {name: sensors, published: perhaps}": r"data.published: 'perhaps' is not allowed",
    "federation: {kind: sites, sizes: [3]}": r"federation.sizes: unknown key; .*here: clients, held_out",
    "federation: {kind: sites, clients: [3]}": r"federation.clients: \[3\] is not allowed, should be an int",
    "algorithm: {name: half, share: 2}": r"algorithm.share: 2 is not allowed, .*share is share of the",
    "algorithm: {name: half, clusters: 2}": r"algorithm.clusters: unknown key; known here: name, share",
    "model: {name: narrow, hidden: 3}": r"model.hidden: narrow has no such option",
    "data: {name: digits, readings: 3}": r"data.readings: unknown key",
    "data: {name: digits, published: true}": r"data.published: unknown key",
}


@pytest.mark.parametrize("text", MISTAKES)
@pytest.mark.usefixtures("installed")
def test_an_option_that_is_not_the_functions_own_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=MISTAKES[text]):
        experiment(**parse_yaml(text))


def test_a_function_whose_options_cannot_be_told_is_one_line(module: types.ModuleType) -> None:
    module.needs = returning(Dataset, lambda seed, beds: None)  # type: ignore[attr-defined]
    with pytest.raises(InputError, match=r"data.beds: missing"):
        experiment(data={"name": "somebodys:needs"})
    module.odd = 3  # type: ignore[attr-defined]
    with pytest.raises(InputError, match=r"data.name: somebodys:odd: its options are not clear \(TypeError"):
        experiment(data={"name": "somebodys:odd"})


@pytest.mark.parametrize("name", ["os:system", "os:listdir", "own_algorithm.federation:sites"])
@pytest.mark.usefixtures("installed")
def test_a_file_cannot_call_just_any_function(name: str, tmp_path: Path) -> None:
    line = rf"data.name: {name}: (allowed: a function annotated -> Dataset|its options are not clear)"
    with pytest.raises(InputError, match=line):
        experiment(data={"name": name, "command": f"touch {tmp_path / 'called'}"})
    assert not (tmp_path / "called").exists()


def test_options_that_were_set_reach_the_function_and_the_file(module: types.ModuleType) -> None:
    got: dict[str, object] = {}

    def take(beds: int, *, ward: tuple[str, ...] = ("a",), **others: int) -> Dataset:
        got.update(beds=beds, ward=ward, others=others)
        raise DataError("enough")

    module.take = take  # type: ignore[attr-defined]
    chosen = experiment(data={"name": "somebodys:take", "beds": "3", "ward": ["x", "y"]})
    with pytest.raises(DataError, match="enough"):
        local.load_federation(chosen)
    assert got == {"beds": 3, "ward": ("x", "y"), "others": {}}
    assert parse_yaml(to_yaml(chosen))["data"]["ward"] == ["x", "y"]
    with pytest.raises(InputError, match=r"data.others: unknown key"):
        experiment(data={"name": "somebodys:take", "beds": 3, "others": 1})


# --- what functions return -----------------------------------------------------------------------------


def dataset(**changes: Any) -> Dataset:
    rows = np.linspace(-1, 1, 40, dtype=np.float32).reshape(20, 2)
    whole = Dataset("t", Records(rows, np.arange(20) % 2), None, Task("classification", (2,), 2), "")
    return replace(whole, **changes)


def raises(seed: int) -> Dataset:
    raise ValueError("the record of Ada is 42")


RETURNED = {
    "returned a int; allowed: a coterie.data.Dataset": lambda: 3,
    "its train is a list; allowed: Records": lambda: dataset(train=[1]),
    "train: features of type float64": lambda: dataset(
        train=Records(np.zeros((4, 2)), np.zeros(4, np.int64))
    ),
    "train: a list; allowed: numpy arrays": lambda: dataset(
        train=Records([[1.0, 2.0]], np.zeros(1, np.int64))
    ),
    "test: row 0 has label 7": lambda: dataset(
        test=Records(np.zeros((1, 2), np.float32), np.full(1, 7, np.int64))
    ),
    "its task is a str; allowed: a Task": lambda: dataset(task="classification"),
}


@pytest.mark.parametrize("line", RETURNED)
def test_data_that_nothing_could_be_made_of_are_one_line(module: types.ModuleType, line: str) -> None:
    module.make = returning(Dataset, RETURNED[line])  # type: ignore[attr-defined]
    with pytest.raises(InputError, match=f"data.name: somebodys:make:? {line}"):
        local.load_federation(experiment(data={"name": "somebodys:make"}))


def test_what_a_function_raises_says_nothing_of_records(module: types.ModuleType) -> None:
    module.make = raises  # type: ignore[attr-defined]
    with pytest.raises(InputError, match=rf"data.name: somebodys:make: ValueError at {__file__}:\d+$"):
        local.load_federation(experiment(data={"name": "somebodys:make"}))


def test_a_federation_that_cannot_be_run_is_one_line(module: types.ModuleType) -> None:
    def deal(dataset: Dataset) -> Federation:
        none = dataset.train.take(slice(0, 0))
        return Federation((Client("a", dataset.train, none, none),), dataset.task)

    module.make, module.deal = returning(Dataset, lambda: dataset()), deal  # type: ignore[attr-defined]
    chosen = experiment(data={"name": "somebodys:make"}, federation={"kind": "somebodys:deal"})
    with pytest.raises(DataError, match=r"federation.kind: somebodys:deal: client a: no test records"):
        local.load_federation(chosen)


def test_a_held_out_share_that_cannot_act_is_refused_once_that_is_known(module: types.ModuleType) -> None:
    module.make = returning(Dataset, lambda: dataset(test=dataset().train))  # type: ignore[attr-defined]
    sections = {"data": {"name": "somebodys:make"}}
    kind = {"kind": "dirichlet", "clients": 2, "alpha": 100}
    assert local.load_federation(experiment(**sections, federation=kind)).task == dataset().task
    with pytest.raises(
        InputError, match=r"federation.test_share: 0.5 has no effect here; t has test records"
    ):
        local.load_federation(experiment(**sections, federation={**kind, "test_share": 0.5}))


@pytest.mark.usefixtures("installed")
def test_scores_of_own_data_are_private_unless_they_are_said_to_be_published() -> None:
    kinds = {
        said: experiment(data={"name": "sensors", **said_in}).evaluation_kind
        for said, said_in in (("nothing", {}), ("no", {"published": False}), ("yes", {"published": True}))
    }
    assert kinds == {
        "nothing": EvaluationKind.PRIVATE,
        "no": EvaluationKind.PRIVATE,
        "yes": EvaluationKind.EXACT,
    }


# --- plans ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Free(PoissonSteps):
    """Claims to cost nothing."""

    tag = "free"


def test_a_plan_of_own_code_is_made_of_our_mechanisms_and_for_what_was_asked(
    module: types.ModuleType,
) -> None:
    class Strange(Global):
        changed: dict[str, Any] = {}  # noqa: RUF012

        def plan(self, facts: Any) -> Any:
            return replace(super().plan(facts), **self.changed)

    module.Strange = Strange  # type: ignore[attr-defined]
    chosen = experiment(algorithm={"name": "somebodys:Strange"})
    known = local.calibrate(chosen)
    assert OWN_ALGORITHM in known.guarantee.caveats
    ours = known.plan
    first = ours.units[0].releases[0]
    mine = PlannedRelease("mine", Free(**vars(first.mechanism)), 1)
    for changes, line in (
        (
            {"units": plan_of(ours.unit, ours.adjacency, {"a": [mine]}).units},
            "has parts that are not of coterie.privacy: Free",
        ),
        ({"threat": replace(ours.threat, observers="nobody")}, "speaks of other observers"),
    ):
        Strange.changed = changes
        with pytest.raises(PlanError, match=f"algorithm.name: somebodys:Strange: its plan .*{line}"):
            local.calibrate(chosen, known.federation)


def test_what_own_code_shows_to_whom_is_not_believed(module: types.ModuleType) -> None:
    """A variant of dp-ogl outside the package pays for everyone seeing everything: more noise, no leakage."""
    module.Mine = type("Mine", (DPOGL,), {"__module__": "somebodys"})  # type: ignore[attr-defined]
    sections = {
        "federation": {"kind": "groups", "structure": "ring", "workers": 6, "groups": 6},
        "privacy": {"unit": "worker", "epsilon": 20, "delta": 1e-5},
        "schedule": {"rounds": 2, "batch": 20},
    }
    ours, own = (
        local.calibrate(experiment(**sections, algorithm={"name": name}))
        for name in ("dp-ogl", "somebodys:Mine")
    )
    noise = [next(iter(run.plan.units[0].releases)).mechanism.multiplier for run in (ours, own)]
    assert noise[1] > noise[0]
    assert own.leakage_facts() is None
    assert EVERYONE_SEES in own.guarantee.caveats
    assert own.guarantee.epsilon <= 20


# --- runs ----------------------------------------------------------------------------------------------


class Stop(Exception):
    pass


def stop(report: object) -> None:
    raise Stop


def test_a_run_says_which_code_it_was_and_goes_on_with_no_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "copy"
    shutil.copytree(EXAMPLE, package)
    own_package.put_on_path(monkeypatch, package, own_package.announce(package, tmp_path / "installed"))
    chosen, out = experiment(**SHORT), tmp_path / "run"
    with pytest.raises(Stop):
        local.run(chosen, out, callbacks=Callbacks(on_round=stop))
    code = json.loads((out / "code.json").read_text())
    assert {key: entry["target"] for key, entry in code.items()} == {
        "algorithm.name": "own_algorithm.algorithm:Half",
        "model.name": "own_algorithm.model:narrow",
        "data.name": "own_algorithm.data:sensors",
        "federation.kind": "own_algorithm.federation:sites",
    }
    assert {(entry["package"], entry["version"]) for entry in code.values()} == {("own-algorithm", "0.1.0")}
    file = package / own_package.MODULE / "algorithm.py"
    whole = file.read_text()
    file.write_text(f"{whole}\n# changed\n")
    own_package.forget()
    with pytest.raises(
        InputError, match=r"algorithm.name: half: the code here \(own-algorithm 0.1.0, sha256"
    ):
        local.run(experiment(**SHORT), out, resume=True)
    file.write_text(whole)
    own_package.forget()
    assert local.run(experiment(**SHORT), out, resume=True).rounds == 2

    # Whoever checks it needs none of the code, and runs none.
    own_package.forget()
    monkeypatch.undo()
    assert verify(out).problems == ()
    assert read_recorded(out / "experiment.yaml").own_algorithm
    assert own_package.MODULE not in sys.modules
    stored = out / "guarantee.json"
    said = Guarantee.from_json(json.loads(stored.read_text()))
    for caveat in (OWN_ALGORITHM, OWN_DATA, OWN_FEDERATION, OWN_CODE):
        less = replace(said, caveats=tuple(each for each in said.caveats if each != caveat))
        stored.write_text(json.dumps(less.to_json()))
        with pytest.raises(LedgerError, match=f"the caveat '{caveat[:40]}.*of the experiment is missing"):
            recount(out)
    stored.write_text(json.dumps(said.to_json()))
    (out / "code.json").unlink()
    with pytest.raises(LedgerError, match=r"code.json: does not say which code algorithm.name half was"):
        recount(out)
    assert any("code.json: missing" in problem for problem in verify(out).problems)


def test_what_an_own_algorithm_raises_in_a_round_is_one_line(
    tmp_path: Path, module: types.ModuleType
) -> None:
    class Broken(Global):
        def jobs(self, state: Any) -> Any:
            raise KeyError("nobody")

    Broken.__module__ = __name__
    module.Broken = Broken  # type: ignore[attr-defined]
    chosen = experiment(algorithm={"name": "somebodys:Broken"}, federation={"kind": "clusters", "sizes": [2]})
    with pytest.raises(
        InputError, match=rf"somebodys:Broken: KeyError: 'nobody', at {__file__}:\d+; --resume"
    ):
        local.run(chosen, tmp_path / "run")


def ended(self: Any, *_: Any) -> Any:
    raise SystemExit(0)


def stuck(self: Any, state: Any) -> Any:
    yield from Global.round(self, state)
    return state


def nothing(self: Any, state: Any) -> Any:
    yield from Global.round(self, state)


@pytest.mark.parametrize(
    ("method", "does", "said"),
    [
        ("plan", ended, r"SystemExit: 0, at .*:\d+$"),
        ("jobs", ended, r"SystemExit: 0, at .*:\d+; --resume"),
        ("round", stuck, "its round 1 returned round 0; allowed: a State of round 1"),
        ("round", nothing, "its round 1 returned a NoneType; allowed: a State of round 1"),
    ],
)
def test_own_code_that_ends_the_program_or_stands_still_is_one_line(
    tmp_path: Path, module: types.ModuleType, method: str, does: Any, said: str
) -> None:
    Broken = type("Broken", (Global,), {method: does, "__module__": __name__})
    module.Broken = Broken  # type: ignore[attr-defined]
    chosen = experiment(algorithm={"name": "somebodys:Broken"}, federation={"kind": "clusters", "sizes": [2]})
    with pytest.raises(InputError, match=rf"algorithm.name: somebodys:Broken: {said}"):
        local.run(chosen, tmp_path / "run")


def test_a_data_function_that_ends_the_program_is_one_line(module: types.ModuleType) -> None:
    def make() -> Dataset:
        raise SystemExit(0)

    module.make = make  # type: ignore[attr-defined]
    with pytest.raises(InputError, match="somebodys:make: SystemExit at"):
        local.load_federation(experiment(data={"name": "somebodys:make"}))


def test_names_are_looked_up_without_running_anything(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "loud.py").write_text("raise SystemExit('ran')\n")
    monkeypatch.chdir(tmp_path)
    assert ALGORITHM.target("loud:Half") == "loud:Half"
    with pytest.raises(InputError, match=r"algorithm.name: loud:Half: SystemExit: ran"):
        ALGORITHM.find("loud:Half")
