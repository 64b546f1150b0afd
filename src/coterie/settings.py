"""The base of every section of the experiment file.

Each room declares the options it understands beside the code that uses them;
`coterie.experiment` puts the sections together.
"""

import difflib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

_NO_TRUTH = PydanticCustomError(
    "truth", "no truth value is meant here; put true and false in quotes where they are names"
)


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


def idle(section: Settings, whole: Settings, inside: str = "") -> Iterator[tuple[str, str]]:
    """Dotted keys that were set and cannot act, each with a line that says what would make them."""
    written = section.model_dump(mode="json")
    for name, field in type(section).model_fields.items():
        value, key = getattr(section, name), f"{inside}{name}"
        if isinstance(value, Settings):
            yield from idle(value, whole, f"{key}.")
        for acts in (entry for entry in field.metadata if isinstance(entry, Acts)):
            if value != field.get_default(call_default_factory=True) and not acts.holds(section, whole):
                yield key, f"{key}: {written[name]} has no effect here; it acts with {acts.given}"


class NamedSettings(Settings):
    """A name out of a table of functions, and options that are parameters of the function behind it."""

    functions: ClassVar[Mapping[str, Callable[..., object]]] = {}
    own_form: ClassVar[str] = ""
    """How a name that is no key of the table must be written, if there may be any; it has no options."""

    name: str

    @classmethod
    def takes(cls, name: str, option: str) -> bool:
        return name in cls.functions and option in inspect.signature(cls.functions[name]).parameters

    @model_validator(mode="after")
    def _known(self) -> Self:
        if self.name not in self.functions and not (self.own_form and ":" in self.name):
            near = difflib.get_close_matches(self.name, self.functions, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            other = f" or {self.own_form}" if self.own_form else ""
            raise ValueError(f"name: {self.name!r}{hint}; allowed: {', '.join(self.functions)}{other}")
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
