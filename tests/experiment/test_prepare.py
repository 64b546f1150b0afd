"""What is settled before anything is written or released: plan, noise and promise of every client."""

import gzip
import json
from pathlib import Path

import pytest

from coterie.experiment.experiment_file import read_experiment
from coterie.experiment.local import calibrate
from coterie.experiment.schema import Experiment
from coterie.privacy import PoissonSteps, epsilon_of

SMALL = [
    "federation.sizes=[2,3]",
    "federation.records_per_client=60",
    "schedule.rounds=5",
    "schedule.batch=20",
]


def noise_of(client: str, overrides: list[str]) -> float:
    mechanism = (
        calibrate(read_experiment(None, overrides)).plan.for_subject(client).release("training").mechanism
    )
    assert isinstance(mechanism, PoissonSteps)
    return mechanism.multiplier


def test_every_client_gets_the_noise_of_its_own_budget() -> None:
    overrides = [*SMALL, "privacy.epsilon=8", "privacy.budgets={client-1: {epsilon: 2, delta: 1.0e-5}}"]
    prepared = calibrate(read_experiment(None, overrides))
    for unit in prepared.plan.units:
        budget = prepared.budgets[unit.subject]
        spent = epsilon_of(unit.event, budget.delta, "rdp", prepared.plan.adjacency)
        assert 0.99 * budget.epsilon < spent <= budget.epsilon
    assert noise_of("client-1", overrides) > 2 * noise_of("client-0", overrides)
    assert prepared.guarantee.epsilon == pytest.approx(8, rel=1e-3)


def test_a_name_that_is_no_client_is_refused() -> None:
    from coterie.errors import InputError

    with pytest.raises(InputError, match=r"privacy.budgets: no client is called 'mars'"):
        calibrate(read_experiment(None, [*SMALL, "privacy.budgets={mars: {epsilon: 2}}"]))


def test_delta_left_open_is_a_tenth_of_one_over_the_records_rounded_down() -> None:
    prepared = calibrate(read_experiment(None, SMALL))
    assert {budget.delta for budget in prepared.budgets.values()} == {1e-3}


@pytest.mark.parametrize("option", ["engine.workers=3", "engine.workers=1", "engine.max_memory=0.0001"])
def test_an_option_of_speed_changes_neither_plan_nor_promise(option: str) -> None:
    plain, tuned = (calibrate(read_experiment(None, overrides)) for overrides in (SMALL, [*SMALL, option]))
    assert tuned.plan.to_json() == plain.plan.to_json()
    assert [unit.event for unit in tuned.plan.units] == [unit.event for unit in plain.plan.units]
    assert tuned.guarantee == plain.guarantee


def test_the_memory_of_a_step_can_be_bounded() -> None:
    plain, small = (
        calibrate(read_experiment(None, overrides)).learner
        for overrides in (SMALL, [*SMALL, "engine.max_memory=0.0001"])
    )
    assert small.micro_batch < plain.micro_batch
    assert small.micro_batch * small.bytes_per_record <= 0.0001 * 2**30


@pytest.mark.parametrize("bad", ["engine.workers=0", "engine.max_memory=0", "engine.workers=two"])
def test_an_option_of_speed_without_meaning_is_refused(bad: str) -> None:
    from coterie.errors import InputError

    with pytest.raises(InputError, match=rf"{bad.partition('=')[0]}.*(one a core|GiB)"):
        read_experiment(None, bad.split("\n"))


@pytest.mark.parametrize(
    ("stride", "unit", "said"), [(5, "record", True), (11, "record", False), (5, "client", False)]
)
def test_windows_that_share_characters_are_a_caveat_of_records(
    stride: int, unit: str, said: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shakespeare").mkdir()
    lines = [json.dumps({"play": "p", "role": role, "text": "to be or not to be " * 20}) for role in "abc"]
    with gzip.open(tmp_path / "shakespeare" / "speeches.jsonl.gz", "wt") as file:
        file.write("\n".join(lines))
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path))
    content = {
        "data": {"name": "shakespeare", "length": 10, "stride": stride},
        "federation": {"kind": "natural"},
        "model": {"name": "lstm"},
        "algorithm": {"name": "global" if unit == "record" else "dp-fedavg"},
        "privacy": {"unit": unit, "epsilon": 100},
        "schedule": {"rounds": 2, "batch": 4},
    }
    promise = calibrate(Experiment.model_validate(content)).guarantee
    assert ("a character is in up to 3 of them" in promise.text) is said
