"""Every record-level algorithm in a short real run: it finishes, charges what it planned, and means it."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from coterie.algorithms import find_algorithm
from coterie.errors import InputError
from coterie.experiment import checkpoint, local
from coterie.experiment.folder import RunFolder
from coterie.experiment.result import RunResult
from coterie.experiment.schema import Experiment
from coterie.files import read_json
from coterie.privacy import AccuracySelection, Budget, Ledger, PrivacyPlan, PrivateSelection, Unit

BASE = {
    "federation": {"kind": "clusters", "sizes": [2, 3], "shift": "rotation", "records_per_client": 60},
    "schedule": {"rounds": 6, "batch": 20},
    "privacy": {"epsilon": 8, "delta": 1e-3},
    "seeds": {"simulation": 3, "noise": 5},
    "evaluation": {"every": 6, "references": False},
}


def run(out: Path, algorithm: dict[str, object], mode: str = "sound") -> RunResult:
    sections = {**BASE, "algorithm": algorithm, "privacy": {**BASE["privacy"], "mode": mode}}
    return local.run(Experiment.model_validate(sections), out)


def final_models(out: Path, name: str) -> NDArray[np.float32]:
    algorithm = find_algorithm(Unit.RECORD, name)
    saved = checkpoint.load(RunFolder(out).checkpoint, algorithm.state_type)
    assert saved is not None
    models: NDArray[np.float32] = saved.state.models  # type: ignore[attr-defined]
    return models


RUNS = [
    ({"name": "mr-mtl"}, "sound"),
    ({"name": "dp-ifca", "clusters": 2}, "sound"),
    ({"name": "dp-ifca", "clusters": 2, "start": "random"}, "sound"),
    ({"name": "km-cdpfl", "clusters": 2}, "sound"),
    ({"name": "rc-dpfl", "clusters": 2}, "paper"),
    ({"name": "r-dpcfl", "clusters": 2, "first_round_noise": "shared"}, "sound"),
    ({"name": "r-dpcfl", "clusters": 2, "first_round_noise": "shared"}, "paper"),
    ({"name": "dp-ifca", "clusters": 2}, "paper"),
]


@pytest.mark.parametrize(("algorithm", "mode"), RUNS)
def test_what_was_planned_is_what_was_charged(
    algorithm: dict[str, object], mode: str, tmp_path: Path
) -> None:
    result = run(tmp_path / "run", algorithm, mode)
    files = RunFolder(tmp_path / "run")
    plan = PrivacyPlan.from_json(read_json(files.plan))
    with Ledger.open(files.ledger, plan, budget=Budget(8.0, 1e-3), accountant="rdp") as ledger:
        for unit in plan.units:
            planned = {release.name: release.times for release in unit.releases}
            assert ledger.executed(unit.subject) == planned
        assert ledger.spent() == pytest.approx(result.epsilon)
    assert result.accuracy.mean > 0.1
    assert result.groups is not None
    assert result.groups.worst == result.accuracy.min
    assert result.groups.minority is not None
    assert RunResult.load(tmp_path / "run") == result
    assert result.epsilon <= 8 or mode == "paper"


@pytest.mark.parametrize("name", ["r-dpcfl", "dp-ifca"])
def test_paper_mode_plans_and_runs_the_published_selection(name: str, tmp_path: Path) -> None:
    kinds = {"sound": (PrivateSelection, 1.0), "paper": (AccuracySelection, 2.0)}
    for mode, (kind, numerator) in kinds.items():
        run(tmp_path / mode, {"name": name, "clusters": 2}, mode)
        plan = PrivacyPlan.from_json(read_json(RunFolder(tmp_path / mode).plan))
        for unit in plan.units:
            mechanism = unit.release("selection").mechanism
            assert type(mechanism) is kind
            assert mechanism.gumbel_scale == pytest.approx(numerator / (0.03 * 8))


def test_mr_mtl_without_pull_equals_local_bit_for_bit(tmp_path: Path) -> None:
    plain = run(tmp_path / "local", {"name": "local"})
    pulled = run(tmp_path / "mr-mtl", {"name": "mr-mtl", "pull": 0.0})
    np.testing.assert_array_equal(
        final_models(tmp_path / "local", "local"), final_models(tmp_path / "mr-mtl", "mr-mtl")
    )
    assert plain.loss == pulled.loss
    assert plain.epsilon == pulled.epsilon


def test_mr_mtl_moves_every_client_towards_the_mean(tmp_path: Path) -> None:
    distances = []
    for pull in (0.0, 0.5, 2.0):
        run(tmp_path / str(pull), {"name": "mr-mtl", "pull": pull})
        models = final_models(tmp_path / str(pull), "mr-mtl")
        distances.append(np.linalg.norm(models - models.mean(axis=0), axis=1))
    free, pulled, held = distances
    # Other noise alone changes these distances by a few percent.
    assert (pulled < 0.8 * free).all()
    assert (held < 0.8 * pulled).all()


def test_rc_dpfl_says_that_it_is_not_private_and_sound_mode_refuses_it(tmp_path: Path) -> None:
    result = run(tmp_path / "run", {"name": "rc-dpfl", "clusters": 2}, "paper")
    assert result.epsilon == float("inf")
    assert "no privacy" in result.guarantee
    assert "not private" in result.guarantee_text
    with pytest.raises(InputError, match=r"'rc-dpfl' .* not private"):
        run(tmp_path / "other", {"name": "rc-dpfl", "clusters": 2})
    assert not (tmp_path / "other").exists()
