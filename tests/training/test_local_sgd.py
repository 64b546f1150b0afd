"""Learning without noise on a processor: as fast as it may be, it is plain SGD."""

import itertools
import math
import weakref
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from coterie.data.records import Task
from coterie.models import ModelSettings, build_model
from coterie.training.learner import Batch, Learner
from coterie.training.local_sgd import (
    LocalJob,
    LocalSGD,
    LocalTrainer,
    StackedLocalSGD,
    mean_gradient,
    queues,
    train_one,
)
from coterie.training.parameters import flatten
from coterie.training.scoring import padded_loss_sums, same_bits_anywhere, score_sums
from coterie.training.tiles import Tiles, tiles_of

CPU = torch.device("cpu")
IMAGES = Task(kind="classification", shape=(1, 12, 12), classes=4)
COLOUR = Task(kind="classification", shape=(3, 9, 8), classes=4)


def batch_of(task: Task, records: int) -> Batch:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(records, *task.shape, generator=generator)
    return Batch(features, torch.arange(records) % task.classes)


def by_optimiser(model: nn.Module, records: Batch, order: np.ndarray, rule: LocalSGD) -> np.ndarray:
    """The textbook's loop: autograd, `torch.optim.SGD`, and the proximal term in the loss."""
    start = [parameter.detach().clone() for parameter in model.parameters()]
    optimiser = torch.optim.SGD(model.parameters(), lr=rule.lr, momentum=rule.momentum)
    for chosen in order:
        taken = records.take(torch.from_numpy(chosen[chosen >= 0]))
        optimiser.zero_grad()
        loss = functional.cross_entropy(model(taken.features), taken.targets)
        for parameter, origin in zip(model.parameters(), start, strict=True):
            loss = loss + rule.proximal / 2 * (parameter - origin).square().sum()
        loss.backward()
        optimiser.step()
    return flatten(model) - torch.cat([origin.flatten() for origin in start]).numpy()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("proximal", [0.0, 0.5])
@pytest.mark.parametrize("name", ["cnn", "softmax"])
def test_a_client_ends_where_the_textbooks_loop_ends(name: str, momentum: float, proximal: float) -> None:
    model = build_model(ModelSettings(name=name), IMAGES, seed=1)
    start = torch.from_numpy(flatten(model))
    learner = Learner(build_model(ModelSettings(name=name), IMAGES, seed=1), IMAGES, CPU)
    assert learner.book is not None
    assert learner.book.chained
    records = batch_of(IMAGES, 17)
    rule = LocalSGD(epochs=2, batch=5, lr=0.1, momentum=momentum, proximal=proximal)
    order = rule.batches(17, seed=3)
    update = train_one(learner, start, records, order, rule)
    expected = by_optimiser(model, records, order, rule)
    torch.testing.assert_close(update.numpy(), expected, rtol=1e-3, atol=1e-5)


MODELS = {
    "whole blocks": lambda: nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 16, 3), nn.Flatten()
    ),
    "stride and groups": lambda: nn.Sequential(
        nn.Conv2d(3, 12, 3, stride=2, bias=False), nn.ReLU(), nn.Conv2d(12, 8, 2, groups=4), nn.Flatten()
    ),
    "no sequence": lambda: nn.Sequential(nn.Flatten(), nn.Linear(216, 9), nn.LayerNorm(9)),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_gradient_of_the_mean_loss_is_autograds(name: str) -> None:
    torch.manual_seed(0)
    body = MODELS[name]()
    width = body(torch.zeros(1, 3, 9, 8)).shape[1]
    model = nn.Sequential(body, nn.ReLU(), nn.Linear(width, 4))
    learner = Learner(model, COLOUR, CPU)
    assert learner.book is not None
    assert learner.book.chained == (name != "no sequence")
    batch = batch_of(COLOUR, 6)
    functional.cross_entropy(model(batch.features), batch.targets).backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    found = mean_gradient(learner, learner.initial(), batch)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


# --- many clients as one program ----------------------------------------------------------------------------


SIZES = (17, 9, 12, 5)


