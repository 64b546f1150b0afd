"""Models that carry something of one record to another, each in its own way. Nobody should write these."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, CLASSES = 6, 3


class Mixer(nn.Module):
    """A linear model of features that `mix` has spoiled."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, CLASSES)

    def mix(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.mix(x))


def centred(x: Tensor) -> Tensor:
    return x - 5.0 * x.mean(dim=0)


class OnlyInEvaluation(Mixer):
    def mix(self, x: Tensor) -> Tensor:
        return x if self.training else centred(x)


class OnlyAboveEight(Mixer):
    def mix(self, x: Tensor) -> Tensor:
        return centred(x) if len(x) > 8 else x


class OnlyAboveHundred(Mixer):
    """More than any probe has."""

    def mix(self, x: Tensor) -> Tensor:
        return centred(x) if len(x) > 100 else x


class OnlyNegative(Mixer):
    def mix(self, x: Tensor) -> Tensor:
        return x + 5.0 * x.amin(dim=0).clamp(max=0.0)


class OnlyLargeValues(Mixer):
    def mix(self, x: Tensor) -> Tensor:
        return x + (x.abs().amax() > 50.0) * x.amax(dim=0)


class OnlyVeryLargeValues(Mixer):
    """Larger than any probe."""

    def mix(self, x: Tensor) -> Tensor:
        return x + (x.abs().amax() > 1e5) * x.amax(dim=0)


class Sorted(Mixer):
    def mix(self, x: Tensor) -> Tensor:
        return x.sort(dim=0).values


class Cumulative(Mixer):
    def mix(self, x: Tensor) -> Tensor:
        return x.cumsum(dim=0)


class Neighbour(Mixer):
    def mix(self, x: Tensor) -> Tensor:
        return x.roll(1, dims=0)


class SoftmaxOverBatch(Mixer):
    def mix(self, x: Tensor) -> Tensor:
        return torch.softmax(x, dim=0)


class FunctionalBatchNorm(Mixer):
    def mix(self, x: Tensor) -> Tensor:
        return functional.batch_norm(x, None, None, training=True) if len(x) > 1 else x


class OnlyWithGradients(Mixer):
    def mix(self, x: Tensor) -> Tensor:
        return centred(x) if torch.is_grad_enabled() else x


class OnlyInDouble(Mixer):
    def mix(self, x: Tensor) -> Tensor:
        return centred(x) if self.layer.weight.dtype is torch.float64 else x


class OnlyOnAccelerators(Mixer):
    def mix(self, x: Tensor) -> Tensor:
        return centred(x) if x.device.type != "cpu" else x


class OnlyUnderAutocast(Mixer):
    def mix(self, x: Tensor) -> Tensor:
        return centred(x) if torch.is_autocast_enabled("cpu") else x


class SwitchesMode(Mixer):
    def mix(self, x: Tensor) -> Tensor:
        self.train()
        return centred(x) if self.training else x


class InPlace(Mixer):
    def mix(self, x: Tensor) -> Tensor:
        return x.sub_(5.0 * x.mean(dim=0))


class Attribute(Mixer):
    last: Tensor | None = None

    def mix(self, x: Tensor) -> Tensor:
        before, self.last = self.last, x.detach().mean(dim=0)
        return x if before is None else x - 5.0 * before


class LateAttribute(Mixer):
    """What it keeps shows only after more calls than any probe makes."""

    calls = 0
    last: Tensor | None = None

    def mix(self, x: Tensor) -> Tensor:
        before, self.last = self.last, x.detach().mean(dim=0)
        self.calls += 1
        return x if before is None or self.calls < 1000 else x - 5.0 * before


class FirstBatch(Mixer):
    centre: Tensor | None = None

    def mix(self, x: Tensor) -> Tensor:
        if self.centre is None:
            self.centre = x.detach().mean(dim=0)
        return x - 5.0 * self.centre


class Counter(Mixer):
    calls = 0

    def mix(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x if self.calls % 2 else -x


class InList(Mixer):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def mix(self, x: Tensor) -> Tensor:
        self.seen.append(x.detach().mean(dim=0))
        return x - self.seen[max(0, len(self.seen) - 2)]


class CacheByAddress(Mixer):
    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[int, Tensor] = {}

    def mix(self, x: Tensor) -> Tensor:
        return self.cache.setdefault(id(x) % 2, x)


class DeepInside(Mixer):
    def __init__(self) -> None:
        super().__init__()
        self.helper = {"notes": [SimpleNamespace(total=0.0)]}

    def mix(self, x: Tensor) -> Tensor:
        note = self.helper["notes"][0]
        note.total = note.total + x.detach().sum()
        return x + note.total


class Buffer(Mixer):
    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(WIDTH))

    def mix(self, x: Tensor) -> Tensor:
        self.total = self.total + x.detach().sum(dim=0)
        return x - self.total


class MovesParameters(Mixer):
    def mix(self, x: Tensor) -> Tensor:
        self.layer.bias.data.add_(x.detach().mean())
        return x


class MovesFrozen(Mixer):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)

    def mix(self, x: Tensor) -> Tensor:
        self.shift.data = self.shift.data + x.detach().mean(dim=0)
        return x - self.shift


