"""Models that per-record clipping cannot handle, and a user's own models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from coterie.data import Task
from coterie.errors import InputError
from coterie.models import ModelSettings, build_model, check_model

TASK = Task("classification", (2, 8, 8), 3)


class Lambda(nn.Module):
    """A user's layer that does anything."""

    def __init__(self, function: object) -> None:
        super().__init__()
        self.function = function

    def forward(self, features: Tensor) -> Tensor:
        return self.function(features)  # type: ignore[operator]


class RunningMean(nn.Module):
    """Keeps statistics of what passes, yet returns each record untouched."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(128))

    def forward(self, features: Tensor) -> Tensor:
        self.seen.add_(features.detach().mean(dim=0))
        return features


def around(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(3))


def ready(model: nn.Module) -> nn.Module:
    model(torch.rand(4, *TASK.shape))
    return model


@pytest.mark.parametrize(
    "layer", [nn.BatchNorm2d(2), nn.SyncBatchNorm(2), nn.LazyBatchNorm2d()], ids=lambda x: type(x).__name__
)
def test_batch_norms_are_refused_with_reason_and_replacement(layer: nn.Module) -> None:
    with pytest.raises(InputError, match=r"layer 0.*mix the records of a batch.*GroupNorm"):
        check_model(nn.Sequential(layer, nn.Flatten(), nn.Linear(128, 3)), TASK)


@pytest.mark.parametrize(
    "layer",
    [nn.GroupNorm(1, 2), nn.LayerNorm([2, 8, 8]), nn.InstanceNorm2d(2), nn.AvgPool2d(2)],
    ids=lambda x: type(x).__name__,
)
def test_norms_within_a_record_pass(layer: nn.Module) -> None:
    check_model(ready(around(layer)), TASK)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x - x.mean(dim=0),
        lambda x: x / x.amax(),
        lambda x: x.cumsum(dim=0),
        lambda x: x.roll(1, dims=0),
        lambda x: torch.softmax(x, dim=0),
    ],
    ids=["centre", "max", "cumsum", "roll", "softmax"],
)
def test_any_other_mixing_of_records_is_found(function: object) -> None:
    with pytest.raises(InputError, match="depends on the other records of its batch"):
        check_model(ready(around(Lambda(function))), TASK)


def test_running_statistics_are_refused() -> None:
    with pytest.raises(InputError, match=r"buffer 1\.seen changes"):
        check_model(nn.Sequential(nn.Flatten(), RunningMean(), nn.Linear(128, 3)), TASK)
    with pytest.raises(InputError, match="track_running_stats=False"):
        check_model(ready(around(nn.InstanceNorm2d(2, track_running_stats=True))), TASK)


def test_dropout_is_refused_because_a_resumed_run_could_not_repeat_it() -> None:
    with pytest.raises(InputError, match="draws random numbers"):
        check_model(ready(around(nn.Dropout(0.5))), TASK)


def test_control_flow_is_refused_where_the_whole_batch_decides_it() -> None:
    with pytest.raises(InputError, match="depends on the other records of its batch"):
        check_model(ready(around(Lambda(lambda x: x if x.sum() > 0 else -x))), TASK)


@pytest.mark.parametrize("width", [1, 4])
def test_wrong_output_shapes_are_refused(width: int) -> None:
    with pytest.raises(InputError, match=rf"shape \(4, {width}\) for 4 records; allowed: \(4, 3\)"):
        check_model(nn.Sequential(nn.Flatten(), nn.Linear(128, width)), TASK)


def test_regression_needs_one_output_column() -> None:
    task = Task("regression", (5,), 0)
    check_model(nn.Linear(5, 1), task)
    with pytest.raises(InputError, match=r"allowed: \(4, 1\)"):
        check_model(nn.Sequential(nn.Linear(5, 1), nn.Flatten(0)), task)


def test_models_that_fail_or_return_something_else_are_refused_in_one_line() -> None:
    with pytest.raises(InputError, match=r"fails on records of shape \(2, 8, 8\): RuntimeError") as refused:
        check_model(nn.Linear(5, 3), TASK)
    assert "\n" not in str(refused.value)
    with pytest.raises(InputError, match="returns a tuple"):
        check_model(nn.Sequential(nn.Flatten(), nn.Linear(128, 3), Lambda(lambda x: (x, x))), TASK)


def test_lazy_parameters_are_refused() -> None:
    with pytest.raises(InputError, match=r"parameter 1\.weight has no shape yet"):
        check_model(nn.Sequential(nn.Flatten(), nn.LazyLinear(3)), TASK)


def test_models_without_parameters_and_with_broken_ones_are_refused() -> None:
    with pytest.raises(InputError, match="no parameters"):
        check_model(nn.Flatten(), TASK)
    sick = nn.Sequential(nn.Flatten(), nn.Linear(128, 3))
    sick[1].weight.data[0, 0] = torch.nan
    with pytest.raises(InputError, match="not finite"):
        check_model(sick, TASK)


def test_checking_leaves_model_and_random_state_alone() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(128, 3)).eval()
    before, state = model[1].weight.clone(), torch.get_rng_state()
    check_model(model, TASK)
    assert torch.equal(model[1].weight, before)
    assert model[1].weight.grad is None
    assert not model.training
    assert torch.equal(torch.get_rng_state(), state)


@pytest.fixture
def own_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_own_networks.py").write_text(
        "from torch import nn\n"
        "def small(task):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(128, task.outputs))\n"
        "def mixing(task):\n"
        "    return nn.Sequential(nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(128, task.outputs))\n"
        "def nothing(task):\n"
        "    return None\n"
        "def failing(task):\n"
        "    raise OSError('no weights')\n"
    )
    return tmp_path


def test_a_users_function_builds_the_model_under_the_seed(own_model: Path) -> None:
    first, again = (build_model(ModelSettings(name="my_own_networks:small"), TASK, seed=4) for _ in range(2))
    assert torch.equal(first[1].weight, again[1].weight)  # type: ignore[index]


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("my_own_networks:mixing", "GroupNorm"),
        ("my_own_networks:nothing", "returned a NoneType"),
        ("my_own_networks:failing", "OSError: no weights"),
        ("my_own_networks:absent", "absent"),
        ("no_such_module_at_all:f", "No module named"),
    ],
)
def test_what_a_users_function_does_wrong_is_one_line(own_model: Path, name: str, line: str) -> None:
    with pytest.raises(InputError, match=line) as refused:
        build_model(ModelSettings(name=name), TASK, seed=0)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", [":f", "module:", "a b:f", ":"])
def test_what_is_no_place_of_a_function_is_refused_by_its_form(name: str) -> None:
    with pytest.raises(ValueError, match=r"allowed: softmax, .* or package\.module:function"):
        ModelSettings(name=name)
