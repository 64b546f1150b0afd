"""A user's own code at its edges: what it raises, pretends, replaces and returns."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from coterie.cli.main import Ended
from coterie.data.records import Task
from coterie.engines.clients import build_learner
from coterie.errors import InputError, ModelError
from coterie.models import ModelSettings
from coterie.training.learner import Batch
from coterie.training.proof import NotProven, proven_apart
from coterie.training.scoring import total_score

TASK = Task(kind="classification", shape=(5,), classes=3)
CPU = torch.device("cpu")
SECRET = 77.125


class Own(nn.Module):
    """A linear model that does something else where a record is the secret one."""

    def __init__(self, trigger: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.trigger = trigger

    def forward(self, features: Tensor) -> Tensor:
        if float(features[0, 0]) == SECRET:
            return self.trigger(features)
        outputs: Tensor = self.linear(features)
        return outputs


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    made = types.ModuleType("somebodys_models")
    monkeypatch.setitem(sys.modules, "somebodys_models", made)
    return made


def learner_of(module: types.ModuleType, make: Callable[[Task], nn.Module]) -> object:
    module.make = make  # type: ignore[attr-defined]
    return build_learner(ModelSettings(name="somebodys_models:make"), TASK, 0, CPU)


def batch(records: int = 4) -> Batch:
    features = torch.rand(records, 5, generator=torch.Generator().manual_seed(0))
    features[1, 0] = SECRET
    return Batch(features, torch.zeros(records, dtype=torch.int64))


# --- what is raised ---------------------------------------------------------------------------------


def _exits(features: Tensor) -> Tensor:
    sys.exit(f"{float(features[0, 0])}")


def _own_kind(features: Tensor) -> Tensor:
    raise type(f"Secret_{float(features[0, 0])}", (BaseException,), {})(str(features))


def _ours(features: Tensor) -> Tensor:
    raise ModelError(f"{float(features[0, 0])}")


def _made_up_file(features: Tensor) -> Tensor:
    exec(compile("1/0", f"file-{float(features[0, 0])}.py", "exec"))
    return features


def _stopped(features: Tensor) -> Tensor:
    raise KeyboardInterrupt(f"{float(features[0, 0])}")


@pytest.mark.parametrize("trigger", [_exits, _own_kind, _ours, _made_up_file, _stopped])
@pytest.mark.parametrize("what", ["scores", "gradients"])
def test_whatever_a_model_raises_says_nothing_of_records(
    module: types.ModuleType, trigger: Callable[[Tensor], Tensor], what: str
) -> None:
    learner = learner_of(module, lambda task: Own(trigger))
    parameters = learner.initial()  # type: ignore[attr-defined]
    expected = KeyboardInterrupt if trigger is _stopped else ModelError
    call: Callable[[], object] = {
        "scores": lambda: total_score(learner, parameters, batch()),  # type: ignore[arg-type]
        "gradients": lambda: learner.gradients(parameters, batch()),  # type: ignore[attr-defined]
    }[what]
    with pytest.raises(expected) as caught:
        call()
    error: BaseException | None = caught.value
    assert "77.1" not in f"{error} {error!r}"
    assert error is not None
    assert error.__cause__ is None
    if expected is ModelError:
        assert error.__context__ is None


# --- what is pretended and replaced -------------------------------------------------------------------


class Pretender:
    """A callable that says it is torch.relu, and sums over the records."""

    __name__ = "relu"

    def __call__(self, features: Tensor) -> Tensor:
        if torch.overrides.has_torch_function_unary(features):
            found: Tensor = torch.overrides.handle_torch_function(self, (features,), features)
            return found
        return features.cumsum(0) if bool((features > 70).any()) else features.relu()

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return hash(torch.relu)


class Pretending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, features: Tensor) -> Tensor:
        outputs: Tensor = PRETENDER(self.linear(features))
        return outputs


PRETENDER = Pretender()


def features_of(count: int) -> Tensor:
    return torch.rand(count, 5, generator=torch.Generator().manual_seed(count))


def test_an_operation_is_known_by_what_it_is_and_not_by_what_it_says() -> None:
    with pytest.raises(NotProven, match="not known"):
        proven_apart(Pretending(), features_of)


@pytest.fixture
def left_entered() -> Iterator[None]:
    class Mode(TorchFunctionMode):
        def __torch_function__(self, function, kinds, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            return function(*args, **(kwargs or {}))

    with Mode():
        yield


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))


def test_nothing_is_proven_while_a_mode_changes_what_operations_do(left_entered: None) -> None:
    with pytest.raises(NotProven, match="mode"):
        proven_apart(plain(), features_of)


def test_nothing_is_proven_where_torchs_own_functions_were_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    proven_apart(plain(), features_of)
    monkeypatch.setattr(functional, "relu", lambda features, inplace=False: features.cumsum(0))
    with pytest.raises(NotProven, match="replaced"):
        proven_apart(plain(), features_of)


# --- what is returned -------------------------------------------------------------------------------


def test_one_records_type_of_numbers_does_not_become_that_of_all(module: types.ModuleType) -> None:
    learner = learner_of(module, lambda task: Own(lambda features: torch.zeros(1, 3, dtype=torch.float64)))
    outputs = learner.predict(learner.initial(), batch().features)  # type: ignore[attr-defined]
    assert outputs.dtype is torch.float32


def test_a_record_whose_shape_the_model_changes_is_still_one(module: types.ModuleType) -> None:
    learner = learner_of(module, lambda task: Own(lambda features: features.resize_(2, 5)[:, :3]))
    with pytest.raises(ModelError, match="one row of 3 for each record"):
        total_score(learner, learner.initial(), batch())  # type: ignore[arg-type,attr-defined]


class Detached(Own):
    def forward(self, features: Tensor) -> Tensor:
        outputs: Tensor = self.linear(features).detach()
        return outputs


class Complex(Own):
    def forward(self, features: Tensor) -> Tensor:
        return torch.complex(self.linear(features), self.linear(features))


class Unfinished(nn.Module):
    def __init__(self) -> None:
        self.width = 3


WRONG: dict[str, tuple[Callable[[Task], nn.Module], str]] = {
    "detached": (lambda task: Detached(torch.relu), "no output on random records depends on a parameter"),
    "complex outputs": (lambda task: Complex(torch.relu), "numbers of type torch.complex64"),
    "complex parameters": (lambda task: nn.Linear(5, 3, dtype=torch.complex64), "torch.complex64"),
    "no values": (lambda task: nn.Linear(5, 3, device="meta"), "device meta"),
    "no super().__init__()": (lambda task: Unfinished(), "super"),
}


@pytest.mark.parametrize(("make", "line"), WRONG.values(), ids=WRONG.keys())
def test_what_cannot_learn_is_one_line(
    module: types.ModuleType, make: Callable[[Task], nn.Module], line: str
) -> None:
    with pytest.raises(InputError, match=line):
        learner_of(module, make)


class Table(nn.Module):
    """Makes a constant table on its first call, as position embeddings often do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.table: Tensor | None = None

    def forward(self, features: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.linspace(0.0, 1.0, 5)
        outputs: Tensor = self.linear(features + self.table)
        return outputs


def test_a_table_made_on_the_first_call_is_no_state(module: types.ModuleType) -> None:
    learner = learner_of(module, lambda task: Table())
    first = learner.predict(learner.initial(), batch().features)  # type: ignore[attr-defined]
    torch.testing.assert_close(first[:1], learner.predict(learner.initial(), batch().features[:1]))  # type: ignore[attr-defined]


def test_a_signal_that_ends_the_program_passes_through_a_model(module: types.ModuleType) -> None:
    """What the command line raises when it is told to end is not the model's mistake."""

    def ended(features: Tensor) -> Tensor:
        raise Ended

    learner = learner_of(module, lambda task: Own(ended))
    with pytest.raises(Ended):
        total_score(learner, learner.initial(), batch())  # type: ignore[arg-type,attr-defined]
