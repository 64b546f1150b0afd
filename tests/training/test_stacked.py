"""Many clients as one program compute what each client computes alone."""

import weakref
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from coterie.data.records import Task
from coterie.models import ModelSettings, build_model
from coterie.privacy import Adjacency, FullBatchSteps, PoissonSteps
from coterie.training import kernel_trial, kernels, philox, stacked
from coterie.training.clipping import clipped_sum
from coterie.training.layers import simple
from coterie.training.learner import Batch, Learner
from coterie.training.parameters import flatten
from coterie.training.stacked import StackedJob, StackedTrainer
from coterie.training.tiles import Tiles

CPU = torch.device("cpu")
TASK = Task(kind="classification", shape=(1, 8, 8), classes=5)
LR = 0.3
ALPHA = 1e-6


def learner_of(name: str) -> tuple[Learner, torch.Tensor]:
    model = build_model(ModelSettings(name=name), TASK, seed=0)
    return Learner(model, TASK, CPU), torch.from_numpy(flatten(model))


def records_of(*sizes: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    return [
        Batch(torch.randn(size, *TASK.shape, generator=generator), torch.arange(size) % 5) for size in sizes
    ]


def poisson(records: int, batch: int, noise: float = 1.0, epochs: int = 1) -> PoissonSteps:
    return PoissonSteps(
        clip=0.4 + 0.1 * batch,
        noise_multiplier=noise,
        records=records,
        batch=batch,
        epochs=epochs,
        adjacency=Adjacency.ZERO_OUT,
    )


def full(records: int, epochs: int = 2) -> FullBatchSteps:
    return FullBatchSteps(
        clip=1.0, noise_multiplier=1.0, records=records, epochs=epochs, adjacency=Adjacency.ZERO_OUT
    )


def flips(keys: torch.Tensor, rates: torch.Tensor, steps: range, records: int) -> torch.Tensor:
    numbers = torch.arange(steps.start, steps.stop)
    return philox.coins(keys, rates, numbers, philox.places(records, 4, CPU))[:, :, :records]


def noise(keys: torch.Tensor, step: int, count: int) -> torch.Tensor:
    return philox.normals(keys, torch.tensor([step]), philox.places(count, 2, CPU))[:, :count]


def trainer_of(learner: Learner, records: list[Batch], tile: int = 8) -> StackedTrainer:
    table = Batch(torch.cat([r.features for r in records]), torch.cat([r.targets for r in records]))
    return StackedTrainer(learner, table, [len(r) for r in records], tile=tile)


def small_only(gather: Callable[[Tiles, torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Refuses to copy the weights of a layer for every tile."""

    def checked(tiles: Tiles, stacked: torch.Tensor) -> torch.Tensor:
        assert stacked.dim() < 3, "weights are copied"
        return gather(tiles, stacked)

    return checked


def alone(learner: Learner, records: Batch, job: StackedJob) -> torch.Tensor:
    """The simple twin: the same coins and noise, one client, one step after the other."""
    mechanism = job.mechanism
    keys = [philox.split_keys([key], CPU) for key in (job.coin_key, job.noise_key)]
    rate = torch.tensor([mechanism.rate], dtype=torch.float64)
    coins = flips(keys[0], rate, range(mechanism.steps), len(records))[:, 0]
    parameters = job.start.double()
    for step in range(mechanism.steps):
        total = clipped_sum(learner, parameters.float(), records.take(coins[step]), mechanism.clip)
        total += mechanism.noise_std * noise(keys[1], step, len(total))[0]
        gradient = total / mechanism.denominator
        if job.anchor is not None:
            gradient += job.anchor_weight * (parameters - job.anchor)
        parameters = parameters - LR * gradient
    return parameters - job.start.double()


@pytest.mark.parametrize("name", ["softmax", "cnn", "softmax on many features"])
@pytest.mark.parametrize("tile", [2, 8])
@pytest.mark.parametrize("crowded", [False, True], ids=["one row a step", "several rows a step"])
def test_stacked_clients_end_where_each_would_end_alone(
    name: str, tile: int, crowded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients of other sizes, rates, clips and numbers of steps, full batches beside Poisson ones."""
    if name == "softmax on many features":  # for which one product serves the weights of all clients
        name = "softmax"
        monkeypatch.setattr(simple, "_suits_everyone", lambda weight, tiles: True)
        monkeypatch.setattr(Tiles, "gather", small_only(Tiles.gather))
    if crowded:
        monkeypatch.setattr(StackedTrainer, "_tiles_at_once", lambda self: 3)
        monkeypatch.setattr(stacked, "ROWS_AT_ONCE", 4)
        monkeypatch.setattr(stacked, "COINS_AT_ONCE", 150)
    learner, start = learner_of(name)
    records = records_of(20, 31, 12)
    plans = [poisson(20, 5), poisson(31, 4), full(12)]
    jobs = [
        StackedJob(which, start + 0.01 * which, plan, LR, noise_key=2**63 + which, coin_key=77 + which)
        for which, plan in enumerate(plans)
    ]
    jobs[1] = replace(jobs[1], anchor=start - 0.1, anchor_weight=0.7)
    trainer = trainer_of(learner, records, tile)
    found = trainer.train(jobs)
    for which, job in enumerate(jobs):
        torch.testing.assert_close(found[which], alone(learner, records[which], job), rtol=1e-5, atol=1e-6)
    # A second round reuses the program and starts afresh.
    torch.testing.assert_close(trainer.train(jobs), found, rtol=0, atol=0)


def test_waves_do_not_change_the_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    learner, start = learner_of("softmax")
    records = records_of(20, 31, 12)
    jobs = [StackedJob(w, start, poisson(len(r), 4), LR, 5 + w, 9 + w) for w, r in enumerate(records)]
    together = trainer_of(learner, records).train(jobs)
    monkeypatch.setattr(StackedTrainer, "_clients_at_once", lambda self, jobs: 2)
    apart = trainer_of(learner, records).train(jobs)
    torch.testing.assert_close(apart, together, rtol=1e-6, atol=1e-9)


def test_a_program_that_raises_leaves_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    learner, start = learner_of("softmax")
    trainer = trainer_of(learner, records_of(20, 31))
    jobs = [StackedJob(which, start, full(20), LR, 5 + which, 9 + which) for which in range(2)]
    held: list[weakref.ref[torch.Tensor]] = []
    finish = stacked._Program._finish_step

    def limited(program: stacked._Program) -> None:
        if program.clients > 1:
            held.append(weakref.ref(program.parameters))
            raise torch.OutOfMemoryError("out of memory")
        finish(program)

    monkeypatch.setattr(stacked._Program, "_finish_step", limited)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        trainer.train(jobs)
    assert [tensor() for tensor in held] == [None], raised  # also while somebody keeps the mistake
    assert len(trainer.train(jobs[:1])) == 1
    assert [clients for clients, _ in trainer._programs] == [1]


def test_philox_gives_the_published_words() -> None:
    """Known answers of the Random123 distribution for Philox 4x32-10."""
    table = [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
            (0xFFFFFFFF, 0xFFFFFFFF),
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ]
    for counter, key, words in table:
        found = philox.philox(
            tuple(torch.tensor(word) for word in counter),  # type: ignore[arg-type]
            tuple(torch.tensor(word) for word in key),  # type: ignore[arg-type]
        )
        assert tuple(int(word) for word in found) == words


def test_coins_on_the_device_are_poisson() -> None:
    """Rate, independence between records and between clients, at 1e-6 each."""
    keys = philox.split_keys([3, 4], CPU)
    rates = torch.tensor([0.1, 0.5], dtype=torch.float64)
    drawn = flips(keys, rates, range(500), 41).numpy()
    for client, rate in enumerate(rates.tolist()):
        own = drawn[:, client]
        assert stats.binomtest(int(own.sum()), own.size, rate).pvalue > ALPHA
        correlations = np.corrcoef(own.T)[np.triu_indices(41, 1)]
        assert np.abs(correlations).max() < stats.norm.isf(ALPHA / 2 / len(correlations)) / 500**0.5
    both = np.corrcoef(drawn[:, 0].ravel(), drawn[:, 1].ravel())[0, 1]
    assert abs(both) < stats.norm.isf(ALPHA / 2) / (500 * 41) ** 0.5
    again = flips(keys, rates, range(100, 107), 41).numpy()
    np.testing.assert_array_equal(again, drawn[100:107])
    assert flips(keys, torch.ones(2, dtype=torch.float64), range(20), 41).all()


def test_noise_on_the_device_is_normal_and_never_repeats() -> None:
    keys = philox.split_keys([3, 4], CPU)
    values = np.stack([noise(keys, step, 1001).numpy() for step in range(20)])
    assert stats.kstest(values.ravel(), "norm").pvalue > ALPHA
    assert len(np.unique(values)) == values.size
    assert np.isfinite(values).all()


@pytest.mark.parametrize(
    "reason",
    [
        torch.OutOfMemoryError("all of it is somebody else's"),
        MemoryError(),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ],
    ids=lambda reason: type(reason).__name__,
)
def test_memory_that_others_have_taken_is_no_reason_to_compute_in_another_way(
    reason: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that was resumed would repeat its noise on sums that are rounded otherwise."""

    def full(*given: object) -> torch.Tensor:
        raise reason

    learner, _ = learner_of("softmax")
    monkeypatch.setattr(kernels, "available", lambda device: True)
    monkeypatch.setattr(kernel_trial, "stacked_clipped_sum", full)
    with pytest.raises(type(reason)):
        kernel_trial.kernels_agree(learner, 4)
