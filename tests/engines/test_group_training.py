"""What the bound for overlapping groups rests on, held to by the engine that trains them."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from group_training import CLIP, LEARNER, Training, build, engine_for, workers
from scipy import stats

from coterie.algorithms.protocol import Sum
from coterie.data import Records
from coterie.errors import PlanError
from coterie.groups import Structure, ring
from coterie.privacy import Mode
from coterie.training.learner import Batch
from coterie.training.local_sgd import LocalSGD, LocalTrainer, train_one

STRUCTURE = Structure("mine", ((0, 1), (1, 2, 3), (3, 4)), 5)


@pytest.mark.parametrize(("name", "releases"), [("dp-ogl", 7), ("dp-ogl-plus", 2)])
def test_every_worker_is_charged_for_each_of_its_groups_and_epochs(name, releases):
    run = Training(build(name, 7, period=3), workers(STRUCTURE))
    assert run.executed == {
        "w0": {"group 0": releases},
        "w1": {"group 0": releases, "group 1": releases},
        "w2": {"group 1": releases},
        "w3": {"group 1": releases, "group 2": releases},
        "w4": {"group 2": releases},
    }


def test_a_worker_flips_a_coin_of_its_own_for_each_group_and_epoch():
    """Coins of one worker in two groups, and in one group from epoch to epoch, are independent."""
    structure = Structure("two", ((0, 1), (0, 2)), 3)
    run = Training(build("dp-ogl", 120, period=1, rate=0.5), workers(structure))
    drawn = np.array([["w0" in run.sampled[e, f"group {g}"] for e in range(1, 121)] for g in (0, 1)])
    for coins in (drawn[0], drawn[1], drawn[0] == drawn[1], drawn[0, 1:] == drawn[0, :-1]):
        assert stats.binomtest(int(coins.sum()), len(coins), 0.5).pvalue > 1e-6


@pytest.mark.parametrize("name", ["dp-ogl", "dp-ogl-plus"])
def test_a_worker_keeps_nothing_from_one_epoch_to_the_next(name):
    """An engine that has seen nothing before answers a late epoch with the same bits."""
    run = Training(build(name, 6, period=2, rate=0.6), workers(STRUCTURE))
    late = {key: request for key, request in run.jobs.items() if key[0] in (4, 6)}
    assert len(late) == 6
    for (epoch, release), request in late.items():
        with engine_for(run.plan, workers(STRUCTURE)) as (fresh, _):
            sums = fresh.answer(Sum(fresh.answer(request, epoch)), epoch)
        assert sums.rows.value.tobytes() == run.sums[epoch, release].value.tobytes()


@pytest.mark.parametrize(
    ("name", "period", "limit"), [("dp-ogl", 1, CLIP), ("dp-ogl-plus", 4, math.sqrt(4) * CLIP)]
)
def test_other_records_of_one_worker_move_each_of_its_sums_by_two_clips_at_most(name, period, limit):
    """Loud records, large steps, the same coins and noise: in the first release nothing else differs."""
    algorithm = build(name, period, period=period, lr=50.0)
    usual = Training(algorithm, workers(STRUCTURE)).sums
    for target in range(5):
        other = Training(algorithm, workers(STRUCTURE, changed=target, scale=100.0)).sums
        for group, members in enumerate(STRUCTURE.groups):
            key = period, f"group {group}"
            moved = float(np.linalg.norm(usual[key].value - other[key].value))
            assert (moved > 0) == (target in members)
            assert moved <= 2 * limit * (1 + 1e-9)


def test_noise_has_the_planned_size_and_is_another_in_every_group_and_epoch():
    # Steps so small that the sums are their noise.
    run = Training(build("dp-ogl", 25, period=2, noise=3.0, lr=1e-9), workers(ring(8, 4)))
    noise = np.array([rows.value[0] for rows in run.sums.values()])
    assert {rows.noise_std for rows in run.sums.values()} == {3.0 * CLIP}
    assert stats.kstest(noise.ravel() / (3.0 * CLIP), "norm").pvalue > 1e-6
    assert len(np.unique(noise[:, 0])) == len(noise)


def test_the_sum_is_not_divided_by_who_came():
    """With a rate below one, the divisor is the expected number, whatever the sample."""
    algorithm = build("dp-ogl", 3, period=1, rate=0.5)
    run = Training(algorithm, workers(STRUCTURE))
    for (epoch, release), rows in run.sums.items():
        group = int(release.split()[1])
        before, after = run.states[epoch - 1].models[group], run.states[epoch].models[group]
        step = rows.value[0] / (0.5 * len(STRUCTURE.groups[group]))
        assert after == pytest.approx(before + step, rel=1e-5, abs=1e-6)


def test_the_workers_of_all_groups_train_as_one_program_where_a_gpu_does_it(monkeypatch):
    """Stacked on a CPU here: one program an epoch, of a size that does not tell who came."""
    algorithm = build("dp-ogl", 4, period=2, rate=0.4, iterations=5)
    one_by_one = Training(algorithm, workers(STRUCTURE))
    waves = []

    train = LocalTrainer.train

    def stacked(trainer, jobs):
        waves.append((sum(len(job.records) for job in jobs), [job.wave for job in jobs]))
        return train(trainer, jobs)

    monkeypatch.setattr("coterie.engines.members.stacks", lambda learner: True)
    monkeypatch.setattr(LocalTrainer, "train", stacked)
    together = Training(algorithm, workers(STRUCTURE))
    assert len(waves) == 4
    assert len({members for members, _ in waves}) > 1
    assert len({tuple(wave) for _, wave in waves}) == 1
    assert together.sampled[1, "group 1"] == one_by_one.sampled[1, "group 1"]
    for group in range(3):
        key = 1, f"group {group}"
        assert together.sums[key].value == pytest.approx(one_by_one.sums[key].value, abs=1e-5)


def test_local_steps_are_counted_not_passes():
    rule = LocalSGD(epochs=1, batch=3, lr=0.1, iterations=5)
    batches = rule.batches(7, seed=0)
    assert batches.shape == (5, 3)
    first_pass = batches[:3]
    assert sorted(first_pass[first_pass >= 0].tolist()) == list(range(7))
    assert len(LocalSGD(epochs=2, batch=3, lr=0.1).batches(7, seed=0)) == 6


def loud_worker(structure, *, silent):
    """Worker 0 pulls with huge records, or has none that pull at all; the others are like each other."""
    federation = workers(structure)
    clients = list(federation.clients)
    quiet, loud = clients[1].train, clients[0].train
    features = np.zeros_like(loud.features) if silent else 1e4 * np.abs(loud.features)
    clients[0] = replace(clients[0], train=Records(features, np.zeros(6, dtype=np.int64)))
    for number in range(1, structure.workers):
        clients[number] = replace(clients[number], train=quiet)
    return replace(federation, clients=tuple(clients))


@pytest.mark.parametrize(("mode", "most"), [(Mode.SOUND, 2.0), (Mode.PAPER, math.inf)])
def test_published_plus_exceeds_its_sensitivity_in_training_and_the_sound_one_does_not(mode, most):
    """One worker's records move the sum of a block of the published version by many times its two clips."""
    structure = Structure("one", (tuple(range(8)),), 8)
    algorithm = build("dp-ogl-plus", 4, period=4, mode=mode, lr=5.0, threat_model=2)
    one, other = (
        Training(algorithm, loud_worker(structure, silent=silent)).sums[4, "group 0"].value
        for silent in (False, True)
    )
    moved = float(np.linalg.norm(one - other)) / (math.sqrt(4) * CLIP)
    if mode is Mode.SOUND:
        assert moved <= most * (1 + 1e-9)
    else:
        assert moved > 4.0


