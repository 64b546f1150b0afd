"""What batch sizes do to the noise of round 1, from the accountant alone.

One noise multiplier z hides every step of a run, as in Figures 3, 4 and 14 (right) of Malekmohammadi, Taik
and Farnadi (TMLR 2025): batches of `first` records in round 1, of `later` records in the rounds after it.
"""

from dataclasses import dataclass
from functools import cache

from coterie.privacy import (
    Adjacency,
    Budget,
    FullBatchSteps,
    Mechanism,
    NoiseRule,
    PlannedRelease,
    PoissonSteps,
    PrivacyPlan,
    ThreatModel,
    Unit,
    UnitPlan,
    calibrate,
)
from coterie.privacy.mechanisms import NoisySum

ZERO_OUT = Adjacency.ZERO_OUT


@dataclass(frozen=True)
class Client:
    """A client and its budget; the defaults are the setting of the publication's Figures 3 and 4."""

    records: int = 6600
    epsilon: float = 5.0
    delta: float = 1e-4
    rounds: int = 200
    clip: float = 3.0
    parameters: int = 11_181_642
    lr: float = 5e-4


@cache
def noise_multiplier(client: Client, first: int, later: int) -> float:
    """The z that fits the budget with these batches in round 1 and afterwards."""
    rounds = (_steps(client, first, 1), _steps(client, later, client.rounds - 1, "training"))
    threat = ThreatModel(observers="the server", sees="every update")
    plan = PrivacyPlan(Unit.RECORD, ZERO_OUT, threat, (UnitPlan("client", rounds),))
    solved = calibrate(plan, Budget(client.epsilon, client.delta))
    mechanism = solved.units[0].releases[0].mechanism
    assert isinstance(mechanism, NoisySum)
    return mechanism.multiplier


def _steps(client: Client, batch: int, times: int, name: str = "first round") -> PlannedRelease:
    mechanism: Mechanism
    if batch == client.records:
        mechanism = FullBatchSteps(client.clip, NoiseRule.SHARED, client.records, 1, ZERO_OUT)
    else:
        mechanism = PoissonSteps(client.clip, NoiseRule.SHARED, client.records, batch, 1, ZERO_OUT)
    return PlannedRelease(name, mechanism, times)


def update_variance(client: Client, first: int, later: int, *, in_round_1: bool) -> float:
    """Variance of the noise in a client's update of one round, summed over its coordinates.

    N / b steps, each with noise of standard deviation lr * c * z / b in every coordinate.
    """
    batch = first if in_round_1 else later
    steps = -(-client.records // batch)
    each = client.lr * client.clip * noise_multiplier(client, first, later) / batch
    return steps * client.parameters * each**2
