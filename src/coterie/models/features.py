"""Public features: what a network sees of a record, made by a transform that no private record was used for.

A transform is known before any record is: wavelets (`scattering`), or a user's own frozen encoder. It takes
every record by itself, so that a record still reaches one gradient alone, and what it makes of a record has
norm 1 at most, by that record alone.
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from coterie.data.records import Task
from coterie.errors import InputError, one_line
from coterie.models import scattering
from coterie.models.check import check_encoder
from coterie.models.settings import NONE, OURS
from coterie.plugins import FEATURES

WIDEST = 2**18
"""Numbers that a transform may make of one record."""


@dataclass(frozen=True)
class PublicFeatures:
    """A transform, ready to be used.

    Args:
        module: from records as a federation holds them to what a network sees, in evaluation mode.
        task: of the network: that of the records, with another shape.
        identity: tells transforms apart that make other numbers.
        own: whether it is a user's own code.
        public_data: what its maker says it was trained on, if anything.
    """

    name: str
    module: nn.Module
    task: Task
    identity: str
    own: bool = False
    public_data: str | None = None


class UnitNorm(nn.Module):
    """Every record divided by its own norm; one that has none, or none that is finite, becomes zero."""

    def forward(self, features: Tensor) -> Tensor:
        norms = torch.linalg.vector_norm(features, dim=1, keepdim=True, dtype=torch.float64)
        usable = torch.isfinite(norms) & (norms > 0)
        scaled = features.to(torch.float64) / torch.where(usable, norms, 1.0)
        return torch.where(usable, scaled, 0.0).to(torch.float32)


_built: dict[tuple[str, Task, int], PublicFeatures] = {}


def public_features(name: str, task: Task) -> PublicFeatures | None:
    """The transform of this name for records of this task, checked; None where there is none."""
    if name == NONE:
        return None
    function = None if name in OURS else FEATURES.find(name)
    key = (name, task, id(function))
    if key not in _built:
        _built[key] = _scattering(task) if function is None else _users(name, function, task)
    return _built[key]


def network_task(name: str, task: Task) -> Task:
    """The task as a network behind these features sees it."""
    found = public_features(name, task)
    return task if found is None else found.task


def public_data_caveats(name: str, task: Task) -> list[str]:
    """What a guarantee must add where an encoder's maker says what it was trained on."""
    found = public_features(name, task)
    said = None if found is None else found.public_data
    return [] if said is None else [f"public, and not protected: what the encoder was trained on ({said})"]


def _scattering(task: Task) -> PublicFeatures:
    module = scattering.Scattering(task)
    return PublicFeatures(
        "scattering", module, replace(task, shape=module.shape), f"scattering {scattering.VERSION}"
    )


def _users(name: str, function: Callable[[Task], Any], task: Task) -> PublicFeatures:
    where = f"{FEATURES.key}: {name}"
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            encoder = function(task)
    except Exception as error:  # anything may go wrong in a user's module
        raise InputError(f"{where}: {one_line(error)}") from error
    if not isinstance(encoder, nn.Module):
        raise InputError(f"{where} returned a {type(encoder).__name__}; allowed: an nn.Module")
    said = getattr(encoder, "public_data", None)
    if said is not None and (not isinstance(said, str) or not said.isprintable() or len(said) > 200):
        raise InputError(f"{where}: public_data is not a line of at most 200 characters that names the data")
    module = nn.Sequential(encoder.requires_grad_(False), nn.Flatten(), UnitNorm()).eval()
    try:
        width = check_encoder(module, task)
    except InputError as mistake:
        raise InputError(f"{where}: {str(mistake).removeprefix('model: ')}") from None
    if not 1 <= width <= WIDEST:
        raise InputError(f"{where} makes {width} numbers of a record; allowed: 1 to {WIDEST}")
    digest = hashlib.sha256(repr(FEATURES.code_of(name)).encode())
    for key, value in sorted(module.state_dict().items()):
        digest.update(key.encode() + value.detach().cpu().contiguous().numpy().tobytes())
    with torch.no_grad():
        digest.update(module(_probe(task)).numpy().tobytes())
    made = replace(task, shape=(width,), vocabulary=None)
    return PublicFeatures(name, module, made, f"{name} {digest.hexdigest()}", own=True, public_data=said)


def _probe(task: Task) -> Tensor:
    """Three records that are nobody's."""
    count = 3 * math.prod(task.shape)
    if task.vocabulary is not None:
        return (torch.arange(count) % task.vocabulary).view(3, *task.shape)
    return torch.linspace(0.0, 1.0, count).view(3, *task.shape)
