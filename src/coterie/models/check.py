"""What makes a model unfit for per-record clipping, found before anything trains."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from coterie.data.records import Task
from coterie.errors import InputError, one_line
from coterie.models.state import KeptTensors, first_change, written_down

SIZES = (2, 3, 5, 8, 9, 17, 33, 64)
"""Batches that are tried beside single records."""
_EACH = 4
"""Probes in each range of values."""
_ROUNDING = 1e-4
_APART = (
    "so that no record has a gradient of its own to clip; normalise within a record (GroupNorm, LayerNorm)"
)


def check_model(model: nn.Module, task: Task) -> None:
    """Refuse, with the reason, a model whose records do not each have a gradient of their own.

    The model is tried on records that are nobody's, in the mode in which it runs: alone and in batches of
    several sizes, orders and ranges of values, again and again, with and without gradients. What this does
    not find is harmless all the same where the model's code is called with one record at a time, as a user's
    is. Neither the model nor the global random state is touched.
    """
    try:
        layers = list(model.named_modules())
    except AttributeError as error:
        raise InputError("model: it is not a whole nn.Module; call super().__init__() first") from error
    for name, layer in layers:
        _check_layer(name, layer)
    for name, parameter in model.named_parameters():
        lazy = nn.parameter.is_lazy(parameter)
        _refuse(lazy, f"parameter {name} has no shape yet; call the model once before returning it")
        kind = "no values (device meta)" if parameter.is_meta else f"type {parameter.dtype}"
        usable = parameter.is_floating_point() and not parameter.is_meta
        _refuse(not usable, f"parameter {name} has {kind}; allowed: real floating-point numbers")
    trained = any(parameter.requires_grad for parameter in model.parameters())
    _refuse(not trained, "it has no parameters to train")
    try:
        model = copy.deepcopy(model).eval()
    except Exception as error:  # a tensor with a history, a lock, an open file
        raise InputError(f"model: it cannot be copied: {one_line(error)}") from error
    with torch.random.fork_rng(devices=[]), one_thread():
        torch.default_generator.manual_seed(0)
        trial = _Trial(model, task)
        for check in (_check_outputs, _check_apart, _check_kept, _check_gradients):
            check(trial)
        trial.check_unchanged()
        _check_draws_in_training(copy.deepcopy(model).train(), trial.probes)


@torch.no_grad()
def check_encoder(encoder: nn.Module, task: Task) -> int:
    """Refuse, with the reason, a frozen encoder that does not make one row of numbers of each record alone.

    It is tried like a model (`check_model`), but has nothing to train: batch norms with fixed statistics are
    functions of one record. Returns how many numbers it makes of a record.
    """
    try:
        encoder = copy.deepcopy(encoder).eval()
        made = encoder(_probes(task)[0][:1].clone())
    except Exception as error:  # a user's network may raise anything
        raise InputError(f"model: it fails on records of shape {task.shape}: {one_line(error)}") from error
    width = made.shape[1] if isinstance(made, Tensor) and made.dim() == 2 else 0
    with torch.random.fork_rng(devices=[]), one_thread():
        torch.default_generator.manual_seed(0)
        trial = _Trial(encoder, task, width)
        for check in (_check_outputs, _check_apart, _check_kept):
            check(trial)
        trial.check_unchanged()
    return width


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread: results must not depend on the number of cores, and small calls are faster."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _refuse(unfit: bool, reason: str) -> None:
    if unfit:
        raise InputError(f"model: {reason}")


def _check_layer(name: str, layer: nn.Module) -> None:
    where = f"layer {name or '(the model itself)'} is a {type(layer).__name__}"
    within = isinstance(layer, nn.modules.instancenorm._InstanceNorm)
    _refuse(
        isinstance(layer, nn.modules.batchnorm._BatchNorm) and not within,
        f"{where}; batch norms mix the records of a batch, so that no record has a gradient of its own to "
        "clip; use GroupNorm",
    )
    _refuse(
        within and bool(layer.track_running_stats),
        f"{where} with track_running_stats; its statistics collect all records without clipping or noise; "
        "use track_running_stats=False",
    )


def _probes(task: Task) -> list[Tensor]:
    """Records of each range of values that features may have: pixels, columns, standardised, others."""
    shape = (_EACH, *task.shape)
    if task.vocabulary is not None:
        drawn = [torch.randint(task.vocabulary, shape) for _ in range(4)]
        return [*drawn, torch.full(shape, 0), torch.full(shape, task.vocabulary - 1)]
    return [
        torch.rand(shape),
        2.0 * torch.rand(shape) - 1.0,
        -torch.rand(shape),
        2.0 * torch.randn(shape),
        torch.rand(shape).round(),
        1e-3 * torch.randn(shape),
        1e3 * torch.randn(shape),
        torch.cat([torch.zeros(_EACH // 2, *task.shape), torch.ones(_EACH - _EACH // 2, *task.shape)]),
    ]


class _Trial:
    """A model, probes, and what the model holds: every call is watched."""

    def __init__(self, model: nn.Module, task: Task, width: int | None = None) -> None:
        self.model, self.task, self.state = model, task, written_down(model)
        self.width = task.outputs if width is None else width
        self.ranges = _probes(task)
        self.probes = torch.cat(self.ranges)

    def call(self, features: Tensor) -> Tensor:
        """The outputs; the input, the random state and torch's modes must be as they were."""
        given, randomness, modes = features.clone(), _randomness(), _modes()
        try:
            outputs = self.model(given)
        except Exception as error:  # a user's network may raise anything
            raise InputError(
                f"model: it fails on records of shape {tuple(features.shape[1:])}: {one_line(error)}"
            ) from error
        _refuse(_randomness() != randomness, _DRAWS)
        switched = _modes() != modes
        torch.set_grad_enabled(modes[0])
        torch.set_default_dtype(modes[1])
        _refuse(switched, "it switches a mode of torch (gradients, default type) and leaves it so")
        if not isinstance(outputs, Tensor):
            raise InputError(f"model: it returns a {type(outputs).__name__}; allowed: one tensor")
        kind, shape, expected = outputs.dtype, tuple(outputs.shape), (len(features), self.width)
        _refuse(not kind.is_floating_point, f"it returns numbers of type {kind}; allowed: floating point")
        changed = not torch.equal(given, features)
        _refuse(changed, "it changes its input in place, which would change the records; copy it first")
        _refuse(
            shape != expected, f"output of shape {shape} for {len(features)} records; allowed: {expected}"
        )
        return outputs

    def check_unchanged(self) -> None:
        changed = first_change(self.state, written_down(self.model))
        path = (changed or "").strip(".:")
        kinds = dict.fromkeys(dict(self.model.named_buffers()), "buffer ")
        kinds |= dict.fromkeys(dict(self.model.named_parameters()), "parameter ")
        kind = "" if path.startswith("the global") else kinds.get(path, "attribute ")
        _refuse(
            changed is not None,
            f"{kind}{path} changes as records pass; what it collects is neither clipped nor noised; compute "
            "it when the model is built, and use layers without running statistics",
        )


