"""Figures that need no runs: an example on a line, and what batches do to the noise of round 1.

The second is from the accountant alone. One noise multiplier z hides every step of a run, as in Figures 3, 4
and 14 (right) of Malekmohammadi, Taik and Farnadi (TMLR 2025): batches of `first` records in round 1, of
`later` records in the rounds after it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial

import numpy as np

from coterie.privacy import Adjacency, Budget, PoissonSteps, Unit, calibrate
from coterie.privacy.plans import FIRST_ROUND, TRAINING, RecordReleases, noise_of, plan_of
from coterie.report.charts import Scale, Series, line_figure
from coterie.report.drawing import Figure
from coterie.reproduce import two_clusters


def two_clusters_on_a_line() -> Iterator[Figure]:
    """The example on a line: how each way of grouping goes from a bad start, and how often it ends well."""
    across = Scale("round", "{:.0f}".format, (0, 10, 20, 30), margin=0.03)
    for place, strategy in enumerate(two_clusters.STRATEGIES):
        rng = np.random.default_rng(0)
        course = two_clusters.play(strategy, two_clusters.TRAPPED_START, noise=4.0, rng=rng)
        groups = [f"client {client + 1} in {group + 1}" for client, group in enumerate(course.groups[-1])]
        right = sum(two_clusters.same_groups(each) for each in course.groups)
        yield line_figure(
            f"course-{place}",
            f"Models, clients grouped {strategy}",
            [
                Series(f"model {k + 1}", [(float(t), models[k]) for t, models in enumerate(course.models)])
                for k in range(2)
            ],
            across,
            Scale("", "{:.3g}".format, (-5.5, 0.0, 5.5, 13.0), margin=0.03),
            "Best for clients 1 and 2 is −5.5, for 3 and 4 it is 5.5. "
            f"At the end {', '.join(groups)}; grouped right in {right} of {len(course.groups)} rounds.",
        )
    levels = (0.0, 10.0, 20.0, 40.0, 60.0, 80.0)
    yield line_figure(
        "strategies",
        "Clients grouped right, against noise",
        [
            Series(name, [(level, two_clusters.success(name, level, draws=200, seed=0)) for level in levels])
            for name in two_clusters.STRATEGIES
        ],
        Scale("standard deviation of the noise on a gradient", "{:g}".format),
        Scale("", "{:.0%}".format, (0.0, 0.25, 0.5, 0.75, 1.0), margin=0.03),
        "Share of 200 random starts after 30 rounds. Losses depend on where models start, updates vanish as "
        "models converge; updates from one start, then losses, suffer neither.",
    )


@dataclass(frozen=True)
class NoiseExample:
    """A client and its budget; the defaults are the setting of the publication's Figures 3 and 4."""

    records: int = 6600
    epsilon: float = 5.0
    delta: float = 1e-4
    rounds: int = 200
    clip: float = 3.0
    parameters: int = 11_181_642
    lr: float = 5e-4


@cache
def noise_multiplier(client: NoiseExample, first: int, later: int) -> float:
    """The z that fits the budget with these batches in round 1 and afterwards."""
    own = RecordReleases(client.records, clip=client.clip)
    batches = {FIRST_ROUND: (first, 1), TRAINING: (later, client.rounds - 1)}
    releases = [
        own.steps(name, times, None if batch == client.records else batch)
        for name, (batch, times) in batches.items()
    ]
    plan = plan_of(Unit.RECORD, Adjacency.ZERO_OUT, {"client": releases})
    noise = noise_of(calibrate(plan, Budget(client.epsilon, client.delta)), FIRST_ROUND)
    assert noise is not None
    return noise


def update_variance(client: NoiseExample, first: int, later: int, *, in_round_1: bool) -> float:
    """Variance of the noise in a client's update of one round, summed over its coordinates."""
    noise, batch = noise_multiplier(client, first, later), first if in_round_1 else later
    steps = PoissonSteps(client.clip, noise, client.records, batch, 1, Adjacency.ZERO_OUT)
    return client.parameters * steps.noise_in_release(client.lr, pull=0.0) ** 2


def noise_by_batches() -> Iterator[Figure]:
    """The noise multiplier and the noise of an update against the batches of round 1 and of later rounds."""
    client = NoiseExample()
    firsts = (16, 64, 256, 1024, client.records)
    batch = Scale("batch of round 1, in records", places=firsts, logarithmic=True, margin=0.03)
    where = f"{client.records:,} records, epsilon {client.epsilon:g}, delta {client.delta:g}, 200 rounds"
    summed = f"Summed over {client.parameters:,} coordinates; clip {client.clip:g}, step size {client.lr:g}"

    def chart(name: str, heading: str, of: Callable[[int, int], float], up: Scale, caption: str) -> Figure:
        lines = [
            Series(f"later batches of {later}", [(float(first), of(first, later)) for first in firsts])
            for later in (8, 16, 32, 64, 128, 256)
        ]
        return line_figure(name, heading, lines, batch, up, caption)

    yield chart(
        "multiplier",
        "Noise multiplier against the batches of a run",
        partial(noise_multiplier, client),
        Scale("", "{:.3g}".format, floor=0.0),
        f"One multiplier for all rounds; {where}. Round 1 is one round, the later batches all others.",
    )
    for in_round_1, when in ((True, "in round 1"), (False, "in a later round")):
        yield chart(
            f"variance-{int(in_round_1)}",
            f"Variance of the noise in an update {when}",
            partial(update_variance, client, in_round_1=in_round_1),
            Scale("", "{:.0e}".format, logarithmic=True),
            f"{summed}; {where}.",
        )
    budgets = (1.0, 2.0, 3.0, 5.0, 10.0, 15.0)
    large = {epsilon: NoiseExample(records=50_000, epsilon=epsilon) for epsilon in budgets}

    def ratio(epsilon: float, later: int) -> float:
        return noise_multiplier(large[epsilon], 50_000, later) / noise_multiplier(
            large[epsilon], later, later
        )

    yield line_figure(
        "ratio",
        "What a full batch in round 1 costs all rounds",
        [
            Series(f"batches of {later}", [(epsilon, ratio(epsilon, later)) for epsilon in budgets])
            for later in (16, 32, 64, 128, 256, 512, 1024)
        ],
        Scale("epsilon", "{:g}".format, (1, 3, 5, 10, 15), margin=0.03),
        Scale("", "{:.3g}".format, floor=1.0),
        "Noise multiplier with a full batch in round 1, over that with the same batch in all rounds; 50,000 "
        "records, 200 rounds.",
    )
