"""What travels between server and sites, and nothing else.

Every message is a Flower `RecordDict` with one record of plain values, `coterie`, and where a model travels
an `arrays` record of float32 arrays (float64 for a clipped update, which is scaled once and then added up as
it is). Reading is strict on both sides: a field too many, too few or of another
type, an array of another shape or with a value that is not finite makes the message garbage
(`GarbageError`, whose text never repeats what was in it).

| message type | to a site | back |
|---|---|---|
| `query.facts` | nothing | name, numbers of records, task, how often models may be scored |
| `query.offer` | the contract | accepted or why not |
| `train` | contract, round, release, start model (and anchor) | one released vector |
| `query.select` | contract, round, release, k models | one released index |
| `train.contribute` | contract, round, release, order of records, k models | its choice, its clipped update |
| `evaluate` | contract, round, model | noisy number of held-out records that it gets right, if planned |
| `query.finished` | contract | nothing: the site may close its books |
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self, TypeAlias

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from numpy.typing import NDArray

from coterie.algorithms.protocol import Vector
from coterie.data.records import Task
from coterie.errors import CoterieError
from coterie.privacy import HeldOut
from coterie.privacy.ranges import PULL

FORMAT = 1
PLAIN = "coterie"
ARRAYS = "arrays"

FACTS = "query.facts"
OFFER = "query.offer"
TRAIN = "train"
SELECT = "query.select"
CONTRIBUTE = "train.contribute"
EVALUATE = "evaluate"
FINISHED = "query.finished"
KINDS = (FACTS, OFFER, TRAIN, SELECT, CONTRIBUTE, EVALUATE, FINISHED)

REFUSALS = {
    "no contract": "it has approved no plan yet",
    "other contract": "the message does not belong to the plan that it approved",
    "not planned": "its plan has no such release",
    "over budget": "its plan has no such release left",
    "passed": "the round is over",
    "late": "the message came after its time",
    "garbage": "the message is not one of ours",
    "not allowed": "its operator does not allow it",
    "failed": "something went wrong there; its own log says what",
    "other experiment": "its ledger belongs to another experiment",
    "out of range": "a number in it is smaller or larger than any that is allowed",
    "too much": "the plan would spend more than its operator allows",
    "other data": "the plan does not describe its records",
    "model": "the model does not fit its records",
    "words": "a text in it is too long, or not one that a site would print",
    "model code": "its operator has not allowed the model's code",
    "not trusted": "its operator has not said that the server is trusted with its updates (--trust-server)",
    "closed": "its books are closed",
}
"""Everything a site may say when it does not answer. Fixed words: an error text could carry data."""

Scalar: TypeAlias = str | int | float | bool
Values: TypeAlias = NDArray[np.float32] | NDArray[np.float64] | NDArray[np.int64]
"""What a site answers with: a vector, or an index as an array of one."""
Arrays: TypeAlias = Mapping[str, NDArray[np.float32]] | Mapping[str, NDArray[np.float64]]


class GarbageError(CoterieError):
    """A message that is not what it should be."""


class RefusedError(CoterieError):
    """A site does not answer; the reason is a key of `REFUSALS`."""

    def __init__(self, reason: str) -> None:
        assert reason in REFUSALS
        self.reason = reason
        super().__init__(REFUSALS[reason])


# --- records ----------------------------------------------------------------------------------------


def pack(plain: Mapping[str, Scalar], arrays: Arrays | None = None, kind: str = "float32") -> RecordDict:
    """A message's content."""
    content = RecordDict({PLAIN: ConfigRecord({"format": FORMAT, **plain})})
    if arrays:
        content[ARRAYS] = ArrayRecord(
            {name: Array(np.ascontiguousarray(array, dtype=kind)) for name, array in arrays.items()}
        )
    return content


def plain_of(content: RecordDict, fields: Mapping[str, type]) -> dict[str, Any]:
    """The plain values of a message, exactly these, exactly of these types."""
    record = content.config_records.get(PLAIN)
    if record is None or set(content) - {PLAIN, ARRAYS}:
        raise GarbageError("records other than ours")
    found = dict(record)
    if found.pop("format", None) != FORMAT:
        raise GarbageError("another format")
    if found.keys() != fields.keys():
        raise GarbageError("fields missing or unknown")
    for name, kind in fields.items():
        if type(found[name]) is not kind or (kind is float and not math.isfinite(found[name])):
            raise GarbageError(f"{name} is not of its type")
    return found


def arrays_of(content: RecordDict, shapes: Mapping[str, Sequence[int | None]]) -> dict[str, Vector]:
    """The arrays of a message: exactly these, float32, finite, of these shapes (None: any length)."""
    return {name: _array(array, shapes[name], "float32") for name, array in _named(content, shapes).items()}


def _named(content: RecordDict, names: Iterable[str]) -> Mapping[str, Array]:
    record = content.array_records.get(ARRAYS, {})
    if set(record) != set(names):
        raise GarbageError("arrays missing or unknown")
    return {name: record[name] for name in names}


