"""A server that wants held-out records: what a site signs, answers and charges, and what attacks learn."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
from flwr.app import RecordDict
from tiny_site import (
    LIMITS,
    REPORTING,
    START,
    TASK,
    ZERO_OUT,
    contract,
    deliver,
    evaluation,
    joined,
    plan_of,
    releases,
    scores,
    site,
)

from coterie.data import Client, Federation, Records
from coterie.engines.flower import messages
from coterie.engines.flower.contract import Contract, Limits
from coterie.engines.flower.messages import RequestId, SiteRequest
from coterie.engines.flower.site import Site
from coterie.errors import InputError
from coterie.privacy import (
    EVALUATION,
    Budget,
    FullBatchSteps,
    HeldOut,
    LowestLoss,
    NoisyScores,
    PlannedRelease,
    PrivacyPlan,
    Unit,
    UnitPlan,
    epsilon_of,
    held_out,
)

REPORTED = contract(plan=plan_of(releases(), scores()))


def refused(answer: RecordDict) -> str | None:
    return messages.is_refusal(answer)


def count_in(answer: RecordDict) -> float:
    return float(answer.config_records["coterie"]["value"])  # type: ignore[arg-type]


def charged(found: Site) -> dict[str, int]:
    assert found.session is not None
    return dict(found.session.ledger.executed(held_out("a")))


# --- what is signed ---------------------------------------------------------------------------------


def with_unit(subject: str, *planned: PlannedRelease) -> PrivacyPlan:
    plan = plan_of(releases())
    return dataclasses.replace(plan, units=(*plan.units, UnitPlan(subject, planned)))


OFFERS: dict[str, tuple[PrivacyPlan, str]] = {
    "less noise than the price allows": (plan_of(releases(), scores(noise=1.0)), "too much"),
    "no noise": (plan_of(releases(), scores(noise=0.0)), "too much"),
    "more reports than allowed": (plan_of(releases(), scores(noise=100.0, times=3)), "not allowed"),
    "more held-out records than there are": (plan_of(releases(), scores(units=400)), "other data"),
    "two kinds of reports": (
        plan_of(releases(), scores(noise=30.0), scores(noise=30.0, name="again")),
        "not planned",
    ),
    "reports under another name": (plan_of(releases(), scores(name="training")), "not planned"),
    "held-out records without a report": (with_unit(held_out("a")), "not planned"),
    "scores of records that are trained on": (plan_of((*releases(), scores())), "not planned"),
}


@pytest.mark.parametrize(("plan", "reason"), OFFERS.values(), ids=OFFERS.keys())
def test_reports_beyond_what_the_operator_said_are_not_signed(
    plan: PrivacyPlan, reason: str, tmp_path: Path
) -> None:
    made = site(tmp_path, REPORTING)
    assert refused(deliver(made, messages.OFFER, contract(plan=plan).to_content())) == reason
    assert made.session is None


def test_a_site_that_holds_nothing_out_signs_no_report(tmp_path: Path) -> None:
    made = site(tmp_path, LIMITS)
    assert refused(deliver(made, messages.OFFER, REPORTED.to_content())) == "not allowed"


def test_training_cannot_be_planned_on_held_out_records() -> None:
    """The plan itself is refused before anybody reads it."""
    data = REPORTED.to_json()
    [scored] = [plan for plan in data["plan"]["plans"] if plan["subjects"] == [held_out("a")]]
    for mechanism in (
        LowestLoss(adjacency=ZERO_OUT),
        FullBatchSteps(1.0, 50.0, records=10, epochs=1, adjacency=ZERO_OUT),
    ):
        scored["releases"] = [{"name": EVALUATION, "times": 1, **mechanism.to_json()}]
        with pytest.raises(messages.GarbageError):
            Contract.from_json(data)


@pytest.mark.parametrize("limits", [LIMITS, REPORTING], ids=["no scores", "some scores"])
def test_training_under_the_name_of_a_score_is_not_answered_with_one(limits: Limits, tmp_path: Path) -> None:
    """Else its charge, on other records, would pay for an exact score of those that are held out."""
    named = dataclasses.replace(releases()[1], name=EVALUATION)
    agreed = contract(plan=plan_of((named,)))
    made = joined(tmp_path, agreed, limits=limits)
    assert refused(deliver(made, messages.EVALUATE, evaluation(agreed=agreed))) == "not planned"
    assert made.session is not None
    assert made.session.ledger.executed("a")[EVALUATION] == 0
    made.close()


# --- what is answered -------------------------------------------------------------------------------


def test_a_report_is_noisy_charged_and_the_same_when_asked_again(tmp_path: Path) -> None:
    made = joined(tmp_path, REPORTED, limits=REPORTING)
    first = count_in(deliver(made, messages.EVALUATE, evaluation(agreed=REPORTED)))
    assert first != round(first), "a count without noise is whole"
    assert charged(made) == {EVALUATION: 1}
    assert count_in(deliver(made, messages.EVALUATE, evaluation(agreed=REPORTED))) == first
    assert charged(made) == {EVALUATION: 1}
    made.close()
    again = site(tmp_path, REPORTING)
    assert count_in(deliver(again, messages.EVALUATE, evaluation(agreed=REPORTED))) == first
    other = evaluation(agreed=REPORTED, model=START + 1)
    assert refused(deliver(again, messages.EVALUATE, other)) is None
    third = evaluation(agreed=REPORTED, model=START + 2)
    assert refused(deliver(again, messages.EVALUATE, third)) == "over budget"
    assert charged(again) == {EVALUATION: 2}
    again.close()


def test_what_was_approved_for_held_out_records_cannot_be_taken_back_silently(tmp_path: Path) -> None:
    joined(tmp_path, REPORTED, limits=REPORTING).close()
    for reported in (None, HeldOut(0, 0.1, 2)):
        with pytest.raises(InputError, match="--evaluation-epsilon"):
            site(tmp_path, dataclasses.replace(REPORTING, reported=reported))


@pytest.mark.parametrize("release", ["training", "sketch", "selection", "other"])
def test_a_report_under_another_releases_name_is_refused(release: str, tmp_path: Path) -> None:
    made = joined(tmp_path, REPORTED, limits=REPORTING)
    before = made.files.ledger.read_bytes()
    asked = evaluation(agreed=REPORTED, release=release)
    assert refused(deliver(made, messages.EVALUATE, asked)) == "not planned"
    assert made.files.ledger.read_bytes() == before
    made.close()


# --- attacks ----------------------------------------------------------------------------------------


def site_with_labels(folder: Path, labels: np.ndarray) -> Site:
    """A site whose held-out features the attacker knows (unit vectors), and whose labels it wants."""
    rng = np.random.default_rng(0)
    train = Records(rng.normal(size=(40, 5)).astype(np.float32), rng.integers(3, size=40))
    features = np.zeros((len(labels), 5), np.float32)
    features[np.arange(len(labels)), np.arange(len(labels))] = 1.0
    client = Client("a", train, train.take(slice(0, 0)), Records(features, labels))
    limits = Limits(Budget(20.0, 1e-2), reported=HeldOut(0, 1.0, 2))
    return Site(Federation((client,), TASK), folder, limits)


def says_one_of(record: int) -> np.ndarray:
    """A model that answers class 1 for one record and class 2, which nobody has, for all others."""
    weight, bias = np.zeros((3, 5), np.float32), np.array([0.0, 0.0, 10.0], np.float32)
    weight[1, record] = 100.0
    return np.concatenate([weight.ravel(), bias])


def test_a_thousand_and_one_queries_read_no_more_than_two_noisy_answers_tell(tmp_path: Path) -> None:
    """Each query isolates one record. Without noise and limits, five of them read five labels."""
    trials, won, others = 60, 0, 0
    agreed = contract(held_out=5, plan=plan_of(releases(), scores(noise=noise_for(1.0, 2), times=2, units=5)))
    rng = np.random.default_rng(1)
    for trial in range(trials):
        labels = rng.integers(2, size=5)
        made = site_with_labels(tmp_path / str(trial), labels)
        assert refused(deliver(made, messages.OFFER, agreed.to_content())) is None
        answers: dict[int, list[float]] = {record: [] for record in range(5)}
        queries = 1001 if trial == 0 else 12
        for query in range(queries):
            # Two reports on one record are the most that can be learnt about any.
            record = 0 if query < 2 else query % 5
            model = says_one_of(record) * np.float32(1 + 1e-3 * query)
            answer = deliver(made, messages.EVALUATE, evaluation(agreed=agreed, model=model))
            if refused(answer) is None:
                answers[record].append(count_in(answer))
        assert sum(map(len, answers.values())) == 2, "whatever is asked, two reports are made"
        assert charged(made) == {EVALUATION: 2}
        won += int((np.mean(answers[0]) > 0.5) == labels[0])
        others += int((rng.integers(2, size=4) == labels[1:]).sum())
        made.close()
    best = math.e / (1 + math.e)
    assert won / trials <= best + 3 * math.sqrt(best * (1 - best) / trials)
    assert others / (4 * trials) <= 0.5 + 3 * 0.5 / math.sqrt(4 * trials), "of all others, nothing"


def noise_for(epsilon: float, reports: int) -> float:
    """The least noise that so many reports need at delta 1e-2, found by bisection."""
    low, high = 0.1, 100.0
    for _ in range(60):
        middle = (low + high) / 2
        event = UnitPlan("x", (PlannedRelease("x", NoisyScores(0.5, middle, 5, ZERO_OUT), reports),)).event
        low, high = (low, middle) if epsilon_of(event, 1e-2, "rdp", ZERO_OUT) <= epsilon else (middle, high)
    return high


MESSAGES = 10_000


def test_ten_thousand_hostile_messages_learn_nothing_that_is_not_charged(tmp_path: Path) -> None:
    """Every answer is one that was given before, or was charged; what is charged stays within the limits."""
    rng = np.random.default_rng(2)
    made = joined(tmp_path, REPORTED, limits=REPORTING)
    assert made.session is not None
    ledger = made.session.ledger
    given: dict[tuple[str, bytes], set[bytes]] = {}
    models = [START * np.float32(scale) for scale in (0.5, 1.0, 2.0, -1.0)]
    answered = 0
    for _ in range(MESSAGES):
        kind, content = random_message(rng, models)
        spent = dict(ledger.executed("a")), dict(ledger.executed(held_out("a")))
        answer = deliver(made, kind, content)
        now = dict(ledger.executed("a")), dict(ledger.executed(held_out("a")))
        if refused(answer) is not None:
            assert now == spent, "a refusal costs nothing"
            continue
        answered += 1
        key, said = (kind, fingerprint(content)), fingerprint(answer)
        if now == spent:
            assert given[key] == {said}, "what is not charged was said before, bit for bit"
        else:
            assert sum(sum(part.values()) for part in now) == 1 + sum(sum(part.values()) for part in spent)
            given[key] = {said}
    assert answered > 50
    for subject, limit in (("a", REPORTING.budget.epsilon), (held_out("a"), 1.0)):
        plan = REPORTED.own_plan.for_subject(subject)
        executed = ledger.executed(subject)
        assert all(times <= plan.release(name).times for name, times in executed.items())
        assert ledger.spent(subject) <= limit
    assert dict(ledger.executed(held_out("a"))) == {EVALUATION: 2}
    made.close()


def random_message(rng: np.random.Generator, models: list[np.ndarray]) -> tuple[str, RecordDict]:
    """A message as a hostile server might send it: mostly well-formed, often beside the contract."""
    names = ["training", "sketch", "selection", EVALUATION, "other"]
    weights = [0.3, 0.15, 0.2, 0.3, 0.05]
    digest = REPORTED.digest if rng.random() < 0.97 else "0" * 64
    wanted = RequestId(digest, int(rng.integers(1, 12)), str(rng.choice(names, p=weights)))
    model = models[int(rng.integers(len(models)))].copy()
    if rng.random() < 0.2:
        model[int(rng.integers(len(model)))] = rng.choice([np.nan, 1e30, -1e30, 0.0])
    kind = str(rng.choice([messages.TRAIN, messages.SELECT, messages.EVALUATE, messages.EVALUATE]))
    if rng.random() < 0.6:  # the message that belongs to the release
        kind = {"selection": messages.SELECT, EVALUATION: messages.EVALUATE}.get(
            wanted.release, messages.TRAIN
        )
    if kind == messages.TRAIN:
        return kind, SiteRequest(wanted, model[None]).to_content(kind)
    stacked = np.stack([model] * (1 if rng.random() < 0.7 else 2))
    return kind, SiteRequest(wanted, stacked).to_content(kind)


def fingerprint(content: RecordDict) -> bytes:
    plain = repr(sorted(content.config_records["coterie"].items())).encode()
    arrays = content.array_records.get("arrays", {})
    return plain + b"".join(name.encode() + arrays[name].data for name in sorted(arrays))


def test_a_worker_is_never_scored(tmp_path: Path) -> None:
    """Its models tell of groups that a reader of the score does not see."""
    plan = dataclasses.replace(plan_of((*releases(), scores())), unit=Unit.WORKER)
    made = site(tmp_path, dataclasses.replace(REPORTING, trust_server=True))
    assert refused(deliver(made, messages.OFFER, contract(plan=plan).to_content())) == "not planned"
