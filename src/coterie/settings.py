"""The base of every section of the experiment file.

Each room declares the options it understands beside the code that uses them;
`coterie.experiment` puts the sections together.
"""

import difflib
import inspect
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Tag,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

from coterie.plugins import PluginKind

_NO_TRUTH = PydanticCustomError(
    "truth", "no truth value is meant here; put true and false in quotes where they are names"
)


RECORDED = {"recorded": True}
"""Context in which what a run was begun with is read again: no code of a user's own is imported."""


def is_recorded(info: ValidationInfo) -> bool:
    return info.context == RECORDED


def tag_of(section: object, key: str, default: str) -> str:
    """What a section that may be of several kinds says under the key that tells them apart.

    What is no section, or says what is no name, is taken for the default one, whose type complains of it.
    """
    found = section.get(key, default) if isinstance(section, Mapping) else getattr(section, key, default)
    return found if isinstance(found, str) else default


def within(allowed: Container[object], *others: object) -> AfterValidator:
    """A number in the range, or one of these instead."""

    def check(value: object) -> object:
        if value not in allowed and value not in others:
            words = f"{', '.join(map(str, others))} or " if others else ""
            raise ValueError(f"should be {words}{allowed}")
        return value

    return AfterValidator(check)


class Settings(BaseModel):
    """A frozen group of options; keys it does not know are errors, and truth values are no numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    @model_validator(mode="before")
    @classmethod
    def _truth_is_no_number(cls, values: Any) -> Any:
        """Refuse the 0 and 1 that false and true would become: `seeds.noise: false` would be a known seed."""
        if not isinstance(values, Mapping):
            return values
        mistakes = [
            InitErrorDetails(type=_NO_TRUTH, loc=(name,), input=values[key])
            for name, field in cls.model_fields.items()
            for key in {name, field.alias}
            if key in values and _says_truth(values[key], field.annotation)
        ]
        if mistakes:
            raise ValidationError.from_exception_data(cls.__name__, mistakes)
        return values


@dataclass(frozen=True)
class Acts:
    """Beside the type of an option: when a value that is not its default has any effect.

    Args:
        given: what must hold, for whoever reads that it does not.
        holds: whether it does, for the section of the option and the whole experiment.
    """

    given: str
    holds: Callable[[Any, Any], bool]


def departures(section: Settings) -> list[str]:
    """Names of the options that were set to something else than their default."""
    fields = type(section).model_fields.items()
    return [name for name, field in fields if getattr(section, name) != _default(field)]


def _default(field: FieldInfo) -> Any:
    return field.get_default(call_default_factory=True)


def idle(section: Settings, whole: Settings, inside: str = "") -> Iterator[tuple[str, str]]:
    """Dotted keys that were set and cannot act, each with a line that says what would make them."""
    written = section.model_dump(mode="json")
    for name, field in type(section).model_fields.items():
        value, key = getattr(section, name), f"{inside}{name}"
        if isinstance(value, Settings):
            yield from idle(value, whole, f"{key}.")
        for acts in (entry for entry in field.metadata if isinstance(entry, Acts)):
            if value != _default(field) and not acts.holds(section, whole):
                yield key, f"{key}: {written[name]} has no effect here; it acts with {acts.given}"


class NamedSettings(Settings):
    """A name out of a table of functions, and options that are parameters of the function behind it."""

    functions: ClassVar[Mapping[str, Callable[..., object]]] = {}
    plugin: ClassVar[PluginKind] = PluginKind("name", "coterie")
    """What a name that is no key of the table may stand for: a user's own function."""
    takes_own: ClassVar[bool] = False
    """Whether such a name may stand here; it then has no options."""

    name: str

    @classmethod
    def takes(cls, name: str, option: str) -> bool:
        return name in cls.functions and option in inspect.signature(cls.functions[name]).parameters

    @property
    def own(self) -> bool:
        """Whether it is a user's own code."""
        return self.name not in self.functions

    @model_validator(mode="after")
    def _known(self, info: ValidationInfo) -> Self:
        known = self.takes_own and (is_recorded(info) or self.plugin.target(self.name) is not None)
        if self.own and not known:
            raise ValueError(f"name: {self.plugin.unknown(self.name, self.functions)}")
        for option in self.given():
            if not self.takes(self.name, option):
                owners = ", ".join(name for name in self.functions if self.takes(name, option))
                raise ValueError(f"{option}: {self.name} has no such option; it belongs to {owners}")
        return self

    def given(self) -> dict[str, Any]:
        """The options that were set."""
        return self.model_dump(exclude={"name"}, exclude_none=True)


