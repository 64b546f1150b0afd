"""A server chooses numbers; a site signs none that arithmetic could not keep, and mixes up no answers."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import RecordDict
from tiny_site import (
    LIMITS,
    REPORTING,
    START,
    TASK,
    contract,
    deliver,
    evaluation,
    joined,
    plan_of,
    releases,
    scores,
    site,
    training,
)

from coterie.engines.flower import messages
from coterie.engines.flower.approval import MOST_RELEASES, MOST_STEPS, approve
from coterie.engines.flower.contract import Contract, Limits, Rules, cost
from coterie.engines.flower.messages import SiteFacts
from coterie.errors import InputError
from coterie.models import ModelSettings
from coterie.privacy import (
    EVALUATION,
    Adjacency,
    Budget,
    PlannedRelease,
    PoissonSteps,
)
from coterie.privacy.mechanisms import NoisySum

REPLACE_ONE = Adjacency.REPLACE_ONE


def refused(answer: RecordDict) -> str | None:
    return messages.is_refusal(answer)


def value(answer: RecordDict) -> np.ndarray:
    return answer.array_records["arrays"]["value"].numpy()


def offered(tmp_path: Path, data: dict[str, Any], limits: Limits = LIMITS) -> str | None:
    """What a site says to a contract that a server wrote by itself; nothing may be left of one refused."""
    made = site(tmp_path / "state", limits)
    sent = messages.pack({"contract": json.dumps(data)})
    reason = refused(deliver(made, messages.OFFER, sent))
    assert made.files.contract.exists() == (reason is None)
    made.close()
    return reason


# --- numbers ----------------------------------------------------------------------------------------


def planned(release: str, key: str, value: object) -> dict[str, Any]:
    """The usual contract as plain data, with one number of one release changed."""
    data: dict[str, Any] = json.loads(json.dumps(contract().to_json()))
    for plan in data["plan"]["plans"]:
        for entry in plan["releases"]:
            if entry["name"] == release:
                assert key in entry
                entry[key] = value
    return data


IN_A_PLAN = [
    *(("training", "clip", value) for value in (5e-324, 1e-310, 2.3e-308, 1e-7, 0.0, -1.0, 1e7, 1e308)),
    *(("sketch", "clip", value) for value in (5e-324, 0.0, 1e308)),
    *(("training", "noise_multiplier", value) for value in (5e-324, 1e-300, -1.0, 1e300)),
    ("sketch", "noise_multiplier", 1e300),
    ("sketch", "dimensions", 10**12),
    ("training", "epochs", 10**9),
    ("training", "times", 10**9),
    *(("selection", "epsilon", value) for value in (5e-324, 1e-300, 0.0, -1.0)),
]


@pytest.mark.parametrize(("release", "key", "value"), IN_A_PLAN)
def test_a_plan_with_a_number_out_of_range_is_not_signed(
    release: str, key: str, value: object, tmp_path: Path
) -> None:
    assert offered(tmp_path, planned(release, key, value)) == "out of range"


@pytest.mark.parametrize("value", [True, False, "1", None, [1.0]])
def test_a_clip_that_is_no_number_is_not_signed(value: object, tmp_path: Path) -> None:
    assert offered(tmp_path, planned("training", "clip", value)) in ("garbage", "out of range")


def test_the_smallest_clip_allowed_is_signed(tmp_path: Path) -> None:
    assert offered(tmp_path, planned("training", "clip", 1e-6)) is None


BESIDE: dict[str, dict[str, Any]] = {
    "a step of nothing": {"lr": 5e-324},
    "an endless step": {"lr": 1e300},
    "endless rounds": {"rounds": 10**9},
    "no round": {"rounds": 0},
    "a delta of nothing": {"delta": 5e-324},
    "a delta of everything": {"delta": 1.0},
    "a seed that no generator takes": {"public_seed": 2**64},
    "a seed below zero": {"public_seed": -1},
}


@pytest.mark.parametrize("changes", BESIDE.values(), ids=BESIDE.keys())
def test_a_number_beside_the_plan_out_of_range_is_not_signed(changes: dict[str, Any], tmp_path: Path) -> None:
    assert offered(tmp_path, contract(**changes).to_json()) == "out of range"


def test_more_steps_than_a_site_should_take_are_not_signed() -> None:
    for epochs, reason in ((5_000, None), (5_001, "out of range")):
        steps = PoissonSteps(1.0, 1e9, records=2000, batch=1, epochs=epochs, adjacency=Adjacency.ZERO_OUT)
        offer = contract(plan=plan_of((PlannedRelease("training", steps, 1),)), records=2000)
        said = None
        try:
            approve(offer, LIMITS, SiteFacts("a", 2000, offer.held_out, None, offer.task, False))
        except messages.RefusedError as mistake:
            said = mistake.reason
        assert said == reason


@pytest.mark.parametrize("weight", [5e-324, 1e-300, 1e300])
def test_a_pull_out_of_range_in_a_message_is_not_executed(weight: float, tmp_path: Path) -> None:
    made = joined(tmp_path)
    before = made.files.ledger.read_bytes()
    assert refused(deliver(made, messages.TRAIN, training(anchor=START, anchor_weight=weight))) == "garbage"
    assert made.files.ledger.read_bytes() == before
    made.close()


# --- adjacency --------------------------------------------------------------------------------------


def test_the_budget_holds_between_the_neighbours_that_the_operator_names(tmp_path: Path) -> None:
    spends, replaced = cost(contract(), 1e-2), cost(contract(), 1e-2, REPLACE_ONE)
    assert replaced > 1.5 * spends
    for name, epsilon, adjacency, reason in (
        ("as planned", spends, None, None),
        ("said again", spends, Adjacency.ZERO_OUT, None),
        ("replaced for less", math.nextafter(replaced, 0), REPLACE_ONE, "too much"),
        ("replaced", replaced, REPLACE_ONE, None),
    ):
        limits = Limits(Budget(epsilon, 1e-2), adjacency=adjacency)
        assert offered(tmp_path / name, contract().to_json(), limits) == reason


def test_a_demand_made_after_signing_is_one_too(tmp_path: Path) -> None:
    spends = cost(contract(), 1e-2)
    joined(tmp_path, limits=Limits(Budget(spends, 1e-2))).close()
    site(tmp_path, Limits(Budget(spends, 1e-2))).close()
    with pytest.raises(InputError, match="less than what was approved"):
        site(tmp_path, Limits(Budget(spends, 1e-2), adjacency=REPLACE_ONE))


def test_records_that_come_and_go_are_no_records_of_a_site(tmp_path: Path) -> None:
    data = json.loads(json.dumps(contract().to_json()).replace('"zero-out"', '"add-remove"'))
    Contract.from_json(data)
    assert offered(tmp_path, data) == "not planned"


# --- answers asked for again ------------------------------------------------------------------------


def test_a_sketch_asked_again_is_not_answered_with_the_update_of_its_round(tmp_path: Path) -> None:
    """Both are computed from the same model: the name of the release tells them apart, on disk, too."""
    made = joined(tmp_path)
    sketch, update = training(1, release="sketch"), training(1)
    first = [value(deliver(made, messages.TRAIN, content)) for content in (sketch, update)]
    assert [len(each) for each in first] == [6, len(START)]
    made.close()
    for _ in range(2):
        again = site(tmp_path)
        second = [value(deliver(again, messages.TRAIN, content)) for content in (sketch, update)]
        for one, other in zip(first, second, strict=True):
            np.testing.assert_array_equal(one, other)
        assert again.session is not None
        assert dict(again.session.ledger.executed("a")) == {"sketch": 1, "training": 1, "selection": 0}
        again.close()


def test_an_update_asked_again_is_not_answered_with_a_score_of_the_same_name(tmp_path: Path) -> None:
    """Records that train and records that are held out are two subjects, whatever a plan calls releases."""
    update = dataclasses.replace(releases()[1], name=EVALUATION)
    agreed = contract(plan=plan_of((update,), scores()))
    made = joined(tmp_path, agreed, limits=REPORTING)
    asked = training(1, agreed=agreed, release=EVALUATION)
    first = value(deliver(made, messages.TRAIN, asked))
    assert refused(deliver(made, messages.EVALUATE, evaluation(agreed=agreed))) is None
    np.testing.assert_array_equal(value(deliver(made, messages.TRAIN, asked)), first)
    made.close()


def test_no_name_of_a_release_is_a_path(tmp_path: Path) -> None:
    release = dataclasses.replace(releases()[1], name="../../../out of here")
    assert offered(tmp_path, contract(plan=plan_of((release,))).to_json()) == "words"
    assert {path.name for path in tmp_path.iterdir()} == {"state"}


# --- noise that is not the planned one --------------------------------------------------------------


def test_a_site_whose_engine_would_draw_less_noise_releases_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = joined(tmp_path)
    monkeypatch.setattr(NoisySum, "noise_std", property(lambda self: 0.9 * self.clip * self.multiplier))
    for release in ("training", "sketch"):
        answer = deliver(made, messages.TRAIN, training(release=release))
        assert refused(answer) == "failed"
        assert not answer.array_records
    assert not list(made.files.answers.iterdir())
    made.close()


# --- what is refused leaves nothing behind ----------------------------------------------------------


@pytest.mark.parametrize("name", ["cnn", "lstm", "resnet18", "mcmahan-cnn"])
def test_a_model_that_does_not_fit_the_records_is_refused_and_leaves_no_trace(
    name: str, tmp_path: Path
) -> None:
    offer = contract(model=ModelSettings(name=name))
    assert offered(tmp_path, offer.to_json()) == "model"
    assert not list((tmp_path / "state").iterdir())
    made = joined(tmp_path / "state")  # the site goes on with the next offer
    assert refused(deliver(made, messages.TRAIN, training())) is None
    made.close()


@pytest.mark.parametrize("broken", ["session.promised", "session.LocalEngine", "kept.Ledger.open"])
def test_a_session_that_cannot_be_opened_leaves_no_trace(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("whatever it is")

    with monkeypatch.context() as patch:
        patch.setattr(f"coterie.engines.flower.{broken}", fails)
        assert offered(tmp_path, contract().to_json()) == "failed"
    assert not list((tmp_path / "state").iterdir())
    joined(tmp_path / "state").close()


def test_a_model_larger_than_any_message_is_refused_before_it_takes_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = dataclasses.replace(TASK, shape=(80,), vocabulary=90)
    offer = contract(model=ModelSettings(name="lstm", hidden=65536, layers=64), task=text)
    monkeypatch.setattr("coterie.engines.clients.build_learner", lambda *_, **__: pytest.fail("built"))
    with pytest.raises(messages.RefusedError) as refusal:
        approve(offer, LIMITS, SiteFacts("a", 40, 10, None, text, False))
    assert refusal.value.reason == "out of range"


# --- work -------------------------------------------------------------------------------------------


def test_more_kinds_of_releases_than_a_site_should_price_are_refused_before_they_are_priced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    training_release = releases(noise=50.0)[1]

    def kinds(count: int) -> dict[str, Any]:
        made = tuple(dataclasses.replace(training_release, name=f"{n}", times=1) for n in range(count))
        return contract(plan=plan_of(made)).to_json()

    assert offered(tmp_path / "most", kinds(MOST_RELEASES)) is None
    monkeypatch.setattr("coterie.engines.flower.approval.cost", lambda *_, **__: pytest.fail("priced"))
    assert offered(tmp_path / "more", kinds(MOST_RELEASES + 1)) == "out of range"


def test_more_steps_in_all_rounds_than_a_site_should_price_are_refused_before_they_are_priced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    each = dataclasses.replace(releases(noise=1e9)[1].mechanism, batch=40, epochs=10**4)  # type: ignore[type-var]
    most = MOST_STEPS // 10**4
    patient = dataclasses.replace(LIMITS, rules=Rules(steps=10 * MOST_STEPS))
    for times, reason in ((most, None), (most + 1, "out of range")):
        plan = plan_of((PlannedRelease("training", each, times),))
        offer = contract(plan=plan, accountant="pld").to_json()
        assert offered(tmp_path / f"{times}", offer, patient) == reason
        monkeypatch.setattr("coterie.engines.flower.approval.cost", lambda *_, **__: pytest.fail("priced"))


def test_a_sketch_with_more_numbers_than_the_model_is_not_signed(tmp_path: Path) -> None:
    for number, reason in ((len(START), None), (len(START) + 1, "out of range"), (10**9, "out of range")):
        data = planned("sketch", "dimensions", number)
        assert offered(tmp_path / f"{number}", data) == reason


@pytest.mark.parametrize("weight", [1e6, 1e3])
def test_a_pull_that_flies_off_is_refused_before_it_is_charged(weight: float, tmp_path: Path) -> None:
    steps = dataclasses.replace(releases()[1].mechanism, epochs=100)  # type: ignore[type-var]
    agreed = contract(plan=plan_of((PlannedRelease("training", steps, 1),)), lr=1e6)
    made = joined(tmp_path, agreed, limits=Limits(Budget(1e6, 1e-2)))
    before = made.files.ledger.read_bytes()
    pulled = training(agreed=agreed, anchor=START, anchor_weight=weight)
    assert refused(deliver(made, messages.TRAIN, pulled)) == "out of range"
    assert made.files.ledger.read_bytes() == before
    assert refused(deliver(made, messages.TRAIN, training(agreed=agreed))) is None
    made.close()