def _array(array: Array, shape: Sequence[int | None], kind: str) -> Any:
    stated = tuple(array.shape)
    if array.dtype != kind or not _fits(stated, shape):
        raise GarbageError("an array of another type or shape")
    # What the header says is checked before numpy allocates for it, what numpy found after.
    if not 0 <= len(array.data) - np.dtype(kind).itemsize * math.prod(stated) <= 256:
        raise GarbageError("an array whose bytes do not match its shape")
    try:
        values = array.numpy()
    except Exception:
        raise GarbageError("an array that cannot be read") from None
    if values.dtype != kind or values.shape != stated:
        raise GarbageError("an array that is not what it says")
    if not np.isfinite(values).all():
        raise GarbageError("values that are not finite")
    return np.ascontiguousarray(values)


def _fits(found: tuple[int, ...], wanted: Sequence[int | None]) -> bool:
    return len(found) == len(wanted) and all(
        have >= 1 if want is None else have == want for have, want in zip(found, wanted, strict=True)
    )


def is_refusal(content: RecordDict) -> str | None:
    """The reason, if the content is a refusal."""
    record = content.config_records.get(PLAIN, {})
    reason = record.get("refused")
    return reason if isinstance(reason, str) and reason in REFUSALS else None


def refusal(reason: str) -> RecordDict:
    assert reason in REFUSALS
    return pack({"refused": reason})


# --- asking for facts -------------------------------------------------------------------------------


@dataclass(frozen=True)
class SiteFacts:
    """What a site makes public before anything else.

    Args:
        records: how many it trains on.
        held_out: how many it trains on nowhere, by its operator's choice.
        reported: how often those may score models, and what that may cost them; None: never.
        simulation: whether its noise comes from a seed.
    """

    name: str
    records: int
    held_out: int
    reported: HeldOut | None
    task: Task
    simulation: bool

    def to_content(self) -> RecordDict:
        reported = self.reported
        return pack(
            {
                "name": self.name,
                "records": self.records,
                "held_out": self.held_out,
                "reports": 0 if reported is None else reported.reports,
                "report_epsilon": 0.0 if reported is None else reported.epsilon,
                "task": json.dumps(asdict(self.task)),
                "simulation": self.simulation,
            }
        )

    @classmethod
    def from_content(cls, content: RecordDict) -> Self:
        fields = {"name": str, "records": int, "held_out": int, "reports": int, "report_epsilon": float}
        found = plain_of(content, {**fields, "task": str, "simulation": bool})
        held_out, reports, epsilon = found["held_out"], found["reports"], found["report_epsilon"]
        sound = (
            1 <= len(found["name"]) <= 200
            and found["records"] >= 1
            and held_out >= 0
            and reports >= 0
            and (reports == 0 or (held_out > 0 and epsilon > 0))
        )
        if not sound:
            raise GarbageError("facts that are none")
        try:
            task = task_from_json(json.loads(found["task"]))
        except (ValueError, RecursionError):
            raise GarbageError("a task that is none") from None
        reported = HeldOut(held_out, epsilon, reports) if reports else None
        return cls(found["name"], found["records"], held_out, reported, task, found["simulation"])


def task_from_json(data: Any) -> Task:
    """The task that `dataclasses.asdict` wrote."""
    try:
        shape = tuple(int(size) for size in data["shape"])
        task = Task(
            data["kind"],
            shape,
            int(data["classes"]),
            vocabulary=data["vocabulary"],
            error_cap=data["error_cap"],
        )
        sound = (
            data.keys() == asdict(task).keys()
            and task.kind in ("classification", "regression")
            and all(size >= 1 for size in shape)
            and (task.vocabulary is None or (type(task.vocabulary) is int and task.vocabulary >= 1))
            and (task.error_cap is None or (type(task.error_cap) is float and 0 < task.error_cap < math.inf))
            and (task.classes >= 2) == (task.kind == "classification")
        )
    except (KeyError, TypeError, AttributeError, ValueError):
        raise GarbageError("a task that is none") from None
    if not sound:
        raise GarbageError("a task that is none")
    return task


# --- requests of a round ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """Which release of which round, under which contract."""

    contract: str
    round: int
    release: str

    def plain(self) -> dict[str, Scalar]:
        return {"contract": self.contract, "round": self.round, "release": self.release}

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Self:
        if plain["round"] < 1:
            raise GarbageError("a round that is none")
        return cls(plain["contract"], plain["round"], plain["release"])


_ASKED: dict[str, type] = {"contract": str, "round": int, "release": str}


