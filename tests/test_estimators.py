"""Estimators follow scikit-learn, and every fit is a run whose guarantee says what came from where."""

import json
import math
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn
from sklearn.base import clone
from sklearn.model_selection import GroupKFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import coterie as ct
from coterie.errors import CoterieError, InputError
from coterie.estimators import FitError
from coterie.experiment.verify import verify
from coterie.privacy.wording import FROM_DATA, SIMULATION

RNG = np.random.default_rng(0)
X = RNG.random((240, 3))
IDS = np.repeat(["north", "south", "east", "west"], 60)
Y = np.where((X[:, 0] > 0.5) ^ np.isin(IDS, ["east", "west"]), "yes", "no")
QUICK: dict[str, Any] = {"rounds": 3, "lr": 2.0, "random_state": 0}
DECLARED: dict[str, Any] = {"bounds": (0, 1), "classes": ["no", "yes"]}

EXPECTED: dict[str, dict[str, str]] = {"ClusteredClassifier": {}, "ClusteredRegressor": {}}
"""Checks that an estimator may fail, each with the reason; none does, at epsilon 8 and with seeded noise."""


@pytest.mark.filterwarnings("ignore:bounds. taken from the data:UserWarning")
@parametrize_with_checks(
    [ct.ClusteredClassifier(8.0, rounds=4, lr=2.0), ct.ClusteredRegressor(8.0, rounds=4, lr=0.5)],
    expected_failed_checks=lambda estimator: EXPECTED[type(estimator).__name__],
)
def test_what_scikit_learn_asks_of_every_estimator(estimator: Any, check: Any) -> None:
    check(estimator)


@pytest.fixture(scope="module")
def fitted() -> Any:
    return ct.ClusteredClassifier(8.0, rounds=8, random_state=0, lr=2.0, **DECLARED).fit(X, Y, clients=IDS)


def test_clients_that_differ_get_models_of_their_own(fitted: Any) -> None:
    assert fitted.clusters_["north"] == fitted.clusters_["south"] != fitted.clusters_["east"]
    assert fitted.score(X, Y, clients=IDS) > 0.9
    proba = fitted.predict_proba(X, clients=IDS)
    assert np.array_equal(fitted.classes_[proba.argmax(axis=1)], fitted.predict(X, clients=IDS))
    np.testing.assert_allclose(proba.sum(axis=1), 1)
    mine = IDS == "north"
    alone = fitted.predict(X[mine], cluster=fitted.clusters_["north"])
    assert np.array_equal(alone, fitted.predict(X, clients=IDS)[mine])


def test_predictions_are_those_of_the_run_and_outlive_its_folder(fitted: Any) -> None:
    run = fitted.run_
    mine = IDS == "east"
    by_run = fitted.classes_[np.asarray(run.predict(X[mine], client="east"), dtype=int)]
    assert by_run.tolist() == fitted.predict(X, clients=IDS)[mine].tolist()
    copied = pickle.loads(pickle.dumps(fitted))
    assert np.array_equal(copied.predict(X, clients=IDS), fitted.predict(X, clients=IDS))


def test_all_records_are_trained_on_and_nothing_is_judged(fitted: Any) -> None:
    facts = json.loads((fitted.run_.folder / "federation.json").read_text())
    assert [client["records"] for client in facts["clients"]] == [60] * 4
    assert {client["test_records"] for client in facts["clients"]} == {0}
    assert fitted.run_.accuracy is None


def said(**options: Any) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        line: str = ct.ClusteredClassifier(**{**QUICK, **options}).fit(X, Y, clients=IDS).guarantee_
    told = [str(each.message) for each in caught if "bounds" in str(each.message)]
    assert bool(told) == (options.get("bounds") is None)
    return line


def test_the_guarantee_says_what_came_from_the_data_and_from_a_seed() -> None:
    assert FROM_DATA in said(classes=["no", "yes"])
    assert FROM_DATA in said(bounds=(0, 1))  # the classes came from y
    declared = said(**DECLARED)
    assert FROM_DATA not in declared
    assert SIMULATION in declared
    secret = said(**DECLARED, random_state=None)
    assert SIMULATION not in secret
    assert "(eps=8.00" in secret
    assert "no privacy" in said(**DECLARED, epsilon=math.inf)


@pytest.mark.parametrize("bounds", [np.array([[0, 1]] * 3), {"x0": (0, 1), "x1": (0, 1), "x2": (0, 1)}])
def test_bounds_may_be_a_pair_for_each_column_or_pairs_by_name(bounds: Any) -> None:
    model = ct.ClusteredClassifier(**QUICK, bounds=bounds, classes=["no", "yes"]).fit(X, Y, clients=IDS)
    assert FROM_DATA not in model.guarantee_


