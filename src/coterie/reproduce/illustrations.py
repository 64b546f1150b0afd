"""Figures that need no runs: an example on a line, and what batches do to the noise of round 1."""

from collections.abc import Iterator

import numpy as np

from coterie.report.charts import Scale, Series, line_figure
from coterie.report.drawing import Figure
from coterie.reproduce import first_round, two_clusters


def two_clusters_on_a_line() -> Iterator[Figure]:
    """The example on a line: how each way of grouping goes from a bad start, and how often it ends well."""
    rounds = Scale("round", lambda value: f"{value:.0f}", places=(0, 10, 20, 30), margin=0.03)
    for place, strategy in enumerate(two_clusters.STRATEGIES):
        course = two_clusters.play(
            strategy, two_clusters.TRAPPED_START, noise=4.0, rng=np.random.default_rng(0)
        )
        series = [
            Series(f"model {k + 1}", [(float(t), models[k]) for t, models in enumerate(course.models)])
            for k in range(2)
        ]
        groups = [f"client {client + 1} in {group + 1}" for client, group in enumerate(course.groups[-1])]
        right = sum(two_clusters.same_groups(each) for each in course.groups)
        yield line_figure(
            f"course-{place}",
            f"Models, clients grouped {strategy}",
            series,
            rounds,
            Scale(
                "", lambda value: f"{value:.3g}".replace("-", "−"), places=(-5.5, 0.0, 5.5, 13.0), margin=0.03
            ),
            "Best for clients 1 and 2 is −5.5, for 3 and 4 it is 5.5. "
            f"At the end {', '.join(groups)}; grouped right in {right} of {len(course.groups)} rounds.",
        )
    levels = (0.0, 10.0, 20.0, 40.0, 60.0, 80.0)
    yield line_figure(
        "strategies",
        "Clients grouped right, against noise",
        [
            Series(
                strategy,
                [(level, two_clusters.success(strategy, level, draws=200, seed=0)) for level in levels],
            )
            for strategy in two_clusters.STRATEGIES
        ],
        Scale("standard deviation of the noise on a gradient", lambda value: f"{value:g}"),
        Scale("", lambda value: f"{100 * value:.0f}%", places=(0.0, 0.25, 0.5, 0.75, 1.0), margin=0.03),
        "Share of 200 random starts after 30 rounds. Losses depend on where models start, updates vanish as "
        "models converge; updates from one start, then losses, suffer neither.",
    )


def noise_by_batches() -> Iterator[Figure]:
    """The noise multiplier and the noise of an update against the batches of round 1 and of later rounds."""
    client = first_round.NoiseExample()
    firsts = (16, 64, 256, 1024, client.records)
    laters = (8, 16, 32, 64, 128, 256)
    batch = Scale(
        "batch of round 1, in records",
        lambda value: f"{value:.4g}",
        logarithmic=True,
        places=firsts,
        margin=0.03,
    )
    where = f"{client.records:,} records, epsilon {client.epsilon:g}, delta {client.delta:g}, 200 rounds"
    yield line_figure(
        "multiplier",
        "Noise multiplier against the batches of a run",
        [
            Series(
                f"later batches of {later}",
                [(float(first), first_round.noise_multiplier(client, first, later)) for first in firsts],
            )
            for later in laters
        ],
        batch,
        Scale("", lambda value: f"{value:.3g}", floor=0.0),
        f"One multiplier for all rounds; {where}. Round 1 is one round, the later batches are all others.",
    )
    for in_round_1, heading in ((True, "in round 1"), (False, "in a later round")):
        yield line_figure(
            f"variance-{int(in_round_1)}",
            f"Variance of the noise in an update {heading}",
            [
                Series(
                    f"later batches of {later}",
                    [
                        (
                            float(first),
                            first_round.update_variance(client, first, later, in_round_1=in_round_1),
                        )
                        for first in firsts
                    ],
                )
                for later in laters
            ],
            batch,
            Scale("", lambda value: f"{value:.0e}", logarithmic=True),
            f"Summed over {client.parameters:,} coordinates; clip {client.clip:g}, step size {client.lr:g}; "
            f"{where}.",
        )
    budgets = (1.0, 2.0, 3.0, 5.0, 10.0, 15.0)
    large = {epsilon: first_round.NoiseExample(records=50_000, epsilon=epsilon) for epsilon in budgets}
    yield line_figure(
        "ratio",
        "What a full batch in round 1 costs all rounds",
        [
            Series(
                f"batches of {later}",
                [
                    (
                        epsilon,
                        first_round.noise_multiplier(large[epsilon], 50_000, later)
                        / first_round.noise_multiplier(large[epsilon], later, later),
                    )
                    for epsilon in budgets
                ],
            )
            for later in (16, 32, 64, 128, 256, 512, 1024)
        ],
        Scale("epsilon", lambda value: f"{value:g}", places=(1, 3, 5, 10, 15), margin=0.03),
        Scale("", lambda value: f"{value:.3g}", floor=1.0),
        "Noise multiplier with a full batch in round 1, over that with the same batch in all rounds; 50,000 "
        "records, 200 rounds.",
    )
