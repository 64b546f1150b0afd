"""A site that trusts the server: it signs what it can check, clips what it sends, and sends nothing else."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import RecordDict
from tiny_site import START, contract, deliver, joined, site

from coterie.algorithms.protocol import Choice, LocalTraining
from coterie.engines.flower import messages
from coterie.engines.flower.approval import MOST_EPOCHS_PRICED, MOST_WATCHED
from coterie.engines.flower.contract import Contract, Limits, TrustedWork, cost, promised, ranges_of
from coterie.engines.flower.messages import RequestId, SiteRequest
from coterie.engines.flower.site import Site
from coterie.groups import GroupSchedule, Noise, Observer, Structure, Threat
from coterie.privacy import (
    EVALUATION,
    POPULATION,
    Adjacency,
    Budget,
    CohortSums,
    PlannedRelease,
    PoissonSample,
    PrivacyPlan,
    ThreatModel,
    Unit,
    UnitPlan,
)

CLIP = 0.01
SUM = CohortSums(CLIP, 1.0, PoissonSample(0.5), Adjacency.ADD_REMOVE)
TRAINING = LocalTraining(epochs=2, batch=8, lr=0.5)
LIMITS = Limits(Budget(20.0, 1e-2), trust_server=True)
THREAT = ThreatModel("whoever sees the models", "every model", "the server")


def population(mechanism: Any = SUM, times: int = 3) -> PrivacyPlan:
    unit = UnitPlan(POPULATION, (PlannedRelease("sums", mechanism, times),))
    return PrivacyPlan(Unit.CLIENT, mechanism.adjacency, THREAT, (unit,))


def trusting(**changes: Any) -> Contract:
    """A contract of a client; what a site does for the server is under `work`."""
    work = TrustedWork(**{"training": TRAINING, **changes.pop("work", {})})
    return contract(**{"plan": population(), "trusted": work, **changes})


def in_groups(watched: dict[str, Any] | None = None, noise: float = 1.0, times: int = 3) -> Contract:
    """A contract of worker a, who is in two groups; b is in one, and c in the other."""
    zeroed = CohortSums(CLIP, noise, PoissonSample(0.5), Adjacency.ZERO_OUT)
    groups = {"a": (0, 1), "b": (0,), "c": (1,)}
    units = tuple(
        UnitPlan(name, tuple(PlannedRelease(f"group {group}", zeroed, times) for group in own))
        for name, own in groups.items()
    )
    plan = PrivacyPlan(Unit.WORKER, Adjacency.ZERO_OUT, THREAT, units)
    structure = Structure("mine", ((0, 1), (0, 2)), 3, names=("a", "b", "c"))
    seen = {
        "structure": structure,
        "schedule": GroupSchedule.of(2, period=2, rate=0.5, noise=1.0),
        "threat": Threat.ANYONE,
        "epochs": 3,
    }
    return trusting(plan=plan, work={"watched": Observer(**{**seen, **(watched or {})})})


def refused(answer: RecordDict) -> str | None:
    return messages.is_refusal(answer)


def ask(to: Site, agreed: Contract, round: int = 1, **changes: Any) -> RecordDict:
    wanted = RequestId(agreed.digest, round, changes.pop("release", "sums"))
    request = SiteRequest(wanted, **{"order": 7, "models": START[None], **changes})
    return deliver(to, messages.CONTRIBUTE, request.to_content(messages.CONTRIBUTE))


def update(answer: RecordDict) -> np.ndarray:
    found: np.ndarray = answer.array_records["arrays"]["value"].numpy()
    return found


# --- signing ----------------------------------------------------------------------------------------

DRAFTED = CohortSums(CLIP, 1.0, PoissonSample(0.5), Adjacency.ADD_REMOVE, drafted=True)
OFFERS: dict[str, tuple[Contract, str]] = {
    "less noise than allowed": (
        trusting(plan=population(dataclasses.replace(SUM, noise_multiplier=0.1))),
        "too much",
    ),
    "more rounds than allowed": (trusting(plan=population(times=5000)), "too much"),
    "members that see each other's drafts": (trusting(plan=population(DRAFTED)), "not planned"),
    "training that never ends": (
        trusting(work={"training": dataclasses.replace(TRAINING, epochs=10**9)}),
        "out of range",
    ),
    "steps that are none": (
        trusting(work={"training": dataclasses.replace(TRAINING, lr=0.0)}),
        "out of range",
    ),
    "nothing to be done": (trusting(trusted=None), "not planned"),
    "trust where none is needed": (contract(trusted=TrustedWork(TRAINING)), "not planned"),
    "a client that is watched like a worker": (
        trusting(work={"watched": in_groups().trusted.watched}),  # type: ignore[union-attr]
        "garbage",
    ),
    "groups with more noise than is planned": (
        in_groups({"schedule": GroupSchedule.of(2, period=2, rate=0.5, noise=9.0)}),
        "garbage",
    ),
    "groups that are asked less often than is planned": (in_groups({"epochs": 2}), "garbage"),
    "groups without the site": (
        in_groups({"structure": Structure("mine", ((0, 1), (0, 2)), 3, names=("d", "b", "c"))}),
        "garbage",
    ),
    "groups that nobody says who watches": (
        trusting(plan=in_groups().plan),
        "garbage",
    ),
    "groups that leak too much": (
        in_groups({"schedule": GroupSchedule.of(2, period=2, rate=0.5, noise=0.1)}, noise=0.1),
        "too much",
    ),
}


@pytest.mark.parametrize(("offered", "reason"), OFFERS.values(), ids=OFFERS.keys())
def test_what_the_operator_did_not_allow_is_not_signed(
    offered: Contract, reason: str, tmp_path: Path
) -> None:
    made = site(tmp_path / "state", LIMITS)
    assert refused(deliver(made, messages.OFFER, offered.to_content())) == reason
    assert not made.files.contract.exists()


def ring(workers: int, kinds: int, epochs: int) -> Contract:
    """A contract of worker a, in a ring of pairs whose groups have so many kinds of noise."""
    names = ("a", *(f"w{number}" for number in range(1, workers)))
    noises = tuple(Noise(0.5, 50.0 + group % kinds) for group in range(workers))
    groups = tuple((group, (group + 1) % workers) for group in range(workers))
    structure = Structure("mine", groups, workers, names=names)
    units = []
    for worker, name in enumerate(names):
        own = sorted(structure.groups_of(worker))
        sums = [
            CohortSums(CLIP, noises[group].multiplier, PoissonSample(0.5), Adjacency.ZERO_OUT)
            for group in own
        ]
        made = (PlannedRelease(f"group {group}", each, 1) for group, each in zip(own, sums, strict=True))
        units.append(UnitPlan(name, tuple(made)))
    plan = PrivacyPlan(Unit.WORKER, Adjacency.ZERO_OUT, THREAT, tuple(units))
    schedule = dataclasses.replace(GroupSchedule.of(workers, period=2, rate=0.5, noise=1.0), noises=noises)
    return trusting(plan=plan, work={"watched": Observer(structure, schedule, Threat.ANYONE, epochs)})


@pytest.mark.parametrize(
    ("workers", "kinds", "epochs", "reason"),
    [
        (10, 10, 100, None),
        (10, 10, MOST_EPOCHS_PRICED // 10 + 1, "out of range"),
        (10, 1, MOST_EPOCHS_PRICED + 1, "out of range"),
        (MOST_WATCHED + 1, 1, 1, "out of range"),
    ],
)
def test_more_groups_than_a_site_should_price_are_not_signed(
    workers: int, kinds: int, epochs: int, reason: str | None, tmp_path: Path
) -> None:
    made = site(tmp_path / "state", LIMITS)
    assert refused(deliver(made, messages.OFFER, ring(workers, kinds, epochs).to_content())) == reason
    assert made.files.contract.exists() == (reason is None)
    made.close()


def test_a_trusted_server_does_not_choose_the_words_of_a_guarantee() -> None:
    """Neither who sees what, nor the names of those that are exposed to each other."""
    lie = ThreatModel("nobody", "nothing at all")
    for offer in (trusting(), in_groups()):
        plan = dataclasses.replace(offer.plan, threat=lie)
        told = promised(dataclasses.replace(offer, plan=plan), [])
        assert told == promised(offer, [])
        assert "nothing at all" not in told.text
        assert told.threat.trusted in ("the server", "the group masters")
        assert told.most_exposed is None


WORK: dict[str, dict[str, Any]] = {
    "a step of nothing": {"lr": 5e-324},
    "an endless step": {"lr": 1e300},
    "a step that is a truth value": {"lr": True},
    "a batch of too many": {"batch": 10**12},
    "endless passes": {"epochs": 10**9},
    "endless steps": {"iterations": 10**9},
    "momentum that grows": {"momentum": 1.0},
    "a pull of nothing": {"proximal": 5e-324},
    "an endless pull": {"proximal": 1e300},
}


@pytest.mark.parametrize("changes", WORK.values(), ids=WORK.keys())
def test_work_out_of_range_is_not_done_for_a_trusted_server(changes: dict[str, Any], tmp_path: Path) -> None:
    made = site(tmp_path / "state", LIMITS)
    data: dict[str, Any] = trusting().to_json()
    data["trusted"]["training"].update(changes)
    sent = messages.pack({"contract": json.dumps(data)})
    reason = "garbage" if changes.get("lr") is True else "out of range"
    assert refused(deliver(made, messages.OFFER, sent)) == reason
    assert not made.files.contract.exists()


@pytest.mark.parametrize("offered", [trusting(), in_groups()], ids=["client", "worker"])
def test_trust_is_said_by_the_operator_and_by_nobody_else(offered: Contract, tmp_path: Path) -> None:
    careful = site(tmp_path / "careful", dataclasses.replace(LIMITS, trust_server=False))
    assert refused(deliver(careful, messages.OFFER, offered.to_content())) == "not trusted"
    made = joined(tmp_path / "trusting", offered, limits=LIMITS)
    assert made.session is not None
    promised = made.session.guarantee
    assert "trusting the" in promised.line
    assert "is trusted with both" in promised.text
    assert "in the clear" in promised.text
    assert Contract.from_json(json.loads(json.dumps(offered.to_json()))) == offered
    made.close()


def test_a_worker_counts_what_the_one_that_learns_most_about_it_learns() -> None:
    offered = in_groups()
    watched = offered.trusted.watched if offered.trusted else None
    assert watched is not None
    found = watched.leakage(delta=1e-2, adjacency=Adjacency.ZERO_OUT)
    for name, own in zip("abc", found.per_worker, strict=True):
        theirs = dataclasses.replace(offered, client=name)
        assert cost(theirs, 1e-2) == own == np.nanmax(found.epsilon["abc".index(name)])


# --- answering --------------------------------------------------------------------------------------


def test_an_update_is_clipped_before_it_leaves_and_charged_before_it_is_computed(tmp_path: Path) -> None:
    made = joined(tmp_path, trusting(), limits=LIMITS)
    answer = ask(made, trusting())
    assert update(answer).dtype == np.float64
    assert np.linalg.norm(update(answer)) == pytest.approx(CLIP, rel=1e-4)
    assert np.linalg.norm(update(answer)) <= CLIP
    assert made.session is not None
    assert made.session.ledger.executed("a") == {"sums": 1}
    again = ask(made, trusting())
    np.testing.assert_array_equal(update(answer), update(again))
    assert made.session.ledger.executed("a") == {"sums": 1}
    # Rounds in which it is not asked tell something, too: what it spends is the whole plan.
    assert made.session.spent == cost(trusting(), trusting().delta) > made.session.ledger.spent("a")
    made.close()


def test_a_restarted_site_answers_as_before(tmp_path: Path) -> None:
    made = joined(tmp_path, trusting(), limits=LIMITS)
    first = update(ask(made, trusting()))
    made.close()
    back = site(tmp_path, LIMITS)
    np.testing.assert_array_equal(first, update(ask(back, trusting())))
    back.close()


def test_no_more_is_sent_than_was_planned(tmp_path: Path) -> None:
    agreed = trusting()
    made = joined(tmp_path, agreed, limits=LIMITS)
    for round in (1, 2, 3):
        assert refused(ask(made, agreed, round)) is None
    assert refused(ask(made, agreed, 3, order=8)) == "over budget"
    assert refused(ask(made, agreed, 2, order=8)) == "passed"
    assert refused(ask(made, agreed, 10)) == "not planned"
    assert refused(ask(made, agreed, 4, release="other")) == "not planned"
    made.close()


BAD: dict[str, dict[str, Any]] = {
    "several models and no choice": {"models": np.stack([START, START])},
    "a model of another size": {"models": START[None, :-1]},
    "a model that is not finite": {"models": np.full_like(START[None], np.nan)},
    "a negative order": {"order": -1},
    "an order too long": {"order": 2**64},
}


@pytest.mark.parametrize("changes", BAD.values(), ids=BAD.keys())
def test_a_message_that_is_none_of_ours_is_garbage_and_costs_nothing(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    made = joined(tmp_path, trusting(), limits=LIMITS)
    assert refused(ask(made, trusting(), **changes)) == "garbage"
    made.close()


def test_a_site_that_trusts_nobody_sends_nothing_in_the_clear(tmp_path: Path) -> None:
    made = joined(tmp_path)
    assert refused(ask(made, contract(), release="training")) == "not trusted"
    assert made.session is not None
    assert not any(made.session.ledger.executed("a").values())
    made.close()


def test_it_chooses_by_its_own_records_and_says_which(tmp_path: Path) -> None:
    routed = CohortSums(CLIP, 1.0, PoissonSample(0.5), Adjacency.ADD_REMOVE, histogram_ratio=4.0)
    agreed = trusting(plan=population(routed), work={"choice": Choice.LOWEST_LOSS})
    made = joined(tmp_path, agreed, limits=LIMITS)
    far = START + 50 * np.random.default_rng(1).normal(size=START.size).astype(np.float32)
    for round, models in ((1, (START, far)), (2, (far, START))):
        answer = ask(made, agreed, round, models=np.stack(models))
        assert answer.config_records["coterie"]["choice"] == round - 1
    made.close()


def test_personal_parameters_stay_and_survive_a_restart(tmp_path: Path) -> None:
    agreed = trusting(work={"personal": ((0, 5),)})
    made = joined(tmp_path, agreed, limits=LIMITS)
    assert update(ask(made, agreed, 1)).size == START.size - 5
    made.close()
    back = site(tmp_path, LIMITS)
    first = update(ask(back, agreed, 2))
    # A second site that never learnt anything of its own starts from what it is sent.
    fresh = joined(tmp_path / "fresh", agreed, limits=LIMITS)
    assert not np.array_equal(first, update(ask(fresh, agreed, 2)))
    for one in (back, fresh):
        one.close()


def test_ranges_are_what_a_mask_says() -> None:
    mask = np.array([1, 1, 0, 1, 0, 0, 1], dtype=bool)
    assert ranges_of(mask) == ((0, 2), (3, 4), (6, 7))
    parts = TrustedWork(TRAINING, personal=ranges_of(mask)).parts(7)
    assert parts is not None
    np.testing.assert_array_equal(parts.personal, mask)
    assert ranges_of(np.zeros(3, dtype=bool)) == ()


def test_sums_under_the_name_of_a_score_are_not_answered_with_one_nor_told_as_such(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its operator allowed no scores, whatever a plan calls releases."""
    unit = UnitPlan(POPULATION, (PlannedRelease(EVALUATION, SUM, 3),))
    agreed = trusting(plan=PrivacyPlan(Unit.CLIENT, Adjacency.ADD_REMOVE, THREAT, (unit,)))
    made = joined(tmp_path, agreed, limits=LIMITS)
    request = SiteRequest(RequestId(agreed.digest, 1, EVALUATION), START[None])
    asked = request.to_content(messages.EVALUATE)
    assert refused(deliver(made, messages.EVALUATE, asked)) == "not planned"
    assert made.session is not None
    assert "up to 3 updates of this client in the clear, clipped to 0.01;" in made.session.consent
    caplog.set_level(logging.INFO)
    assert refused(ask(made, agreed, release=EVALUATION)) is None
    assert "sent to the trusted server in the clear, clipped to 0.01" in caplog.text
    made.close()
