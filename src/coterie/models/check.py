"""What makes a model unfit for per-record clipping, found before anything trains."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from coterie.data.records import Task
from coterie.errors import InputError

_PROBES = 4


def check_model(model: nn.Module, task: Task) -> None:
    """Refuse, with the reason, a model whose records do not each have a gradient of their own.

    The model is tried on random records: besides batch norms that finds any other way in which one record
    reaches another's output. Neither the model nor the global random state is touched.
    """
    for name, layer in model.named_modules():
        _check_layer(name, layer)
    for name, parameter in model.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise InputError(
                f"model: parameter {name} has no shape yet; call the model once before returning it"
            )
    model = copy.deepcopy(model).train()
    parameters = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    if not parameters:
        raise InputError("model: it has no parameters to train")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        features = _random_features(task)
        _check_outputs(model, features, task)
        _check_records_apart(model, features, task)
        _check_gradients(model, parameters, features)


def _check_layer(name: str, layer: nn.Module) -> None:
    where = f"model: layer {name or '(the model itself)'} is a {type(layer).__name__}"
    if isinstance(layer, nn.modules.batchnorm._BatchNorm) and not isinstance(
        layer, nn.modules.instancenorm._InstanceNorm
    ):
        raise InputError(
            f"{where}; batch norms mix the records of a batch, so that no record has a gradient of its own "
            "to clip; use GroupNorm"
        )
    if isinstance(layer, nn.modules.instancenorm._InstanceNorm) and layer.track_running_stats:
        raise InputError(
            f"{where} with track_running_stats; its statistics collect all records without clipping or "
            "noise; use track_running_stats=False"
        )


def _random_features(task: Task) -> Tensor:
    if task.vocabulary is not None:
        return torch.randint(task.vocabulary, (_PROBES, *task.shape))
    return torch.rand(_PROBES, *task.shape)


def _forward(model: nn.Module, features: Tensor) -> Tensor:
    try:
        outputs = model(features)
    except Exception as error:  # a user's network may raise anything
        raise InputError(
            f"model: it fails on records of shape {tuple(features.shape[1:])}: {one_line(error)}"
        ) from error
    if not isinstance(outputs, Tensor):
        raise InputError(f"model: it returns a {type(outputs).__name__}; allowed: one tensor")
    return outputs.detach()


def _check_outputs(model: nn.Module, features: Tensor, task: Task) -> None:
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    outputs = _forward(model, features)
    expected = (len(features), task.outputs)
    if tuple(outputs.shape) != expected:
        raise InputError(
            f"model: output of shape {tuple(outputs.shape)} for {len(features)} records; allowed: {expected}"
        )
    if not outputs.isfinite().all():
        raise InputError("model: its output on random records is not finite")
    for name, buffer in model.named_buffers():
        if not torch.equal(before[name], buffer):
            raise InputError(
                f"model: buffer {name} changes as records pass; what it collects is neither clipped nor "
                "noised; use layers without running statistics"
            )


def _check_records_apart(model: nn.Module, features: Tensor, task: Task) -> None:
    """Changing any one record must leave the outputs of the others alone."""
    others = _random_features(task)
    state = torch.get_rng_state()
    before = _forward(model, features)
    for record in range(len(features)):
        changed = features.clone()
        changed[record] = others[record]
        torch.set_rng_state(state)  # so that a layer that draws random numbers draws the same
        difference = (_forward(model, changed) - before).abs()
        difference[record] = 0.0
        if difference.max() > 1e-5 * max(1.0, float(before.abs().max())):  # rounding, no more
            raise InputError(
                "model: the output of a record depends on the other records of its batch, so that no record "
                "has a gradient of its own to clip; normalise within a record (GroupNorm, LayerNorm)"
            )


def _check_gradients(model: nn.Module, parameters: Mapping[str, Tensor], features: Tensor) -> None:
    def output_sum(weights: Mapping[str, Tensor], record: Tensor) -> Tensor:
        outputs: Tensor = functional_call(model, dict(weights), (record[None],))
        return outputs.sum()

    try:
        gradients = vmap(grad(output_sum), (None, 0))(parameters, features)
    except Exception as error:
        if "randomness" in str(error):
            raise InputError(
                "model: it draws random numbers (dropout?), which a resumed run could not repeat; remove the "
                "layer that does"
            ) from error
        raise InputError(f"model: torch.func cannot give per-record gradients: {one_line(error)}") from error
    for name, gradient in gradients.items():
        if not gradient.isfinite().all():
            raise InputError(f"model: the gradient of {name} on random records is not finite")


def one_line(error: Exception) -> str:
    """Kind and first line of an error that user code or torch raised."""
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
