"""Points on four noisy lines, drawn: where clustered learning loses a model, a picture shows it.

The synthetic study of RR-Cluster (appendix E.5), y = a x + b + noise with a mean squared error, in four
scenarios: clusters of equal or of unequal size, lines that are easy or hard to tell apart. Its constants are
not printed; these are ours.
"""

from typing import Literal

import numpy as np

from coterie.data.records import Dataset, Owners, Records, Task

Scenario = Literal["balanced-easy", "balanced-hard", "imbalanced-easy", "imbalanced-hard"]

LINES = ((1.0, 3.0), (-1.0, 5.0), (1.0, 7.0), (-1.0, 9.0))
"""Slope and intercept of each cluster's line: all above where models begin, so that one is nearest to all."""
SIZES = {"balanced": (20, 20, 20, 20), "imbalanced": (44, 16, 12, 8)}
NOISE = {"easy": 0.2, "hard": 1.0}
_POINTS = 30
_TEST_POINTS = 10


def draw_lines(scenario: Scenario = "balanced-easy", *, seed: int) -> Dataset:
    """80 clients of 30 + 10 points, each on its cluster's line, x between -2 and 2."""
    balance, difficulty = scenario.split("-")
    sizes, noise = SIZES[balance], NOISE[difficulty]
    rng = np.random.default_rng([seed, 4])
    clusters = np.repeat(np.arange(len(LINES)), sizes)
    parts = []
    for points in (_POINTS, _TEST_POINTS):
        owner = np.repeat(np.arange(len(clusters)), points)
        slope, intercept = np.array(LINES)[clusters[owner]].T
        x = rng.uniform(-2.0, 2.0, len(owner))
        y = slope * x + intercept + noise * rng.normal(size=len(owner))
        parts.append((Records(x.astype(np.float32)[:, None], y.astype(np.float32)), owner))
    (train, train_owner), (test, test_owner) = parts
    return Dataset(
        name="lines",
        train=train,
        test=test,
        task=Task("regression", (1,), 0, error_cap=9.0),
        note=f"four lines, {scenario}: {', '.join(map(str, sizes))} clients, noise {noise:g}",
        owners=Owners(
            tuple(f"client-{index:02d}" for index in range(len(clusters))), train_owner, test_owner, clusters
        ),
    )
