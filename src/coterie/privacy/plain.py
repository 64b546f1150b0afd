"""Facts as plain data and back: one converter for everything that is written to a file or sent to a site.

A frozen dataclass becomes an object with a key for each field, in the order of its fields; declared types say
how each value is spelled and what is read. Reading is strict, because a file may have been changed and a
message may come from anybody: every key once and no other, integers that are integers, texts that are texts.
What does not fit is a `MalformedError` that names the key.
"""

import dataclasses
import math
import reprlib
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    Self,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from coterie.privacy.errors import CoterieError, PlanError

T = TypeVar("T")
_F = TypeVar("_F", bound=Callable[..., object])
Json = dict[str, object]


class MalformedError(ValueError):
    """Plain data that does not describe what it should."""


@dataclass(frozen=True)
class Key:
    """In an annotation: the key under which a field is written, where it is not the field's name."""

    name: str


@dataclass(frozen=True)
class KeyedBy:
    """In an annotation of a tuple of facts: written as an object whose keys are this field of each."""

    name: str


@dataclass(frozen=True)
class Codec:
    """How values of one kind are written and read."""

    write: Callable[[Any], object]
    read: Callable[[object], object]


class Plain:
    """A dataclass that can be written as plain data and read back."""

    __slots__ = ()
    called: ClassVar[str]
    """What it is, for whoever wrote one that is malformed."""
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

    @classmethod
    def read(cls, data: object) -> Self:
        """The same, inside of something larger that says where it stands."""
        return cast(Self, record(cls).read(data))


def _remembered(function: _F) -> _F:
    return cast(_F, cache(function))


_CODECS: dict[object, Codec] = {}


def register(kind: object, write: Callable[[Any], object], read: Callable[[object], object]) -> None:
    """Say how values of a kind are spelled that is no dataclass of ours."""
    _CODECS[kind] = Codec(write, read)


def to_plain(kind: object, value: object) -> object:
    """A value of this kind (a class or an annotation) as plain data."""
    return codec(kind).write(value)


def from_plain(kind: type[T], data: object) -> T:
    """The value of this kind that `to_plain` wrote."""
    return cast(T, codec(kind).read(data))


@_remembered
def codec(kind: object) -> Codec:
    """How values of this kind are written and read."""
    if kind in _CODECS:
        return _CODECS[kind]
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        keyed = [note.name for note in arguments[1:] if isinstance(note, KeyedBy)]
        return _keyed(get_args(arguments[0])[0], keyed[0]) if keyed else codec(arguments[0])
    if origin in (Union, types.UnionType):
        return _either(arguments)
    if origin is Literal:
        return Codec(_same, lambda data: data if data in arguments else _refuse(data, f"one of {arguments}"))
    if origin in (tuple, list):
        return _row(origin, arguments)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        inner = codec(arguments[1])
        return Codec(
            lambda value: {key: inner.write(each) for key, each in value.items()},
            lambda data: {key: _inside(key, inner, each) for key, each in _object(data).items()},
        )
    if isinstance(kind, type) and issubclass(kind, Plain):
        return Codec(lambda value: value.to_json(), kind.read)
    if isinstance(kind, type) and issubclass(kind, Enum):
        allowed = {member.value: member for member in kind}
        return Codec(lambda value: value.value, lambda data: _member(data, allowed))
    if dataclasses.is_dataclass(kind):
        return record(cast(type, kind))
    raise TypeError(f"{kind}: no way to write it is known")


@_remembered
def record(kind: type, keys: tuple[tuple[str, str], ...] = ()) -> Codec:
    """How a class with declared fields is written: key by key, in the order of its fields.

    Args:
        kind: the class.
        keys: names of all fields and their keys, where the class itself cannot say.
    """
    hints = get_type_hints(kind, include_extras=True)
    if dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind) if field.init]
        keys = tuple((name, _key(name, hints[name])) for name in names)
    fields = [(name, key, codec(hints[name])) for name, key in keys]
    expected = {key for _, key in keys}

    def read(data: object) -> object:
        found = _object(data)
        odd = sorted(map(str, found.keys() ^ expected))
        if odd:
            raise MalformedError(f"missing or unknown fields: {', '.join(odd)}")
        return kind(**{name: _inside(key, each, found[key]) for name, key, each in fields})

    return Codec(lambda value: {key: each.write(getattr(value, name)) for name, key, each in fields}, read)


