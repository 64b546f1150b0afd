"""Models in which every record goes its own way, as people write them."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from coterie.data import Task

VECTORS = Task("classification", (6,), 3)
IMAGES = Task("classification", (2, 8, 8), 3)
TOKENS = Task("classification", (7,), 3, vocabulary=11)
NUMBER = Task("regression", (6,), 0)


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def regression() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 1))


class ResidualCNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm, self.head = nn.GroupNorm(2, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.first(x))
        x = x + functional.relu(self.norm(self.second(x)))
        return self.head(x.mean(dim=(2, 3)))


class Normalised(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(2, 4, 3), norm, nn.Linear(4 * 36, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.conv(x)))
        return self.head(x.view(x.size(0), -1))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 4), nn.Linear(5, 3)
        self.cells = kind(4, 5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        outputs, _ = self.cells(self.embed(x))
        return self.head(outputs[:, -1])


class Transformer(nn.Module):
    """Learnt attention over the tokens of a record, with a table of positions."""

    positions: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.register_buffer("positions", torch.linspace(-1, 1, 7 * 8).view(7, 8))
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.embed(x) + self.positions).mean(dim=1))


class HandWrittenAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.query, self.key = nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        values = self.embed(x)
        weights = self.query(values) @ self.key(values).transpose(1, 2) / math.sqrt(6)
        weights = weights.masked_fill(_causal(x.shape[1]), -torch.inf)
        return self.head(self.norm(torch.softmax(weights, dim=-1) @ values)[:, -1])


@lru_cache
def _causal(length: int) -> Tensor:
    """A table that is made once for all."""
    return torch.ones(length, length, dtype=torch.bool).triu(1)


class MeanOfTokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 4, padding_idx=0), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        present = (x != 0).float()[..., None]
        return self.head((self.embed(x) * present).sum(dim=1) / present.sum(dim=1).clamp(min=1.0))


class Tied(nn.Module):
    """One matrix both ways."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.head = nn.Linear(6, 4, bias=False), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(functional.linear(self.down(x), self.down.weight.t())))


class SharedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.step, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.step(x))
        return self.head(x)


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.body.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.body(x)))


class OwnWay(nn.Module):
    """Each record takes the branch that its own values say."""

    def __init__(self) -> None:
        super().__init__()
        self.warm, self.cold = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.warm(one) if one.sum() > 0.1 else self.cold(one.abs()) for one in x])


class Experts(nn.Module):
    """The same without Python's branches."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(6, 2), nn.ModuleList(nn.Linear(6, 3) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(self.gate(x), dim=-1)
        return torch.einsum("ne,eno->no", weights, torch.stack([expert(x) for expert in self.experts]))


class FeatureSoftmax(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x / x.norm(dim=1, keepdim=True).clamp(min=1e-3) * torch.softmax(x, dim=1))


class _Steep(torch.autograd.Function):
    """The old style, of which vmap knows nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0.0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * torch.sigmoid(10.0 * x)


class _Straight(torch.autograd.Function):
    """The new style, whose rule torch derives."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class OwnBackward(nn.Module):
    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.function, self.body, self.head = function, nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.function.apply(self.body(x)))


class Constants(nn.Module):
    """Buffers and plain attributes that stay what they are."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.arange(1.0, 7.0))
        self.options: dict[str, Any] = {"power": 2, "names": ["a", "b"]}
        self.history = [torch.ones(6)]
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((x / self.scale) ** self.options["power"] + self.history[0])


class CopiesFirst(nn.Module):
    """Works in place, on a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        x.clamp_(-1.0, 1.0).mul_(2.0)
        x[:, 0] = 0.0
        return self.head(x)


class Lambdas(nn.Module):
    """Functions that refer to the model they belong to."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.step = lambda x: torch.tanh(self.body(x))
        self.head.register_forward_pre_hook(lambda layer, given: (given[0] * self.body.bias,))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.step(x))


class OneDimensional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv1d(1, 4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(x.unsqueeze(1)).amax(dim=2))


HONEST: dict[str, tuple[Callable[[], nn.Module], Task]] = {
    "perceptron": (perceptron, VECTORS),
    "regression": (regression, NUMBER),
    "residual": (ResidualCNN, IMAGES),
    "group norm": (lambda: Normalised(nn.GroupNorm(2, 4)), IMAGES),
    "layer norm": (lambda: Normalised(nn.LayerNorm([4, 6, 6])), IMAGES),
    "instance norm": (lambda: Normalised(nn.InstanceNorm2d(4, affine=True)), IMAGES),
    "lstm": (lambda: Recurrent(nn.LSTM), TOKENS),
    "gru": (lambda: Recurrent(nn.GRU), TOKENS),
    "transformer": (Transformer, TOKENS),
    "attention": (HandWrittenAttention, TOKENS),
    "mean of tokens": (MeanOfTokens, TOKENS),
    "tied": (Tied, VECTORS),
    "shared layer": (SharedLayer, VECTORS),
    "frozen": (Frozen, VECTORS),
    "own way": (OwnWay, VECTORS),
    "experts": (Experts, VECTORS),
    "feature softmax": (FeatureSoftmax, VECTORS),
    "own backward, old": (lambda: OwnBackward(_Steep), VECTORS),
    "own backward, new": (lambda: OwnBackward(_Straight), VECTORS),
    "constants": (Constants, VECTORS),
    "copies first": (CopiesFirst, VECTORS),
    "lambdas": (Lambdas, VECTORS),
    "one dimension": (OneDimensional, VECTORS),
}
