"""Whatever a user's model does with a batch, one record moves a count by one and no other gradient."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from mixers import (
    BEYOND_PROBES,
    CLASSES,
    GLOBAL,
    HARMLESS_APART,
    WIDTH,
    Attribute,
    LateAttribute,
    Mixer,
    OnlyAboveEight,
    OnlyInEvaluation,
    OnlyNegative,
    own_rule,
)
from torch import Tensor, nn

from coterie.data import Task
from coterie.errors import InputError
from coterie.models import check_model
from coterie.training.clipping import clip_rows, clipped_sum
from coterie.training.learner import Batch, Learner
from coterie.training.scoring import padded_loss_sums, score_sums, total_score

TASK = Task("classification", (WIDTH,), CLASSES)
CPU = torch.device("cpu")
RECORDS = 120

Kind = Callable[[], nn.Module]


def build(kind: Kind) -> nn.Module:
    torch.manual_seed(1)
    return kind()


def neighbours(first: Tensor) -> tuple[Batch, Batch]:
    """Two clients whose records are the same but for the first."""
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(RECORDS, WIDTH, generator=generator)
    targets = torch.randint(CLASSES, (RECORDS,), generator=generator)
    other = features.clone()
    other[0] = first
    return Batch(features, targets), Batch(other, targets)


def assert_one_record_is_one_record(model: nn.Module) -> None:
    learner = Learner(model, TASK, CPU, fast=False)
    parameters = learner.initial()
    for first in (torch.zeros(WIDTH), torch.full((WIDTH,), -1e6)):
        ours, theirs = neighbours(first)
        before = total_score(learner, parameters, ours)
        rows = learner.gradients(parameters, ours)
        assert abs(total_score(learner, parameters, theirs) - before) <= 1
        others = learner.gradients(parameters, theirs)
        assert torch.equal(others[1:], rows[1:])
        moved = clip_rows(others, 1.0).sum(dim=0) - clip_rows(rows, 1.0).sum(dim=0)
        assert moved.norm() <= 2.0
        # The same again, after other records have passed.
        assert total_score(learner, parameters, ours) == before
        assert torch.equal(learner.gradients(parameters, ours), rows)


@pytest.mark.parametrize(
    "kind", [OnlyInEvaluation, OnlyAboveEight, OnlyNegative, LateAttribute], ids=lambda kind: kind.__name__
)
def test_what_passed_for_honest_once_is_refused(kind: Kind) -> None:
    with pytest.raises(
        InputError, match=r"depends on the other records|changes as records pass|passes again"
    ):
        check_model(build(kind), TASK)


@pytest.mark.parametrize("kind", HARMLESS_APART, ids=lambda kind: kind.__name__)
def test_one_record_moves_a_count_by_one_and_no_other_gradient_whatever_the_model_does(kind: Kind) -> None:
    assert_one_record_is_one_record(build(kind))


@pytest.mark.parametrize("kind", HARMLESS_APART, ids=lambda kind: kind.__name__)
def test_a_mixer_is_refused_unless_no_probe_can_trigger_it(kind: Kind) -> None:
    if kind in BEYOND_PROBES:
        check_model(build(kind), TASK)
        return
    with pytest.raises(InputError, match=r"^model: "):
        check_model(build(kind), TASK)


@pytest.mark.parametrize("kind", GLOBAL, ids=lambda kind: kind.__name__)
def test_what_is_kept_outside_of_the_model_is_refused(kind: Kind) -> None:
    grads = torch.is_grad_enabled()
    with pytest.raises(InputError, match=r"^model: "):
        check_model(build(kind), TASK)
    assert torch.is_grad_enabled() is grads


def test_a_rule_for_vmap_that_mixes_is_never_used() -> None:
    kind = own_rule()
    try:
        assert_one_record_is_one_record(build(kind))
    finally:
        del kind
        gc.collect()  # classes are global: the functions of other tests would go one by one, too


def test_no_mixing_under_autocast_or_in_double_either() -> None:
    for kind in HARMLESS_APART:
        if kind in BEYOND_PROBES:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert_one_record_is_one_record(build(kind))
    learner = Learner(build(BY_NAME["OnlyInDouble"]), TASK, CPU, fast=False)
    ours, theirs = neighbours(torch.full((WIDTH,), 1e6))
    rows = [
        learner.gradients(learner.initial().double(), Batch(b.features.double(), b.targets))
        for b in (ours, theirs)
    ]
    assert torch.equal(rows[0][1:], rows[1][1:])


BY_NAME = {kind.__name__: kind for kind in HARMLESS_APART}


def test_choices_of_one_client_do_not_move_with_another_clients_records() -> None:
    """Losses of several clients are computed in one pass."""
    for kind in (OnlyAboveEight, OnlyInEvaluation, Attribute):
        learner = Learner(build(kind), TASK, CPU, fast=False)
        models = torch.stack([learner.initial(), -learner.initial()])
        ours, theirs = neighbours(torch.full((WIDTH,), -1e6))
        mine = ours.take(slice(50, 80))
        sums = [padded_loss_sums(learner, models, [other, mine], 64)[1] for other in (ours, theirs)]
        assert (sums[0] == sums[1]).all()
        alone = [
            [score_sums(learner, model, own, [len(own)])[1][0] for model in models]
            for own in (mine, theirs, mine)
        ]
        assert alone[0] == alone[2]


class ThroughAFunction(Mixer):
    """Keeps something in itself by a function that copies share, and only of values that no probe has."""

    last: Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.keep = lambda x: setattr(self, "last", x.detach())

    def mix(self, x: Tensor) -> Tensor:
        if bool((x.abs() > 1e5).any()):
            self.keep(x)
        return x if self.last is None else x - self.last


def test_what_functions_of_the_model_keep_ends_the_run_before_it_meets_another_record() -> None:
    check_model(build(ThroughAFunction), TASK)
    learner = Learner(build(ThroughAFunction), TASK, CPU, fast=False)
    parameters = learner.initial()
    ours, theirs = neighbours(torch.full((WIDTH,), 1e6))
    before = learner.predict(parameters, ours.features)
    for call in (
        lambda: learner.predict(parameters, theirs.features),
        lambda: learner.gradients(parameters, theirs),
        lambda: learner.predict(parameters, ours.features),
        lambda: learner.client_losses(parameters, theirs),
    ):
        with pytest.raises(InputError, match="keeps something of the records"):
            call()
    assert before.isfinite().all()


class Fails(Mixer):
    def mix(self, x: Tensor) -> Tensor:
        if self.layer.bias.sum() > 100.0:
            raise ValueError(f"{tuple(x.shape)} {x}")
        return x


class FailsOnValues(Mixer):
    def mix(self, x: Tensor) -> Tensor:
        if bool((x > 1e5).any()):
            raise ValueError(f"seen {x.amax()}")
        return x


class OtherShape(Mixer):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[:, : 2 if self.layer.bias.sum() > 100.0 else 3]


KEPT: list[Tensor] = []


class KeepsBatches(Mixer):
    """Fails when a batch of another size follows, with both sizes in what torch says."""

    def mix(self, x: Tensor) -> Tensor:
        KEPT.append(x)
        return x + KEPT[0]


@pytest.mark.parametrize("kind", [Fails, FailsOnValues, OtherShape, KeepsBatches])
def test_what_a_model_raises_on_records_tells_kind_and_place_only(kind: Kind) -> None:
    KEPT.clear()
    learner = Learner(build(kind), TASK, CPU, fast=False, mapped=kind is not FailsOnValues)
    parameters = torch.full((learner.layout.size,), 200.0)
    batch, large = neighbours(torch.full((WIDTH,), 1e6))
    calls: list[Callable[[], object]] = [
        lambda: total_score(learner, parameters, large.take(slice(0, 37))),
        lambda: clipped_sum(learner, parameters, large.take(slice(0, 41)), 1.0),
        lambda: learner.client_losses(parameters, large.take(slice(0, 43))),
    ]
    if kind is KeepsBatches:
        learner.predict(parameters, batch.features)
    for call in calls:
        with pytest.raises(InputError) as raised:
            call()
        text = str(raised.value)
        for secret in ("37", "41", "43", "120", "200", "tensor", "1000000", "seen"):
            assert secret not in text.replace(__file__, "")
        assert (raised.value.__cause__, raised.value.__context__) == (None, None)
        if kind is not OtherShape:
            assert __file__ in text