def people(learner: Learner, rule: LocalSGD) -> tuple[torch.Tensor, list[Batch], list[np.ndarray]]:
    """Clients with different starts and numbers of records: the last steps of some are empty."""
    generator = torch.Generator().manual_seed(4)
    everyone = batch_of(IMAGES, sum(SIZES))
    bounds = np.cumsum((0, *SIZES))
    records = [everyone.take(slice(low, high)) for low, high in itertools.pairwise(bounds)]
    starts = learner.initial() + 0.05 * torch.randn(len(SIZES), learner.layout.size, generator=generator)
    return starts, records, [rule.batches(size, seed) for seed, size in enumerate(SIZES)]


@pytest.mark.parametrize("name", ["cnn", "softmax"])
@pytest.mark.parametrize(("momentum", "proximal"), [(0.0, 0.0), (0.9, 0.5)])
def test_stacked_clients_end_where_each_alone_ends(name: str, momentum: float, proximal: float) -> None:
    learner = Learner(build_model(ModelSettings(name=name), IMAGES, seed=1), IMAGES, CPU)
    rule = LocalSGD(epochs=2, batch=5, lr=0.1, momentum=momentum, proximal=proximal)
    starts, records, batches = people(learner, rule)
    program = StackedLocalSGD(learner, len(records), rule)
    program.train(starts + 1.0, records[::-1], batches[::-1])  # what an earlier round leaves does no harm
    together = program.train(starts, records, batches)
    for client, own in enumerate(records):
        alone = train_one(learner, starts[client], own, batches[client], rule)
        torch.testing.assert_close(together[client], alone, rtol=1e-3, atol=1e-5)


def test_a_batch_may_take_several_tiles() -> None:
    """Layer rules take so many records at once; a larger batch is cut, and its gradient is the same."""
    learner = Learner(build_model(ModelSettings(name="cnn"), IMAGES, seed=1), IMAGES, CPU)
    rule = LocalSGD(epochs=1, batch=7, lr=0.1)
    starts, records, batches = people(learner, rule)
    whole = StackedLocalSGD(learner, len(records), rule)
    learner.micro_batch = 3
    cut = StackedLocalSGD(learner, len(records), rule)
    assert (whole.tiles.count, cut.tiles.count, cut.tiles.size) == (4, 12, 3)
    people_of = (starts, records, batches)
    torch.testing.assert_close(cut.train(*people_of), whole.train(*people_of), rtol=1e-3, atol=1e-6)


def test_a_stacked_clients_update_has_the_same_bits_whoever_its_neighbours_are() -> None:
    """Given the number of slots of the program, which is public; and in whichever slot, at whatever time."""
    learner = Learner(build_model(ModelSettings(name="cnn"), IMAGES, seed=1), IMAGES, CPU)
    rule = LocalSGD(epochs=1, batch=5, lr=0.1)
    starts, records, batches = people(learner, rule)
    updates = []
    for order in ([0, 1, 2, 3], [2, 0, 0, 0], [3, 3, 0, 1], [0], [1, 2, 3, 2, 1, 0, 3, 1, 2]):
        program = StackedLocalSGD(learner, 4, rule)
        theirs = [records[k] for k in order], [batches[k] for k in order]
        updates.append(program.train(starts[order], *theirs)[order.index(0)])
    for other in updates[1:]:
        assert torch.equal(updates[0], other)


def test_a_client_that_diverges_moves_nobody_else() -> None:
    """Its numbers are not finite; a zero times them must reach no other client's sum."""
    learner = Learner(build_model(ModelSettings(name="softmax"), IMAGES, seed=1), IMAGES, CPU)
    learner.micro_batch = 4  # several tiles to a client
    rule = LocalSGD(epochs=2, batch=8, lr=0.1)
    starts, records, batches = people(learner, rule)
    found = []
    for scale in (1.0, 1e38):
        theirs = [Batch(records[0].features * scale, records[0].targets), *records[1:]]
        found.append(StackedLocalSGD(learner, 4, rule).train(starts, theirs, batches))
    assert not bool(torch.isfinite(found[1][0]).all())
    assert bool(torch.isfinite(found[0]).all())
    assert torch.equal(found[0][1:], found[1][1:])


