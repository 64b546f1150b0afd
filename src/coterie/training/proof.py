"""Proof that a user's model keeps records apart: it is traced into known operations, each of which does.

What is proven is what runs: the traced graph takes the model's place, and the user's code is called no more.
A branch on values or on the size of a batch cannot be traced, and an operation that is not known here proves
nothing: such a model sees one record at a time (`isolation.py`).
"""

import copy
import operator
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from coterie.training.recording import hooked

_GENUINE = {name: value for name, value in vars(functional).items() if callable(value)}
"""As they were before any user's code was imported."""
_SIZES = (5, 7)
"""Batches on which shapes are found; a first dimension that follows both is that of the records."""


class Kind(Enum):
    """What a value of the graph has to do with records."""

    RECORDS = "a tensor whose first dimension is that of the records, each row of its own record alone"
    CONSTANT = "the same whatever the records are and however many"
    COUNT = "the number of records"
    STATE = "what a recurrent layer ends with: one or two tensors (layers, records, width)"


class NotProven(Exception):
    """The model does something of which nothing is known here."""


@dataclass(frozen=True)
class Known:
    """A value of the graph, and its kind."""

    kind: Kind
    value: Any


def proven_apart(model: nn.Module, features: Callable[[int], Tensor]) -> nn.Module:
    """A model of known operations that computes what this one computes; raises `NotProven`.

    Args:
        features: so many records that are nobody's.
    """
    if nn.modules.module._has_any_global_hook():  # type: ignore[no-untyped-call]
        raise NotProven("there are hooks on all modules")
    modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    if modes or _get_current_dispatch_mode_stack():
        raise NotProven("a mode is entered that changes what operations of torch do")
    if any(getattr(functional, name, None) is not genuine for name, genuine in _GENUINE.items()):
        raise NotProven("a function of torch.nn.functional was replaced")
    model = copy.deepcopy(model).eval()
    try:
        traced = _traced(model)
        for size in _SIZES:
            given = features(size)
            with torch.no_grad():
                found = _Proof(traced, size).run(given)
            # Not what follows from the trace: functions with a gradient of their own leave no trace of it.
            ours, theirs = _computed(traced, given), _computed(model, given)
            pairs = zip([found, *ours], [theirs[0], *theirs], strict=True)
            if not all(torch.allclose(one, other, rtol=1e-3, atol=1e-5) for one, other in pairs):
                raise NotProven("the traced model computes something else")
    except NotProven:
        raise
    except Exception as reason:  # user code that is traced may raise anything
        raise NotProven(" ".join(f"{type(reason).__name__}: {reason}".split())) from reason
    return traced


class TracedModel(fx.GraphModule):
    """A graph that runs like any module: fx's own call would print, when it fails, what it failed on."""

    def recompile(self) -> Any:
        code = super().recompile()
        type(self).__call__ = nn.Module.__call__  # type: ignore[method-assign]
        return code

    def __reduce__(self) -> Any:
        return _traced, (self.meta["source"],)


def _traced(model: nn.Module) -> TracedModel:
    """The model as a graph, with the same parameters in the same order."""
    tracer = _Tracer()
    with torch.enable_grad():  # and back: user code may leave it switched
        graph = tracer.trace(model)
    for node in graph.nodes:
        if node.op == "call_method" and node.target == "view":
            node.target = "reshape"  # the same, and layer rules may order memory in another way
    traced = TracedModel(tracer.root, graph).eval()
    _order_like(traced, model)
    if [name for name, _ in traced.named_parameters()] != [name for name, _ in model.named_parameters()]:
        raise NotProven("some parameters are not used")
    traced.meta["source"] = model
    return traced


