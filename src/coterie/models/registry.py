"""Models by name: the `model` section of an experiment, and the function behind each name."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache
from typing import Any, Self

import torch
from pydantic import Field, PositiveInt, ValidationInfo, model_validator
from torch import nn

from coterie.data.records import Task
from coterie.errors import InputError, check_memory, one_line
from coterie.models import networks
from coterie.models.check import check_model
from coterie.models.features import NONE, OURS, OWN_FEATURES, network_task
from coterie.plugins import FEATURES, MODEL
from coterie.settings import NamedSettings, is_recorded

_NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "softmax": networks.softmax,
    "linear": networks.linear,
    "mlp": networks.mlp,
    "cnn": networks.cnn,
    "resnet18": networks.resnet18,
    "mcmahan-cnn": networks.mcmahan_cnn,
    "lstm": networks.lstm,
    "ngrams": networks.ngrams,
}


_checked: dict[tuple[str, int, Task], object] = {}
"""Users' functions that were seen to build a model that passes: once for all seeds, the code is the same."""

OWN_CODE = "the model is the user's own code, which is trusted to keep nothing between records"


WIDEST = 2**16
"""Width of a layer beyond which a model, which a server may name to a site, is a way to fill its memory."""


class ModelSettings(NamedSettings):
    """Which model, and the options that are its own.

    `package.module:function`, or a name of the entry points `coterie.models`, is a user's own: the function
    gets the task and returns an `nn.Module` that maps features of shape (n, *task.shape) to outputs of shape
    (n, task.outputs).
    """

    functions = _NETWORKS
    plugin, takes_own = MODEL, True

    name: str = Field("softmax", description=" | ".join([*_NETWORKS, MODEL.form]))
    hidden: PositiveInt | None = Field(
        None, le=WIDEST, description="mlp, mcmahan-cnn, lstm: width of a hidden layer (64, 512, 256)"
    )
    embedding: PositiveInt | None = Field(
        None, le=WIDEST, description="lstm: width of the character embedding (8)"
    )
    layers: PositiveInt | None = Field(None, le=64, description="lstm: number of LSTM layers (2)")
    order: PositiveInt | None = Field(None, le=4, description="ngrams: last tokens that count (2)")
    features: str = Field(
        NONE,
        description="what the network sees of a record: none (itself) | scattering (wavelets, of images) | "
        f"{FEATURES.form} (a frozen encoder)",
    )

    @model_validator(mode="after")
    def _known_features(self, info: ValidationInfo) -> Self:
        known = self.features in OURS or is_recorded(info) or FEATURES.target(self.features) is not None
        if not known:
            raise ValueError(f"features: {FEATURES.unknown(self.features, OURS)}")
        return self

    @property
    def own_features(self) -> bool:
        """Whether features are made by a user's own code."""
        return self.features not in OURS

    def given(self) -> dict[str, Any]:
        """The options of the network that were set."""
        return {name: value for name, value in super().given().items() if name != "features"}

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        # Noise is bound to what this says: a model without features says what it always said.
        return [pair for pair in super().__repr_args__() if pair != ("features", NONE)]


@cache
def parameters_of(settings: ModelSettings, task: Task) -> int:
    """How many parameters a network that is no user's own has, counted without taking their memory."""
    task = network_task(settings.features, task)
    with torch.device("meta"):
        model = _NETWORKS[settings.name](task, **settings.given())
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
        return _NETWORKS[settings.name](task, **settings.given())


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


def code_caveats(settings: ModelSettings) -> Iterator[str]:
    """What a guarantee must add where a model, or what it sees of records, is a user's own code."""
    if settings.own:
        yield OWN_CODE
    if settings.own_features:
        yield OWN_FEATURES