@pytest.mark.parametrize("slots", [1, 2, 3, 7])
@pytest.mark.parametrize(("momentum", "proximal"), [(0.0, 0.0), (0.9, 0.5)])
def test_a_slot_is_taken_by_the_next_client_when_one_is_done(
    slots: int, momentum: float, proximal: float
) -> None:
    learner = Learner(build_model(ModelSettings(name="softmax"), IMAGES, seed=1), IMAGES, CPU)
    rule = LocalSGD(epochs=2, batch=5, lr=0.1, momentum=momentum, proximal=proximal)
    starts, records, batches = people(learner, rule)
    program = StackedLocalSGD(learner, slots, rule)
    taken = 0
    step = program._take_step

    def counted() -> None:
        nonlocal taken
        taken += 1
        step()

    program._take_step = counted  # type: ignore[method-assign]
    together = program.train(starts, records, batches)
    for client, own in enumerate(records):
        alone = train_one(learner, starts[client], own, batches[client], rule)
        torch.testing.assert_close(together[client], alone, rtol=1e-3, atol=1e-5)
    lengths = [len(order) for order in batches]
    assert sum(lengths) / slots <= taken <= max(max(lengths), sum(lengths) / slots + min(lengths))
    assert torch.equal(program.train(starts[:0], [], []), starts[:0])


def test_each_slot_takes_the_longest_that_is_left() -> None:
    assert queues([1, 5, 2, 2, 3], 2) == [[1, 3], [4, 2, 0]]
    assert queues([1, 2], 3) == [[1], [0], []]
    assert queues([], 2) == [[], []]


def cancelling(learner: Learner) -> tuple[Batch, np.ndarray]:
    """A client whose three tiles of two cancel but for the last digits, so that the order of sums shows."""
    targets = torch.tensor([2.0**60, 0.0, -(2.0**60), 0.0, 12.0, 0.0])
    return Batch(torch.zeros(6, 2), targets), np.arange(6)[None]


