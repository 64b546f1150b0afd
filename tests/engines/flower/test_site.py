"""A site signs nothing that costs too much, answers nothing else, says nothing else, and forgets nothing."""

from __future__ import annotations

import dataclasses
import json
import logging
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from tiny_site import (
    FINAL,
    LIMITS,
    START,
    ZERO_OUT,
    contract,
    deliver,
    evaluation,
    joined,
    plan_of,
    releases,
    scores,
    selection,
    site,
    training,
)

from coterie.data import Client, Federation, Records, Task
from coterie.engines.flower import messages
from coterie.engines.flower.contract import Contract, Limits, cost, promised
from coterie.engines.flower.site import Site
from coterie.errors import InputError
from coterie.models import OWN_CODE, ModelSettings, build_model
from coterie.privacy import Budget, LowestLoss, PlannedRelease, Unit
from coterie.training.parameters import flatten


def refused(answer: RecordDict) -> str | None:
    return messages.is_refusal(answer)


def executed(found: Site) -> dict[str, int]:
    assert found.session is not None
    return dict(found.session.ledger.executed("a"))


def value(answer: RecordDict) -> np.ndarray:
    return answer.array_records["arrays"]["value"].numpy()


def for_records(count: int) -> tuple[PlannedRelease, ...]:
    """The releases of somebody with so many records."""
    changed = []
    for release in releases()[:2]:
        mechanism: Any = dataclasses.replace(release.mechanism, records=count)  # type: ignore[type-var]
        changed.append(dataclasses.replace(release, mechanism=mechanism))
    return tuple(changed)


# --- signing ----------------------------------------------------------------------------------------

OFFERS: dict[str, tuple[dict[str, Any], str]] = {
    "less noise than allowed": ({"plan": plan_of(releases(noise=0.3))}, "too much"),
    "more releases than allowed": ({"plan": plan_of(releases(times=5000))}, "too much"),
    "a release without noise": (
        {"plan": plan_of((*releases(), PlannedRelease("look", LowestLoss(adjacency=ZERO_OUT), 1)))},
        "too much",
    ),
    "a larger delta": ({"delta": 0.5}, "too much"),
    "another's records": ({"records": 41}, "other data"),
    "another's name": ({"client": "b"}, "other data"),
    "another task": ({"task": dataclasses.replace(contract().task, classes=4)}, "other data"),
    "a plan for more records": ({"plan": plan_of(for_records(400))}, "other data"),
    "code of the server's choice": ({"model": ModelSettings(name="os:getcwd")}, "model code"),
    "an encoder of the server's choice": ({"model": ModelSettings(features="os:getcwd")}, "model code"),
    "features that these records do not have": ({"model": ModelSettings(features="scattering")}, "model"),
    "reports that are not allowed": ({"plan": plan_of(releases(), scores())}, "not allowed"),
    "a step that is none": ({"lr": -0.1}, "out of range"),
    "nothing at all": ({"plan": plan_of(())}, "not planned"),
}


