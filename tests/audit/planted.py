"""A gallery of mistakes that privacy was lost by elsewhere, each planted into the code that runs.

Every one leaves the plan and the claim as they are and changes what is executed. An audit that cannot find
them is worthless; `benchmarks/audit.py` counts how often it does."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from coterie.algorithms.protocol import Choice, CohortJob, LocalTraining
from coterie.audit.arena import Audited
from coterie.audit.cohort_games import AskedCohort, CohortGame
from coterie.audit.games import Game
from coterie.audit.record_games import SelectionGame, TrainingGame
from coterie.audit.score_games import ScoresGame
from coterie.data.records import Task
from coterie.engines import cohorts, evaluation
from coterie.engines.clients import TrainingFacts
from coterie.privacy import (
    EVALUATION,
    POPULATION,
    Adjacency,
    Charge,
    CohortSums,
    FullBatchSketch,
    FullBatchSteps,
    Mechanism,
    NoisyScores,
    PlannedRelease,
    PoissonSample,
    PoissonSteps,
    PrivateSelection,
    RandomStream,
    SecretKey,
    Unit,
    UnitPlan,
    held_out,
    selections,
)
from coterie.privacy.plans import plan_of
from coterie.training import clipping, dpsgd
from coterie.training.contributions import Products, Rows
from coterie.training.learner import Batch, Learner
from coterie.training.narrow_head import NarrowHead
from coterie.training.parameters import flatten

ZERO = Adjacency.ZERO_OUT
DELTA = 1e-2
TASK = Task("classification", (6,), 3)


# --- what is attacked, as small as it can be ---------------------------------------------------------------


def audited(
    mechanism: Mechanism, unit: Unit = Unit.RECORD, subject: str = "client", times: int = 2
) -> Audited:
    """A plan of one release, for softmax regression on six features."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 3))
    plan = plan_of(unit, mechanism.adjacency, {subject: [PlannedRelease(EVALUATION, mechanism, times)]})
    learner = Learner(model, TASK, torch.device("cpu"))
    return Audited(plan, learner, 0.1, 0, None, flatten(model), {subject: DELTA}, "pld")


def of_records(mechanism: Mechanism, times: int = 2) -> Game:
    """The game of a release of a client's records."""
    own = audited(mechanism, times=times)
    [unit] = own.plan.units
    return (SelectionGame if mechanism.kind == "a selection" else TrainingGame)(own, unit, unit.releases[0])


@cache
def full_batch() -> Game:
    return of_records(FullBatchSteps(1.0, 1.0, 8, 1, ZERO))


@cache
def many_records() -> Game:
    return of_records(FullBatchSteps(1.0, 1.0, 3000, 1, ZERO), times=1)


@cache
def poisson() -> Game:
    return of_records(PoissonSteps(1.0, 0.5, 4, 1, 1, ZERO), times=1)


@cache
def little_noise() -> Game:
    return of_records(PoissonSteps(1.0, 0.3, 4, 1, 1, ZERO), times=1)


@cache
def large_batches() -> Game:
    return of_records(PoissonSteps(1.0, 0.5, 8, 4, 1, ZERO), times=1)


@cache
def sketch() -> Game:
    return of_records(FullBatchSketch(1.0, 1.0, 8, 5, ZERO), times=1)


@cache
def selection() -> Game:
    return of_records(PrivateSelection(1.0, ZERO))


@cache
def scores() -> Game:
    subject = held_out("client")
    own = audited(NoisyScores(0.5, 2.0, 5, ZERO), subject=subject)
    return ScoresGame(own, UnitPlan(subject, own.plan.units[0].releases), own.plan.units[0].releases[0])


def of_clients(**beside: Any) -> Game:
    """The game of a cohort's sums, of clients who choose between two models where counts come with them."""
    noise, sample = beside.pop("noise", 1.0), PoissonSample(beside.pop("rate", 1.0))
    mechanism = CohortSums(1.0, noise, sample, Adjacency.ADD_REMOVE, **beside)
    own = audited(mechanism, Unit.CLIENT, POPULATION)
    choice = Choice.LOWEST_LOSS if mechanism.histogram_ratio is not None else Choice.GIVEN
    models = np.repeat(own.initial[None], 2 if mechanism.histogram_ratio is not None else 1, axis=0)
    clip = mechanism.clip if mechanism.tracking_ratio is not None else None
    job = CohortJob(("anyone",), models, LocalTraining(1, 2, 0.1), choice, clip=clip)
    [unit] = own.plan.units
    return CohortGame(own, unit, unit.releases[0], mechanism, AskedCohort(job))


