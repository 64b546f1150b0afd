"""Facts as plain data and back: one converter for everything that is written to a file or sent to a site.

A frozen dataclass becomes an object with a key for each field, in the order of its fields; declared types say
how each value is spelled and what is read. Reading is strict, because a file may have been changed and a
message may come from anybody: every key once and no other, integers that are integers, texts that are texts.
What does not fit is a `MalformedError` that names the key.
"""

import dataclasses
import math
import reprlib
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NoReturn,
    Self,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from coterie.privacy.errors import CoterieError, PlanError

Json = dict[str, object]
T = TypeVar("T")
_F = TypeVar("_F", bound=Callable[..., object])


class MalformedError(ValueError):
    """Plain data that does not describe what it should."""


@dataclass(frozen=True)
class Key:
    """In an annotation: how a field is written.

    Args:
        name: the key, where it is not the field's name.
        by: of a tuple of facts: as an object whose keys are this field of each.
        optional: whether the key stands there only where the field has another value than its default.
    """

    name: str = ""
    by: str = ""
    optional: bool = False


@dataclass(frozen=True)
class Codec:
    """How values of one kind are written and read."""

    write: Callable[[Any], Any]
    read: Callable[[object], Any]


class Plain:
    """A dataclass that can be written as plain data and read back.

    `called` is what it is, for whoever wrote one that is malformed, and `mistake` the error about that.
    """

    __slots__ = ()
    called: ClassVar[str]
    mistake: ClassVar[type[CoterieError]] = PlanError

    def to_json(self) -> Json:
        """Itself as plain data."""
        return cast(Json, record(type(self)).write(self))

    @classmethod
    def from_json(cls, data: object) -> Self:
        """What `to_json` wrote; one line that says what is wrong where it did not."""
        try:
            return cls.read(data)
        except MalformedError as mistake:
            raise cls.mistake(f"{cls.called}: {mistake}") from None
        except RecursionError:
            raise cls.mistake(f"{cls.called}: nested too deeply") from None

    @classmethod
    def read(cls, data: object) -> Self:
        """The same, inside of something larger that says where it stands."""
        return cast(Self, record(cls).read(data))


def _once(function: _F) -> _F:
    return cast(_F, cache(function))


_CODECS: dict[object, Codec] = {}


def register(kind: object, write: Callable[[Any], object], read: Callable[[object], object]) -> None:
    """Say how values of a kind are spelled that is no dataclass of ours."""
    _CODECS[kind] = Codec(write, read)


def from_plain(kind: type[T], data: object) -> T:
    """The value of this kind that was written as plain data."""
    return cast(T, codec(kind).read(data))


@_once
def codec(kind: object) -> Codec:
    """How values of this kind (a class or an annotation) are written and read."""
    if kind in _CODECS:
        return _CODECS[kind]
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _keyed(kind) if _note(kind).by else codec(arguments[0])
    if origin in (Union, types.UnionType):
        return _either(arguments)
    if origin is Literal:
        return _one_of({value: value for value in arguments})
    if origin in (tuple, list):
        return _row(cast(type, origin), arguments)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        inner = codec(arguments[1])
        return Codec(
            lambda value: {key: inner.write(each) for key, each in value.items()},
            lambda data: {key: _inside(key, inner, each) for key, each in _object(data).items()},
        )
    if isinstance(kind, type) and issubclass(kind, Plain):
        return Codec(lambda value: value.to_json(), kind.read)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _one_of({member.value: member for member in kind})
    return record(kind)


@_once
def record(kind: Any, keys: tuple[tuple[str, str], ...] = ()) -> Codec:
    """How a class with declared fields is written: key by key, in the order of its fields.

    Args:
        kind: the class.
        keys: names of all fields and their keys, where the class itself cannot say.
    """
    hints = get_type_hints(kind, include_extras=True)
    optional: dict[str, object] = {}
    if dataclasses.is_dataclass(kind):
        keys = tuple(
            (each.name, _note(hints[each.name]).name or each.name) for each in dataclasses.fields(kind)
        )
        defaults = {each.name: each.default for each in dataclasses.fields(kind)}
        optional = {key: defaults[name] for name, key in keys if _note(hints[name]).optional}
    fields = [(name, key, codec(hints[name])) for name, key in keys]

    def read(data: object) -> object:
        found = _object(data)
        odd = sorted(map(str, (found.keys() ^ {key for _, key in keys}) - (optional.keys() - found.keys())))
        if odd:
            raise MalformedError(f"missing or unknown fields: {', '.join(odd)}")
        there = [(name, key, each) for name, key, each in fields if key in found]
        return kind(**{name: _inside(key, each, found[key]) for name, key, each in there})

    def write(value: Any) -> Json:
        held = ((key, each, getattr(value, name)) for name, key, each in fields)
        return {
            key: each.write(own) for key, each, own in held if key not in optional or own != optional[key]
        }

    return Codec(write, read)


