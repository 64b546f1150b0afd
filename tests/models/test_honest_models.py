"""Models in which no record meets another are accepted, and learn what a loop over single records would."""

from __future__ import annotations

import pytest
import torch
from honest import HONEST
from torch.nn import functional

from coterie.models import check_model
from coterie.training.learner import Learner

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_model_is_accepted(name: str) -> None:
    torch.manual_seed(1)
    kind, task = HONEST[name]
    check_model(kind(), task)


@pytest.mark.parametrize("name", HONEST)
def test_gradients_and_outputs_are_those_of_single_records(name: str) -> None:
    torch.manual_seed(1)
    kind, task = HONEST[name]
    model = kind().eval()
    learner = Learner(model, task, CPU, fast=False)
    batch = learner.random_batch(6)
    if task.vocabulary is None:
        batch.features.sub_(0.5)
    found = learner.gradients(learner.initial(), batch)
    outputs = learner.predict(learner.initial(), batch.features)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for record in range(len(batch)):
        output = model(batch.features[record : record + 1])
        torch.testing.assert_close(outputs[record], output[0].detach(), rtol=1e-4, atol=1e-5)
        if task.classes:
            loss = functional.cross_entropy(output, batch.targets[record : record + 1])
        else:
            loss = 0.5 * (output[0, 0] - batch.targets[record]) ** 2
        parts = torch.autograd.grad(loss, trained, allow_unused=True)
        pairs = zip(parts, trained, strict=True)
        expected = [torch.zeros_like(p) if one is None else one for one, p in pairs]
        expected_row = torch.cat([one.flatten() for one in expected])
        torch.testing.assert_close(found[record], expected_row, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("name", "mapped"), [("residual", True), ("own way", False), ("lstm", False)])
def test_records_go_one_after_the_other_only_where_they_must(name: str, mapped: bool) -> None:
    kind, task = HONEST[name]
    assert Learner(kind(), task, CPU, fast=False).shape.mapped is mapped
