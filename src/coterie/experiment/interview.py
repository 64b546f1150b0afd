"""What must be declared about a table, column by column, in answers that a person types."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from coterie.data.columns import Column, read_columns
from coterie.data.drafting import Bound, Drafting, TaskKind, described
from coterie.data.frames import ColumnValues, ValueKind
from coterie.data.tables import as_day
from coterie.errors import InputError
from coterie.experiment.from_table import (
    NewFederation,
    place_of,
    read_tables,
    suffix_of,
    write_federation,
)
from coterie.settings import explain

HOW = (
    "18 to 100 (a range); 2001-01-01 to 2020-12-31 (days); no, yes, unknown (categories); data (from the "
    "records, and every guarantee will say so); leave out"
)


@dataclass(frozen=True)
class Question:
    """A column of which nothing is declared yet: what it looks like, and whether values are missing in it."""

    column: str
    kind: ValueKind
    missing: bool


class Interview:
    """The columns of a table, and what was answered about them so far."""

    def __init__(
        self,
        data: Path,
        client: str | None,
        label: str,
        missing: Sequence[str] = (),
        leave_out: Sequence[str] = (),
        task: TaskKind | None = None,
        person: str | None = None,
    ) -> None:
        self._data, self._label, self._task, self._person = data, label, task, person
        self._tables = read_tables(data, client, leave_out)
        self._columns = next(iter(self._tables.values()))
        self._columns.column(label)
        self._missing, self.left_out = list(missing), set[str]()
        self._bounds: dict[str, Bound] = {}

    def open_questions(self) -> Iterator[Question]:
        """Every column of which nothing is declared, the label first."""
        names = [self._label, *(name for name in self._columns.columns if name != self._label)]
        for name in names:
            values = ColumnValues(self._tables, name)
            if (
                name == self._person
                or name in self._bounds
                or name in self.left_out
                or values.kind is ValueKind.TRUTH
            ):
                continue
            asked = bool(values.missing) and name not in self._missing and name != self._label
            yield Question(name, values.kind, asked)

    def answer(self, column: str, text: str) -> None:
        """Declare a column as somebody typed it; an InputError where it cannot be so."""
        self._columns.column(column)
        text = text.strip()
        if text in ("leave out", "-"):
            if column == self._person:
                raise InputError(f"{column}: says whose a record is; allowed: nothing else about it")
            if column == self._label:
                raise InputError(f"{column}: is what is predicted; allowed: classes, or a range")
            self.left_out.add(column)
            return
        if column == self._label and text.isdecimal():
            self._bounds[column] = int(text)
            return
        bound = "data" if text == "data" else _parsed(column, text)
        if bound != "data":
            self._check(column, bound)
        self._bounds[column] = bound

    def may_be_missing(self, column: str) -> None:
        self._missing.append(column)

    def take_from_records(self) -> None:
        """Whatever nobody has declared is as the records say."""
        for question in list(self.open_questions()):
            self._bounds[question.column] = "data"

    def write(self, epsilon: float, out: Path | None) -> NewFederation:
        """Write the folder, with FILL-IN where nothing was answered."""
        kept = [name for name in self._columns.columns if name not in self.left_out]
        tables = {client: table.only(kept) for client, table in self._tables.items()}
        rest = (self._label, self._bounds, self._missing, self._task, self._person)
        draft = Drafting(tables, *rest).draft()
        return write_federation(draft, place_of(self._data, out), epsilon, suffix=suffix_of(self._data))

    def _check(self, column: str, bound: Bound) -> None:
        """Refuse what is no declaration, and what the records contradict."""
        try:
            declared = Column.model_validate(
                {"column": column, **described(column, bound), "missing": "indicator"}
            )
        except ValidationError as mistakes:
            raise InputError(f"{column}: {explain(mistakes, Column)}") from None
        for table in self._tables.values():
            read_columns(table, (declared,))


def _parsed(column: str, text: str) -> Bound:
    low, to, high = (part.strip() for part in text.partition(" to "))
    if to and as_day(low) is not None and as_day(high) is not None and "-" in low[1:]:
        return low, high
    if to:
        try:
            return float(low), float(high)
        except ValueError:
            raise InputError(f"{column}: {text!r} is no range; allowed: {HOW}") from None
    words = [word.strip() for word in text.split(",")]
    if len(words) < 2 or not all(words):
        raise InputError(f"{column}: {text!r} is not allowed; allowed: {HOW}")
    return [int(word) for word in words] if all(map(_is_integer, words)) else list(words)


def _is_integer(text: str) -> bool:
    digits = text.removeprefix("-")
    return digits.isdecimal() and (digits == "0" or digits[0] != "0")
