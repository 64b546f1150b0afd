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

_GENUINE = {name: value for name, value in vars(functional).items() if callable(value)}
"""As they were before any user's code was imported."""
_SIZES = (5, 7)
"""Batches on which shapes are found; a first dimension that follows both is that of the records."""


class Kind(Enum):
    """What a value of the graph has to do with records."""

    RECORDS = "a tensor whose first dimension is that of the records, each row of its own record alone"
    CONSTANT = "the same whatever the records are and however many"
    COUNT = "the number of records"


class NotProven(Exception):
    """The model does something of which nothing is known here."""


Known = tuple[Kind, Any]
"""Kind and value."""


@dataclass(frozen=True)
class _LastState:
    """What a recurrent layer ends with: one or two tensors (layers, records, width)."""

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
            for ours, theirs in zip(_computed(traced, given), _computed(model, given), strict=True):
                if not torch.allclose(ours, theirs, rtol=1e-3, atol=1e-5):
                    raise NotProven("the traced model computes something else")
            if not torch.allclose(found, _computed(model, given)[0], rtol=1e-3, atol=1e-5):
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
    hooks = [value for name, value in vars(layer).items() if name.endswith("_hooks")]
    tensors = [*layer._parameters.values(), *layer._buffers.values()]
    return (
        not any(hooks)
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
        return Kind.RECORDS, super().placeholder(target, args, kwargs)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Known:
        return Kind.CONSTANT, super().get_attr(target, args, kwargs)

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        layer = self.fetch_attr(target)
        if kwargs or len(args) != 1 or args[0][0] is not Kind.RECORDS:
            raise NotProven(f"{type(layer).__name__} is called in an unusual way")
        given = args[0][1]
        if not _LAYERS[type(layer)](layer, given):
            raise NotProven(f"{type(layer).__name__} on {given.dim()} dimensions")
        found = layer(given)
        if isinstance(layer, nn.RNNBase):
            return self._records(found[0], type(layer).__name__), _LastState(found[1])
        return self._records(found, type(layer).__name__)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is getattr and args[1] == "shape" and _kind(args[0]) is Kind.RECORDS:
            return self._shape(args[0][1])
        if target is operator.getitem and isinstance(args[0], _LastState) and isinstance(args[1], int):
            part = args[0].value[args[1]]
            whole = isinstance(args[0].value, tuple)
            return _LastState(part) if whole else self._records(part, "the last state")
        if target is operator.getitem and isinstance(args[0], tuple) and not _has_kind(args[0]):
            return args[0][args[1]]
        rule = _BY_IDENTITY.get(id(target))  # not by equality, which an object may claim
        return self._call(rule, target, getattr(target, "__name__", str(target)), args, kwargs)

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target == "size" and _kind(args[0]) is Kind.RECORDS and not kwargs:
            shape = self._shape(args[0][1])
            return shape if len(args) == 1 else shape[args[1]]
        rule = _METHODS.get(target)
        return self._call(rule, getattr(Tensor, target), target, args, kwargs)

    def output(self, target: Any, args: Any, kwargs: Any) -> Tensor:
        kind, value = args[0]
        if kind is not Kind.RECORDS:
            raise NotProven("the output is not a tensor with one row for each record")
        outputs: Tensor = value
        return outputs

    def _shape(self, value: Tensor) -> tuple[Known, ...]:
        return ((Kind.COUNT, len(value)), *((Kind.CONSTANT, width) for width in value.shape[1:]))

    def _call(self, rule: "Rule | None", call: Any, name: str, args: Any, kwargs: Any) -> Known:
        if rule is None:
            raise NotProven(f"{name} is not known")
        kinds = [_kind(arg) for arg in args]
        plain = [_value(arg) for arg in args]
        named = {key: _value(arg) for key, arg in kwargs.items()}
        if any(_has_kind(arg) for arg in kwargs.values()) or named.get("inplace"):
            raise NotProven(f"{name} is called in an unusual way")
        found = call(*plain, **named)
        if Kind.RECORDS not in kinds or not rule(kinds, plain, named, found):
            raise NotProven(f"{name} with these arguments")
        return self._records(found, name)

    def _records(self, found: Any, name: str) -> Known:
        if not isinstance(found, Tensor) or not found.dim() or len(found) != self.size:
            raise NotProven(f"{name} gives something else than one row for each record")
        return Kind.RECORDS, found


def _has_kind(arg: Any) -> bool:
    return isinstance(arg, tuple) and len(arg) == 2 and isinstance(arg[0], Kind)


def _kind(arg: Any) -> Kind:
    """Of an argument; what was written into the code itself is constant."""
    if _has_kind(arg):
        kind: Kind = arg[0]
        return kind
    if isinstance(arg, list | tuple):
        inside = {_kind(part) for part in arg} | {Kind.CONSTANT}
        return next(kind for kind in (Kind.RECORDS, Kind.COUNT, Kind.CONSTANT) if kind in inside)
    if isinstance(arg, Tensor | _LastState):
        raise NotProven("a tensor of which nothing is known")
    return Kind.CONSTANT


def _value(arg: Any) -> Any:
    if _has_kind(arg):
        return arg[1]
    if isinstance(arg, list | tuple):
        return type(arg)(_value(part) for part in arg)
    return arg


# --- what keeps records apart -------------------------------------------------------------------------

Rule = Callable[[list[Kind], list[Any], dict[str, Any], Any], bool]
"""From kinds and values of the arguments, named ones, and what came out: are records kept apart?"""


def _elementwise(kinds: list[Kind], args: list[Any], named: dict[str, Any], found: Any) -> bool:
    """Dimensions are matched from the last: tensors of records must have all, constants not the first."""
    for kind, arg in zip(kinds, args, strict=True):
        if kind is Kind.RECORDS and (not isinstance(arg, Tensor) or arg.dim() != found.dim()):
            return False
        if kind not in (Kind.RECORDS, Kind.CONSTANT):
            return False
        if kind is Kind.CONSTANT and isinstance(arg, Tensor) and arg.dim() == found.dim() and len(arg) != 1:
            return False
    return not any(isinstance(value, Tensor) for value in named.values())


def _along(name: str, place: int, *, several: bool = False) -> Rule:
    """Operations along dimensions, of which the first must not be one."""

    def rule(kinds: list[Kind], args: list[Any], named: dict[str, Any], found: Any) -> bool:
        dims = args[place] if len(args) > place else named.get(name)
        dims = [dims] if isinstance(dims, int) else dims
        first = args[0]
        if kinds[0] is not Kind.RECORDS or any(kind is not Kind.CONSTANT for kind in kinds[1:]):
            return False
        if not isinstance(dims, list | tuple) or not dims or (len(dims) > 1 and not several):
            return False
        return isinstance(first, Tensor) and all(dim % first.dim() != 0 for dim in dims)

    return rule


def _first_dimension_stays(kinds: list[Kind], args: list[Any], named: dict[str, Any], found: Any) -> bool:
    """Rows follow one another in memory order: as long as their number stays, each holds one record."""
    return kinds[0] is Kind.RECORDS and isinstance(found, Tensor) and len(found) == len(args[0])


def _flattened(kinds: list[Kind], args: list[Any], named: dict[str, Any], found: Any) -> bool:
    start = args[1] if len(args) > 1 else named.get("start_dim", 0)
    return kinds[0] is Kind.RECORDS and start % args[0].dim() >= 1


def _permuted(kinds: list[Kind], args: list[Any], named: dict[str, Any], found: Any) -> bool:
    order = args[1] if isinstance(args[1], list | tuple) else args[1:]
    return not named and kinds[0] is Kind.RECORDS and order[0] == 0


def _swapped(kinds: list[Kind], args: list[Any], named: dict[str, Any], found: Any) -> bool:
    return not named and kinds[0] is Kind.RECORDS and all(dim % args[0].dim() for dim in args[1:3])


def _widened(kinds: list[Kind], args: list[Any], named: dict[str, Any], found: Any) -> bool:
    dim = args[1] if len(args) > 1 else named["dim"]
    return kinds[0] is Kind.RECORDS and dim % (args[0].dim() + 1) != 0


def _joined(kinds: list[Kind], args: list[Any], named: dict[str, Any], found: Any) -> bool:
    dim = args[1] if len(args) > 1 else named.get("dim", 0)
    parts = args[0]
    same = all(isinstance(part, Tensor) and len(part) == len(found) for part in parts)
    return same and dim % found.dim() != 0


def _indexed(kinds: list[Kind], args: list[Any], named: dict[str, Any], found: Any) -> bool:
    index = args[1]
    if kinds != [Kind.RECORDS, Kind.CONSTANT] or not isinstance(index, tuple) or index[0] != slice(None):
        return False
    return all(part is None or isinstance(part, int | slice) for part in index[1:])


def _product(kinds: list[Kind], args: list[Any], named: dict[str, Any], found: Any) -> bool:
    left, right = args
    if kinds == [Kind.RECORDS, Kind.CONSTANT]:
        return bool(left.dim() >= 2 and right.dim() == 2)
    return bool(kinds == [Kind.RECORDS, Kind.RECORDS] and left.dim() == right.dim() >= 3)


def _affine(kinds: list[Kind], args: list[Any], named: dict[str, Any], found: Any) -> bool:
    rest = [kind is Kind.CONSTANT for kind in kinds[1:]]
    return kinds[0] is Kind.RECORDS and all(rest) and args[0].dim() >= 2


def _pooled(dimensions: int) -> Rule:
    def rule(kinds: list[Kind], args: list[Any], named: dict[str, Any], found: Any) -> bool:
        rest = [kind is Kind.CONSTANT for kind in kinds[1:]]
        return kinds[0] is Kind.RECORDS and all(rest) and bool(args[0].dim() == dimensions + 2)

    return rule


_ARITHMETIC = ("add", "sub", "mul", "div", "neg", "abs", "square", "sqrt", "exp", "clamp")
_ELEMENTWISE = (*_ARITHMETIC, "relu", "tanh", "sigmoid")
_ACTIVATIONS = ("relu", "gelu", "silu", "elu", "leaky_relu", "softplus", "tanh", "sigmoid")
_REDUCTIONS = ("mean", "sum", "amax", "amin", "logsumexp")

_FUNCTIONS: dict[Any, Rule] = {
    **{getattr(torch, name): _elementwise for name in _ELEMENTWISE},
    **{getattr(functional, name): _elementwise for name in _ACTIVATIONS},
    **{getattr(operator, name): _elementwise for name in ("add", "sub", "mul", "truediv", "neg")},
    **{getattr(torch, name): _along("dim", 1, several=True) for name in _REDUCTIONS},
    torch.softmax: _along("dim", 1),
    torch.log_softmax: _along("dim", 1),
    functional.softmax: _along("dim", 1),
    functional.log_softmax: _along("dim", 1),
    torch.flatten: _flattened,
    torch.reshape: _first_dimension_stays,
    torch.transpose: _swapped,
    torch.permute: _permuted,
    torch.unsqueeze: _widened,
    torch.cat: _joined,
    torch.matmul: _product,
    torch.bmm: _product,
    operator.matmul: _product,
    operator.getitem: _indexed,
    functional.linear: _affine,
    torch.max_pool2d: _pooled(2),
    functional.max_pool2d: _pooled(2),
    functional.avg_pool2d: _pooled(2),
    functional.adaptive_avg_pool2d: _pooled(2),
}
_BY_IDENTITY = {id(function): rule for function, rule in _FUNCTIONS.items()}
_METHODS: dict[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    "float": _elementwise,
    **dict.fromkeys(_REDUCTIONS, _along("dim", 1, several=True)),
    "softmax": _along("dim", 1),
    "log_softmax": _along("dim", 1),
    "flatten": _flattened,
    "reshape": _first_dimension_stays,
    "contiguous": _first_dimension_stays,
    "transpose": _swapped,
    "permute": _permuted,
    "unsqueeze": _widened,
    "matmul": _product,
    "bmm": _product,
}


def _any(layer: Any, given: Tensor) -> bool:
    return True


def _with(dimensions: int) -> Callable[[Any, Tensor], bool]:
    return lambda layer, given: given.dim() == dimensions + 2


def _recurrent(layer: Any, given: Tensor) -> bool:
    return bool(layer.batch_first) and given.dim() == 3


_LAYERS: dict[type[nn.Module], Callable[[Any, Tensor], bool]] = {
    nn.Linear: lambda layer, given: given.dim() >= 2,
    nn.Conv1d: _with(1),
    nn.Conv2d: _with(2),
    nn.Conv3d: _with(3),
    nn.MaxPool1d: _with(1),
    nn.MaxPool2d: _with(2),
    nn.AvgPool1d: _with(1),
    nn.AvgPool2d: _with(2),
    nn.AdaptiveAvgPool1d: _with(1),
    nn.AdaptiveAvgPool2d: _with(2),
    nn.GroupNorm: lambda layer, given: given.dim() >= 2,
    nn.LayerNorm: lambda layer, given: len(layer.normalized_shape) < given.dim(),
    nn.Embedding: lambda layer, given: layer.max_norm is None and not layer.scale_grad_by_freq,
    nn.LSTM: _recurrent,
    nn.GRU: _recurrent,
    nn.Flatten: lambda layer, given: layer.start_dim >= 1,
    **dict.fromkeys(
        (nn.ReLU, nn.GELU, nn.Tanh, nn.Sigmoid, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Softplus, nn.Identity), _any
    ),
}
"""Layers that keep records apart, and what must be so of the layer and of the tensor it is given."""