@dataclass(frozen=True)
class TrainMessage:
    """Learn from this start model, release what the plan says."""

    asked: Asked
    start: Vector
    anchor: Vector | None
    anchor_weight: float

    def to_content(self) -> RecordDict:
        arrays = {"start": self.start}
        if self.anchor is not None:
            arrays["anchor"] = self.anchor
        return pack({**self.asked.plain(), "anchor_weight": float(self.anchor_weight)}, arrays)

    @classmethod
    def from_content(cls, content: RecordDict, parameters: int) -> Self:
        plain = plain_of(content, {**_ASKED, "anchor_weight": float})
        weight = plain["anchor_weight"]
        if weight != 0 and weight not in PULL:
            raise GarbageError("an anchor weight out of its range")
        names = ("start", "anchor") if weight != 0 else ("start",)
        arrays = arrays_of(content, dict.fromkeys(names, (parameters,)))
        return cls(Asked.of(plain), arrays["start"], arrays.get("anchor"), weight)


@dataclass(frozen=True)
class SelectMessage:
    """Choose one of these models."""

    asked: Asked
    models: NDArray[np.float32]

    def to_content(self) -> RecordDict:
        return pack(self.asked.plain(), {"models": self.models})

    @classmethod
    def from_content(cls, content: RecordDict, parameters: int) -> Self:
        plain = plain_of(content, _ASKED)
        return cls(Asked.of(plain), arrays_of(content, {"models": (None, parameters)})["models"])


@dataclass(frozen=True)
class ContributeMessage:
    """Learn from the one of these models that fits, without noise, and send the clipped update.

    Args:
        order: seed of the order in which the records are gone through; nothing rests on it.
    """

    asked: Asked
    order: int
    models: NDArray[np.float32]

    def to_content(self) -> RecordDict:
        # As text: Flower's integers have a sign.
        return pack({**self.asked.plain(), "order": f"{self.order:016x}"}, {"models": self.models})

    @classmethod
    def from_content(cls, content: RecordDict, parameters: int) -> Self:
        plain = plain_of(content, {**_ASKED, "order": str})
        if len(plain["order"]) != 16 or set(plain["order"]) - set("0123456789abcdef"):
            raise GarbageError("an order that is none")
        models = arrays_of(content, {"models": (None, parameters)})["models"]
        return cls(Asked.of(plain), int(plain["order"], 16), models)


@dataclass(frozen=True)
class EvaluateMessage:
    """Score this model, or the one of these that the site would use, on held-out records, as planned."""

    asked: Asked
    models: NDArray[np.float32]

    def to_content(self) -> RecordDict:
        return pack(self.asked.plain(), {"models": self.models})

    @classmethod
    def from_content(cls, content: RecordDict, parameters: int) -> Self:
        plain = plain_of(content, _ASKED)
        return cls(Asked.of(plain), arrays_of(content, {"models": (None, parameters)})["models"])


# --- answers of a round -----------------------------------------------------------------------------


def answer_with_vector(asked: Asked, value: Vector) -> RecordDict:
    return pack(asked.plain(), {"value": value})


def vector_in(content: RecordDict, asked: Asked, length: int) -> Vector:
    """The released vector in an answer to exactly this request."""
    _check_answers(plain_of(content, _ASKED), asked)
    return arrays_of(content, {"value": (length,)})["value"]


def answer_with_index(asked: Asked, value: int) -> RecordDict:
    return pack({**asked.plain(), "value": value})


def index_in(content: RecordDict, asked: Asked, choices: int) -> int:
    """The released index in an answer to exactly this request."""
    plain = plain_of(content, {**_ASKED, "value": int})
    _check_answers(plain, asked)
    value: int = plain["value"]
    if not 0 <= value < choices:
        raise GarbageError("an index out of range")
    return value


def answer_with_contribution(asked: Asked, choice: int, value: NDArray[np.float64]) -> RecordDict:
    return pack({**asked.plain(), "choice": choice}, {"value": value}, "float64")


def contribution_in(
    content: RecordDict, asked: Asked, choices: int, length: int, clip: float
) -> tuple[int, NDArray[np.float64]]:
    """The choice and the clipped update in an answer to exactly this request."""
    plain = plain_of(content, {**_ASKED, "choice": int})
    _check_answers(plain, asked)
    if not 0 <= plain["choice"] < choices:
        raise GarbageError("a choice out of range")
    value: NDArray[np.float64] = _array(_named(content, ["value"])["value"], (length,), "float64")
    # What an honest site sends is shorter than the clip by more than rounding takes.
    if np.abs(value).max(initial=0.0) > clip or np.linalg.norm(value) > clip:
        raise GarbageError("an update longer than the clip")
    return plain["choice"], value


def answer_with_score(asked: Asked, value: float) -> RecordDict:
    return pack({**asked.plain(), "value": float(value)})


def score_in(content: RecordDict, asked: Asked, least: float, most: float) -> float:
    """The score in an answer to exactly this request, which an honest site keeps within these bounds."""
    plain = plain_of(content, {**_ASKED, "value": float})
    _check_answers(plain, asked)
    value: float = plain["value"]
    if not least <= value <= most:
        raise GarbageError("a score that no honest site could have reported")
    return value


def _check_answers(plain: Mapping[str, Any], asked: Asked) -> None:
    if {name: plain[name] for name in _ASKED} != asked.plain():
        raise GarbageError("an answer to something else")