@pytest.mark.parametrize("own_kernels", [False, True])
def test_a_client_learns_the_same_bits_in_every_slot(
    own_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    line = Task(kind="regression", shape=(2,), classes=0, error_cap=1.0)
    learner = Learner(nn.Linear(2, 1), line, CPU)
    learner.micro_batch = 2
    rule = LocalSGD(epochs=1, batch=6, lr=1.0)
    own, order = cancelling(learner)
    other = Batch(torch.ones(6, 2), torch.arange(6.0)), order
    found = []
    for slot in range(5):
        program = StackedLocalSGD(learner, 5, rule)
        if own_kernels:
            in_tiles(program, monkeypatch)
        people_of = [(own, order) if place == slot else other for place in range(5)]
        starts = learner.initial().expand(5, -1).clone()
        monkeypatch.setattr("coterie.training.local_sgd.queues", lambda steps, slots: [[k] for k in range(5)])
        found.append(program.train(starts, *zip(*people_of, strict=True))[slot])
        monkeypatch.undo()
    assert all(torch.equal(one, found[0]) for one in found)
    assert found[0][-1] != 0.0


def in_tiles(program: StackedLocalSGD, monkeypatch: pytest.MonkeyPatch) -> list[Tiles]:
    """Let a program lay out its batches as for our kernels, while torch's operations compute on all records,
    which are nonsense where there are none; the layouts of its steps."""
    program.own_kernels = True
    seen: list[Tiles] = []

    def laid_out(
        owner: torch.Tensor, size: int, clients: int, present: torch.Tensor | None, *, most: int
    ) -> Tiles:
        assert present is not None
        seen.append(tiles_of(owner.clone(), size, clients, present.clone()))
        return tiles_of(owner, size, clients, None, most=most)

    monkeypatch.setattr("coterie.training.local_sgd.tiles_of", laid_out)
    load = program.load

    def spoilt(**values: torch.Tensor) -> None:
        if "features" in values:
            present = program.present.view(-1, *(1,) * (values["features"].dim() - 1))
            values["features"] = torch.where(present, values["features"], math.nan)
        load(**values)

    program.load = spoilt  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("micro_batch", [5, 2])
@pytest.mark.parametrize("name", ["cnn", "softmax"])
def test_what_stands_where_no_record_is_does_not_matter(
    name: str, micro_batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels skip those places and leave there whatever was in the memory."""
    learner = Learner(build_model(ModelSettings(name=name), IMAGES, seed=1), IMAGES, CPU)
    learner.micro_batch = micro_batch
    rule = LocalSGD(epochs=1, batch=5, lr=0.1)
    people_of = people(learner, rule)
    expected = StackedLocalSGD(learner, 3, rule).train(*people_of)
    program = StackedLocalSGD(learner, 3, rule)
    layouts = in_tiles(program, monkeypatch)
    torch.testing.assert_close(program.train(*people_of), expected, rtol=1e-3, atol=1e-6)
    shapes = {(tiles.count, tiles.size, tiles.records) for tiles in layouts}
    assert len(shapes) == 1
    for tiles in layouts:
        assert tiles.present is not None
        assert tiles.owner is not None
        assert tiles.bounds is not None
        there = tiles.present.view(tiles.count, tiles.size)
        assert torch.equal(there, there.cummin(dim=1).values)  # records of a tile before its padding
        filled = int(there[:, 0].sum())
        assert bool(there[:filled, 0].all())  # tiles that are there before those that are not
        assert int(tiles.bounds[-1]) == filled
        for slot in range(3):
            own = tiles.owner[tiles.bounds[slot] : tiles.bounds[slot + 1]]
            assert bool((own == slot).all())
    assert {int(tiles.bounds[-1]) for tiles in layouts if tiles.bounds is not None} != {tiles.count}


def test_jobs_learn_together_by_rule_and_as_many_as_fit_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = Learner(build_model(ModelSettings(name="softmax"), IMAGES, seed=1), IMAGES, CPU)
    rule = LocalSGD(epochs=1, batch=5, lr=0.1)
    starts, records, batches = people(learner, rule)

    def job(of: LocalSGD, wave: int) -> LocalJob:
        return LocalJob(lambda: starts[:2], records[:2], batches[:2], of, wave)

    trainer, other = LocalTrainer(learner), replace(rule, proximal=0.1)
    asked = [[job(rule, 4)], [job(other, 4)], [job(rule, 3), job(rule, 1)], [job(rule, 2)], [job(other, 5)]]
    assert trainer.portions(asked) == [[0, 2, 3], [1, 4]]
    monkeypatch.setattr("coterie.training.local_sgd._kept_at_once", lambda learner: 8)
    assert trainer.portions(asked) == [[0, 2], [1], [3], [4]]
    assert trainer.portions([[job(rule, 0)], [job(other, 9)]]) == [[0], [1]]  # nobody, and too many
    found = trainer.train([one for place in (0, 2) for one in asked[place]])
    assert [len(each) for each in found] == [2, 2, 2]
    assert torch.equal(found[0], found[2])
    # Room for the largest cohort, and for more where it takes more to fill a GPU.
    assert trainer._slots(rule, [4, 3, 1]) == 8
    monkeypatch.setattr("coterie.training.local_sgd._FILLING", 6 * learner.layout.size)
    assert trainer._slots(rule, [4, 3, 1]) == 6
    assert trainer._slots(rule, [9, 3]) == 9
    monkeypatch.setattr("coterie.training.local_sgd._room", lambda learner, rule: 5)
    assert trainer._slots(rule, [9, 3]) == 5


def test_a_program_that_raises_leaves_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be what does not fit; whoever learns alone afterwards needs the room."""
    learner = Learner(build_model(ModelSettings(name="softmax"), IMAGES, seed=1), IMAGES, CPU)
    rule = LocalSGD(epochs=1, batch=5, lr=0.1)
    starts, records, batches = people(learner, rule)
    job = LocalJob(lambda: starts[:2], records[:2], batches[:2], rule, 2)
    held: list[weakref.ref[torch.Tensor]] = []
    step = StackedLocalSGD._take_step

    def limited(program: StackedLocalSGD) -> None:
        if program.slots > 2:
            held.append(weakref.ref(program.parameters))
            raise torch.OutOfMemoryError("out of memory")
        step(program)

    monkeypatch.setattr(StackedLocalSGD, "_take_step", limited)
    trainer = LocalTrainer(learner)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        trainer.train([job, job])
    assert [tensor() for tensor in held] == [None], raised  # also while somebody keeps the mistake
    assert len(trainer.train([job])) == 1
    assert [slots for _, slots in trainer._programs] == [2]


Predict = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def test_padded_losses_are_those_of_each_alone_whoever_else_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = Learner(build_model(ModelSettings(name="softmax"), IMAGES, seed=1), IMAGES, CPU)
    starts, records, _ = people(learner, LocalSGD(1, 5, 0.1))
    models = starts[:3]
    found = padded_loss_sums(learner, models, records, size=16)
    alone = [[score_sums(learner, model, own, [len(own)])[1][0] for model in models] for own in records]
    np.testing.assert_allclose(found, alone, rtol=1e-5)
    seen: list[int] = []
    predict = learner.predict
    monkeypatch.setattr(learner, "predict", lambda model, features: _noted(seen, predict)(model, features))
    for others in ([2], [2, 1], [3, 3, 2, 0]):
        again = padded_loss_sums(learner, models, [records[k] for k in others], size=16)
        np.testing.assert_array_equal(again[others.index(2)], found[2])
    assert set(seen) == {16}, "a model sees as many records whoever there is"
    assert padded_loss_sums(learner, models, []).shape == (0, 3)


def _noted(seen: list[int], predict: Predict) -> Predict:
    def noting(model: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        seen.append(len(features))
        return predict(model, features)

    return noting


def test_sums_of_losses_are_exact() -> None:
    """A sum that rounds would depend on the order, and so on how many there are."""
    learner = Learner(nn.Linear(1, 1), Task(kind="regression", shape=(1,), classes=0, error_cap=1.0), CPU)
    ones = torch.cat([torch.full((1,), 2.0**31), torch.full((64,), 2.0**4)])
    (sums,) = padded_loss_sums(learner, torch.zeros(1, 2), [Batch(torch.zeros(65, 1), ones)], size=128)
    assert sums.tolist() == [2.0**61 + 64 * 2.0**7]


def test_where_a_record_stands_shows_in_its_outputs_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = Learner(build_model(ModelSettings(name="softmax"), IMAGES, seed=1), IMAGES, CPU)
    monkeypatch.setattr(learner, "predict", lambda model, features: features.flatten(1) * model[0])
    assert same_bits_anywhere(learner, size=64)

    def by_place(model: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        outputs = features.flatten(1) * model[0]
        outputs[-1] = torch.nextafter(outputs[-1], torch.tensor(math.inf))  # the last row goes another way
        return outputs

    monkeypatch.setattr(learner, "predict", by_place)
    assert not same_bits_anywhere(learner, size=64)


@pytest.mark.parametrize("name", ["cnn", "mcmahan-cnn", "mlp"])
def test_where_a_record_stands_shows_in_the_outputs_of_every_network(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also behind a ReLU, which of unlucky parameters and records would leave nothing."""
    shape = (1, 28, 28) if name == "mcmahan-cnn" else IMAGES.shape
    task = Task(kind="classification", shape=shape, classes=10)
    learner = Learner(build_model(ModelSettings(name=name), task, seed=1), task, CPU)
    real = learner.predict

    def by_place(model: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        rounded = features.clone()
        rounded[: len(features) // 2] *= 1.0 + 2.0**-20
        return real(model, rounded)

    monkeypatch.setattr(learner, "predict", by_place)
    assert not same_bits_anywhere(learner, size=64)


def test_outputs_that_are_all_alike_show_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = Learner(build_model(ModelSettings(name="softmax"), IMAGES, seed=1), IMAGES, CPU)
    for value in (0.5, math.nan):
        monkeypatch.setattr(
            learner, "predict", lambda model, features, value=value: torch.full((len(features), 10), value)
        )
        assert not same_bits_anywhere(learner, size=64)

    def infinite(model: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        outputs = features.flatten(1).clone()
        outputs[:, 0] = math.inf
        return outputs

    monkeypatch.setattr(learner, "predict", infinite)
    assert not same_bits_anywhere(learner, size=64)


def test_a_network_that_begins_with_zeros_shows_it_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model(ModelSettings(name="softmax"), IMAGES, seed=1)
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    learner = Learner(model, IMAGES, CPU)
    monkeypatch.setattr(learner, "predict", lambda model, features: features.flatten(1) * model[0])
    assert same_bits_anywhere(learner, size=64)
