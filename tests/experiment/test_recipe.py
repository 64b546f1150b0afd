"""Keys that are auto: numbers from public facts, written into the run; and whether a budget is usable."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coterie.algorithms.settings import Schedule
from coterie.data.records import Task
from coterie.errors import InputError
from coterie.experiment import local, recipe
from coterie.experiment.experiment_file import read_experiment, to_yaml
from coterie.experiment.recipe import batch_for, sized, usability
from coterie.experiment.schema import SIZED, Experiment
from coterie.files import parse_yaml

ALL: dict[str, Any] = {
    "schedule": {"rounds": "auto", "batch": "auto", "lr": "auto", "averaging": "auto"},
    "privacy": {"clip": "auto"},
}
TWO, NUMBER = Task("classification", (10,), 2), Task("regression", (10,), 0, error_cap=0.1)


def experiment(**sections: Any) -> Experiment:
    merged = {name: {**ALL.get(name, {}), **sections.get(name, {})} for name in {*ALL, *sections}}
    return Experiment.model_validate(merged)


def counts(*records: int) -> dict[str, int]:
    return {f"client-{place}": count for place, count in enumerate(records)}


def test_auto_stays_auto_in_files_until_the_records_are_known(tmp_path: Path) -> None:
    whole = experiment()
    assert whole.auto == SIZED
    assert parse_yaml(to_yaml(whole))["schedule"]["lr"] == "auto"
    (tmp_path / "e.yaml").write_text(to_yaml(whole))
    assert read_experiment(tmp_path / "e.yaml") == whole != Experiment()
    assert read_experiment(None, ["schedule.lr=auto"]).auto == ("schedule.lr",)
    found = sized(whole, TWO, counts(100, 100, 100))
    assert found.auto == ()
    assert parse_yaml(to_yaml(found))["schedule"]["batch"] == 12
    # Where progress is counted before the records are read, the defaults stand in.
    assert Schedule().rounds == recipe.ROUNDS == found.schedule.rounds


def test_what_is_given_stays_and_the_rest_follows_it() -> None:
    free = sized(experiment(), TWO, counts(100, 100, 100))
    fixed = sized(experiment(privacy={"clip": 2.0}, schedule={"rounds": 60}), TWO, counts(100, 100, 100))
    assert (fixed.privacy.clip, fixed.schedule.rounds) == (2.0, 60)
    # Step size times clip times rounds is what counts.
    lengths = [run.schedule.lr * run.privacy.clip * run.schedule.rounds for run in (free, fixed)]
    assert lengths[0] == pytest.approx(lengths[1], rel=0.05)


def test_few_rounds_do_not_make_long_steps() -> None:
    def step(rounds: int) -> float:
        found = sized(experiment(schedule={"rounds": rounds}), TWO, counts(200, 200, 200))
        return found.schedule.lr * found.privacy.clip

    assert step(2) == pytest.approx(step(30), rel=0.05) == pytest.approx(2 * step(60), rel=0.05)


@pytest.mark.parametrize("records", [(2, 5, 1000), (1, 1), (7,), (50,) * 30, (10, 400, 400, 400, 400)])
def test_no_batch_comes_near_the_size_of_a_client(records: tuple[int, ...]) -> None:
    assert 1 <= batch_for(sorted(records)) <= max(1, min(records) // 2)


@pytest.mark.parametrize("task", [TWO, NUMBER])
def test_more_noise_means_a_shorter_way(task: Task) -> None:
    def lr(epsilon: float, records: int = 200, **sections: Any) -> float:
        chosen = experiment(privacy={"epsilon": epsilon}, **sections)
        if task is NUMBER:
            chosen = chosen.model_copy(update={"model": chosen.model.model_copy(update={"name": "linear"})})
        return sized(chosen, task, counts(*[records] * 4)).schedule.lr

    assert lr(0.01) <= lr(0.1) < lr(1.0) <= lr(8.0) <= lr(float("inf"))
    assert lr(0.3, records=20) < lr(0.3)
    assert lr(0.3, algorithm={"name": "local"}) < lr(0.3, algorithm={"name": "global"})


def test_heads_on_features_go_far() -> None:
    """Thousands of features share a record's norm of 1: what was best on images is within a factor of two."""
    grey, colour = (Task("classification", shape, 10) for shape in ((1, 28, 28), (3, 32, 32)))

    def length(task: Task, epsilon: float, records: int, clients: int) -> float:
        model = {"name": "softmax", "features": "scattering", "bias": False}
        privacy = {"epsilon": epsilon, "delta": 1e-4}
        chosen = experiment(model=model, privacy=privacy, algorithm={"name": "r-dpcfl", "clusters": 2})
        found = sized(chosen, task, counts(*[records] * clients))
        steps = found.schedule.rounds * -(-records // found.schedule.batch)
        return found.schedule.lr * found.privacy.clip * steps

    best = {(1.0, 1000): 900.0, (3.0, 1000): 1800.0}
    for (epsilon, records), tried in best.items():
        assert tried / 2 < length(grey, epsilon, records, 6) < 2 * tried
    assert 10_080 / 2 < length(colour, 3.0, 6666, 12) < 2 * 10_080


def test_means_over_rounds_serve_where_there_are_rounds() -> None:
    found = [
        sized(experiment(schedule={"rounds": rounds}), TWO, counts(200, 200, 200)).schedule.averaging
        for rounds in (1, 2, 30)
    ]
    assert found == [0.0, recipe.AVERAGING, recipe.AVERAGING]
    assert sized(experiment(schedule={"averaging": 0}), TWO, counts(200, 200)).schedule.averaging == 0.0


def test_a_pull_leaves_no_step_beyond_the_mean() -> None:
    pulled = sized(experiment(algorithm={"name": "mr-mtl"}), TWO, counts(200, 200, 200))
    assert pulled.schedule.lr * pulled.algorithm.pull <= 1.0


def test_units_without_a_recipe_are_refused() -> None:
    chosen = experiment(privacy={"unit": "client"}, algorithm={"name": "dp-fedavg"})
    with pytest.raises(InputError, match=r"schedule.rounds: auto with privacy.unit client"):
        sized(chosen, TWO, counts(10, 10))


SMALL: dict[str, Any] = {
    "federation": {"sizes": [2, 2], "records_per_client": 60},
    "algorithm": {"name": "global"},
    "schedule": {"rounds": 2},
    "evaluation": {"kind": "none"},
    "seeds": {"noise": 1},
}


def test_a_run_writes_the_numbers_down_and_goes_on_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = experiment(**SMALL)
    local.run(chosen, tmp_path / "run")
    stored = read_experiment(tmp_path / "run" / "experiment.yaml")
    assert stored == sized(chosen, Task("classification", (1, 8, 8), 10), counts(60, 60, 60, 60))
    # Another recipe, and the run is still the one that was begun.
    monkeypatch.setattr(recipe, "CLASSIFICATION", replace(recipe.CLASSIFICATION, clip=0.5))
    assert local.run(chosen, tmp_path / "run", resume=True).rounds == 2
    with pytest.raises(InputError, match=r"privacy.clip: 0.75 is not 0.25"):
        local.run(experiment(**{**SMALL, "privacy": {"clip": 0.75}}), tmp_path / "run", resume=True)


def test_a_budget_is_called_what_it_is() -> None:
    verdicts = {}
    for epsilon in (0.05, 200.0):
        found = usability(local.calibrate(experiment(**SMALL, privacy={"epsilon": epsilon})))
        assert found is not None
        assert found.line.endswith("would help") is (found.verdict != "usable")
        verdicts[epsilon] = found.verdict
    assert verdicts == {0.05: "not usable", 200.0: "usable"}
