"""Models by name: built from the settings of an experiment, and a user's own checked."""

from contextlib import suppress
from functools import cache

import torch
from torch import nn

from coterie.data.records import Task
from coterie.errors import InputError, check_memory, one_line
from coterie.models import networks
from coterie.models.check import check_model
from coterie.models.features import network_task
from coterie.models.settings import NETWORKS, ModelSettings
from coterie.plugins import MODEL

_checked: dict[tuple[str, int, Task], object] = {}
"""Users' functions that were seen to build a model that passes: once for all seeds, the code is the same."""


@cache
def parameters_of(settings: ModelSettings, task: Task) -> int:
    """How many parameters a network that is no user's own has, counted without taking their memory."""
    task = network_task(settings.features, task)
    with torch.device("meta"):
        model = NETWORKS[settings.name](task, **settings.given())
    return sum(part.numel() for part in model.parameters())


def _check_size(settings: ModelSettings, task: Task) -> None:
    """Refuse a model that this machine cannot hold beside its gradient and an update of it."""
    parameters = parameters_of(settings, task)
    largest = max(settings.given().items(), key=lambda option: option[1], default=("name", settings.name))
    check_memory("model.{}: {}".format(*largest), 3 * 4 * parameters)


def build_model(settings: ModelSettings, task: Task, seed: int, *, additive: bool = False) -> nn.Module:
    """The model with its initial parameters, which depend on the seed alone.

    A user's own model comes back checked. The global random state is left as it was.

    Args:
        task: of the records; the network's follows from the features that the settings name.
        additive: two of the model, with their outputs added.
    """
    if additive:
        # Seeds of models are below 2^31: the second model's are its own.
        second = build_model(settings, task, seed + 2**31)
        return networks.AddedModels(build_model(settings, task, seed), second)
    if not settings.own:
        _check_size(settings, task)
    task = network_task(settings.features, task)
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed: that would seed the accelerators too, and those are not restored.
        torch.default_generator.manual_seed(seed)
        if settings.own:
            return _user_model(settings.name, task)
        model: nn.Module = NETWORKS[settings.name](task, **settings.given())
        return model


def _user_model(name: str, task: Task) -> nn.Module:
    function = MODEL.find(name)
    try:
        model = function(task)
    except Exception as error:  # anything may go wrong in a user's module
        raise InputError(f"model.name: {name}: {one_line(error)}") from error
    if not isinstance(model, nn.Module):
        raise InputError(f"model.name: {name} returned a {type(model).__name__}; allowed: an nn.Module")
    _warm_up(model, task)
    if (name, id(function), task) not in _checked:
        check_model(model, task)
        _checked[name, id(function), task] = function
    return model


def _warm_up(model: nn.Module, task: Task) -> None:
    """Let a model make the tables that it makes on its first call, on a record that is nobody's."""
    kind = torch.float32 if task.vocabulary is None else torch.int64
    # What is wrong with it, the check says.
    with suppress(Exception), torch.no_grad(), torch.random.fork_rng(devices=[]):
        training = model.training
        model.eval()(torch.zeros(1, *task.shape, dtype=kind))
        model.train(training)
