"""Figures over clients mean what their names say."""

import itertools

import numpy as np
import pytest

from coterie.experiment.result import (
    Spread,
    cluster_means,
    clustering_accuracy,
    fairness,
    groups,
    live_clusters,
    minority_found,
    same_partition,
)
from coterie.training.scoring import Score

SCORES = {"a": Score(0.9, 0.3), "b": Score(0.6, 0.9), "c": Score(0.75, 0.5)}
BEST = {"a": Score(0.95, 0.2), "b": Score(0.9, 0.3), "c": Score(0.79, 0.45)}


def test_accuracy_is_summarised_over_clients() -> None:
    spread = Spread.of({client: score.accuracy for client, score in SCORES.items()})
    assert (spread.mean, spread.min, spread.max) == (pytest.approx(0.75), 0.6, 0.9)
    assert spread.per_client == {"a": 0.9, "b": 0.6, "c": 0.75}


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"mean": "high"}, "mean: 'high'"),
        ({"per_client": {"a": "x"}}, "per_client.a: 'x'"),
        ({"intervals": {"a": ["low", 1.0]}}, "intervals.a.0: 'low'"),
    ],
)
def test_a_figure_of_another_type_is_refused_by_name(changed: dict[str, object], named: str) -> None:
    content = {"mean": 0.5, "min": None, "max": None, "per_client": {"a": 0.5}, "interval": [0.4, 0.6]}
    assert Spread.from_json(content).interval == (0.4, 0.6)
    with pytest.raises(ValueError, match=f"^{named} is of another type"):
        Spread.from_json({**content, **changed})


def test_fairness_compares_what_each_client_falls_short_of() -> None:
    figures = fairness(SCORES, BEST)
    assert figures.disparity == pytest.approx(0.3)
    # Short of the best by 0.05, 0.30 and 0.04.
    assert figures.f_acc == pytest.approx(0.26)
    # Excess losses 0.1, 0.6 and 0.05.
    assert figures.f_loss == pytest.approx(0.55)
    assert fairness(SCORES, None).f_acc is None


@pytest.mark.parametrize(
    ("found", "truth", "same"),
    [
        ([2, 2, 0], [0, 0, 1], True),
        ([0, 1, 2], [0, 0, 1], False),
        ([0, 0, 0], [0, 0, 1], False),
        ([0, 1, 1], [0, 0, 1], False),
        ([1, 0, 1, 0], [0, 1, 0, 1], True),
    ],
)
def test_partitions_are_compared_up_to_names(found: list[int], truth: list[int], same: bool) -> None:
    assert same_partition(found, truth) is same


def test_cluster_means_are_of_the_true_clusters() -> None:
    assert cluster_means(SCORES, {"a": 0, "b": 1, "c": 1}) == {0: 0.9, 1: pytest.approx(0.675)}


def test_the_minority_are_the_clients_of_the_smallest_cluster() -> None:
    figures = groups(SCORES, {"a": 0, "b": 1, "c": 0})
    assert figures.minority == pytest.approx(0.6)
    assert figures.majority == pytest.approx((0.9 + 0.75) / 2)
    assert figures.worst == 0.6


def test_clusters_of_one_size_have_no_minority() -> None:
    figures = groups(SCORES, {"a": 0, "b": 1, "c": 2})
    assert (figures.minority, figures.majority, figures.worst) == (None, None, 0.6)
    assert minority_found({"a": 0, "b": 1, "c": 2}, {"a": 0, "b": 1, "c": 2}) is None


@pytest.mark.parametrize(
    ("found", "right"),
    [
        ([7, 7, 1, 1, 1], True),
        ([7, 7, 1, 2, 1], True),  # the majority is split, the minority is whole
        ([7, 1, 1, 1, 1], False),
        ([7, 7, 7, 1, 1], False),
        ([0, 0, 0, 0, 0], False),
    ],
)
def test_the_minority_is_found_when_it_is_a_cluster_of_its_own(found: list[int], right: bool) -> None:
    truth = dict(zip("abcde", [0, 0, 1, 1, 1], strict=True))
    assert minority_found(dict(zip("abcde", found, strict=True)), truth) is right


def test_clustering_accuracy_is_under_the_best_matching() -> None:
    truth = {"a": 0, "b": 0, "c": 1, "d": 1, "e": 2}
    assert clustering_accuracy({"a": 7, "b": 7, "c": 3, "d": 3, "e": 1}, truth) == 1.0
    assert clustering_accuracy({"a": 1, "b": 1, "c": 1, "d": 0, "e": 2}, truth) == pytest.approx(0.8)
    # Everyone in one cluster: one true cluster can be matched, the largest.
    assert clustering_accuracy(dict.fromkeys(truth, 0), truth) == pytest.approx(0.4)
    # More clusters than there are: the smaller half of a split one counts as wrong.
    assert clustering_accuracy({"a": 0, "b": 1, "c": 2, "d": 2, "e": 3}, truth) == pytest.approx(0.8)


def test_the_best_matching_is_the_best_of_all_matchings() -> None:
    """Independently: try every way of calling the found clusters by true names."""
    rng = np.random.default_rng(0)
    for true, found in itertools.product((1, 2, 4), (1, 3, 4)):
        truth = {str(client): int(rng.integers(true)) for client in range(23)}
        mine = {client: int(rng.integers(found)) for client in truth}
        best = max(
            np.mean([names[mine[client]] == own for client, own in truth.items()])
            for names in itertools.permutations(range(max(true, found)), found)
        )
        assert clustering_accuracy(mine, truth) == pytest.approx(best)


def test_a_cluster_lives_if_one_client_in_a_hundred_uses_it() -> None:
    used = {str(client): client % 3 for client in range(300)}
    assert live_clusters(used) == 3
    assert live_clusters({**used, "stray": 3}) == 3
    assert live_clusters({"a": 0, "b": 4}) == 2
