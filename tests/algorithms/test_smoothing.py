"""Means over rounds: the right mean, of released models alone, and training goes on as if there were none."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.algorithms import algorithm_names
from coterie.algorithms.protocol import Models
from coterie.algorithms.record.global_model import Global, GlobalState
from coterie.algorithms.smoothing import Smoothed, smoothed
from coterie.errors import InputError
from coterie.experiment.calibrated import build_algorithm
from coterie.experiment.callbacks import Callbacks
from coterie.experiment.local import calibrate, run
from coterie.experiment.result import RunResult
from coterie.experiment.schema import Experiment
from coterie.privacy import Unit


def experiment(name: str, averaging: float, rounds: int = 6) -> Experiment:
    algorithm = {"name": name, **({"clusters": 2} if name == "r-dpcfl" else {})}
    return Experiment.model_validate(
        {
            "federation": {"sizes": [2, 2], "records_per_client": 60},
            "algorithm": algorithm,
            "schedule": {"rounds": rounds, "batch": 20, "averaging": averaging},
            "evaluation": {"references": False},
            "seeds": {"noise": 1},
        }
    )


def states(averaging: float, shapes: list[int]) -> list[Any]:
    """Drive a stand-in whose models are known: row k of round t holds 10 k + t."""
    from dataclasses import replace

    from coterie.algorithms.protocol import Algorithm, Assignment, State

    @dataclass(frozen=True)
    class Counted(State):
        models: Any

    class Counting(Algorithm[Any]):
        unit = None  # type: ignore[assignment]

        def plan(self, facts: Any) -> Any: ...

        def start(self, facts: Any, rng: Any) -> Counted:
            return Counted(0, ("a",), 0, np.full((shapes[0], 1), -100.0, dtype=np.float32))

        def round(self, state: Counted) -> Any:
            now = state.round + 1
            yield from ()
            rows = [[10.0 * k + now] for k in range(shapes[now])]
            return replace(state, round=now, models=np.array(rows, dtype=np.float32))

        def models(self, state: Counted) -> Assignment:
            return Assignment(state.models, {"a": 0})

    # A name in the class would put the stand-in among the algorithms of experiment files.
    Counting.name = "counting"
    settings = experiment("global", averaging)
    algorithm = smoothed(Counting(settings.algorithm, settings.schedule, settings.privacy))
    found = [algorithm.start(None, None)]  # type: ignore[arg-type]
    for _ in shapes[1:]:
        asking = algorithm.round(found[-1])
        with pytest.raises(StopIteration) as done:
            next(asking)
        found.append(done.value.value)
    return [algorithm.models(state).models for state in found]


def test_the_mean_weighs_rounds_by_their_polynomial() -> None:
    """Decay 1 weighs round t by t (Shamir and Zhang): checked against the sum written out."""
    models = states(1.0, [2] * 9)
    for now in range(1, 9):
        rounds = np.arange(1, now + 1)
        mean = (rounds * rounds).sum() / rounds.sum()
        np.testing.assert_allclose(models[now][:, 0], [mean, 10 + mean], rtol=1e-6)


def test_where_the_number_of_models_changes_the_mean_begins_anew() -> None:
    models = states(1.0, [1, 1, 3, 3, 3])
    np.testing.assert_allclose(models[2][:, 0], [2, 12, 22])
    np.testing.assert_allclose(models[3][:, 0], [(2 + 2 * 3) / 3, 10 + 8 / 3, 20 + 8 / 3], rtol=1e-6)


def test_a_state_of_ones_own_whose_field_the_mean_would_overwrite_is_refused() -> None:
    @dataclass(frozen=True)
    class WithMean(GlobalState):
        mean: Models

    settings = experiment("global", 1.0)
    algorithm = Global(settings.algorithm, settings.schedule, settings.privacy)
    algorithm.state_type = WithMean  # type: ignore[misc]
    with pytest.raises(InputError, match="WithMean has a field 'mean'"):
        smoothed(algorithm)


def test_without_averaging_an_algorithm_stays_itself() -> None:
    assert not isinstance(build_algorithm(experiment("global", 0.0), None), Smoothed)


@pytest.mark.parametrize("name", ["r-dpcfl", "oracle"])
def test_averaging_changes_what_is_served_and_nothing_that_is_released(name: str, tmp_path: Path) -> None:
    for averaging in (0.0, 4.0):
        run(experiment(name, averaging), tmp_path / str(averaging))
    plain, mean = (RunResult.load(tmp_path / str(averaging)) for averaging in (0.0, 4.0))
    assert plain.guarantee == mean.guarantee
    assert plain.loss != mean.loss
    ledgers = [(tmp_path / str(averaging) / "ledger.jsonl").read_text() for averaging in (0.0, 4.0)]
    assert ledgers[0].splitlines()[1:] == ledgers[1].splitlines()[1:]


def test_a_smoothed_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    settings = experiment("r-dpcfl", 4.0)
    whole = run(settings, tmp_path / "whole")
    seen = 0

    class Stop(Exception):
        pass

    def stop(report: Any) -> None:
        nonlocal seen
        seen += 1
        if seen == 3:
            raise Stop

    with pytest.raises(Stop):
        run(settings, tmp_path / "broken", callbacks=Callbacks(on_round=stop))
    again = run(settings, tmp_path / "broken", resume=True)
    assert again.loss == whole.loss


def test_the_plan_is_that_of_the_algorithm() -> None:
    plans = [calibrate(experiment("r-dpcfl", averaging)).plan.digest() for averaging in (0.0, 4.0)]
    assert plans[0] == plans[1]


@pytest.mark.parametrize(
    ("unit", "name"), [(unit, name) for unit in Unit for name in algorithm_names(unit) if name != "rc-dpfl"]
)
def test_every_algorithm_can_serve_means(unit: Unit, name: str) -> None:
    content = {"privacy": {"unit": unit.value}, "algorithm": {"name": name}, "schedule": {"averaging": 4}}
    algorithm = build_algorithm(Experiment.model_validate(content), {"a": 0})
    own = {field.name for field in fields(type(algorithm.algorithm).state_type)}
    assert {field.name for field in fields(algorithm.state_type)} == own | {"mean", "mean_from"}
    assert issubclass(algorithm.state_type, type(algorithm.algorithm).state_type)


def test_clusters_that_clients_choose_themselves_serve_means_and_resume(tmp_path: Path) -> None:
    content = experiment("global", 4.0, rounds=3).model_dump()
    content |= {"privacy": {"unit": "client"}, "algorithm": {"name": "dp-ifca", "clusters": 2, "rate": 0.5}}
    settings = Experiment.model_validate(content)
    whole = run(settings, tmp_path / "whole")

    def stop(report: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(settings, tmp_path / "broken", callbacks=Callbacks(on_round=stop))
    assert run(settings, tmp_path / "broken", resume=True).loss == whole.loss