@cache
def sums() -> Game:
    return of_clients()


@cache
def few_sums() -> Game:
    return of_clients(rate=0.2)


@cache
def routed() -> Game:
    return of_clients(histogram_ratio=1.0)


@cache
def tracked() -> Game:
    return of_clients(tracking_ratio=1.0)


# --- the mistakes ------------------------------------------------------------------------------------------

Patch = Callable[[], Any]


def _less_noise(
    place: Any, share: float, when: Callable[[dict[str, Any]], bool] = lambda given: True
) -> Patch:
    """Noise that a function named `gaussian` or `gumbel` draws, times a share."""
    name = "gumbel" if place is selections else "gaussian"
    real = getattr(place, name)

    def drawn(stream: RandomStream, shape: Any, scale: float, **given: Any) -> Any:
        return real(stream, shape, scale, **given) * (share if when(given) else 1.0)

    return lambda: mock.patch.object(place, name, drawn)


def _streams(change: Callable[[Charge], Charge]) -> Patch:
    """Streams of noise that are keyed by less than they should be."""
    real = TrainingFacts.stream

    def stream(facts: TrainingFacts, purpose: str, charge: Charge) -> RandomStream:
        return real(facts, purpose, change(charge))

    return lambda: mock.patch.object(TrainingFacts, "stream", stream)


def _shared_key() -> Any:
    return mock.patch.object(SecretKey, "from_os", return_value=SecretKey(bytes(32), simulation=False))


def _double_clip() -> Any:
    real = clipping.largest_norm
    return mock.patch.object(clipping, "largest_norm", lambda clip: real(2.0 * clip))


def _rows(learner: Learner, parameters: Tensor, batch: Batch, project: Any = None) -> Tensor:
    rows = learner.gradients(parameters, batch).double()
    return rows if project is None else project(rows)


def _clipped_after(
    learner: Learner, parameters: Tensor, batch: Batch, clip: float, project: Any = None, views: Any = None
) -> Tensor:
    total = _rows(learner, parameters, batch, project).sum(dim=0)
    return total * min(1.0, clip / max(float(total.norm()), 1e-30))


def _unclipped_bias(
    learner: Learner, parameters: Tensor, batch: Batch, clip: float, project: Any = None, views: Any = None
) -> Tensor:
    rows, bias = _rows(learner, parameters, batch), learner.task.classes
    weights = clipping.clip_rows(rows[:, :-bias], clip)
    return torch.cat([weights, rows[:, -bias:]], dim=1).sum(dim=0)


def _realised_size(
    learner: Learner,
    parameters: Tensor,
    batch: Batch,
    mechanism: Any,
    noise: RandomStream,
    *_: Any,
    done: Callable[[slice, Tensor], None],
    **__: Any,
) -> Tensor:
    """The mean over the batch that was drawn, with the noise of the batch that was expected."""
    mean = clipping.clipped_sum(learner, parameters, batch, mechanism.clip) / max(1, len(batch))
    spread = mechanism.noise_std / mechanism.denominator
    mean += torch.from_numpy(noise.normal(tuple(mean.shape), spread))
    done(slice(0, len(mean)), mean)
    return mean


class _Shuffled:
    """Coins of which each unit has one head in a pass: a shuffled order, cut into batches."""

    def __init__(self) -> None:
        self.turn, self.order = 0, np.empty(0)

    def bernoulli(self, stream: RandomStream, rate: float, shape: Any) -> Any:
        steps = round(1.0 / rate)
        if self.turn % steps == 0:
            self.order = np.floor(stream.uniform(shape) * steps)
        self.turn += 1
        return self.order == (self.turn - 1) % steps


def _shuffled_batches() -> Any:
    coins = _Shuffled()

    def of_steps(stream: RandomStream, rate: float, shape: Any) -> Any:
        return np.stack([coins.bernoulli(stream, rate, shape[1:]) for _ in range(shape[0])])

    return mock.patch.object(RandomStream, "bernoulli", of_steps)


def _everyone() -> Any:
    return mock.patch.object(
        RandomStream, "bernoulli", lambda stream, rate, shape: np.ones(shape, dtype=np.bool_)
    )


def _every_member() -> Any:
    return mock.patch.object(PoissonSample, "drawn", lambda sample, coins: np.arange(len(coins)))


def _half_precision() -> Any:
    real = clipping.clipped_sum
    return mock.patch.object(
        dpsgd, "clipped_sum", lambda *given, **more: real(*given, **more).half().double()
    )


