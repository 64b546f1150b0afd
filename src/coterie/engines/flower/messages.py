"""What travels between server and sites, and nothing else.

Every message is a Flower `RecordDict` with one record of plain values, `coterie`, and where a model travels
an `arrays` record of float32 arrays (float64 for a clipped update, which is scaled once and then added up as
it is). Reading is strict on both sides: a field too many, too few or of another type, an array of another
shape or with a value that is not finite makes the message garbage (`GarbageError`, whose text never repeats
what was in it).

| message type | to a site | back |
|---|---|---|
| `query.facts` | nothing | name, numbers of records, task, how often models may be scored |
| `query.offer` | the contract | accepted or why not |
| `train` | contract, round, release, start model (and anchor) | one released vector |
| `query.select` | contract, round, release, k models | one released index |
| `train.contribute` | contract, round, release, order of records, k models | its choice, its clipped update |
| `evaluate` | contract, round, model | noisy number of held-out records that it gets right, if planned |
| `query.finished` | contract, the models that the site uses or chooses from | nothing: it may finish |
"""

import json
import logging
import math
import re
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Self, TypeAlias, cast

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from numpy.typing import NDArray

from coterie.algorithms.protocol import Vector
from coterie.data.records import Task
from coterie.errors import CoterieError
from coterie.privacy import HeldOut
from coterie.privacy.plain import Key, MalformedError, Plain, record, register
from coterie.privacy.plan import canonical_json
from coterie.privacy.ranges import CLUSTERS, PULL, RECORDS_PER_PERSON, SEED, Range

CLUSTER_NUMBERS = Range(0, CLUSTERS.most - 1, whole=True)
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
    "code version": "it has another version of the model's code; install the same package on both sides",
    "not trusted": "its operator has not said that the server is trusted with its updates (--trust-server)",
    "closed": "it has finished this experiment",
    "disk": "its disk has no room for the answer; nothing was charged",
    "review": "its operator is still reading the plan",
    "declined": "its operator has read the plan and said no",
    "rule algorithms": "its operator's policy does not allow the algorithm (algorithms)",
    "rule models": "its operator's policy does not allow the model (models)",
    "rule rounds": "its operator's policy allows fewer rounds (rounds)",
    "rule steps": "it would take more steps of training than its operator allows (steps)",
    "rule hours": "the time that its operator's policy allows is over (hours)",
}
"""Everything a site may say when it does not answer. Fixed words: an error text could carry data."""

Scalar: TypeAlias = str | int | float | bool
Values: TypeAlias = NDArray[np.float32] | NDArray[np.float64] | NDArray[np.int64]
"""What a site answers with: a vector, or an index as an array of one."""
Arrays: TypeAlias = Mapping[str, NDArray[np.float32]] | Mapping[str, Values]


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
    GarbageError.when(not {PLAIN} <= set(content) <= {PLAIN, ARRAYS}, "records other than ours")
    found = dict(content.config_records.get(PLAIN, {}))
    GarbageError.when(found.pop("format", None) != FORMAT, "another format")
    GarbageError.when(found.keys() != fields.keys(), "fields missing or unknown")
    for name, kind in fields.items():
        fits = type(found[name]) is kind and (kind is not float or math.isfinite(found[name]))
        GarbageError.when(not fits, f"{name} is not of its type")
    return found


def arrays_of(
    content: RecordDict, shapes: Mapping[str, Sequence[int | None]], kind: str = "float32"
) -> dict[str, Any]:
    """The arrays of a message: exactly these, of this type, finite, of these shapes (None: any length)."""
    record = content.array_records.get(ARRAYS, {})
    GarbageError.when(set(record) != set(shapes), "arrays missing or unknown")
    return {name: _checked(record[name], shape, kind) for name, shape in shapes.items()}


def _checked(array: Array, shape: Sequence[int | None], kind: str) -> Any:
    stated = tuple(array.shape)
    fits = len(stated) == len(shape) and all(
        have >= 1 if want is None else have == want for have, want in zip(stated, shape, strict=True)
    )
    GarbageError.when(array.dtype != kind or not fits, "an array of another type or shape")
    # What the header says is checked before numpy allocates for it, what numpy found after.
    beside = len(array.data) - np.dtype(kind).itemsize * math.prod(stated)
    GarbageError.when(not 0 <= beside <= 256, "an array whose bytes do not match its shape")
    try:
        values = array.numpy()
    except Exception:
        raise GarbageError("an array that cannot be read") from None
    honest = values.dtype == kind and values.shape == stated and np.isfinite(values).all()
    GarbageError.when(not honest, "an array that is not what it says, or has values that are not finite")
    return np.ascontiguousarray(values)