def _says_truth(value: object, *kinds: Any) -> bool:
    """Whether a truth value stands where these types want none; sections inside look for themselves."""
    parts = [part for kind in kinds for part in _parts(kind)]
    if isinstance(value, Mapping) and any(isinstance(part, type(BaseModel)) for part in parts):
        return False
    entries = value.values() if isinstance(value, Mapping) else value
    if isinstance(entries, Iterable) and not isinstance(entries, str):
        # No deeper than the types go: YAML can write a list that holds itself.
        inner = [part for kind in kinds for part in get_args(kind)]
        return bool(inner) and any(_says_truth(entry, *inner) for entry in entries)
    allowed = any(part is bool or part is Any or isinstance(part, bool) for part in parts)
    return isinstance(value, bool) and not allowed


def _parts(annotation: Any) -> Iterator[Any]:
    """A type and all that it is made of, the choices of a literal among them."""
    yield annotation
    for part in get_args(annotation):
        yield from _parts(part)


# --- from pydantic's errors to one line: the key, the value, what is allowed -------------------------------

_WANTED = {
    "model_type": "a section of keys and values",
    "model_attributes_type": "a section of keys and values",
    "dict_type": "a section of keys and values",
    "mapping_type": "a section of keys and values",
    "tuple_type": "a list",
    "int_type": "an integer",
    "int_parsing": "an integer",
    "int_parsing_size": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "a text",
    "path_type": "a path",
}
"""Of errors that only say that a value is of the wrong type."""


@dataclass(frozen=True)
class _Mistake:
    """One of pydantic's errors, at the key where the file has it.

    Args:
        path: the keys that lead to it.
        root: the same, up to a key that may have values of several types: pydantic tells of all of them.
        known: the fields of the section that holds the last key.
        inner: keys of sections that may stand there.
    """

    error: ErrorDetails
    path: tuple[str, ...]
    root: tuple[str, ...]
    known: Mapping[str, FieldInfo]
    inner: Collection[str]

    @property
    def rank(self) -> tuple[bool, int]:
        """Smaller for what says more: a value that is wrong in itself, then one deep inside."""
        kind, value = self.error["type"], self.error["input"]
        # A list is also too short where its entries are wrong.
        follows = kind == "too_short" and len(value) >= self.error["ctx"]["min_length"]
        return follows or kind in (*_WANTED, "literal_error"), -len(".".join(self.path))

    @property
    def reason(self) -> str:
        if self.error["type"] in _WANTED:
            return f"should be {_WANTED[self.error['type']]}"
        if self.error["type"] == "too_short":
            return f"should have {self.error['ctx']['min_length']} or more entries"
        message = self.error["msg"].removeprefix("Value error, ").removeprefix("Input ")
        return message[0].lower() + message[1:]


