"""Data sets and federations that a user's own function makes: found by name, their options checked, and what
they return.

    def hospitals(seed: int, *, beds: int = 100) -> Dataset: ...
    def wards(dataset: Dataset, seed: int, *, per_ward: int = 20) -> Federation: ...

A function has `seed` (and, for a federation, `dataset`) from us, where it has parameters of these names; all
others are options that an experiment may set, of the types that the function annotates. It says by its
annotation what it returns: an experiment file must not call just any function that Python has.
"""

import inspect
import warnings
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, Self, TypeVar, get_type_hints

from pydantic import (
    ConfigDict,
    Field,
    StrictBool,
    ValidationError,
    ValidationInfo,
    create_model,
    model_validator,
)

from coterie.data.clients import Federation, check_records
from coterie.data.records import Array, Dataset, Owners, Records, Task
from coterie.errors import CoterieError, DataError, InputError, one_line, where
from coterie.plugins import DATA, FEDERATION, PluginKind
from coterie.settings import Settings, explain, is_recorded

T = TypeVar("T")


class OwnSettings(Settings):
    """A user's own function, and its options: keyword arguments that its signature allows."""

    model_config = ConfigDict(extra="allow")
    plugin: ClassVar[PluginKind]
    ours: ClassVar[Collection[str]]
    """Names that are not a user's own."""
    supplied: ClassVar[tuple[str, ...]]
    """Parameters of the function that no file sets."""
    returns: ClassVar[type]

    @property
    def own(self) -> bool:
        return True

    @property
    def _name(self) -> str:
        return str(getattr(self, self.plugin.key.rpartition(".")[2]))

    def _checked(self, info: ValidationInfo) -> Self:
        """Itself, if there is such a function and it takes these options."""
        if not is_recorded(info):
            if self.plugin.target(self._name) is None:
                raise InputError(f"{self.plugin.key}: {self.plugin.unknown(self._name, self.ours)}")
            self._options()
        return self

    def _options(self) -> dict[str, Any]:
        """What the function is called with, beside what is ours; an InputError where it takes no such."""
        reserved = (*self.supplied, *type(self).model_fields)
        kind = _options_type(self.plugin, self._name, self.returns, reserved)
        try:
            options = kind.model_validate(self.model_extra or {})
        except ValidationError as mistakes:
            section = self.plugin.key.partition(".")[0]
            raise InputError(explain(mistakes, kind, prefix=section)) from None
        return {name: getattr(options, name) for name in options.model_fields_set}

    def call(self, kind: type[T], supplied: Mapping[str, object]) -> T:
        """What the function returns, which must be of this kind.

        What it raises is said without its text, which may repeat values of records; errors of ours are not.
        """
        function, options = self.plugin.find(self._name), self._options()
        taken = inspect.signature(function).parameters
        given = {name: value for name, value in supplied.items() if name in taken}
        try:
            made = function(**given, **options)
        except CoterieError:
            raise
        except (Exception, SystemExit) as mistake:
            raise InputError(f"{self.plugin.key}: {self._name}: {where(mistake)}") from None
        if not isinstance(made, kind):
            found = f"{self.plugin.key}: {self._name} returned a {type(made).__name__}"
            raise InputError(f"{found}; allowed: a coterie.data.{kind.__name__}")
        return made


class _Options(Settings):
    """The options of a user's function; a model of its own is made from each signature."""

    model_config = ConfigDict(arbitrary_types_allowed=True, protected_namespaces=())


def _options_type(plugin: PluginKind, name: str, returns: type, reserved: Collection[str]) -> type[Settings]:
    """The parameters of a user's function that a file may set, with their types and defaults."""
    function = plugin.find(name)
    try:
        parameters, hints = (
            inspect.signature(function).parameters,
            get_type_hints(function, include_extras=True),
        )
        fields: dict[str, Any] = {
            each.name: (hints.get(each.name, Any), ... if each.default is each.empty else each.default)
            for each in parameters.values()
            if each.name not in reserved and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an option may be called as a method of pydantic's is
            kind = create_model(name, __base__=_Options, **fields)
    except Exception as mistake:  # it cannot be called, or says nothing that can be checked
        raise InputError(f"{plugin.key}: {name}: its options are not clear ({one_line(mistake)})") from None
    if hints.get("return") is not returns:
        raise InputError(f"{plugin.key}: {name}: allowed: a function annotated -> {returns.__name__}")
    return kind


class OwnDataSettings(OwnSettings):
    """A data set that a user's own function reads or draws, and its options."""

    plugin, supplied, returns = DATA, ("seed",), Dataset

    name: str = Field(description=DATA.form)
    published: StrictBool = Field(
        False, description="true: anybody may look at these records, so that exact scores of them harm nobody"
    )

    @model_validator(mode="after")
    def _known(self, info: ValidationInfo) -> Self:
        return self._checked(info)

    @property
    def undivided(self) -> bool:
        """Whether options about the held-out share may act; whether they do is known once the data are."""
        return True

    @property
    def windows_per_character(self) -> int:
        return 1

    @property
    def own_records(self) -> bool:
        return not self.published

    def load(self, seed: int) -> Dataset:
        """What the function returns, if it is a data set that can be dealt and learnt from."""
        found = self.call(Dataset, {"seed": seed})
        try:
            check_dataset(found)
        except DataError as problem:
            raise DataError(f"{self.plugin.key}: {self.name}: {problem}") from None
        return found


class OwnFederation(OwnSettings):
    """A federation that a user's own function deals, and its options."""

    plugin, supplied, returns = FEDERATION, ("dataset", "seed"), Federation

    kind: str = Field(description=FEDERATION.form)

    @model_validator(mode="after")
    def _known(self, info: ValidationInfo) -> Self:
        return self._checked(info)

    def build(self, dataset: Dataset, seed: int) -> Federation:
        """What the function returns; whoever builds federations checks all of them alike."""
        return self.call(Federation, {"dataset": dataset, "seed": seed})


def check_dataset(dataset: Dataset) -> None:
    """Refuse, in one line, a data set that no federation could be made of."""
    parts = (
        {"train": dataset.train} if dataset.test is None else {"train": dataset.train, "test": dataset.test}
    )
    if not isinstance(dataset.task, Task):
        raise DataError(f"its task is a {type(dataset.task).__name__}; allowed: a Task")
    for name, records in parts.items():
        if not isinstance(records, Records):
            raise DataError(f"its {name} is a {type(records).__name__}; allowed: Records")
        if not len(records):
            raise DataError(f"its {name} has no records")
        check_records(records, dataset.task, name)
    counts = {name: len(records) for name, records in parts.items()}
    if dataset.owners is not None:
        _check_owners(dataset.owners, counts)
    if dataset.persons is not None:
        for name, count in counts.items():
            _check_numbers(getattr(dataset.persons, name), f"persons.{name}", count)


def _check_numbers(own: Array | None, where: str, count: int) -> None:
    if own is None or own.shape != (count,) or own.dtype.kind not in "iu":
        raise DataError(f"{where}: allowed: an integer for each of {count} records")


def _check_owners(owners: Owners, counts: Mapping[str, int]) -> None:
    for name, count in counts.items():
        own = getattr(owners, name)
        _check_numbers(own, f"owners.{name}", count)
        if count and not 0 <= own.min() <= own.max() < len(owners.names):
            raise DataError(f"owners.{name}: allowed: 0 to {len(owners.names) - 1}, places in owners.names")
    if owners.clusters is not None and len(owners.clusters) != len(owners.names):
        raise DataError(f"owners.clusters: {len(owners.clusters)} for {len(owners.names)} owners")