def _note(hint: object) -> Key:
    notes = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    return next((note for note in notes if isinstance(note, Key)), Key())


def _keyed(hint: object) -> Codec:
    """Facts in an object, by one of their fields."""
    by, inner = _note(hint).by, codec(get_args(get_args(hint)[0])[0])

    def write(values: Any) -> Json:
        rows = [inner.write(value) for value in values]
        return {row.pop(by): row for row in rows}

    def read(data: object) -> object:
        rows = {name: _object(row) for name, row in _object(data).items()}
        for name, row in rows.items():
            if by in row:
                raise MalformedError(f"{name}: missing or unknown fields: {by}")
        return tuple(_inside(name, inner, {**row, by: name}) for name, row in rows.items())

    return Codec(write, read)


def _either(kinds: tuple[Any, ...]) -> Codec:
    """The first of several kinds that fits; an integer, too, where a number is allowed."""

    def write(value: object) -> object:
        fitting = (kind for kind in kinds if isinstance(value, get_origin(kind) or kind))
        return codec(next(fitting, float)).write(value)

    def read(data: object) -> object:
        said = []
        for kind in kinds:
            try:
                return codec(kind).read(data)
            except MalformedError as mistake:
                said.append(mistake)
        raise said[0]

    return Codec(write, read)


def _row(origin: Any, kinds: tuple[Any, ...]) -> Codec:
    """A tuple of so many values of these kinds, or a tuple or list of any number of one kind."""
    many = origin is list or kinds[-1] is ...
    inner = [codec(kind) for kind in (kinds[:1] if many else kinds)]

    def read(data: object) -> object:
        if not isinstance(data, list | tuple) or not (many or len(data) == len(inner)):
            _refuse(data, "a list" if many else f"a list of {len(inner)}")
        each = inner * len(data) if many else inner
        return origin(_inside(str(place), one, data[place]) for place, one in enumerate(each))

    return Codec(lambda value: [inner[at % len(inner)].write(item) for at, item in enumerate(value)], read)


def _one_of(allowed: Mapping[object, object]) -> Codec:
    def read(data: object) -> object:
        if not isinstance(data, str | int) or data not in allowed:
            _refuse(data, f"one of {', '.join(map(str, allowed))}")
        return allowed[data]

    return Codec(lambda value: value.value if isinstance(value, Enum) else value, read)


def _inside(key: str, inner: Codec, data: object) -> object:
    try:
        return inner.read(data)
    except MalformedError as mistake:
        raise MalformedError(f"{key}: {mistake}") from None


def _refuse(data: object, allowed: str) -> NoReturn:
    raise MalformedError(f"{reprlib.repr(data)} is not allowed, {allowed} is")


def _object(data: object) -> Mapping[str, object]:
    return data if isinstance(data, Mapping) else _refuse(data, "an object")


def _number(data: object) -> float:
    """JSON has no infinity: it is written as a word."""
    if isinstance(data, int | float) and not isinstance(data, bool) and abs(data) <= sys.float_info.max:
        return float(data)
    return math.inf if data == "inf" else _refuse(data, "a number")


def _exactly(kind: type, name: str) -> Callable[[object], object]:
    return lambda data: data if type(data) is kind else _refuse(data, name)


# By declared type, so that a clip of 1 and a clip of 1.0 have the same spelling.
register(float, lambda value: "inf" if math.isinf(value) else float(value), _number)
register(int, int, _exactly(int, "an integer"))
register(str, str, _exactly(str, "a text"))
register(bool, bool, _exactly(bool, "true or false"))
register(type(None), lambda value: value, _exactly(type(None), "null"))