def _wrong_rule() -> Any:
    """The norm of one layer's gradient, by a rule that forgets most of it."""
    real = Rows.squared_norms, Products.squared_norms, NarrowHead.clipped_sum

    @contextmanager
    def all_of_them() -> Iterator[None]:
        with (
            mock.patch.object(Products, "squared_norms", lambda part: real[1](part) / 4.0),
            mock.patch.object(
                NarrowHead,
                "clipped_sum",
                lambda head, parameters, features, targets, most: real[2](
                    head, parameters, features, targets, 2.0 * most
                ),
            ),
            mock.patch.object(Rows, "squared_norms", lambda part: real[0](part) / 4.0),
        ):
            yield

    return all_of_them()


def _scaled_scores() -> Any:
    real = PrivateSelection.choose

    def choose(mechanism: Any, scores: Any, losses: Any, noise: RandomStream) -> int:
        return real(mechanism, -losses, losses, noise)

    return mock.patch.object(PrivateSelection, "choose", choose)


def _fresh_route() -> Any:
    """Where members go is drawn anew whenever it is asked, noise is not."""
    real, fresh = cohorts.routed, np.random.default_rng(0)
    return mock.patch.object(
        cohorts, "routed", lambda choices, route, coins: real(choices, route, fresh.random(len(coins)))
    )


def _unclipped_updates() -> Any:
    return mock.patch.object(cohorts, "clip_rows", lambda rows, clip: 3.0 * clipping.clip_rows(rows, clip))


def _of(charge: Charge, **fields: Any) -> Charge:
    return Charge(
        **{**{key: getattr(charge, key) for key in ("subject", "round", "release", "input_hash")}, **fields}
    )


@dataclass(frozen=True)
class Planted:
    """A mistake, the game that must find it, and with how many trials it does nearly always.

    Args:
        quick, explore: trials that are enough with the keys of the tests.
    """

    name: str
    game: Callable[[], Game]
    patch: Patch
    trials: int
    quick: int = 240
    explore: int = 16


_no_clip = lambda given: "clip" not in given  # noqa: E731  a count of choices moves by one

GALLERY = (
    Planted("noise missing", full_batch, _less_noise(dpsgd, 0.0), 400),
    Planted("half the noise", full_batch, _less_noise(dpsgd, 0.5), 800),
    Planted("half the noise on a sketch", sketch, _less_noise(dpsgd, 0.5), 800, 800),
    Planted(
        "noise reused between rounds", full_batch, _streams(lambda c: _of(c, round=1, input_hash="-")), 400
    ),
    Planted("noise reused between clients", full_batch, _streams(lambda c: _of(c, subject="-")), 400),
    Planted("noise key shared by all runs", full_batch, _shared_key, 400),
    Planted("clip doubled", full_batch, _double_clip, 800, 800),
    Planted(
        "clip after the sum",
        full_batch,
        lambda: mock.patch.object(dpsgd, "clipped_sum", _clipped_after),
        800,
        480,
        40,
    ),
    Planted(
        "clip missing on a bias",
        full_batch,
        lambda: mock.patch.object(dpsgd, "clipped_sum", _unclipped_bias),
        2400,
        1200,
        40,
    ),
    Planted(
        "realised batch size as divisor",
        large_batches,
        lambda: mock.patch.object(dpsgd, "noisy_mean", _realised_size),
        800,
        480,
        40,
    ),
    Planted("shuffled batches charged as Poisson", little_noise, _shuffled_batches, 800, 480),
    Planted("every record in every batch", poisson, _everyone, 400),
    Planted("selection without noise", selection, _less_noise(selections, 0.0), 400),
    Planted("selection by losses in place of counts", selection, _scaled_scores, 400),
    Planted("half precision", many_records, _half_precision, 800),
    Planted("one layer's rule wrong", full_batch, _wrong_rule, 800, 800),
    Planted("histogram without noise", routed, _less_noise(cohorts, 0.0, _no_clip), 400),
    Planted("route drawn again when a round is resumed", routed, _fresh_route, 1200, 480),
    Planted("updates clipped to three clips", sums, _unclipped_updates, 400),
    Planted(
        "noise of cohorts reused between rounds",
        sums,
        _streams(lambda c: _of(c, round=1, input_hash="-")),
        400,
    ),
    Planted("every client sampled", few_sums, _every_member, 800, 480),
    Planted(
        "a fifth of the noise on the count within the clip",
        tracked,
        _less_noise(cohorts, 0.2, lambda given: given.get("clip") == 0.5),
        800,
    ),
    Planted("half the noise on scores", scores, _less_noise(evaluation, 0.5), 800),
)
