"""A model of unknown code, called so that no record can reach another.

Every call of the model sees one record, in a copy of the model made for that call: what the code does with
the other records of a batch it cannot do, and what it keeps in the model is gone with the copy. `vmap` makes
one call stand for the same call on every record. Where it cannot (control flow on a record's values, autograd
functions without a rule), records go through one after the other.
"""

import copy
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import ParamSpec
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from coterie.errors import ModelError, where
from coterie.models.state import first_change, holds_functions, written_down
from coterie.training.parameters import Layout

_TOLERANCE = 1e-3
_AT_A_KINK = 50 * _TOLERANCE
"""Of a gradient where a unit that is zero but for rounding is on for one and off for the other: in a deep
network that is so for every few records, for a model that is taken wrongly all records are off."""

MOST_ROUNDED, MOST_ROUNDED_OF_ONE = 0.2, 0.5
"""How far gradients of all parameters, and of one, may be off where factors are rounded to ten bits or eight
in every layer, which a deep network that has learnt nothing yet enlarges: a layer that is wrong is off by all
that it is."""

P = ParamSpec("P")
_told: "WeakSet[BaseException]" = WeakSet()
"""Errors that were made here; user code may raise one of the same class, and say anything."""

Losses = Callable[[Tensor, Tensor], Tensor]
"""From outputs and targets to one loss per record."""