@pytest.mark.parametrize(("changes", "reason"), OFFERS.values(), ids=OFFERS.keys())
def test_what_the_operator_did_not_allow_is_not_signed(
    changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    made = site(tmp_path / "state")
    assert refused(deliver(made, messages.OFFER, contract(**changes).to_content())) == reason
    assert made.session is None
    assert not made.files.contract.exists()
    assert not made.files.ledger.exists()


def test_the_limit_is_the_sites_own_arithmetic_to_the_last_digit(tmp_path: Path) -> None:
    spends = cost(contract(), 1e-2)
    exactly = Limits(Budget(spends, 1e-2))
    below = Limits(Budget(float(np.nextafter(spends, 0)), 1e-2))
    refusing = site(tmp_path / "refusing", below)
    assert refused(deliver(refusing, messages.OFFER, contract().to_content())) == "too much"
    joined(tmp_path / "agreeing", limits=exactly).close()


def test_a_plan_for_another_unit_is_not_signed(tmp_path: Path) -> None:
    plan = dataclasses.replace(contract().plan, unit=Unit.CLIENT)
    answer = deliver(site(tmp_path), messages.OFFER, contract(plan=plan).to_content())
    assert refused(answer) == "not planned"


def test_a_contract_binds_once_and_only_once(tmp_path: Path) -> None:
    made = joined(tmp_path)
    again = deliver(made, messages.OFFER, contract().to_content())
    assert again.config_records["coterie"]["accepted"] == contract().digest
    assert refused(deliver(made, messages.OFFER, contract(lr=0.2).to_content())) == "other experiment"
    assert stat.S_IMODE(made.files.secret.stat().st_mode) == 0o600
    made.close()


def test_a_contract_says_nothing_that_is_not_read(tmp_path: Path) -> None:
    data = {**contract().to_json(), "noise_off": True}
    sent = messages.pack({"contract": json.dumps(data)})
    assert refused(deliver(site(tmp_path), messages.OFFER, sent)) == "garbage"
    assert Contract.from_json(json.loads(json.dumps(contract().to_json()))) == contract()


# --- answering --------------------------------------------------------------------------------------


def with_record(content: RecordDict, **plain: Any) -> RecordDict:
    return RecordDict({**content, "coterie": ConfigRecord({**content.config_records["coterie"], **plain})})


def with_arrays(**arrays: np.ndarray) -> RecordDict:
    content = training()
    content["arrays"] = ArrayRecord({name: Array(array) for name, array in arrays.items()})
    return content


def lying_array() -> RecordDict:
    content = training()
    honest = Array(START)
    content["arrays"] = ArrayRecord(
        {"models": Array(dtype="float32", shape=(1, 18000), stype=honest.stype, data=honest.data)}
    )
    return content


NAN = np.where(np.arange(len(START)) == 3, np.nan, START).astype(np.float32)
BAD: dict[str, tuple[str, RecordDict, str]] = {
    "no such type": ("query.dump", training(), "garbage"),
    "no record of ours": (messages.TRAIN, RecordDict({}), "garbage"),
    "a field too many": (messages.TRAIN, with_record(training(), noise=0.0), "garbage"),
    "a round of another type": (messages.TRAIN, with_record(training(), round=1.0), "garbage"),
    "round zero": (messages.TRAIN, with_record(training(), round=0), "garbage"),
    "another format": (messages.TRAIN, with_record(training(), format=2), "garbage"),
    "a pull that pushes": (messages.TRAIN, with_record(training(), anchor_weight=-1.0), "garbage"),
    "a pull towards nothing": (messages.TRAIN, with_record(training(), anchor_weight=1.0), "garbage"),
    "a start that is not finite": (messages.TRAIN, with_arrays(models=NAN[None]), "garbage"),
    "a start of another shape": (messages.TRAIN, with_arrays(models=START[None, :-1]), "garbage"),
    "doubles": (messages.TRAIN, with_arrays(models=START[None].astype(np.float64)), "garbage"),
    "two starts": (messages.TRAIN, with_arrays(models=np.stack([START, START])), "garbage"),
    "another array": (messages.TRAIN, with_arrays(models=START[None], extra=START), "garbage"),
    "a row": (messages.TRAIN, with_arrays(models=START), "garbage"),
    "an array that lies": (messages.TRAIN, lying_array(), "garbage"),
    "no models": (messages.SELECT, selection(models=np.zeros((0, len(START)), np.float32)), "garbage"),
    "another contract": (messages.TRAIN, with_record(training(), contract="0" * 64), "other contract"),
    "a release of another name": (messages.TRAIN, training(release="evaluation"), "not planned"),
    "a selection as training": (messages.TRAIN, training(release="selection"), "not planned"),
    "a round after the last": (messages.TRAIN, training(10), "not planned"),
    "accuracy, unasked": (
        messages.EVALUATE,
        evaluation(agreed=contract()),
        "not planned",
    ),
}


@pytest.mark.parametrize(("kind", "content", "reason"), BAD.values(), ids=BAD.keys())
def test_nothing_but_the_contract_is_answered_or_charged(
    kind: str, content: RecordDict, reason: str, tmp_path: Path
) -> None:
    made = joined(tmp_path)
    before = made.files.ledger.read_bytes()
    assert refused(deliver(made, kind, content)) == reason
    assert made.files.ledger.read_bytes() == before
    made.close()


def test_without_a_contract_nothing_is_answered(tmp_path: Path) -> None:
    assert refused(deliver(site(tmp_path), messages.TRAIN, training())) == "no contract"


def test_less_noise_cannot_be_asked_for_in_a_message(tmp_path: Path) -> None:
    """A message has no field for it; the mechanism that runs is the signed one."""
    made = joined(tmp_path)
    noise = [value(deliver(made, messages.TRAIN, training(round))) for round in (1, 2, 3)]
    # Steps of 0.1 over batches of 8 with noise 2 leave a spread that data of clip 1 alone could not.
    assert np.std(noise) > 0.5 * 0.1 * 2.0 / 8 * np.sqrt(5)
    made.close()


def test_what_the_plan_allows_is_all_there_is(tmp_path: Path) -> None:
    made = joined(tmp_path)
    for round in (1, 2, 3):
        assert refused(deliver(made, messages.TRAIN, training(round))) is None
    assert refused(deliver(made, messages.TRAIN, training(4))) == "over budget"
    # Another start under an old name is another release, and there is none left.
    assert refused(deliver(made, messages.TRAIN, training(3, start=START + 1))) == "over budget"
    assert executed(made) == {"sketch": 0, "training": 3, "selection": 0}
    made.close()


def test_a_round_that_is_over_is_not_executed(tmp_path: Path) -> None:
    made = joined(tmp_path)
    deliver(made, messages.TRAIN, training(2))
    assert refused(deliver(made, messages.TRAIN, training(1))) == "passed"
    assert executed(made)["training"] == 1
    made.close()


def test_a_message_past_its_time_is_not_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = joined(tmp_path)
    monkeypatch.setattr("coterie.engines.flower.site.time", SimpleNamespace(time=lambda: 1e12))
    assert refused(deliver(made, messages.TRAIN, training())) == "late"
    assert executed(made)["training"] == 0
    made.close()


@pytest.mark.parametrize("lost", [False, True], ids=["kept", "kept answers lost"])
@pytest.mark.parametrize("restarted", [False, True])
def test_a_message_that_comes_again_gets_the_same_answer_for_nothing(
    tmp_path: Path, restarted: bool, lost: bool
) -> None:
    made = joined(tmp_path)
    first = value(deliver(made, messages.TRAIN, training()))
    chosen = deliver(made, messages.SELECT, selection())
    ledger = made.files.ledger.read_bytes()
    if lost:
        for path in made.files.answers.iterdir():
            path.unlink()
    if restarted:
        made.close()
        made = site(tmp_path)
    np.testing.assert_array_equal(value(deliver(made, messages.TRAIN, training())), first)
    again = deliver(made, messages.SELECT, selection())
    assert again.config_records["coterie"]["value"] == chosen.config_records["coterie"]["value"]
    assert made.files.ledger.read_bytes() == ledger
    made.close()


def test_the_charge_is_on_disk_before_the_answer_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed while it trains, a site has the charge and not the answer: it stands."""
    made = joined(tmp_path)

    def killed(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("coterie.engines.clients.train_privately", killed)
        with pytest.raises(KeyboardInterrupt):
            deliver(made, messages.TRAIN, training())
    made.close()
    made = site(tmp_path)
    assert executed(made)["training"] == 1
    assert refused(deliver(made, messages.TRAIN, training())) is None
    assert executed(made)["training"] == 1
    made.close()


def test_what_goes_wrong_here_is_not_told_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = joined(tmp_path)

    def failing(*arguments: object) -> None:
        raise ValueError("patient 4711 has a cholesterol of 603")

    monkeypatch.setattr("coterie.engines.clients.train_privately", failing)
    with caplog.at_level(logging.DEBUG, logger="coterie"):
        answer = deliver(made, messages.TRAIN, training())
    assert refused(answer) == "failed"
    assert dict(answer.config_records["coterie"]) == {"format": 1, "refused": "failed"}
    assert "ValueError" in caplog.text
    assert "4711" not in caplog.text
    assert "603" not in caplog.text
    made.close()


# --- through restarts -------------------------------------------------------------------------------


def test_the_books_belong_to_the_records(tmp_path: Path) -> None:
    joined(tmp_path).close()
    with pytest.raises(InputError, match="other records"):
        site(tmp_path, shift=1.0)


def test_limits_may_not_fall_below_what_was_signed(tmp_path: Path) -> None:
    joined(tmp_path).close()
    with pytest.raises(InputError, match="--epsilon"):
        site(tmp_path, Limits(Budget(0.1, 1e-2)))


def test_a_seeded_site_stays_one(tmp_path: Path) -> None:
    joined(tmp_path, noise_seed=3).close()
    with pytest.raises(InputError, match="--noise-seed"):
        site(tmp_path)


def test_two_processes_cannot_spend_from_the_same_books(tmp_path: Path) -> None:
    made = joined(tmp_path)
    with pytest.raises(Exception, match="another run has this ledger open"):
        site(tmp_path)
    made.close()


def test_closed_books_have_no_key_and_answer_nothing(tmp_path: Path) -> None:
    made = joined(tmp_path)
    deliver(made, messages.TRAIN, training())
    key = made.files.secret.read_bytes()
    other = dataclasses.replace(FINAL, contract="0" * 64).to_content()
    assert refused(deliver(made, messages.FINISHED, other)) == "other contract"
    assert refused(deliver(made, messages.FINISHED, FINAL.to_content())) is None
    assert made.finished
    assert not made.files.secret.exists()
    made.files.secret.write_bytes(key)  # as a crash before its deletion leaves it
    for again in (made, site(tmp_path)):
        assert refused(deliver(again, messages.TRAIN, training())) == "closed"
        assert refused(deliver(again, messages.OFFER, contract(lr=0.2).to_content())) == "closed"
    assert not made.files.secret.exists()


def test_a_site_is_told_that_a_models_code_is_trusted() -> None:
    ours = contract()
    theirs = dataclasses.replace(ours, model=ModelSettings(name="their.networks:cnn"))
    assert OWN_CODE not in promised(ours, ()).caveats
    assert OWN_CODE in promised(theirs, ()).caveats


# --- public features -----------------------------------------------------------------------------------


def test_a_site_computes_features_itself_keeps_them_in_its_folder_and_binds_noise_to_them(
    tmp_path: Path,
) -> None:
    rng, task = np.random.default_rng(0), Task("classification", (1, 12, 12), 3)
    images = rng.random((50, 1, 12, 12)).astype(np.float32)
    own = Records(images, rng.integers(3, size=50))
    client = Client("a", own.take(slice(0, 40)), own.take(slice(0, 0)), own.take(slice(40, 50)))
    model = ModelSettings(name="softmax", features="scattering")
    start = flatten(build_model(model, task, seed=0))
    found = []
    for name, agreed in (
        ("features", contract(task=task, model=model)),
        ("pixels", contract(task=task)),
    ):
        made = Site(Federation((client,), task), tmp_path / name, LIMITS, noise_seed=1)
        assert refused(deliver(made, messages.OFFER, agreed.to_content())) is None
        assert made.session is not None
        begins = start if name == "features" else flatten(build_model(agreed.model, task, seed=0))
        answer = deliver(made, messages.TRAIN, training(agreed=agreed, start=begins))
        found.append(value(answer))
        assert (tmp_path / name / "features").exists() == (name == "features")
        made.close()
    assert found[0].shape == (81 * 9 * 3 + 3,)
    assert found[1].shape == (144 * 3 + 3,)
    again = Site(Federation((client,), task), tmp_path / "features", LIMITS, noise_seed=1)
    agreed = contract(task=task, model=model)
    np.testing.assert_array_equal(
        value(deliver(again, messages.TRAIN, training(agreed=agreed, start=start))), found[0]
    )
    again.close()