def test_published_plus_follows_its_equations():
    """A slow twin: full batches, everybody there, no noise to speak of, drafts shared as written."""
    clip, lr, steps = 0.3, 0.5, 2
    algorithm = build(
        "dp-ogl-plus", 3, period=3, mode=Mode.PAPER, clip=clip, noise=1e-12, iterations=steps, batch=6
    )
    federation = workers(STRUCTURE)
    run = Training(algorithm, federation)
    rule = LocalSGD(epochs=1, batch=6, lr=lr, iterations=steps)
    begun = torch.from_numpy(run.states[0].models[0])
    for group, members in enumerate(STRUCTURE.groups):
        draft, totals = begun.clone(), [torch.zeros_like(begun) for _ in members]
        for _ in range(3):
            learnt = []
            for member in members:
                records = Batch.of(federation.clients[member].train, torch.device("cpu"))
                learnt.append(train_one(LEARNER, draft, records, rule.batches(6, seed=0), rule))
            totals = [total + one for total, one in zip(totals, learnt, strict=True)]
            draft = draft + sum(learnt) / len(members)
        limit = math.sqrt(3) * clip
        clipped = [total * min(1.0, limit / float(total.norm())) for total in totals]
        expected = begun + sum(clipped) / len(members)
        assert run.states[3].models[group] == pytest.approx(expected.numpy(), abs=1e-5)


def test_drafts_are_refused_where_they_were_not_planned():
    sound = Training(build("dp-ogl-plus", 2, period=2), workers(STRUCTURE))
    published = Training(build("dp-ogl-plus", 2, period=2, mode=Mode.PAPER), workers(STRUCTURE))
    for plan, asked in ((sound.plan, published), (published.plan, sound)):
        with engine_for(plan, workers(STRUCTURE)) as (engine, ledger):
            with pytest.raises(PlanError, match="drafts"):
                engine.answer(asked.jobs[2, "group 0"], 2)
            assert not any(ledger.executed("w0").values())