def _key(name: str, hint: object) -> str:
    notes = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    return next((note.name for note in notes if isinstance(note, Key)), name)


def _keyed(kind: type, by: str) -> Codec:
    """Facts in an object, by one of their fields."""
    inner = codec(kind)

    def write(values: Iterable[object]) -> Json:
        rows = [cast(Json, inner.write(value)) for value in values]
        return {str(row[by]): {key: each for key, each in row.items() if key != by} for row in rows}

    def read(data: object) -> object:
        rows = {name: _object(row) for name, row in _object(data).items()}
        return tuple(_inside(name, inner, {**row, by: name}) for name, row in rows.items())

    return Codec(write, read)


def _either(kinds: tuple[object, ...]) -> Codec:
    """The first of several kinds that fits."""
    options = [(kind, codec(kind)) for kind in kinds]

    def write(value: object) -> object:
        for kind, option in options:
            plain = get_origin(kind) or kind
            if isinstance(plain, type) and isinstance(value, plain):
                return option.write(value)
        return codec(float).write(value)  # an integer, where a number is allowed

    def read(data: object) -> object:
        said = []
        for _, option in options:
            try:
                return option.read(data)
            except MalformedError as mistake:
                said.append(str(mistake))
        raise MalformedError(said[0])

    return Codec(write, read)


def _row(origin: Callable[[Iterable[object]], object], kinds: tuple[object, ...]) -> Codec:
    """A tuple of so many values of these kinds, or a tuple or list of any number of one kind."""
    many = origin is list or (len(kinds) == 2 and kinds[1] is ...)
    inner = [codec(kind) for kind in (kinds[:1] if many else kinds)]

    def read(data: object) -> object:
        if not isinstance(data, list | tuple) or not (many or len(data) == len(inner)):
            return _refuse(data, "a list" if many else f"a list of {len(inner)}")
        each = inner * len(data) if many else inner
        return origin(_inside(str(place), one, data[place]) for place, one in enumerate(each))

    def write(value: Any) -> list[object]:
        each = inner * len(value) if many else inner
        return [one.write(item) for one, item in zip(each, value, strict=True)]

    return Codec(write, read)


def _inside(key: str, inner: Codec, data: object) -> object:
    try:
        return inner.read(data)
    except MalformedError as mistake:
        raise MalformedError(f"{key}: {mistake}") from None


def _refuse(data: object, allowed: str) -> object:
    raise MalformedError(f"{reprlib.repr(data)} is not allowed, {allowed} is")


def _object(data: object) -> Mapping[str, object]:
    return data if isinstance(data, Mapping) else cast(Mapping[str, object], _refuse(data, "an object"))


def _member(data: object, allowed: Mapping[object, object]) -> object:
    if isinstance(data, str | int) and data in allowed:
        return allowed[data]
    return _refuse(data, f"one of {', '.join(map(str, allowed))}")


def _number(data: object) -> object:
    """JSON has no infinity: it is written as a word."""
    if data == "inf":
        return math.inf
    if isinstance(data, int | float) and not isinstance(data, bool) and math.isfinite(data):
        return float(data)
    return _refuse(data, "a number")


def _exactly(kind: type, name: str) -> Callable[[object], object]:
    return lambda data: data if type(data) is kind else _refuse(data, name)


def _same(value: object) -> object:
    return value


# By declared type, so that a clip of 1 and a clip of 1.0 have the same spelling.
register(float, lambda value: "inf" if math.isinf(value) else float(value), _number)
register(int, int, _exactly(int, "an integer"))
register(str, _same, _exactly(str, "a text"))
register(bool, bool, _exactly(bool, "true or false"))
register(type(None), _same, _exactly(type(None), "null"))
