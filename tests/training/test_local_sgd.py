"""Learning without noise on a processor: as fast as it may be, it is plain SGD."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from coterie.data.records import Task
from coterie.models import ModelSettings, build_model
from coterie.training.learner import Batch, Learner
from coterie.training.local_sgd import LocalSGD, StackedLocalSGD, mean_gradient, train_one
from coterie.training.parameters import flatten
from coterie.training.scoring import padded_loss_sums, score_sums

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
    """Given the number of clients in the program, which is public."""
    learner = Learner(build_model(ModelSettings(name="cnn"), IMAGES, seed=1), IMAGES, CPU)
    rule = LocalSGD(epochs=1, batch=5, lr=0.1)
    starts, records, batches = people(learner, rule)
    updates = []
    for order in ([0, 1, 2, 3], [2, 0, 0, 0], [3, 3, 0, 1]):
        program = StackedLocalSGD(learner, len(order), rule)
        theirs = [records[k] for k in order], [batches[k] for k in order]
        updates.append(program.train(starts[order], *theirs)[order.index(0)])
    assert torch.equal(updates[0], updates[1])
    assert torch.equal(updates[0], updates[2])


def test_padded_losses_are_those_of_each_alone_whoever_else_there_is() -> None:
    learner = Learner(build_model(ModelSettings(name="softmax"), IMAGES, seed=1), IMAGES, CPU)
    starts, records, _ = people(learner, LocalSGD(1, 5, 0.1))
    models = starts[:3]
    found = padded_loss_sums(learner, models, records, wave=3, length=20)
    alone = [[score_sums(learner, model, own, [len(own)])[1][0] for model in models] for own in records]
    np.testing.assert_allclose(found, alone, rtol=1e-5)
    fewer = padded_loss_sums(learner, models, records[:1], wave=3, length=20)
    np.testing.assert_array_equal(fewer[0], found[0])
    assert padded_loss_sums(learner, models, [], wave=3, length=20).shape == (0, 3)
