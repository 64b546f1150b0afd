"""From tables of clients to a folder with a `federation.yaml`: what is declared, by whom, and what is open.

Ranges and categories are public: somebody says them without looking at the records. What nobody says stands
as FILL-IN in the draft, which no run accepts; or it is taken from the records, and then the declaration says
so, and with it every guarantee. What the draft itself tells of the records (which columns there are, whether
they hold numbers or words) is for their holder, who is to read it before anybody else does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, Literal

from coterie.data.client_files import DECLARATION, Clipped, read_client_table
from coterie.data.folder import FILL_IN, Declaration, as_dataset, parse_declaration, to_fill_in
from coterie.data.frames import TRUTH_VALUES, ColumnValues, ValueKind
from coterie.data.preprocessing import TableInputs
from coterie.data.records import Dataset
from coterie.data.tables import ClientTable, as_day
from coterie.errors import DataError, InputError
from coterie.files import LARGEST_YAML, yaml_text
from coterie.notices import tell_here

Bound = tuple[object, object] | list[Any] | int | Literal["data"]
"""What is declared of a column: (low, high) or (first day, last day), a list of categories, "data"; of a
label that counts from 0 also the number of classes."""
TaskKind = Literal["classification", "regression"]
MOST_CATEGORIES = 100
"""Different words in a column beyond which it is free text, unless somebody lists its categories."""
MOST_CODES = 20
"""Different integers in a label up to which they are taken for classes."""
_HEADING = """\
# What is public about these records; everybody who takes part has the same file. A range is what is known of
# a column without looking at the records (an age is 0 to 120); `missing: indicator` stands where a value may
# be missing. coterie run refuses a file with FILL-IN in it.
"""
_TAKEN = """\
# Here ranges or categories were taken from the records themselves, and every guarantee says so. Whoever knows
# them otherwise writes those, and removes `declared: from-data`.
"""


@dataclass(frozen=True)
class FederationDraft:
    """Who holds which rows, and what is declared about their columns.

    Args:
        tables: of each client, with the columns that are declared alone.
        declared: the content of `federation.yaml`, with FILL-IN where something is open.
    """

    tables: Mapping[str, ClientTable]
    declared: Mapping[str, Any]

    @property
    def fill_in(self) -> list[str]:
        """What must still be declared."""
        return to_fill_in(self.declared)

    @property
    def text(self) -> str:
        """As it is written."""
        columns = (f"  - {_in_one_line(column)}" for column in self.declared["features"])
        others = (f"{key}: {_in_one_line(self.declared[key])}" for key in self.declared if key != "features")
        heading = _HEADING + (_TAKEN if "declared" in self.declared else "")
        return heading + "\n".join([*others, "features:", *columns]) + "\n"

    def declaration(self) -> Declaration:
        """What is declared, checked; a DataError where something is open or odd."""
        return parse_declaration(Path(DECLARATION), self.text)

    def dataset(self, path: Path) -> Dataset:
        """The records as a run would read them; a DataError where they are not as declared."""
        declaration, clipped = self.declaration(), Clipped()
        described = declaration.preprocessing()
        assert isinstance(described.inputs, TableInputs)
        raw = {
            client: read_client_table(table, described.inputs, described.label, clipped, declaration.person)
            for client, table in self.tables.items()
        }
        clipped.tell(path)
        return as_dataset(path, declaration, raw)

    def write_tables(self, folder: Path, suffix: str) -> None:
        """A file for each client."""
        for client, table in self.tables.items():
            table.write(folder / f"{client}{suffix}")


@dataclass
class Drafting:
    """Declares one column after the other, and remembers whether any was taken from the records.

    Args:
        bounds: what is declared of each column; "data" for all takes them from the records, and a pair of
            numbers is the range of all columns of numbers that have none of their own.
        missing: columns in which values may be missing.
        person: the column that says whose each record is: no feature.
    """

    tables: Mapping[str, ClientTable]
    label: str
    bounds: Mapping[str, Bound] | Bound | None = None
    missing: Sequence[str] = ()
    task: TaskKind | None = None
    person: str | None = None
    from_data: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        known = next(iter(self.tables.values()))
        known.column(self.label)
        given = self.bounds if isinstance(self.bounds, Mapping) else {}
        for name in (*given, *self.missing, *([] if self.person is None else [self.person])):
            known.column(name)
        if self.person is not None and self.person in (self.label, *given, *self.missing):
            raise InputError(
                f"person: {self.person} says whose a record is, and is neither label nor feature; allowed: a "
                "column of its own, of which nothing else is declared"
            )

    def draft(self) -> FederationDraft:
        """All columns, the label last to be found and first to be written."""
        beside = (self.label, self.person)
        names = [name for name in next(iter(self.tables.values())).columns if name not in beside]
        features = [column for name in names if (column := self._feature(name)) is not None]
        if not features:
            raise DataError(
                "features: no column is left to learn from; allowed: at least one beside the label"
            )
        task, label = self._label()
        declared: dict[str, Any] = {"task": task, "label": label, "features": features}
        if self.person is not None:
            declared["person"] = self.person
        if self.from_data:
            declared["declared"] = "from-data"
        kept = [self.label, *(str(column["column"]) for column in features)]
        kept += [] if self.person is None else [self.person]
        return FederationDraft({client: own.only(kept) for client, own in self.tables.items()}, declared)

    def _bound(self, name: str, values: ColumnValues) -> Bound | None:
        if isinstance(self.bounds, Mapping):
            bound = self.bounds.get(name)
        else:
            everywhere = self.bounds == "data" or (values.kind is ValueKind.NUMBERS and name != self.label)
            bound = self.bounds if everywhere else None
        if bound is None and values.kind is ValueKind.TRUTH:
            return list(TRUTH_VALUES)  # no others are possible, whatever the records hold
        return bound

    def _feature(self, name: str) -> dict[str, Any] | None:
        values = ColumnValues(self.tables, name)
        bound = self._bound(name, values)
        if values.identifies and not isinstance(bound, list):
            tell_here(f"warning: every row has another {name}, as an identifier does; better leave it out")
        if bound == "data":
            if len(values.distinct) < 2:
                tell_here(f"note: {name} is the same in all rows, and left out")
                return None
            bound, self.from_data = _from_records(values), True
            own: dict[str, Any] = {"column": name, **described(name, bound)}
            return {**own, "missing": "indicator"} if values.missing or name in self.missing else own
        if bound is None:
            own = {"column": name, **_open(values)}
        else:
            own = {"column": name, **described(name, bound)}
        if name in self.missing:
            return {**own, "missing": "indicator"}
        return {**own, "missing": FILL_IN} if values.missing else own

    def _label(self) -> tuple[str, dict[str, Any]]:
        values = ColumnValues(self.tables, self.label)
        bound = self._bound(self.label, values)
        if bound == "data":
            self.from_data = True
            codes = values.whole and len(values.distinct) <= MOST_CODES and self.task != "regression"
            bound = _codes(values) if codes else _from_records(values)
        if bound is None:
            words = values.kind in (ValueKind.WORDS, ValueKind.TRUTH, ValueKind.DATES)
            few = values.whole and len(values.distinct) <= MOST_CODES
            task = self.task or ("classification" if words or few else "regression")
            key = "classes" if task == "classification" else "range"
            return task, {"column": self.label, key: [FILL_IN, FILL_IN] if key == "range" else [FILL_IN]}
        if isinstance(bound, int):
            return "classification", {"column": self.label, "classes": bound}
        own = described(self.label, bound)
        if "dates" in own:
            raise InputError(f"bounds: {self.label} is a date; a label is one of some classes, or a number")
        task = "classification" if "categories" in own else "regression"
        if self.task not in (None, task):
            raise InputError(
                f"task: {self.task}, but {self.label} is declared as {bound!r}; a list of classes is a "
                "classification, a pair of numbers a regression"
            )
        key = "classes" if task == "classification" else "range"
        return task, {"column": self.label, key: next(iter(own.values()))}


def described(name: str, bound: Bound) -> dict[str, Any]:
    """A bound as `federation.yaml` writes it: range, dates or categories."""
    if isinstance(bound, list):
        return {"categories": [_plain(value) for value in bound]}
    if isinstance(bound, tuple) and len(bound) == 2:
        low, high = map(_plain, bound)
        if isinstance(low, int | float) and isinstance(high, int | float):
            return {"range": [low, high]}
        if isinstance(low, str) and isinstance(high, str) and as_day(low) and as_day(high):
            return {"dates": [low[:10], high[:10]]}
    raise InputError(
        f"bounds: {name}: {bound!r} is not allowed; allowed: (low, high), (first day, last day), a list of "
        "categories, or 'data'"
    )


def _in_one_line(content: Any) -> str:
    text = yaml_text(content, default_flow_style=True, width=LARGEST_YAML)
    return text.strip().removesuffix("...").strip()


def _plain(value: object) -> object:
    """Numbers of an array, and dates, as a file writes them."""
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, date):
        return value.isoformat()[:10]
    return str(value).lower() if isinstance(value, bool) else value


def _from_records(values: ColumnValues) -> Bound:
    """What the records themselves say: their extremes, or every word that occurs."""
    if values.kind in (ValueKind.NUMBERS, ValueKind.DATES) and len(values.distinct) > 1:
        found = values.numbers
        if values.kind is ValueKind.NUMBERS:
            return float(found.min()), float(found.max())
        return (
            date.fromordinal(int(found.min())).isoformat(),
            date.fromordinal(int(found.max()) + (found.max() % 1 > 0)).isoformat(),
        )
    _refuse_free_text(values)
    if len(values.distinct) < 2:
        raise DataError(f"column {values.name}: one value only; there is nothing to tell apart")
    return list(TRUTH_VALUES) if values.kind is ValueKind.TRUTH else list(values.distinct)


def _codes(values: ColumnValues) -> list[Any]:
    if len(values.distinct) < 2:
        raise DataError(f"column {values.name}: one value only; there is nothing to tell apart")
    return sorted({int(number) for number in values.numbers})


def _open(values: ColumnValues) -> dict[str, Any]:
    """What must be declared of a column, by what it looks like."""
    match values.kind:
        case ValueKind.NOTHING:
            raise DataError(f"column {values.name}: no values at all; leave it out")
        case ValueKind.WORDS:
            _refuse_free_text(values)
            return {"categories": [FILL_IN]}
        case ValueKind.DATES:
            return {"dates": [FILL_IN, FILL_IN]}
    return {"range": [FILL_IN, FILL_IN]}


def _refuse_free_text(values: ColumnValues) -> None:
    if values.kind is ValueKind.WORDS and len(values.distinct) > MOST_CATEGORIES:
        raise DataError(
            f"column {values.name}: free text, or names of single rows (more than {MOST_CATEGORIES} different"
            " values); leave it out, turn it into categories or numbers first, or list its categories"
        )
