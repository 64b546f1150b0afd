"""What a comparison can tell apart: beside scipy's own test, in degenerate cases, and for each client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from coterie.experiment.result import RunResult, Spread
from coterie.experiment.scores import PooledScore
from coterie.experiment.sweep import Sweep
from coterie.experiment.verdict import ComparisonVerdict, Difference, Reading, holm, paired, verdict_of

SEEDS = [1, 2, 3, 4, 5]


def sweep(algorithms: list[str], seeds: list[int] | None = None, **grid: list[Any]) -> Sweep:
    return Sweep({}, {"algorithm.name": algorithms, **grid, "seeds.simulation": seeds or SEEDS})


def result(per_client: dict[str, float] | None, **changed: Any) -> RunResult:
    told: dict[str, Any] = {
        "folder": Path("run"),
        "algorithm": "any",
        "accuracy": Spread.of(per_client) if per_client else None,
        "loss": None,
        "clusters": {},
        "clusters_found": None,
        "guarantee": "a line",
        "guarantee_text": "a paragraph",
        "epsilon": 1.0,
        "delta": 1e-3,
        "rounds": 1,
        "seconds": 1.0,
        "warnings": (),
    }
    return RunResult(**{**told, **changed})


def verdict(algorithms: dict[str, list[float]], seeds: list[int] | None = None) -> ComparisonVerdict:
    """Of runs with two clients around these accuracies, one for each seed."""
    chosen = sweep(list(algorithms), seeds)
    results = {}
    for cell in chosen.cells():
        place = (seeds or SEEDS).index(cell.values["seeds.simulation"])
        mean = algorithms[cell.values["algorithm.name"]][place]
        results[cell.name] = result({"a": mean - 0.1, "b": mean + 0.1})
    return verdict_of(chosen, results)


LOCAL = [0.60, 0.62, 0.61, 0.59, 0.60]
BETTER = [0.70, 0.71, 0.72, 0.68, 0.70]
SIMILAR = [0.69, 0.72, 0.71, 0.69, 0.70]


def test_a_paired_difference_is_that_of_the_t_test_and_its_interval_that_of_scipy() -> None:
    rng = np.random.default_rng(0)
    one, other = rng.normal(0.7, 0.02, 6), rng.normal(0.68, 0.02, 6)
    found = paired("one", "other", [(Reading(a), Reading(b)) for a, b in zip(one, other, strict=True)])
    tested = stats.ttest_rel(one, other)
    interval = tested.confidence_interval(0.95)
    assert found.mean == pytest.approx((one - other).mean())
    assert found.p == pytest.approx(tested.pvalue)
    assert found.half_width == pytest.approx((interval.high - interval.low) / 2)
    gaps = one - other
    by_hand = 2.570581835636314 * np.sqrt(((gaps - gaps.mean()) ** 2).sum() / 5 / 6)
    assert found.half_width == pytest.approx(by_hand), "the 97.5 % quantile for 5 degrees, from a table"


def test_the_error_is_never_less_than_what_known_noise_gives() -> None:
    quiet = [(Reading(0.7 + 0.001 * seed), Reading(0.6)) for seed in range(4)]
    noisy = [(Reading(a.value, 0.3), Reading(b.value, 0.4)) for a, b in quiet]
    sharp, blurred = paired("a", "b", quiet), paired("a", "b", noisy)
    assert sharp.p is not None
    assert sharp.p < 0.001
    assert blurred.p is not None
    assert blurred.p > 0.5
    assert blurred.half_width == pytest.approx(stats.t.ppf(0.975, 3) * np.sqrt(4 * 0.25) / 4)


def test_holm_multiplies_the_smallest_by_all_the_next_by_one_less_and_never_falls() -> None:
    tested = [Difference("a", "b", 5, 1.0, 1.0, p) for p in (0.04, 0.01, 0.03)]
    corrected = [own.p_holm for own in holm([*tested, Difference("a", "c", 1, 1.0)])]
    assert corrected == [pytest.approx(0.06), pytest.approx(0.03), pytest.approx(0.06), None]


def test_the_best_is_ahead_of_what_it_is_ahead_of_and_not_distinguishable_from_the_rest() -> None:
    found = verdict({"r-dpcfl": BETTER, "local": LOCAL, "oracle": SIMILAR})
    [contest] = found.contests
    line = contest.lines[0]
    gaps = 100 * (np.array(BETTER) - LOCAL)
    half = stats.t.ppf(0.975, 4) * gaps.std(ddof=1) / np.sqrt(5)
    assert f"r-dpcfl is ahead of local by {gaps.mean():.1f} ± {half:.1f} points over 5 seeds" in line
    assert "not distinguishable from it is oracle" in line
    assert len(contest.pairs) == 3, "every two of them, so that choosing the best costs nothing"
    assert "Holm's method over 3 pairs" in found.text
    told = found.to_json()
    assert told["text"] == found.text
    assert {pair["status"] for pair in told["contests"][0]["pairs"]} == {
        "ahead",
        "not distinguishable",
        "behind",
    }


def test_one_run_of_each_is_called_one_run() -> None:
    found = verdict({"global": [0.7], "local": [0.6]}, [1])
    assert "one run of each, so differences are not tested: global is highest, local 10.0 less" in found.text
    assert "±" not in found.text
    assert "one run of each, better for 2 of 2 clients, which is not tested" in found.text


def test_what_never_varies_is_not_tested() -> None:
    text = verdict({"r-dpcfl": [0.7] * 5, "local": [0.7] * 5, "oracle": [0.6] * 5}).text
    assert "from r-dpcfl is local the same in every seed" in text
    assert "is oracle 10.0 by the same in every seed, so not tested" in text


def test_clients_for_whom_it_paid_are_counted_with_seeds() -> None:
    rng = np.random.default_rng(1)
    chosen, results = sweep(["local", "global", "r-dpcfl"]), {}
    for cell in chosen.cells():
        name = cell.values["algorithm.name"]
        gain = {"local": (0.0, 0.0, 0.0), "global": (0.1, -0.1, 0.0), "r-dpcfl": (0.2, 0.2, 0.0)}[name]
        own = {f"client-{k}": 0.6 + gain[k] + float(rng.normal(0, 0.005)) for k in range(3)}
        results[cell.name] = result(own)
    found = verdict_of(chosen, results)
    lines = found.contests[0].lines
    assert (
        "Federating (global against local): paid for 1 of 3 clients, cost 1, cannot be told for 1." in lines
    )
    assert (
        "Clustering (r-dpcfl against global): paid for 2 of 3 clients, cost 0, cannot be told for 1." in lines
    )
    [clustering] = [own for own in found.to_json()["contests"][0]["by_client"] if own["what"] == "clustering"]
    assert clustering["clients"]["client-1"]["mean"] == pytest.approx(30, abs=2)


def test_cells_that_are_missing_are_named_and_pairs_use_the_seeds_that_both_have() -> None:
    chosen = sweep(["global", "local"])
    cells = {
        (cell.values["algorithm.name"], cell.values["seeds.simulation"]): cell for cell in chosen.cells()
    }
    results = {
        cells["global", seed].name: result({"a": value}) for seed, value in zip(SEEDS, BETTER, strict=True)
    }
    results |= {cells["local", seed].name: result({"a": 0.6 + 0.01 * seed}) for seed in (2, 4)}
    results[cells["local", 5].name] = result(None)
    [contest] = verdict_of(chosen, results).contests
    assert contest.pairs[0].seeds == 2
    assert contest.pairs[0].mean == pytest.approx(100 * np.mean([0.71 - 0.62, 0.68 - 0.64]))
    assert contest.missing == {"local": "2 of 5 runs have a score, the others are not compared"}
    assert "2 of 5 runs have a score" in verdict_of(chosen, results).text
    assert "nothing to compare" in verdict_of(chosen, {}).text
    assert "nothing to compare" in verdict_of(sweep(["local"]), {}).text


def test_settings_are_compared_at_equal_values_of_everything_else() -> None:
    chosen = sweep(["global", "local"], **{"privacy.epsilon": [1, 8]})
    results = {
        cell.name: result(
            {
                "a": 0.1 * cell.values["privacy.epsilon"] / 2
                + (cell.values["algorithm.name"] == "global") / 10
                + cell.values["seeds.simulation"] ** 2 / 1000
            }
        )
        for cell in chosen.cells()
    }
    found = verdict_of(chosen, results)
    assert [contest.setting for contest in found.contests] == ["epsilon 1", "epsilon 8"]
    assert all(contest.best == "global" for contest in found.contests)


def test_a_regression_is_compared_by_its_errors_and_less_is_better() -> None:
    chosen, results = sweep(["global", "local"]), {}
    bounded = Spread.of({"a": 0.9})
    for cell in chosen.cells():
        wrong = (5.0 if cell.values["algorithm.name"] == "global" else 7.0) + 0.1 * cell.values[
            "seeds.simulation"
        ]
        wrong += 0.05 * (cell.values["seeds.simulation"] % 2) * (cell.values["algorithm.name"] == "local")
        score = PooledScore(wrong, per_client={"a": wrong})
        results[cell.name] = result(None, bounded_score=bounded, scores={"rmse": score})
    found = verdict_of(chosen, results)
    assert "global is ahead of local by 2.03 ± " in found.text
    assert "of RMSE over 5 seeds" in found.text
    assert found.contests[0].means["global"] == pytest.approx(5.3)
    assert "points" not in found.text


def test_noise_of_private_scores_is_read_off_their_intervals() -> None:
    chosen, results = sweep(["global", "local"], [1, 2]), {}
    for cell in chosen.cells():
        mean = 0.99 if cell.values["algorithm.name"] == "global" else 0.5
        mean -= 0.001 * cell.values["seeds.simulation"] * (cell.values["algorithm.name"] == "local")
        spread = Spread(mean, None, None, {}, "private", (mean - 0.196, 1.0 if mean > 0.9 else mean + 0.196))
        results[cell.name] = result(None, accuracy=spread)
    [pair] = verdict_of(chosen, results).contests[0].pairs
    assert pair.half_width == pytest.approx(stats.t.ppf(0.975, 1) * 100 * np.sqrt(4 * 0.1**2) / 2, rel=1e-3)