def withheld(call: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """Replace what user code raises on somebody's records by its kind and place: its text may repeat them."""

    @functools.wraps(call)
    def silent(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        try:
            return call(*args, **kwargs)
        except (KeyboardInterrupt, GeneratorExit) as ended:
            ended.args = ()  # whoever stops the program has nothing to say; a model could
            raise
        except BaseException as error:  # user code may raise anything, and end the program
            if not isinstance(error, Exception) and type(error).__module__.startswith("coterie."):
                raise  # a signal came while the model ran
            told = error in _told
            found = str(error) if told else where(error)
        # Outside of the handler: the error that is raised must not carry the one that it replaces.
        withheld_error = ModelError(
            found if told else f"{found} (what it said is withheld: it may tell of the records)"
        )
        _told.add(withheld_error)
        raise withheld_error

    return silent


class Isolation:
    """A model that takes parameters as a flat vector and records one at a time."""

    def __init__(
        self, model: nn.Module, layout: Layout, losses: Losses, width: int, *, mapped: bool = True
    ) -> None:
        """Args:
        losses: of a batch, from its outputs.
        width: of a record's output.
        mapped: whether `vmap` may be used; `why_not_mapped` finds out.
        """
        self._model, self._layout, self._losses, self._width = model, layout, losses, width
        self._dtype = next((p.dtype for p in model.parameters() if p.requires_grad), torch.float32)
        self.mapped = mapped
        # A copy would share what its functions hold: such a model runs itself, and is watched.
        self._state = written_down(model) if holds_functions(model) else None

    @withheld
    def outputs(self, parameters: Tensor, features: Tensor) -> Tensor:
        """Outputs of each record, (records, width)."""
        if not len(features):
            return parameters.new_zeros(0, self._width)
        if self.mapped and not own_rules():
            return self._mapped_outputs(parameters, features)
        return torch.stack([self._output(parameters, record) for record in torch.split(features, 1)])

    @withheld
    def gradients(self, parameters: Tensor, features: Tensor, targets: Tensor) -> Tensor:
        """Gradient of each record's loss, (records, parameters)."""
        if not len(features):
            return parameters.new_zeros(0, len(parameters))
        if self.mapped and not own_rules():
            return self._mapped_gradients(parameters, features, targets)
        records = zip(torch.split(features, 1), torch.split(targets, 1), strict=True)
        return torch.stack([self._gradient(parameters, *record) for record in records])

    @withheld
    def together(self, parameters: Tensor, features: Tensor) -> Tensor:
        """Outputs of records that belong to one owner, in one call: they may reach one another, no others."""
        with self._fresh(parameters.device) as model:
            return self._called(model, parameters, features.clone())

    def why_not_mapped(self, parameters: Tensor, features: Tensor, targets: Tensor) -> str | None:
        """Why `vmap` would not do for this model, tried on records that are nobody's; None if it does."""
        if own_rules():
            return "an autograd function has a rule of its own for vmap, which sees all records"
        try:
            with torch.no_grad():
                outputs = self._mapped_outputs(parameters, features)
            gradients = self._mapped_gradients(parameters, features, targets)
        except Exception as reason:  # user code under vmap may raise anything
            return " ".join(f"{type(reason).__name__}: {reason}".split())
        alone = Isolation(self._model, self._layout, self._losses, self._width, mapped=False)
        with torch.no_grad():
            expected = (alone.outputs(parameters, features), alone.gradients(parameters, features, targets))
        agreed = same_outputs(outputs, expected[0]) and same_gradients(gradients, expected[1])
        return None if agreed else "vmap and single records disagree"

    # --- all records in one call of vmap --------------------------------------------------------------

    def _mapped_outputs(self, parameters: Tensor, features: Tensor) -> Tensor:
        values = parameters.clone()
        with self._fresh(parameters.device) as model:
            each = vmap(lambda record: self._called(model, values, record[None])[0])
            mapped: Tensor = each(features.clone())
        return mapped

    def _mapped_gradients(self, parameters: Tensor, features: Tensor, targets: Tensor) -> Tensor:
        with self._fresh(parameters.device) as model:

            def loss(parameters: Tensor, record: Tensor, target: Tensor) -> Tensor:
                return self._losses(self._called(model, parameters, record[None]), target[None])[0]

            gradients: Tensor = vmap(grad(loss), (None, 0, 0))(parameters.clone(), features.clone(), targets)
        return gradients

    # --- one after the other --------------------------------------------------------------------------

    def _output(self, parameters: Tensor, record: Tensor) -> Tensor:
        with self._fresh(parameters.device) as model:
            return self._called(model, parameters.clone(), record.clone())[0]

    def _gradient(self, parameters: Tensor, record: Tensor, target: Tensor) -> Tensor:
        moving = parameters.detach().clone().requires_grad_(True)
        with self._fresh(parameters.device) as model, torch.enable_grad():
            loss = self._losses(self._called(model, moving, record.clone()), target)[0]
            # None where the record took a way without parameters.
            found = torch.autograd.grad(loss, moving, allow_unused=True)[0] if loss.requires_grad else None
        return torch.zeros_like(parameters) if found is None else found

    @contextmanager
    def _fresh(self, device: torch.device) -> Iterator[nn.Module]:
        """A model that holds nothing of earlier calls, and of which, and of whose call, nothing stays."""
        model = copy.deepcopy(self._model) if self._state is None else self._model
        with _global_state(device):
            yield model
        if self._state is not None and first_change(self._state, written_down(model)) is not None:
            raise _saying("it keeps something of the records that it is called with")

    def _called(self, model: nn.Module, parameters: Tensor, features: Tensor) -> Tensor:
        expected = (len(features), self._width)  # now: the model may change the shape of what it is given
        outputs: object = functional_call(model, self._layout.split(parameters), (features,))
        if not isinstance(outputs, Tensor) or tuple(outputs.shape) != expected:
            raise _saying(f"it returned something else than one row of {self._width} for each record")
        if outputs.is_complex():
            raise _saying("it returned complex numbers")
        # One record's own type of numbers must not become that of all.
        return outputs.to(self._dtype)


def same_outputs(found: Tensor, expected: Tensor) -> bool:
    """Whether outputs are the same but for rounding."""
    return bool((_apart(found, expected) <= _TOLERANCE).all())


def same_gradients(found: Tensor, expected: Tensor) -> bool:
    """Whether gradients are the same but for rounding, which at a kink (of ReLU, of a maximum) shows."""
    error = _apart(found, expected)
    return bool((error <= _TOLERANCE).any() and (error <= _AT_A_KINK).all())


def off_by(found: Tensor, expected: Tensor, sizes: Sequence[int]) -> tuple[float, float]:
    """How far gradients are from those expected: relative to all of them, and the worst parameter to its own.

    Without end where nothing is expected, or what is no number.

    Args:
        found, expected: (any, parameters).
        sizes: numbers of each parameter.
    """
    whole = float(expected.norm())
    if not 0.0 < whole < math.inf:
        return math.inf, math.inf
    pairs = zip(*(torch.split(values, list(sizes), dim=1) for values in (found, expected)), strict=True)
    worst = max(float((one - other).norm()) / max(float(other.norm()), whole / 100) for one, other in pairs)
    return float((found - expected).norm()) / whole, worst


def _apart(found: Tensor, expected: Tensor) -> Tensor:
    """How far rows are from those expected, relative to these."""
    error: Tensor = (found - expected).norm(dim=1) / expected.norm(dim=1).clamp(min=1e-6)
    return error


def _saying(text: str) -> ModelError:
    """An error of ours, whose text is told."""
    error = ModelError(text)
    _told.add(error)
    return error


def own_rules() -> bool:
    """Whether an autograd function or operator of a user says itself how it is mapped.

    Such a rule is handed all records at once. Others are mapped by what they do with one record.
    """
    rules: list[Callable[..., object]] = []
    kinds = torch.autograd.Function.__subclasses__()
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        if kind.vmap is not torch.autograd.Function.vmap:
            rules.append(kind.vmap)
    operators = list(torch._library.custom_ops.OPDEFS.values())
    rules += [operator._vmap_fn for operator in operators if operator._vmap_fn is not None]
    return not all(rule.__module__.startswith("torch.") for rule in rules)


@contextmanager
def _global_state(device: torch.device) -> Iterator[None]:
    """Undo what a call does to the modes and random numbers that torch keeps for all."""
    kind, deterministic = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
    cuda = [device] if device.type == "cuda" else []
    with torch.set_grad_enabled(torch.is_grad_enabled()), torch.random.fork_rng(devices=cuda):
        try:
            yield
        finally:
            if torch.get_default_dtype() != kind:
                torch.set_default_dtype(kind)
            if torch.are_deterministic_algorithms_enabled() != deterministic:
                torch.use_deterministic_algorithms(deterministic)