_DRAWS = (
    "it draws random numbers (dropout?), which a resumed run could not repeat; remove the layer that does"
)


def _randomness() -> tuple[bytes, int, bytes]:
    _, numbers, place, *_ = np.random.get_state()  # noqa: NPY002 (a user's code may draw from it)
    return (
        torch.get_rng_state().numpy().tobytes(),
        hash(random.getstate()),
        bytes(f"{place} ", "ascii") + np.asarray(numbers).tobytes(),
    )


def _modes() -> tuple[bool, torch.dtype]:
    return torch.is_grad_enabled(), torch.get_default_dtype()


@torch.no_grad()
def _check_outputs(trial: _Trial) -> None:
    for features in (trial.probes[:4], trial.ranges[1]):
        _refuse(not trial.call(features).isfinite().all(), "its output on random records is not finite")
    trial.check_unchanged()


@torch.no_grad()
def _check_apart(trial: _Trial) -> None:
    """A record's output must be what it is alone, whoever else is there, and the same every time."""
    probes, order = trial.probes, torch.randperm(len(trial.probes)).repeat(max(SIZES) // _EACH)
    alone = torch.cat([trial.call(record) for record in torch.split(probes, 1)])
    batches = [order[:size] for size in SIZES]
    # Records of one range only; more than eight, some of them several times.
    batches += [torch.arange(first, first + _EACH).repeat(3)[:9] for first in range(0, len(probes), _EACH)]
    batches += [order[:9].flip(0), order[:1].expand(5)]
    for chosen in batches:
        mixed = _differ(trial.call(probes[chosen]), alone[chosen])
        _refuse(mixed, f"the output of a record depends on the other records of its batch, {_APART}")
    once = alone[order[:9]]
    again = torch.cat([trial.call(record) for record in torch.split(probes[order[:9]], 1)])
    _refuse(
        not torch.equal(_plain(again), _plain(once)),
        "the same record gives another output when it passes again: something is kept between calls, or "
        "drawn at random",
    )
    with torch.enable_grad():
        other = _differ(trial.call(probes[order[:9]]).detach(), once)
        _refuse(other, "its output is another one when gradients are asked for")


def _check_kept(trial: _Trial) -> None:
    """No tensor of a call may outlive it, wherever it is kept. (Tables made once are: they are not new.)"""
    features = trial.probes[:9]
    for _ in range(2):
        given = features.clone()
        with torch.no_grad(), KeptTensors() as kept:
            trial.model(given)
    alive = bool(kept.alive)
    _refuse(alive, "it keeps a tensor after the call, which the next records could meet; keep nothing")


def _check_gradients(trial: _Trial) -> None:
    """The gradient of a batch must be the sum of its records' own."""
    parameters = {name: p for name, p in trial.model.named_parameters() if p.requires_grad}

    def gradient(features: Tensor, weights: Tensor) -> Sequence[Tensor]:
        with torch.enable_grad():
            outputs = (trial.call(features) * weights).sum()
            if not outputs.requires_grad:  # these records took a way without parameters
                return [torch.zeros_like(p) for p in parameters.values()]
            try:
                return torch.autograd.grad(outputs, list(parameters.values()), materialize_grads=True)
            except Exception as error:
                raise InputError(f"model: it has no gradient: {one_line(error)}") from error

    probes = torch.cat(trial.ranges[:3])[:9]
    weights = torch.randn(len(probes), trial.task.outputs)
    alone = list(map(gradient, torch.split(probes, 1), torch.split(weights, 1)))
    for name, part in (pair for own in alone for pair in zip(parameters, own, strict=True)):
        _refuse(not part.isfinite().all(), f"the gradient of {name} on random records is not finite")
    moved = any(part.any() for own in alone for part in own)
    _refuse(not moved, "no output on random records depends on a parameter that is trained")
    for size in (2, len(probes)):
        together = torch.cat([part.flatten() for part in gradient(probes[:size], weights[:size])])
        apart = torch.stack([torch.cat([part.flatten() for part in own]) for own in alone[:size]])
        allowed = 10 * _ROUNDING * apart.norm(dim=1).sum().clamp(min=1e-3)
        mixed = bool((together - apart.sum(dim=0)).norm() > allowed)
        _refuse(mixed, f"the gradient of a record depends on the other records of its batch, {_APART}")


def _check_draws_in_training(model: nn.Module, probes: Tensor) -> None:
    """Layers that draw when a model trains (dropout) are idle here: better said than silently left out."""
    before = _randomness()
    try:
        model(probes[:4].clone())
    except Exception:  # never run in this mode
        return
    _refuse(_randomness() != before, _DRAWS)


def _plain(outputs: Tensor) -> Tensor:
    """Without what is not a number, which is not even equal to itself."""
    return torch.nan_to_num(outputs, nan=0.0)


def _differ(found: Tensor, alone: Tensor) -> bool:
    """Beyond rounding, which grows with the numbers that a record's outputs are made of."""
    scale = alone.abs().amax(dim=1, keepdim=True).clamp(min=1.0).nan_to_num(nan=1.0, posinf=1e30)
    return bool(((_plain(found) - _plain(alone)).abs() > _ROUNDING * scale).any())
