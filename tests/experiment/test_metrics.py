"""Figures over clients mean what their names say."""

import pytest

from coterie.experiment.metrics import accuracy, cluster_means, fairness, same_partition
from coterie.training.scoring import Score

SCORES = {"a": Score(0.9, 0.3), "b": Score(0.6, 0.9), "c": Score(0.75, 0.5)}
BEST = {"a": Score(0.95, 0.2), "b": Score(0.9, 0.3), "c": Score(0.75, 0.5)}


def test_accuracy_is_summarised_over_clients() -> None:
    spread = accuracy(SCORES)
    assert (spread.mean, spread.min, spread.max) == (pytest.approx(0.75), 0.6, 0.9)
    assert spread.per_client == {"a": 0.9, "b": 0.6, "c": 0.75}


def test_fairness_compares_what_each_client_falls_short_of() -> None:
    figures = fairness(SCORES, BEST)
    assert figures.disparity == pytest.approx(0.3)
    # Short of the best by 0.05, 0.30 and 0.00.
    assert figures.f_acc == pytest.approx(0.30)
    # Excess losses 0.1, 0.6 and 0.0.
    assert figures.f_loss == pytest.approx(0.6)
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