def explain(mistakes: ValidationError, model: type[BaseModel], prefix: str = "") -> str:
    """The first mistake in words, and how many more there are."""
    found = [_located(error, model) for error in mistakes.errors(include_url=False)]
    roots = {mistake.root for mistake in found}
    more = len([root for root in roots if not any(_inside(other, root) for other in roots - {root})]) - 1
    told = f" (and {more} more mistake{'s' if more > 1 else ''})" if more > 0 else ""
    related = [
        each for each in found if _inside(each.root, found[0].root) or _inside(found[0].root, each.root)
    ]
    best = min(related, key=lambda each: each.rank)
    alike = dict.fromkeys(each.reason for each in related if (each.path, each.rank) == (best.path, best.rank))
    reason = " or ".join([next(iter(alike)), *(each.removeprefix("should be ") for each in list(alike)[1:])])
    return _told(best, reason, prefix) + told


def _told(mistake: _Mistake, reason: str, prefix: str) -> str:
    error, known, name = mistake.error, mistake.known, mistake.path[-1] if mistake.path else ""
    key = ".".join(part for part in (prefix, *mistake.path) if part)
    description = known[name].description if name in known else None
    allowed = f"; {name} is {description}" if description else ""
    if error["type"] == "extra_forbidden":
        guesses = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
        hint = "".join(f"did you mean '{guess}'? " for guess in guesses)
        return f"{key}: unknown key; {hint}known here: {', '.join(known) or 'none'}"
    if error["type"] == "missing":
        return f"{key}: missing{allowed}"
    opening, given = reason.partition(": ")[0], error["input"]
    if not key or opening in mistake.inner or (isinstance(given, Mapping) and opening in given):
        # A check of a whole section names the key it is about itself.
        return f"{key}.{reason}".lstrip(".")
    shown = repr(given)
    return f"{key}: {shown if len(shown) <= 60 else f'{shown[:57]}...'} is not allowed, {reason}{allowed}"


def _located(error: ErrorDetails, model: type[BaseModel]) -> _Mistake:
    """The path of an error as written in the file.

    Pydantic puts the tag of a union (`federation.clusters.sizes`) into the location, and the type that it
    tried (`rate.float`); the file has neither.
    """
    path: list[str] = []
    root: tuple[str, ...] | None = None
    known: Mapping[str, FieldInfo] = {}
    members: list[tuple[Collection[str], type[BaseModel]]] = [((), model)]
    for step in error["loc"]:
        tagged = [member for member in members if len(members) > 1 and str(step) in member[0]]
        if tagged:
            members = tagged
        elif isinstance(step, int) and path:
            path[-1] += f"[{step}]"
        elif _is_type_branch(str(step)):
            root = root or tuple(path)
        else:
            path.append(str(step))
            known = members[0][1].model_fields if len(members) == 1 else {}
            members = _sections(known, path[-1])
    inner = {field for _, section in members for field in section.model_fields}
    return _Mistake(error, tuple(path), root or tuple(path), known, inner)


def _inside(path: tuple[str, ...], other: tuple[str, ...]) -> bool:
    """Whether a path is the other, or leads through it."""
    return f"{'.'.join(path)}.".replace("[", ".").startswith(f"{'.'.join(other)}.".replace("[", "."))


def _sections(known: Mapping[str, FieldInfo], name: str) -> list[tuple[Collection[str], type[BaseModel]]]:
    """The kinds of section that may stand under a key, each with the tags that tell it from the others."""
    return list(_models_in(known[name].rebuild_annotation(), ())) if name in known else []


def _is_type_branch(step: str) -> bool:
    """Whether a step names the branch of a union of plain types, such as `int` or `literal['auto']`."""
    return step in {"int", "float", "str", "bool"} or step.startswith(
        ("literal[", "constrained-", "tuple[", "function-", "lax-or-strict[")
    )


def _models_in(annotation: Any, tags: Collection[str]) -> Iterator[tuple[Collection[str], type[BaseModel]]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        fields = annotation.model_fields.values()
        literals = (value for field in fields for value in get_args(field.annotation))
        yield (*tags, *(value for value in literals if isinstance(value, str))), annotation
    for part in get_args(annotation):
        given = (entry.tag for entry in get_args(annotation)[1:] if isinstance(entry, Tag))
        yield from _models_in(part, (*tags, *given))