def is_refusal(content: RecordDict) -> str | None:
    """The reason, if the content is a refusal."""
    reason = content.config_records.get(PLAIN, {}).get("refused")
    return reason if isinstance(reason, str) and reason in REFUSALS else None


def refusal(reason: str) -> RecordDict:
    return pack({"refused": reason})


# --- what travels as one text -----------------------------------------------------------------------


class Told(Plain):
    """Facts that travel as one text, under the name of what they are."""

    mistake = GarbageError

    def to_content(self) -> RecordDict:
        return pack({self.called: canonical_json(self.to_json())})

    @classmethod
    def from_content(cls, content: RecordDict) -> Self:
        text = plain_of(content, {cls.called: str})[cls.called]
        try:
            return cls.from_json(json.loads(text))
        except (ValueError, RecursionError, GarbageError):
            raise GarbageError(f"malformed {cls.called}") from None


@dataclass(frozen=True)
class SiteFacts(Told):
    """What a site makes public before anything else.

    Args:
        records: how many, or how many persons, it trains on.
        held_out: how many it trains on nowhere, by its operator's choice.
        reported: how often those may score models, and what that may cost them; None: never.
        simulation: whether its noise comes from a seed.
        records_per_person: where it counts persons, how many records of one; None: it counts records.
    """

    called = "facts"
    name: str
    records: int
    held_out: int
    reported: HeldOut | None
    task: Task
    simulation: bool
    records_per_person: Annotated[int | None, Key(optional=True)] = None

    @classmethod
    def read(cls, data: object) -> Self:
        facts = super().read(data)
        scored = facts.reported or HeldOut(facts.held_out, 1.0, 1)
        sound = (
            1 <= len(facts.name) <= 200
            and facts.records >= 1
            and scored.units == facts.held_out >= (0 if facts.reported is None else 1)
            and scored.reports >= 1
            and 0 < scored.epsilon < math.inf
            and (facts.records_per_person is None or facts.records_per_person in RECORDS_PER_PERSON)
            # JSON has numbers that no float holds.
            and max(facts.records, facts.held_out, scored.reports) in SEED
        )
        GarbageError.when(not sound, "malformed facts")
        return facts


def task_from_json(data: object) -> Task:
    """The task that was written as plain data, if there can be one like it."""
    try:
        task = cast(Task, record(Task).read(data))
    except MalformedError:
        raise GarbageError("malformed task") from None
    sound = (
        min(task.shape, default=1) >= 1
        and (task.vocabulary is None or task.vocabulary >= 1)
        and (task.error_cap is None or 0 < task.error_cap < math.inf)
        and (task.classes >= 2) == (task.kind == "classification")
    )
    GarbageError.when(not sound, "malformed task")
    return task


register(Task, record(Task).write, task_from_json)


# --- requests of a round, and their answers ---------------------------------------------------------


@dataclass(frozen=True)
class RequestId:
    """Which release of which round, under which contract."""

    contract: str
    round: int
    release: str


_ID: dict[str, type] = {"contract": str, "round": int, "release": str}

REQUESTS: Mapping[str, Mapping[str, type]] = {
    TRAIN: {"anchor_weight": float},
    SELECT: {},
    CONTRIBUTE: {"order": str},
    EVALUATE: {},
}
"""Plain values that requests of each kind have beside their `RequestId`."""


@dataclass(frozen=True)
class SiteRequest:
    """What a site is asked to compute in a round, from one model or several.

    Args:
        models: one in each row: the one to start training from, or those that the site chooses from.
        anchor: the model towards which training is pulled, with `anchor_weight`.
        order: seed of the order in which a contribution goes through the records; nothing rests on it.
    """

    id: RequestId
    models: NDArray[np.float32]
    anchor: Vector | None = None
    anchor_weight: float = 0.0
    order: int = 0

    def to_content(self, kind: str) -> RecordDict:
        # As text: Flower's integers have a sign.
        values = {"anchor_weight": float(self.anchor_weight), "order": f"{self.order:016x}"}
        anchored = {} if self.anchor is None else {"anchor": self.anchor}
        plain = {**asdict(self.id), **{name: values[name] for name in REQUESTS[kind]}}
        return pack(plain, {"models": self.models, **anchored})

    @classmethod
    def from_content(cls, kind: str, content: RecordDict, parameters: int) -> Self:
        plain = plain_of(content, {**_ID, **REQUESTS[kind]})
        weight, order = plain.get("anchor_weight", 0.0), plain.get("order", "0" * 16)
        GarbageError.when(weight != 0 and weight not in PULL, "an anchor weight out of its range")
        malformed = len(order) != 16 or set(order) - set("0123456789abcdef")
        GarbageError.when(bool(malformed), "malformed order of records")
        GarbageError.when(plain["round"] < 1, "a round before the first")
        shapes = {"models": (1 if kind == TRAIN else None, parameters)}
        arrays = arrays_of(content, {**shapes, "anchor": (parameters,)} if weight != 0 else shapes)
        identity = RequestId(**{name: plain[name] for name in _ID})
        return cls(identity, arrays["models"], arrays.get("anchor"), weight, int(order, 16))


