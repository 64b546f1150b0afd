"""Every layer rule gives, for every record, the gradient that a backward pass of that record alone gives."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from coterie.training import contributions
from coterie.training.bookkeeping import Bookkeeping
from coterie.training.clipping import stacked_clipped_sum
from coterie.training.contributions import Products, Rows
from coterie.training.layers import conv
from coterie.training.layers.base import UnsupportedLayer
from coterie.training.layers.conv import ConvRule
from coterie.training.learner import Batch
from coterie.training.parameters import Layout
from coterie.training.tiles import Tiles

RECORDS = 6
CLASSES = 4
CLIP = 0.5


class Twice(nn.Module):
    """Uses one layer twice, with something in between."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, values: Tensor) -> Tensor:
        return torch.tanh(self.layer(torch.tanh(self.layer(values))))


class MeanOver(nn.Module):
    """Averages everything between the records and the last dimension."""

    def forward(self, values: Tensor) -> Tensor:
        return values.flatten(1, -2).mean(dim=1)


class Last(nn.Module):
    """Classifies what an LSTM knows at the end."""

    def __init__(self, lstm: nn.LSTM, time_first: bool = False) -> None:
        super().__init__()
        self.time_first = time_first
        self.lstm, self.head = lstm, nn.Linear(2 * lstm.hidden_size, CLASSES)

    def forward(self, values: Tensor) -> Tensor:
        steps, (state, cell) = self.lstm(values.transpose(0, 1) if self.time_first else values)
        last = steps[-1] if self.time_first else steps[:, -1]
        return self.head(torch.cat((last + state[-1], cell[0]), dim=1))


class Residual(nn.Module):
    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(*inner)

    def forward(self, values: Tensor) -> Tensor:
        return values + self.inner(values)


def images(*layers_: nn.Module) -> nn.Module:
    return nn.Sequential(*layers_, nn.Flatten(), nn.LazyLinear(CLASSES))


def numbers(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(RECORDS, *shape, dtype=torch.float64)


def tokens(length: int, size: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(size, (RECORDS, length))


IMAGE = numbers(3, 9, 8)
WIDE = numbers(16, 6, 5)
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "one linear": (lambda: nn.Linear(5, CLASSES), numbers(5)),
    "no bias": (lambda: nn.Linear(5, CLASSES, bias=False), numbers(5)),
    "linear at every position": (lambda: nn.Sequential(nn.Linear(5, CLASSES), MeanOver()), numbers(7, 5)),
    "linear on a grid": (lambda: nn.Sequential(nn.Linear(5, CLASSES), MeanOver()), numbers(2, 3, 5)),
    "wide linear": (
        lambda: nn.Sequential(nn.Linear(90, 80), nn.Linear(80, CLASSES), MeanOver()),
        numbers(2, 90),
    ),
    "conv": (lambda: images(nn.Conv2d(3, 5, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)), IMAGE),
    "convs in whole blocks": (
        lambda: images(
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 16, (3, 2), dilation=(1, 2)),
        ),
        numbers(16, 7, 8),
    ),
    "a sequence in a sequence": (
        lambda: images(
            nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU()), nn.MaxPool2d((3, 2)), nn.Tanh()
        ),
        IMAGE,
    ),
    "conv on many channels": (lambda: images(nn.Conv2d(16, 4, 3, padding=1), nn.ReLU()), WIDE),
    "stride": (
        lambda: images(nn.Conv2d(3, 5, 3, stride=2, padding=1), nn.Conv2d(5, 9, (2, 3), (2, 1))),
        IMAGE,
    ),
    "stride on many channels": (lambda: images(nn.Conv2d(16, 9, 3, stride=2, bias=False)), WIDE),
    "dilation": (lambda: images(nn.Conv2d(3, 5, 3, dilation=2), nn.Conv2d(5, 3, 2)), IMAGE),
    "same padding": (lambda: images(nn.Conv2d(3, 4, (3, 5), padding="same"), nn.Conv2d(4, 2, 1)), IMAGE),
    "groups": (lambda: images(nn.Conv2d(3, 12, 3), nn.ReLU(), nn.Conv2d(12, 8, 3, groups=4)), IMAGE),
    "depthwise on many channels": (lambda: images(nn.Conv2d(16, 16, 3, padding=1, groups=16)), WIDE),
    "deep convs": (
        lambda: images(nn.Conv2d(3, 8, 5, padding=2), nn.ReLU(), nn.Conv2d(8, 64, 5, stride=4)),
        IMAGE,
    ),
    "conv1d": (
        lambda: images(nn.Conv1d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv1d(8, 4, 3, 2)),
        numbers(3, 11),
    ),
    "embedding": (
        lambda: nn.Sequential(nn.Embedding(6, 5), nn.Linear(5, 4), MeanOver(), nn.Linear(4, CLASSES)),
        tokens(7, 6),
    ),
    "embedding with padding": (
        lambda: nn.Sequential(nn.Embedding(4, CLASSES, padding_idx=1), MeanOver()),
        tokens(7, 4),
    ),
    "group norm": (lambda: images(nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8), nn.ReLU()), IMAGE),
    "group norm of vectors": (
        lambda: nn.Sequential(nn.Linear(5, 8), nn.GroupNorm(2, 8), nn.Linear(8, CLASSES)),
        numbers(5),
    ),
    "layer norm": (
        lambda: nn.Sequential(nn.LayerNorm((3, 5)), nn.Linear(5, CLASSES), nn.LayerNorm(CLASSES), MeanOver()),
        numbers(3, 5),
    ),
    "layer norm without bias": (
        lambda: nn.Sequential(nn.LayerNorm(5, bias=False), nn.Linear(5, CLASSES)),
        numbers(5),
    ),
    "lstm": (lambda: Last(nn.LSTM(5, 6, num_layers=2, batch_first=True)), numbers(7, 5)),
    "lstm that counts steps first": (lambda: Last(nn.LSTM(5, 6, bias=False), time_first=True), numbers(4, 5)),
    "residual": (lambda: images(nn.Conv2d(3, 8, 3), Residual(nn.GroupNorm(4, 8), nn.Conv2d(8, 8, 1))), IMAGE),
    "a layer used twice": (lambda: nn.Sequential(Twice(nn.Linear(5, 5)), nn.Linear(5, CLASSES)), numbers(5)),
    "a conv used twice": (lambda: images(Twice(nn.Conv2d(3, 3, 3, padding=1))), IMAGE),
    "a norm used twice": (lambda: nn.Sequential(Twice(nn.LayerNorm(5)), nn.Linear(5, CLASSES)), numbers(5)),
    "work in place": (lambda: images(nn.Conv2d(3, 8, 3), nn.ReLU(inplace=True), nn.Conv2d(8, 4, 3)), IMAGE),
}