def _computed(model: nn.Module, features: Tensor) -> list[Tensor]:
    """Outputs, and gradients of a sum of them in which no two count the same."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with torch.enable_grad():
        outputs = model(features.clone())
        total = (outputs * torch.linspace(0.5, 1.5, outputs.numel()).view_as(outputs)).sum()
        gradients = torch.autograd.grad(total, trained, allow_unused=True)
    pairs = zip(gradients, trained, strict=True)
    return [outputs.detach(), *(torch.zeros_like(p) if one is None else one for one, p in pairs)]


def _plain(layer: nn.Module) -> bool:
    """Whether a layer is what its class says: no hook, nothing replaced."""
    tensors = [*layer._parameters.values(), *layer._buffers.values()]
    return (
        not hooked(layer)
        and type(layer).forward.__module__.startswith("torch.")
        and not any(callable(value) for value in vars(layer).values())
        and all(type(tensor) in (nn.Parameter, Tensor, type(None)) for tensor in tensors)
    )


class _Tracer(fx.Tracer):
    """Known layers are steps of the graph; everything else is followed inside."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return type(m) in _LAYERS and _plain(m)


def _order_like(traced: nn.Module, model: nn.Module) -> None:
    """Parameters are one flat vector elsewhere: they must keep their order."""
    for name, part in traced.named_modules():
        if type(part) in (nn.Module, type(traced)):
            original = model.get_submodule(name)
            for table in ("_modules", "_parameters", "_buffers"):
                places = {key: place for place, key in enumerate(getattr(original, table))}
                mine = getattr(part, table)
                ordered = sorted(mine.items(), key=lambda item: places.get(item[0], len(places)))
                mine.clear()
                mine.update(ordered)


class _Proof(fx.Interpreter):
    """Runs the graph on a batch of one size; every value carries its kind."""

    def __init__(self, traced: fx.GraphModule, size: int) -> None:
        super().__init__(traced)
        self.size = size

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Known:
        return Known(Kind.RECORDS, super().placeholder(target, args, kwargs))

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Known:
        return Known(Kind.CONSTANT, super().get_attr(target, args, kwargs))

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        layer = self.fetch_attr(target)
        name = type(layer).__name__
        if kwargs or len(args) != 1 or _kind(args[0]) is not Kind.RECORDS:
            raise NotProven(f"{name} is called in an unusual way")
        given = args[0].value
        if not _LAYERS[type(layer)](layer, given):
            raise NotProven(f"{name} on {given.dim()} dimensions")
        found = layer(given)
        if isinstance(layer, nn.RNNBase):
            return self._records(found[0], name), Known(Kind.STATE, found[1])
        return self._records(found, name)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is getattr and args[1] == "shape" and _kind(args[0]) is Kind.RECORDS:
            return self._shape(args[0].value)
        if target is operator.getitem and isinstance(args[0], tuple):
            return args[0][args[1]]
        state = args[0].value if isinstance(args[0], Known) and args[0].kind is Kind.STATE else None
        if target is operator.getitem and state is not None and isinstance(args[1], int):
            part = state[args[1]]
            return (
                Known(Kind.STATE, part) if isinstance(state, tuple) else self._records(part, "a last state")
            )
        _, rule = _FUNCTIONS.get(id(target), (None, None))
        return self._call(rule, target, getattr(target, "__name__", str(target)), args, kwargs)

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target == "size" and _kind(args[0]) is Kind.RECORDS and not kwargs:
            shape = self._shape(args[0].value)
            return shape if len(args) == 1 else shape[args[1]]
        return self._call(_METHODS.get(target), getattr(Tensor, target), target, args, kwargs)

    def output(self, target: Any, args: Any, kwargs: Any) -> Any:
        if not isinstance(args[0], Known) or args[0].kind is not Kind.RECORDS:
            raise NotProven("the output is not a tensor with one row for each record")
        return args[0].value

    def _shape(self, value: Tensor) -> tuple[Known, ...]:
        constant = (Known(Kind.CONSTANT, width) for width in value.shape[1:])
        return (Known(Kind.COUNT, len(value)), *constant)

    def _call(self, rule: "Rule | None", call: Any, name: str, args: Any, kwargs: Any) -> Known:
        if rule is None:
            raise NotProven(f"{name} is not known")
        kinds = [_kind(arg) for arg in args]
        plain = [_value(arg) for arg in args]
        named = {key: _value(arg) for key, arg in kwargs.items()}
        if any(isinstance(arg, Known) for arg in kwargs.values()) or named.get("inplace"):
            raise NotProven(f"{name} is called in an unusual way")
        found = call(*plain, **named)
        if Kind.RECORDS not in kinds or not rule(Operation(kinds, plain, named, found)):
            raise NotProven(f"{name} with these arguments")
        return self._records(found, name)

    def _records(self, found: Any, name: str) -> Known:
        if not isinstance(found, Tensor) or not found.dim() or len(found) != self.size:
            raise NotProven(f"{name} gives something else than one row for each record")
        return Known(Kind.RECORDS, found)