@dataclass(frozen=True)
class FinalModels:
    """What a site takes home when nothing more will be asked of it.

    Args:
        models: one in each row: the one that it uses, or those that it chooses from itself.
        cluster: the number of the one that it uses; None where it chooses.
    """

    contract: str
    models: NDArray[np.float32]
    cluster: int | None

    def to_content(self) -> RecordDict:
        number = -1 if self.cluster is None else self.cluster
        return pack({"contract": self.contract, "cluster": number}, {"models": self.models})

    @classmethod
    def from_content(cls, content: RecordDict, parameters: int) -> Self:
        plain = plain_of(content, {"contract": str, "cluster": int})
        models, cluster = arrays_of(content, {"models": (None, parameters)})["models"], plain["cluster"]
        known = cluster in CLUSTER_NUMBERS and len(models) == 1
        GarbageError.when(not known and cluster != -1, "a model of no cluster")
        return cls(plain["contract"], models, cluster if known else None)


def answer(
    request: RequestId,
    plain: Mapping[str, Scalar] | None = None,
    value: Values | None = None,
    kind: str = "float32",
) -> RecordDict:
    """What a site sends back: plain values (an index, a score), a vector, or both."""
    return pack({**asdict(request), **(plain or {})}, None if value is None else {"value": value}, kind)


def read_answer(content: RecordDict, request: RequestId, fields: Mapping[str, type]) -> dict[str, Any]:
    """The plain values of an answer to exactly this request."""
    plain = plain_of(content, {**_ID, **fields})
    GarbageError.when({name: plain[name] for name in _ID} != asdict(request), "an answer to something else")
    return plain


def read_choice(content: RecordDict, request: RequestId, choices: int, name: str = "value") -> int:
    """The index in an answer: one of so many."""
    value: int = read_answer(content, request, {name: int})[name]
    GarbageError.when(not 0 <= value < choices, "an index out of range")
    return value


def read_vector(content: RecordDict, length: int, kind: str = "float32") -> Any:
    """The vector in an answer."""
    return arrays_of(content, {"value": (length,)}, kind)["value"]


# --- text from elsewhere: what a site lets into its contract, and into its own log ------------------

MOST_LETTERS = 300
"""Of any text in a contract."""
MOST_CAVEATS = 16
RELEASE = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._-]{0,39}")
"""Names that can stand in a line of the log without saying more than which release it was."""


def check_texts(data: object) -> None:
    """Raise `RefusedError` where a text in plain data, a key or a value, is very long or not printable."""
    waiting = [data]
    while waiting:
        found = waiting.pop()
        if isinstance(found, dict):
            waiting += [*found.keys(), *found.values()]
        elif isinstance(found, list):
            waiting += found
        elif isinstance(found, str) and (len(found) > MOST_LETTERS or not found.isprintable()):
            raise RefusedError("words")


def printable(text: str) -> str:
    """One line of a terminal, whatever is in it."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def quoted(text: str) -> str:
    """A text of the server's: one line, in quotes that it cannot close."""
    return json.dumps(printable(text), ensure_ascii=False)


class SiteLog(logging.LoggerAdapter[logging.Logger]):
    """A site's log: nothing that came over the network ends a line or moves a cursor."""

    def log(self, level: int, msg: object, *args: object, **options: Any) -> None:
        if self.isEnabledFor(level):
            text = str(msg) % args if args else str(msg)
            super().log(level, "%s", printable(text), **options)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        return msg, kwargs  # what an event brings along stays with it

    def event(self, name: str, text: str, *, level: int = logging.INFO, **facts: Any) -> None:
        """Something that a program may want to read: its facts are names, numbers and fixed words."""
        self.log(level, "%s", text, extra={"event": name, "facts": facts})


def site_log(name: str) -> SiteLog:
    return SiteLog(logging.getLogger(name), {})