def test_a_folder_that_was_asked_for_holds_and_is_not_written_twice(tmp_path: Path) -> None:
    model = ct.ClusteredClassifier(**QUICK, **DECLARED, out=tmp_path / "kept").fit(X, Y, clients=IDS)
    assert verify(tmp_path / "kept" / "run").verdict == "holds"
    assert (tmp_path / "kept" / "run" / "report.html").exists()
    with pytest.raises(FitError, match="exists already"):
        model.fit(X, Y, clients=IDS)


def test_regression_is_in_the_labels_own_units() -> None:
    target = 100 + 40 * X[:, 0]
    model = ct.ClusteredRegressor(bounds=(0, 1), label_bounds=(90, 150), random_state=0, rounds=10)
    model.fit(X, target, clients=IDS)
    found = model.predict(X, clients=IDS)
    assert np.abs(found - target).mean() < 12
    assert FROM_DATA not in model.guarantee_
    assert FROM_DATA in ct.ClusteredRegressor(**QUICK, bounds=(0, 1)).fit(X, target).guarantee_


def test_without_clients_there_is_one_and_whole_clients_can_be_protected() -> None:
    alone = ct.ClusteredClassifier(**QUICK, **DECLARED).fit(X, Y)
    assert alone.clients_.tolist() == ["all"]
    assert alone.predict(X).shape == (240,)
    ids = np.repeat(np.arange(24), 10)
    protected = ct.ClusteredClassifier(
        **QUICK, **DECLARED, unit="client", algorithm={"name": "dp-fedavg", "rate": 0.5}
    )
    assert "one client of" in protected.fit(X, Y, clients=ids).guarantee_


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (lambda model: model.predict(X), r"clients: 2 models were fitted.*clients=ids.*cluster=0 to 1"),
        (lambda model: model.predict(X, clients=["moon"] * 240), r"'moon' was not there.*cluster=0 to 1"),
        (lambda model: model.predict(X, cluster=7), r"cluster: 7 is none of the fitted.*0 to 1"),
        (lambda model: model.predict(X, clients=IDS, cluster=0), r"both are given"),
        (lambda model: clone(model).set_params(bounds=(0, 1, 2)).fit(X, Y), r"bounds: \(0, 1, 2\); allowed"),
        (lambda model: clone(model).set_params(bounds={"x0": (0, 1)}).fit(X, Y), r"nothing for 'x1'"),
        (lambda model: clone(model).set_params(classes=["no"]).fit(X, Y), r"one class only|none of the decl"),
        (lambda model: clone(model).set_params(classes=["no", "maybe"]).fit(X, Y), r"'yes' is none of the"),
        (lambda model: clone(model).set_params(algorithm="oracl").fit(X, Y), r"algorithm.name: 'oracl'"),
        (lambda model: clone(model).set_params(epsilon=-1).fit(X, Y), r"privacy.epsilon"),
        (
            lambda model: clone(model).set_params(bounds=(1, 0)).fit(X, Y),
            r"bounds: \(1, 0\) for .x0. should",
        ),
        (lambda model: clone(model).fit(X, Y, clients=[None] * 240), r"clients: some records have none"),
        (
            lambda model: clone(model).fit(X, Y, clients=[float("nan")] * 240),
            r"clients: some records",
        ),
        (
            lambda model: clone(model).fit(X, Y, clients=np.array([1] * 120 + ["a"] * 120, object)),
            r"clients: ids of several types",
        ),
    ],
)
def test_mistakes_are_one_line_that_names_what_is_allowed(fitted: Any, mistake: Any, words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        mistake(fitted)
    assert "\n" not in str(caught.value)


def test_a_fit_that_is_refused_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(CoterieError):
        ct.ClusteredClassifier(1e-9, **DECLARED, out=tmp_path / "kept", batch=10_000).fit(X, Y)
    assert not (tmp_path / "kept").exists()


@pytest.fixture
def routing() -> Iterator[None]:
    with sklearn.config_context(enable_metadata_routing=True):
        yield


def test_ids_are_routed_through_pipelines_and_cross_validation(routing: None) -> None:
    model = ct.ClusteredClassifier(**QUICK, **DECLARED)
    asks = (
        model.set_fit_request(clients=True).set_predict_request(clients=True).set_score_request(clients=True)
    )
    piped = make_pipeline(MinMaxScaler(), asks).fit(X, Y, clients=IDS)
    assert piped.predict(X, clients=IDS).shape == (240,)
    folds = GroupKFold(2).split(X, groups=np.tile([0, 1], 120))
    scores = cross_val_score(asks, X, Y, params={"clients": IDS}, cv=list(folds))
    assert scores.shape == (2,)
    assert scores.min() > 0.5