def _kind(arg: Any) -> Kind:
    """Of an argument; what was written into the code itself is constant."""
    if isinstance(arg, Tensor) or (isinstance(arg, Known) and arg.kind is Kind.STATE):
        raise NotProven("a tensor of which nothing is known")
    if isinstance(arg, list | tuple):
        inside = {_kind(part) for part in arg} | {Kind.CONSTANT}
        return next(kind for kind in (Kind.RECORDS, Kind.COUNT, Kind.CONSTANT) if kind in inside)
    return arg.kind if isinstance(arg, Known) else Kind.CONSTANT


def _value(arg: Any) -> Any:
    if isinstance(arg, list | tuple):
        return type(arg)(_value(part) for part in arg)
    return arg.value if isinstance(arg, Known) else arg


# --- what keeps records apart -------------------------------------------------------------------------


@dataclass(frozen=True)
class Operation:
    """An operation that was called: kinds and values of its arguments, named ones, and what came out."""

    kinds: list[Kind]
    args: list[Any]
    named: dict[str, Any]
    found: Any

    def argument(self, place: int, name: str, default: Any = None) -> Any:
        return self.args[place] if len(self.args) > place else self.named.get(name, default)

    @property
    def rank(self) -> int:
        """Dimensions of the first argument."""
        return int(self.args[0].dim())

    @property
    def on_records(self) -> bool:
        """Whether the first argument holds records."""
        return self.kinds[0] is Kind.RECORDS

    @property
    def on_records_only(self) -> bool:
        """Whether the first argument holds records, and all others are constant."""
        return self.on_records and all(kind is Kind.CONSTANT for kind in self.kinds[1:])


Rule = Callable[[Operation], bool]
"""Are records kept apart?"""


def _elementwise(call: Operation) -> bool:
    """Dimensions are matched from the last: tensors of records must have all, constants not the first."""

    def apart(kind: Kind, arg: Any) -> bool:
        whole = isinstance(arg, Tensor) and arg.dim() == call.found.dim()
        return whole if kind is Kind.RECORDS else kind is Kind.CONSTANT and not (whole and len(arg) != 1)

    named = any(isinstance(value, Tensor) for value in call.named.values())
    return not named and all(map(apart, call.kinds, call.args))


def _along(call: Operation) -> bool:
    """Along one dimension or several, of which the first must not be one."""
    dims = call.argument(1, "dim")
    dims = [dims] if isinstance(dims, int) else dims
    if not isinstance(dims, list | tuple) or not dims or not call.on_records_only:
        return False
    return isinstance(call.args[0], Tensor) and all(dim % call.rank != 0 for dim in dims)


def _first_dimension_stays(call: Operation) -> bool:
    """Rows follow one another in memory order: as long as their number stays, each holds one record."""
    return call.on_records and isinstance(call.found, Tensor) and len(call.found) == len(call.args[0])


def _permuted(call: Operation) -> bool:
    order = call.args[1] if isinstance(call.args[1], list | tuple) else call.args[1:]
    return not call.named and call.on_records and order[0] == 0


def _joined(call: Operation) -> bool:
    same = all(isinstance(part, Tensor) and len(part) == len(call.found) for part in call.args[0])
    return same and call.argument(1, "dim", 0) % call.found.dim() != 0


def _indexed(call: Operation) -> bool:
    index = call.args[1]
    if call.kinds != [Kind.RECORDS, Kind.CONSTANT] or not isinstance(index, tuple) or index[0] != slice(None):
        return False
    return all(part is None or isinstance(part, int | slice) for part in index[1:])


