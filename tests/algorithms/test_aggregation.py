"""Updates of records are combined as the file says; honest ones are never shortened, loud ones are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from liars import lying

from coterie.algorithms.aggregation import agreeing, believable, centre, combined, shortened
from coterie.errors import InputError
from coterie.experiment import local
from coterie.experiment.schema import Experiment
from coterie.privacy import Adjacency, PoissonSteps, Released

SMALL: dict[str, Any] = {
    "federation": {"kind": "clusters", "sizes": [4], "records_per_client": 120, "test_per_client": 100},
    "schedule": {"rounds": 6, "batch": 30, "lr": 0.5},
    "privacy": {"epsilon": 8, "delta": 1e-3},
    "seeds": {"simulation": 1, "noise": 2},
    "evaluation": {"every": 6, "references": False},
    "algorithm": {"name": "global"},
}


def experiment(**sections: Any) -> Experiment:
    found = {key: {**SMALL.get(key, {}), **sections.get(key, {})} for key in {*SMALL, *sections}}
    return Experiment.model_validate(found)


def released(*rows: list[float], bound: float = np.inf) -> list[Released[Any]]:
    return [Released(np.array(row, dtype=np.float32), 0.1, bound) for row in rows]


# --- rules ------------------------------------------------------------------------------------------


def test_rules_by_hand() -> None:
    rows = [[0.0, 1.0], [1.0, 2.0], [2.0, 3.0], [100.0, -50.0]]
    updates, values = released(*rows), np.array(rows)
    np.testing.assert_allclose(combined(updates, "mean", 0.25), [25.75, -11.0])
    np.testing.assert_allclose(centre(values, "median", 0.25), [1.5, 1.5])
    np.testing.assert_allclose(centre(values, "trimmed-mean", 0.25), [1.5, 1.5])
    np.testing.assert_allclose(centre(values, "trimmed-mean", 0.2), [25.75, -11.0])  # less than one
    against = released([1.0, 1.0], [1.0, 1.0], [1.0, 1.0], [-5.0, -5.0])
    np.testing.assert_allclose(combined(against, "filtered-mean", 0.25), [1.0, 1.0])
    for rule in ("median", "trimmed-mean"):
        np.testing.assert_allclose(combined(updates[:1], rule, 0.49), [0.0, 1.0])  # type: ignore[arg-type]


@given(arrays(np.float64, (5, 3), elements=st.floats(-1e3, 1e3)), st.floats(-1e9, 1e9))
def test_one_of_five_cannot_move_a_coordinate_beyond_the_others(values: Any, lie: float) -> None:
    honest, all_of_them = values[1:], np.vstack([np.full((1, 3), lie), values[1:]])
    for rule in ("median", "trimmed-mean"):
        found = centre(all_of_them, rule, 0.2)  # type: ignore[arg-type]
        assert np.all(found >= honest.min(axis=0) - 1e-9)
        assert np.all(found <= honest.max(axis=0) + 1e-9)


def test_what_is_longer_than_an_honest_update_is_shortened() -> None:
    found = shortened(released([3.0, 4.0], [0.3, 0.4], [2.0, 0.0], bound=1.0))
    np.testing.assert_allclose(found, [[0.6, 0.8], [0.3, 0.4], [1.0, 0.0]], rtol=1e-6)
    loud = shortened(released([1.0, 0.0], [0.0, 1.0], [30.0, 40.0]))
    np.testing.assert_allclose(loud, [[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]], rtol=1e-6)


def test_what_no_honest_client_releases_is_left_out_and_not_shortened() -> None:
    """Shortened, it would still point where the liar wants it to."""
    updates = released([0.6, 0.8], [0.8, 0.6], [-3.0, 4.0], bound=1.0 + 1e-6)
    assert believable(updates).tolist() == [True, True, False]
    for rule in ("filtered-mean", "median", "trimmed-mean"):
        np.testing.assert_allclose(combined(updates, rule), [0.7, 0.7], rtol=1e-6)  # type: ignore[arg-type]
    everybody = released([3.0, 4.0], [4.0, 3.0], bound=1.0)  # then nobody can be told from the others
    assert believable(everybody).all()
    np.testing.assert_allclose(combined(everybody, "median"), [0.7, 0.7], rtol=1e-6)
    assert believable(released([1e9, 0.0])).all()  # where nothing bounds an honest one


def test_who_speaks_against_the_others_is_left_out_and_noise_is_not() -> None:
    """By a level of noise that is public; pure noise is mostly kept, and all of it where nobody agrees."""
    rng, signal = np.random.default_rng(0), np.full(200, 0.3)
    honest, own = signal + rng.normal(size=(3, 200)), signal + rng.normal(size=(1, 200))
    assert agreeing(np.vstack([honest, -own]), [1.0] * 4).tolist() == [True, True, True, False]
    noise = [agreeing(rng.normal(size=(4, 200)), [1.0] * 4).mean() for _ in range(400)]
    assert 0.69 < np.mean(noise) < 0.8  # P(Z > -0.5) = 0.69 by itself
    assert agreeing(np.array([[1.0], [-1.0]]), [0.1, 0.1]).all()  # of two nobody can tell


# --- the bound --------------------------------------------------------------------------------------


@pytest.mark.parametrize("records", [40, 400])
@pytest.mark.parametrize("multiplier", [0.0, 1.0, 20.0])
def test_honest_releases_stay_within_the_bound(records: int, multiplier: float) -> None:
    """The worst honest client: every gradient at full clip in one direction, Poisson batches, noise."""
    rng, parameters, lr = np.random.default_rng(0), 50, 0.3
    mechanism = PoissonSteps(2.0, multiplier, records, batch=16, epochs=2, adjacency=Adjacency.ZERO_OUT)
    bound = mechanism.norm_in_release(lr, 0.0, parameters)
    longest = 0.0
    for _ in range(300):
        sums = 2.0 * rng.binomial(records, mechanism.rate, size=mechanism.steps)
        noise = rng.normal(size=(mechanism.steps, parameters)) * mechanism.noise_std
        update = lr * noise.sum(axis=0) / mechanism.denominator
        update[0] += lr * sums.sum() / mechanism.denominator
        longest = max(longest, float(np.linalg.norm(update)))
    assert 0.2 * bound < longest < bound
    assert mechanism.norm_in_release(lr, 0.1, parameters) == np.inf


def test_a_claim_about_records_moves_the_bound_no_faster_than_the_steps() -> None:
    few, many = (
        PoissonSteps(1.0, 1.0, records, batch=24, epochs=1, adjacency=Adjacency.ZERO_OUT)
        for records in (240, 240_000)
    )
    assert many.norm_in_release(0.1, 0, 650) < 1001 * few.norm_in_release(0.1, 0, 650)


# --- runs -------------------------------------------------------------------------------------------


def accuracy(chosen: Experiment, out: Path, honest: list[str]) -> float:
    result = local.run(chosen, out)
    assert result.accuracy is not None
    return float(np.mean([result.accuracy.per_client[name] for name in honest]))


def test_one_liar_of_four_ruins_a_mean_and_not_a_filtered_one(tmp_path: Path) -> None:
    """On average: where one processor rounds otherwise than another, the noise of all later rounds is new."""
    names = [client.name for client in local.load_federation(experiment()).clients]
    liar, honest = names[0], names[1:]
    filtered = {"schedule": {"aggregation": "filtered-mean"}}
    alone, ruined, kept = [], [], []
    for seed in range(16):
        drawn = {
            "federation": {"records_per_client": 150, "test_per_client": 200},
            "privacy": {"epsilon": 30},
            "seeds": {"simulation": seed, "noise": seed},
        }
        out = tmp_path / str(seed)
        alone.append(accuracy(experiment(**drawn), out / "honest", honest))
        with lying([liar]):
            ruined.append(accuracy(experiment(**drawn), out / "mean", honest))
            kept.append(accuracy(experiment(**drawn, **filtered), out / "kept", honest))
    assert np.mean(kept) > np.mean(alone) - 0.05
    assert max(ruined) < min(kept) - 0.2


def test_a_rule_is_free_and_the_ledger_does_not_know_of_it(tmp_path: Path) -> None:
    plain = local.run(experiment(), tmp_path / "mean")
    robust = local.run(experiment(schedule={"aggregation": "median"}), tmp_path / "median")
    assert robust.epsilon == plain.epsilon
    # The first round is the same; what follows trains from another model.
    lines = [(tmp_path / out / "ledger.jsonl").read_text().splitlines()[:2] for out in ("mean", "median")]
    assert lines[0] == lines[1]


REFUSED: dict[str, dict[str, Any]] = {
    "clients": {"privacy": {"unit": "client"}, "algorithm": {"name": "dp-fedavg"}},
    "local": {"algorithm": {"name": "local"}},
}


@pytest.mark.parametrize("sections", REFUSED.values(), ids=REFUSED.keys())
def test_where_nothing_released_is_averaged_it_is_refused(sections: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"schedule\.aggregation"):
        local.run(experiment(schedule={"aggregation": "median"}, **sections), tmp_path / "run")