def build(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(1)
    make, draw = MODELS[name]
    features = draw()
    model = make()
    with torch.no_grad():
        model = model.double()
        model(features)  # gives lazy layers their shape
    return model, features


def losses(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets, reduction="none")


def gradients(outputs: Tensor, targets: Tensor) -> Tensor:
    with torch.enable_grad():
        leaves = outputs.detach().requires_grad_()
        return torch.autograd.grad(losses(leaves, targets).sum(), leaves)[0]


def one_at_a_time(model: nn.Module, features: Tensor, targets: Tensor) -> Tensor:
    """The obviously right rows: a backward pass for each record."""
    rows = []
    for record in range(len(features)):
        model.zero_grad()
        losses(model(features[record : record + 1]), targets[record : record + 1]).sum().backward()
        parameters = [p for p in model.parameters() if p.requires_grad]
        rows.append(
            torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])
        )
    return torch.stack(rows)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])


def clipped(rows: Tensor) -> Tensor:
    return rows * (CLIP / rows.norm(dim=1, keepdim=True)).clamp(max=1.0)


@pytest.fixture(params=["chosen by cost", "rows", "rows one by one", "products"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whichever way a layer's gradients are found and kept, they are the same."""
    if request.param != "chosen by cost":
        monkeypatch.setattr(contributions, "products_are_cheaper", lambda *_: request.param == "products")
    if request.param == "rows one by one":
        monkeypatch.setattr(conv, "LARGE_PRODUCT", 0)
    return str(request.param)


@pytest.mark.parametrize("name", MODELS)
def test_rows_equal_single_backward_passes(name: str, form: str) -> None:
    model, features = build(name)
    targets = torch.arange(RECORDS) % CLASSES
    book = Bookkeeping(model, Layout.of(model), losses, gradients)
    expected = one_at_a_time(model, features, targets)
    torch.testing.assert_close(book.rows(flat(model), features, targets), expected, rtol=1e-9, atol=1e-12)


def test_a_maximum_that_occurs_twice_gets_the_gradient_that_autograd_gives_it() -> None:
    """Blank images: all positions of a window are equal."""
    for name in ("conv", "convs in whole blocks"):
        model, features = build(name)
        features = torch.where(features > 1.0, 1.0, 0.0).double()
        features[0] = 0.0
        targets = torch.arange(RECORDS) % CLASSES
        book = Bookkeeping(model, Layout.of(model), losses, gradients)
        rows = book.rows(flat(model), features, targets)
        torch.testing.assert_close(rows, one_at_a_time(model, features, targets), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("layer", [1, 2], ids=["ReLU", "pool"])
def test_a_hook_on_a_layer_without_parameters_still_takes_part(layer: int) -> None:
    model, features = build("conv")
    model[layer].register_forward_hook(lambda module, inputs, outputs: 2.0 * outputs)  # type: ignore[operator, union-attr]
    targets = torch.arange(RECORDS) % CLASSES
    book = Bookkeeping(model, Layout.of(model), losses, gradients)
    expected = one_at_a_time(model, features, targets)
    torch.testing.assert_close(book.rows(flat(model), features, targets), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["conv", "convs in whole blocks", "wide linear", "no bias"])
def test_a_chain_without_autograd_is_used_and_gives_what_autograd_gives(name: str) -> None:
    model, features = build(name)
    targets = torch.arange(RECORDS) % CLASSES
    book = Bookkeeping(model, Layout.of(model), losses, gradients)
    found = book.rows(flat(model), features, targets)
    assert (book._chain is None) == (name == "wide linear")  # its mean over positions is a layer of its own
    book._chain = None
    torch.testing.assert_close(found, book.rows(flat(model), features, targets), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_the_clipped_sum_of_one_client_equals_single_backward_passes(name: str, form: str) -> None:
    model, features = build(name)
    targets = torch.arange(RECORDS) % CLASSES
    book = Bookkeeping(model, Layout.of(model), losses, gradients)
    expected = clipped(one_at_a_time(model, features, targets)).sum(dim=0)
    found = stacked_clipped_sum(book, flat(model)[None], Batch(features, targets), Tiles(1, RECORDS), CLIP)
    # The margin of the clip, and of norms that come from products.
    torch.testing.assert_close(found[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("size", [2, 6])
def test_stacked_clients_each_get_their_own_sum(name: str, size: int, form: str) -> None:
    """Three clients with weights of their own; tiles of two records, or one padded tile for each client."""
    model, features = build(name)
    layout = Layout.of(model)
    targets = torch.arange(RECORDS) % CLASSES
    book = Bookkeeping(model, layout, losses, gradients)
    stacked = flat(model) + 0.1 * torch.randn(3, layout.size, dtype=torch.float64)
    per_client = [[0, 1, 2, 3, 4], [5], [0, 2, 4]]
    chosen, present, owner = [], [], []
    for client, own in enumerate(per_client):
        for first in range(0, len(own), size):
            part = own[first : first + size]
            chosen += part + [0] * (size - len(part))
            present += [True] * len(part) + [False] * (size - len(part))
            owner.append(client)
    tiles = Tiles(len(owner), size, None if size == 6 else torch.tensor(owner), dynamic=False)
    batch = Batch(features[chosen], targets[chosen])
    found = stacked_clipped_sum(book, stacked, batch, tiles, CLIP, torch.tensor(present))
    for client, own in enumerate(per_client):
        with torch.no_grad():
            nn.utils.vector_to_parameters(stacked[client], [p for p in model.parameters() if p.requires_grad])
        expected = clipped(one_at_a_time(model, features[own], targets[own])).sum(dim=0)
        torch.testing.assert_close(found[client], expected, rtol=1e-4, atol=1e-5)


def test_frozen_parameters_take_part_but_get_no_gradient() -> None:
    model, features = build("conv")
    next(model.parameters()).requires_grad_(False)
    targets = torch.arange(RECORDS) % CLASSES
    book = Bookkeeping(model, Layout.of(model), losses, gradients)
    expected = one_at_a_time(model, features, targets)
    torch.testing.assert_close(book.rows(flat(model), features, targets), expected)


@pytest.mark.parametrize("frozen", ["weight", "bias", "neither"])
def test_a_norm_taken_of_weight_and_bias_together_leaves_neither_unclipped(
    frozen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a GPU's kernel takes it: all of it under the weight's name, nothing under that of the bias."""

    def at_once(
        rule: ConvRule, inputs: Tensor, gradient: Tensor, tiles: Tiles, compiled: bool
    ) -> dict[str, Rows]:
        found = rule.contributions(*rule.factors(inputs, gradient, tiles), tiles)
        both = found["weight"].squared_norms() + found["bias"].squared_norms()
        return {
            "weight": Rows(found["weight"].rows(), squares=both),
            "bias": Rows(found["bias"].rows(), squares=torch.zeros_like(both)),
        }

    monkeypatch.setattr(ConvRule, "contributions_at_once", at_once)
    torch.manual_seed(2)
    convolution = nn.Conv2d(1, 2, 3)
    if frozen != "neither":
        getattr(convolution, frozen).requires_grad_(False)
    model = nn.Sequential(convolution, nn.Tanh(), nn.Flatten(), nn.Linear(72, CLASSES)).double()
    for parameter in model[3].parameters():
        parameter.requires_grad_(False).mul_(20)
    features, targets = torch.randn(RECORDS, 1, 8, 8).double(), torch.arange(RECORDS) % CLASSES
    book = Bookkeeping(model, Layout.of(model), losses, gradients)
    rows = one_at_a_time(model, features, targets)
    assert (rows.norm(dim=1) > 2 * CLIP).any()
    # Two tiles: several small parts of one tile are joined, and have their norm taken anew.
    stacked, tiles = flat(model).expand(2, -1), Tiles(2, RECORDS // 2, torch.tensor([0, 1]))
    found = stacked_clipped_sum(book, stacked, Batch(features, targets), tiles, CLIP)
    expected = torch.stack([clipped(part).sum(dim=0) for part in torch.split(rows, RECORDS // 2)])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_parameter_that_nothing_depends_on_gets_zero() -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(5, CLASSES), nn.Linear(5, 2)

        def forward(self, values: Tensor) -> Tensor:
            return self.used(values)

    model, targets = Idle().double(), torch.arange(RECORDS) % CLASSES
    book = Bookkeeping(model, Layout.of(model), losses, gradients)
    rows = book.rows(flat(model), numbers(5)(), targets)
    assert (rows[:, -12:] == 0).all()
    assert (rows[:, :-12] != 0).any()


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (nn.Bilinear(2, 2, 2), "no rule for Bilinear"),
        (nn.Sequential(nn.Conv2d(1, 1, 3, padding=1, padding_mode="circular")), "padding_mode"),
        (nn.Sequential(nn.Embedding(3, 2, max_norm=1.0)), "max_norm"),
        (nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), "rule|hooks or parts"),
    ],
)
def test_what_no_rule_covers_is_refused_with_its_reason(model: nn.Module, reason: str) -> None:
    with pytest.raises(UnsupportedLayer, match=reason):
        Bookkeeping(model, Layout.of(model), losses, gradients)


def test_shared_parameters_are_refused() -> None:
    first = nn.Linear(4, 4)
    second = nn.Linear(4, 4)
    second.weight = first.weight
    model = nn.Sequential(first, second)
    with pytest.raises(UnsupportedLayer, match="share"):
        Bookkeeping(model, Layout.of(model), losses, gradients)


def test_long_products_are_refused_beyond_what_the_margin_covers() -> None:
    part = Products(torch.ones(300, 100, 2), torch.ones(300, 100, 3))
    with pytest.raises(ValueError, match="round"):
        part.scaled_sum(torch.ones(300).double(), torch.ones(300, dtype=torch.bool), Tiles(1, 300))


def test_factors_that_cancel_do_not_slip_through_the_clip() -> None:
    """Two positions whose products cancel: rounding of the sum stays below the margin of the clip."""
    generator = torch.Generator().manual_seed(0)
    left = 1e8 * torch.randn(1, 2, 50, generator=generator)
    left[:, 1] = left[:, 0]
    right = 1e8 * torch.randn(1, 2, 40, generator=generator)
    right[:, 1] = -right[:, 0]
    part = Products(left, right)
    scale = (CLIP / part.squared_norms().sqrt()).clamp(max=1.0)
    assert float(part.scaled_sum(scale, torch.tensor([True]), Tiles(1, 1)).norm()) <= CLIP * 2**-16
    exact = Rows(right.double().mT @ left.double())
    assert float(exact.squared_norms()[0]) <= float(part.squared_norms()[0])