def _product(call: Operation) -> bool:
    left, right = call.args
    if call.kinds == [Kind.RECORDS, Kind.CONSTANT]:
        return bool(left.dim() >= 2 and right.dim() == 2)
    return bool(call.kinds == [Kind.RECORDS, Kind.RECORDS] and left.dim() == right.dim() >= 3)


_ARITHMETIC = ("add", "sub", "mul", "div", "neg", "abs", "square", "sqrt", "exp", "clamp")
_ELEMENTWISE = (*_ARITHMETIC, "relu", "tanh", "sigmoid")
_ACTIVATIONS = ("relu", "gelu", "silu", "elu", "leaky_relu", "softplus", "tanh", "sigmoid")
_POOLS = (torch.max_pool2d, functional.max_pool2d, functional.avg_pool2d, functional.adaptive_avg_pool2d)
_REDUCTIONS = ("mean", "sum", "amax", "amin", "logsumexp")

_METHODS: dict[str, Rule] = {
    **dict.fromkeys((*_ELEMENTWISE, "float"), _elementwise),
    **dict.fromkeys((*_REDUCTIONS, "softmax", "log_softmax"), _along),
    **dict.fromkeys(("reshape", "contiguous"), _first_dimension_stays),
    **dict.fromkeys(("matmul", "bmm"), _product),
    "flatten": lambda call: call.on_records and call.argument(1, "start_dim", 0) % call.rank >= 1,
    "transpose": lambda call: (
        call.on_records and not call.named and all(dim % call.rank for dim in call.args[1:3])
    ),
    "permute": _permuted,
    "unsqueeze": lambda call: call.on_records and call.argument(1, "dim") % (call.rank + 1) != 0,
}
_FUNCTIONS: dict[int, tuple[object, Rule]] = {
    id(function): (function, rule)
    for function, rule in (
        *(
            (getattr(torch, name), rule)
            for name, rule in _METHODS.items()
            if callable(getattr(torch, name, None))
        ),
        *((getattr(functional, name), _elementwise) for name in _ACTIVATIONS),
        *((getattr(functional, name), _along) for name in ("softmax", "log_softmax")),
        *((pool, lambda call: call.on_records_only and call.rank == 4) for pool in _POOLS),
        *((getattr(operator, name), _elementwise) for name in ("add", "sub", "mul", "truediv", "neg")),
        (torch.cat, _joined),
        (operator.matmul, _product),
        (operator.getitem, _indexed),
        (functional.linear, lambda call: call.on_records_only and call.rank >= 2),
    )
}
"""By identity, not by equality, which an object may claim; held, so that an identity is not given anew."""


_ANYWHERE = (nn.ReLU, nn.GELU, nn.Tanh, nn.Sigmoid, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Softplus, nn.Identity)
_ON_LINES = (nn.Conv1d, nn.MaxPool1d, nn.AvgPool1d, nn.AdaptiveAvgPool1d)
_ON_IMAGES = (nn.Conv2d, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d)
_LAYERS: dict[type[nn.Module], Callable[[Any, Tensor], bool]] = {
    **dict.fromkeys(_ANYWHERE, lambda layer, given: True),
    **dict.fromkeys(_ON_LINES, lambda layer, given: given.dim() == 3),
    **dict.fromkeys(_ON_IMAGES, lambda layer, given: given.dim() == 4),
    nn.Conv3d: lambda layer, given: given.dim() == 5,
    **dict.fromkeys((nn.Linear, nn.GroupNorm), lambda layer, given: given.dim() >= 2),
    **dict.fromkeys((nn.LSTM, nn.GRU), lambda layer, given: layer.batch_first and given.dim() == 3),
    nn.LayerNorm: lambda layer, given: len(layer.normalized_shape) < given.dim(),
    nn.Embedding: lambda layer, given: layer.max_norm is None and not layer.scale_grad_by_freq,
    nn.Flatten: lambda layer, given: layer.start_dim >= 1,
}
"""Layers that keep records apart, and what must be so of the layer and of the tensor it is given."""
