"""What a model and the code around it hold, written down so that two moments can be compared."""

import hashlib
import sys
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_DEEPEST = 12
_MOST = 200_000
_LIBRARIES = ("torch", "numpy", "coterie", "scipy", "sklearn")


def written_down(model: nn.Module) -> dict[str, object]:
    """Every value that hangs off the model, or off the modules that its code stands in, by its path.

    Reached are attributes, parameters, buffers, hooks, what closures and default arguments hold, and the
    global variables and classes of the user's own files. What hides elsewhere (files, other libraries) is
    not.
    """
    pen = _Pen(model)
    for name in sorted(pen.files):
        for variable, value in list(vars(sys.modules[name]).items()):
            if not isinstance(value, types.ModuleType) and not variable.startswith("__"):
                pen.write(f"the global variable {variable} of {name}", value)
    return pen.found


def holds_functions(model: nn.Module) -> bool:
    """Whether the model holds functions or references that a copy would share with it."""
    return _Pen(model).shared


def first_change(before: Mapping[str, object], after: Mapping[str, object]) -> str | None:
    """The path of a value that is not what it was."""
    gone = object()
    paths = [*before, *after]
    return next((path for path in paths if before.get(path, gone) != after.get(path, gone)), None)


def _is_users(name: str | None) -> bool:
    top = (name or "builtins").partition(".")[0]
    return top not in _LIBRARIES and top not in sys.stdlib_module_names


class _Pen:
    """Walks over values and notes what they are made of, and the user's files that their code stands in."""

    def __init__(self, model: nn.Module) -> None:
        self.found: dict[str, object] = {}
        self.files: set[str] = set()
        self.shared = False
        self._seen: dict[int, object] = {}
        self.write("", model)

    def write(self, path: str, value: object, depth: int = 0) -> None:
        match value:
            case Tensor():
                self.found[path] = _digest(value)
            case np.ndarray():
                hashed = hashlib.sha256(value.tobytes()).hexdigest()
                self.found[path] = (value.shape, str(value.dtype), hashed)
            case None | bool() | int() | float() | complex() | str() | bytes():
                self.found[path] = (type(value).__name__, repr(value))
            case _ if id(value) in self._seen or depth > _DEEPEST or len(self.found) > _MOST:
                self.found[path] = id(value)
            case _:
                self._seen[id(value)] = value  # kept, so that no other object takes its address
                self.found[f"{path}:"] = type(value).__qualname__
                function = isinstance(value, types.FunctionType) and ".class" not in path  # not a method
                self.shared |= (function and _is_users(value.__module__)) or isinstance(value, weakref.ref)
                kinds = value.__mro__ if isinstance(value, type) else (value,)
                names = {getattr(kind, "__module__", None) for kind in kinds}
                self.files |= {name for name in names if _is_users(name) and name in sys.modules}
                for name, part in _parts(value):
                    self.write(f"{path}{name}", part, depth + 1)


def _digest(value: Tensor) -> object:
    if type(value).__module__.partition(".")[0] != "torch" or value.layout is not torch.strided:
        return id(value)
    if nn.parameter.is_lazy(value):
        return "lazy"
    numbers = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return (
        tuple(value.shape),
        str(value.dtype),
        value.requires_grad,
        hashlib.sha256(numbers.tobytes()).hexdigest(),
    )


def _parts(value: Any) -> Iterable[tuple[str, object]]:
    match value:
        case Mapping():
            return [(f"[{key!r}]", part) for key, part in list(value.items())]
        case list() | tuple() | set() | frozenset() | deque():
            return [("[length]", len(value)), *((f"[{place}]", part) for place, part in enumerate(value))]
        case partial():
            return [(".func", value.func), (".args", value.args), (".keywords", value.keywords)]
        case weakref.ref():
            return [("()", value())]
        case types.MethodType():
            return [(".__self__", value.__self__), (".__func__", value.__func__)]
        case types.FunctionType():
            return _held_by(value)
        case type():
            own = vars(value) if _is_users(value.__module__) else {}
            return [(f".{name}", part) for name, part in own.items() if not _is_slot(name, part)]
        case nn.Module():
            rest = {name: part for name, part in vars(value).items() if name not in _TABLES}
            found = {**rest, **value._parameters, **value._buffers, **value._modules}
        case _ if not _is_users(type(value).__module__):
            return []  # a logger, a lock, a generator: theirs to change
        case _:
            slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
            found = {**getattr(value, "__dict__", {}), **{name: getattr(value, name, None) for name in slots}}
    return [*((f".{name}", part) for name, part in found.items()), (".class", type(value))]


_TABLES = {"_parameters", "_buffers", "_modules", "_flat_weights", "_flat_weight_refs"}
"""Shown by what they contain; the last two are a recurrent layer's other names for its parameters."""


def _is_slot(name: str, part: object) -> bool:
    return name in {"__dict__", "__weakref__", "__doc__"} or isinstance(
        part, types.GetSetDescriptorType | types.MemberDescriptorType
    )


def _held_by(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    """What a function remembers from one call to the next."""
    if not _is_users(function.__module__):
        return
    yield ".defaults", function.__defaults__
    yield ".keyword defaults", function.__kwdefaults__
    yield from ((f".{name}", part) for name, part in vars(function).items())
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f" holds {name}", cell.cell_contents
        except ValueError:  # an empty cell
            yield f" holds {name}", None


class KeptTensors(TorchFunctionMode):
    """Follows every tensor that is made in this thread; those that outlive the call were kept somewhere."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[weakref.ref[Tensor]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {id(part) for part in args}  # what was there before and is handed back
        for part in result if isinstance(result, tuple | list) else (result,):
            if isinstance(part, Tensor) and id(part) not in known:
                self._made.append(weakref.ref(part))
        return result

    @property
    def alive(self) -> list[Tensor]:
        return [tensor for made in self._made if (tensor := made()) is not None]