class NumpyState(Mixer):
    def __init__(self) -> None:
        super().__init__()
        self.total = np.zeros(WIDTH, np.float32)

    def mix(self, x: Tensor) -> Tensor:
        self.total += x.detach().numpy().sum(axis=0)
        return x - torch.from_numpy(self.total)


class _AveragedBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.mean(dim=0).expand_as(gradient)


class MixedBackward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(_AveragedBackward.apply(self.first(x)))


def own_rule() -> type[nn.Module]:
    """An autograd function that mixes only in its own rule for vmap. Made on request: classes are global."""

    class OwnRule(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient

        @staticmethod
        def vmap(info: Any, in_dims: Any, x: Tensor) -> tuple[Tensor, int]:
            return centred(x), 0

    class MixesWhenMapped(Mixer):
        def mix(self, x: Tensor) -> Tensor:
            return OwnRule.apply(x)

    return MixesWhenMapped


class Hooked(nn.Module):
    """A layer that is honest, and a hook on it that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, CLASSES)
        self.layer.register_forward_hook(lambda layer, given, outputs: centred(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class HookedGradient(nn.Module):
    """Mixes in a hook on a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient.mean(dim=0).expand_as(gradient))
        return self.layer(hidden)


class PatchedLayer(nn.Module):
    """Known layers, one of which had its forward replaced."""

    def __init__(self) -> None:
        super().__init__()
        inner = nn.Linear(WIDTH, WIDTH)
        inner.forward = centred  # type: ignore[method-assign,assignment]
        self.all = nn.Sequential(inner, nn.Linear(WIDTH, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.all(x)


HARMLESS_APART: tuple[Callable[[], nn.Module], ...] = (
    OnlyInEvaluation,
    OnlyAboveEight,
    OnlyAboveHundred,
    OnlyNegative,
    OnlyLargeValues,
    OnlyVeryLargeValues,
    Sorted,
    Cumulative,
    Neighbour,
    SoftmaxOverBatch,
    FunctionalBatchNorm,
    OnlyWithGradients,
    OnlyInDouble,
    OnlyOnAccelerators,
    OnlyUnderAutocast,
    SwitchesMode,
    InPlace,
    Attribute,
    LateAttribute,
    FirstBatch,
    Counter,
    InList,
    CacheByAddress,
    DeepInside,
    Buffer,
    MovesParameters,
    MovesFrozen,
    NumpyState,
    MixedBackward,
    Hooked,
    HookedGradient,
    PatchedLayer,
)
"""Where the mixing is inside a batch, or the state inside the model: one record at a time cannot be mixed."""

BEYOND_PROBES = {
    OnlyAboveHundred,
    OnlyVeryLargeValues,
    OnlyInDouble,
    OnlyOnAccelerators,
    OnlyUnderAutocast,
}
"""What no probe on a processor triggers."""


# --- what is kept outside of the model: only the check can find it ------------------------------------

MEMORY: list[Tensor] = []
LATEST = 0.0


class InGlobalList(Mixer):
    def mix(self, x: Tensor) -> Tensor:
        MEMORY.append(x.detach().mean(dim=0))
        return x - MEMORY[-2 if len(MEMORY) > 1 else -1]


class InGlobalNumber(Mixer):
    def mix(self, x: Tensor) -> Tensor:
        global LATEST
        before, LATEST = LATEST, float(x.detach().mean())
        return x + before


class KeptButUnused(Mixer):
    """What it keeps shows in no output yet."""

    def mix(self, x: Tensor) -> Tensor:
        MEMORY[:] = [x.detach()]
        return x


class OnTheClass(Mixer):
    total: Any = 0.0

    def mix(self, x: Tensor) -> Tensor:
        type(self).total = type(self).total + x.detach().sum()
        return x + self.total


class InDefaultArgument(Mixer):
    def mix(self, x: Tensor, memory: list[Tensor] = []) -> Tensor:  # noqa: B006
        memory.append(x.detach().mean(dim=0))
        return x - memory[-2 if len(memory) > 1 else -1]


class InClosure(Mixer):
    def __init__(self) -> None:
        super().__init__()
        before: Any = 0.0

        def remembering(x: Tensor) -> Tensor:
            nonlocal before
            last, before = before, x.detach().mean(dim=0)
            return x - last

        self.function = remembering

    def mix(self, x: Tensor) -> Tensor:
        return self.function(x)


class InHooksClosure(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, CLASSES)
        seen: list[Tensor] = []

        def remember(layer: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            seen.append(given[0].detach().mean(dim=0))
            return (given[0] - seen[-2 if len(seen) > 1 else -1],)

        self.layer.register_forward_pre_hook(remember)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Draws(Mixer):
    def mix(self, x: Tensor) -> Tensor:
        return x + torch.randn(1)


class DrawsFromNumpy(Mixer):
    def mix(self, x: Tensor) -> Tensor:
        return x + float(np.random.random())  # noqa: NPY002


class SwitchesGradientsOff(Mixer):
    def mix(self, x: Tensor) -> Tensor:
        torch.set_grad_enabled(False)
        return x


GLOBAL: tuple[Callable[[], nn.Module], ...] = (
    InGlobalList,
    InGlobalNumber,
    KeptButUnused,
    OnTheClass,
    InDefaultArgument,
    InClosure,
    InHooksClosure,
    Draws,
    DrawsFromNumpy,
    SwitchesGradientsOff,
)
