"""Plans as data: the same everywhere, both ways, and refused when they contradict themselves."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from privacy_oracles import SERVER, record_plan

from coterie.privacy import (
    Adjacency,
    Budget,
    CohortSums,
    FixedSample,
    FullBatchSketch,
    NoiseRule,
    PlanError,
    PlannedRelease,
    PoissonSample,
    PoissonSteps,
    PrivacyInputError,
    PrivacyPlan,
    PrivateSelection,
    ShuffledSteps,
    Unit,
    UnitPlan,
    calibrate,
)
from coterie.privacy.mechanisms import Mechanism

HERE = Path(__file__).parent
ZERO_OUT, ADD_REMOVE = Adjacency.ZERO_OUT, Adjacency.ADD_REMOVE


def test_plan_survives_a_file_exactly():
    plan = calibrate(record_plan(subjects=("a", "b")), Budget(5.0, 1e-4))
    copy = PrivacyPlan.from_json(json.loads(json.dumps(plan.to_json())))
    assert copy == plan
    assert copy.digest() == plan.digest()


def test_digest_is_the_same_in_another_process():
    code = (
        f"import sys; sys.path.insert(0, {str(HERE)!r}); from privacy_oracles import record_plan;"
        "print(record_plan(noise=1.3, first=8.0).digest())"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == record_plan(noise=1.3, first=8.0).digest()


def test_digest_changes_with_every_part_of_the_plan():
    digests = {
        record_plan(noise=1.3).digest(),
        record_plan(noise=1.4).digest(),
        record_plan(noise=1.3, selections=20).digest(),
        record_plan(noise=1.3, rounds=201).digest(),
        record_plan(noise=1.3, subjects=("other",)).digest(),
        record_plan(noise=1.3, adjacency=Adjacency.REPLACE_ONE).digest(),
    }
    assert len(digests) == 6


@pytest.mark.parametrize(
    "mechanism",
    [
        PoissonSteps(1, NoiseRule.SHARED, 100, 10, 2, ZERO_OUT),
        ShuffledSteps(1.0, 0.5, 100, 10, 2, ZERO_OUT),
        FullBatchSketch(0.5, NoiseRule.AUTO, 100, 50, ZERO_OUT),
        PrivateSelection(float("inf"), ZERO_OUT),
        CohortSums(1.0, 2.0, PoissonSample(0.1), ADD_REMOVE),
        CohortSums(1.0, 2.0, PoissonSample(0.1), ADD_REMOVE, histogram_ratio=4.0),
        CohortSums(1.0, 2.0, FixedSample(1000, 100), ADD_REMOVE, identifier_ratio=1.0),
        CohortSums(1.0, 2.0, PoissonSample(0.1), ADD_REMOVE, tracking_ratio=2.0),
        CohortSums(1.0, 2.0, PoissonSample(0.1), ADD_REMOVE, histogram_ratio=4.0, tracking_ratio=2.0),
        CohortSums(1.0, 2.0, PoissonSample(0.1), ADD_REMOVE, drafted=True),
    ],
)
def test_every_mechanism_survives_a_file(mechanism):
    assert Mechanism.from_json(json.loads(json.dumps(mechanism.to_json()))) == mechanism


@pytest.mark.parametrize(
    "extra",
    [{"drafted": True}, {"drafted": False}, {"sampling": {}}, {"tracking_ratio": None}, {"clients": 3}],
)
def test_what_the_name_of_a_mechanism_says_is_not_said_again(extra):
    written = CohortSums(1.0, 2.0, PoissonSample(0.1), ADD_REMOVE).to_json()
    with pytest.raises(PlanError, match=f"unknown fields: {next(iter(extra))}$"):
        Mechanism.from_json({**written, **extra})


def test_a_part_that_the_name_of_a_mechanism_promises_is_there():
    written = CohortSums(1.0, 2.0, PoissonSample(0.1), ADD_REMOVE, tracking_ratio=4.0).to_json()
    with pytest.raises(PlanError, match="tracking_ratio"):
        Mechanism.from_json({**written, "tracking_ratio": None})
    del written["tracking_ratio"]
    with pytest.raises(PlanError, match="unknown fields: tracking_ratio"):
        Mechanism.from_json(written)


def test_adjacency_of_mechanism_and_plan_must_agree():
    release = PlannedRelease("selection", PrivateSelection(0.1, Adjacency.REPLACE_ONE), 1)
    with pytest.raises(PlanError, match="replace-one"):
        PrivacyPlan(Unit.RECORD, ZERO_OUT, SERVER, (UnitPlan("a", (release,)),))


def test_undeclared_release_is_refused():
    with pytest.raises(PlanError, match="not declared"):
        record_plan().for_subject("client 3").release("validation")
    with pytest.raises(PlanError, match="nobody"):
        record_plan().for_subject("nobody")


def test_uncalibrated_plan_has_no_cost():
    with pytest.raises(PlanError, match="calibrated"):
        _ = record_plan().units[0].event


@pytest.mark.parametrize(
    "build",
    [
        lambda: PoissonSteps(1.0, 1.0, 100, 101, 1, ZERO_OUT),
        lambda: PoissonSteps(0.0, 1.0, 100, 10, 1, ZERO_OUT),
        lambda: PoissonSteps(1.0, -1.0, 100, 10, 1, ZERO_OUT),
        lambda: PrivateSelection(0.0, ZERO_OUT),
        lambda: CohortSums(1.0, 1.0, PoissonSample(1.5), ADD_REMOVE),
        lambda: Budget(0.0, 1e-4),
        lambda: Budget(1.0, 1.0),
    ],
)
def test_meaningless_parameters_are_refused(build):
    with pytest.raises(PrivacyInputError, match="is not allowed"):
        build()
