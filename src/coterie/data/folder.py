"""A user's own data: a folder with one file per client and a declaration of what is public about them.

`federation.yaml` declares the task, the label and the features; every `.csv`, `.parquet` or `.npz` file
beside it is a client, named like the file, and so is a folder NAME.parquet of part files. For tables:

    task: classification
    label: {column: diagnosis, classes: [healthy, ill]}
    features:
      - {column: age, range: [18, 100]}
      - {column: smoker, categories: ["no", "yes"]}
      - {column: admitted, dates: [2001-01-01, 2020-12-31]}
      - {column: cholesterol, range: [100, 400], missing: indicator, missing_values: [0]}

For `.npz` files with arrays `x` (records first) and `y`:

    task: classification
    label: {classes: 10}
    features: {shape: [1, 28, 28], range: [0, 255]}

For regression the label has a range instead of classes, mapped to [0, 1]: `task: regression`,
`label: {column: score, range: [0, 70]}`. There `error_cap` (default 0.1) bounds the squared error on that
scale, in the score by which a client privately selects a model.

Where a person may have several records, `person: patient` names the column (for arrays: one more array) that
says whose each record is. It is no feature: it keeps a person's records together, for `privacy.unit: person`.
The same text is the same person in the files of all clients.

`identifier: patient` names the column by which a record is known again when its values change or its row
stands in another folder; without one it is known by its person, or else by its whole row. The register of
what records have paid uses it, and no model sees it unless it is a feature, too.

Ranges and categories must be known without looking at the records; where they were taken from them after all,
`declared: from-data` says so, and every guarantee repeats it. A draft has FILL-IN where something is still to
be declared, and is refused. Values outside a range are clipped to it;
how many is told on stderr to whoever reads the folder, and nowhere else: the number is private.
A column's range is mapped to [-1, 1]; arrays are divided by the largest absolute value of their range, so
that zero stays zero.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import Discriminator, Field, PositiveInt, Tag, ValidationError, model_validator

from coterie.data.client_files import (
    DECLARATION,
    Clipped,
    KnownBy,
    RawRecords,
    client_files,
    formats,
    read_client,
)
from coterie.data.columns import Column, PublicSettings, Range
from coterie.data.dataset_files import reading
from coterie.data.preprocessing import Label, Preprocessing, TableInputs
from coterie.data.records import Dataset, Persons, Records, Task
from coterie.errors import DataError
from coterie.files import parse_yaml, regular
from coterie.privacy.wording import FROM_DATA
from coterie.settings import explain

FILL_IN = "FILL-IN"
"""Stands in a draft where a public fact is still to be declared."""
TAKEN_FROM_DATA = (
    f"{FROM_DATA}: ranges and categories of {DECLARATION} were taken from the records themselves, so what "
    "they tell of single records, an extreme or a rare value say, is not covered"
)
_ERROR_CAP = 0.1


class ArrayFeatures(PublicSettings):
    """Features that come as one array per client: the shape of a record and the range of its values."""

    shape: Annotated[tuple[PositiveInt, ...], Field(min_length=1)]
    range: Range


class Declaration(PublicSettings):
    """The content of `federation.yaml`."""

    task: Literal["classification", "regression"]
    label: Label
    features: Annotated[
        Annotated[ArrayFeatures, Tag("array")] | Annotated[tuple[Column, ...], Tag("table")],
        Discriminator(lambda declared: "table" if isinstance(declared, list | tuple) else "array"),
    ]
    error_cap: Annotated[float, Field(ge=1e-9, le=1e6)] | None = None
    person: Annotated[str, Field(min_length=1)] | None = None
    identifier: str | None = None
    declared: Literal["in-advance", "from-data"] = "in-advance"

    @model_validator(mode="before")
    @classmethod
    def _no_draft(cls, declared: Any) -> Any:
        if isinstance(declared, dict) and (open_places := to_fill_in(declared)):
            raise ValueError(
                f"a draft, in which {', '.join(open_places)} must be declared: put what is known without "
                f"looking at the records in place of {FILL_IN}"
            )
        return declared

    @model_validator(mode="after")
    def _complete(self) -> Self:
        label, classification = self.label, self.task == "classification"
        if classification and (
            label.classes is None or label.range is not None or self.error_cap is not None
        ):
            raise ValueError("label: classification needs classes, and neither range nor error_cap")
        if not classification and (label.range is None or label.classes is not None):
            raise ValueError("label: regression needs a range, and no classes")
        if label.classes == 1:
            raise ValueError("label.classes: 1; allowed: 2 or more")
        if isinstance(self.features, ArrayFeatures):
            if label.column is not None or isinstance(label.classes, tuple):
                raise ValueError("label: beside arrays it has no column, and classes is a number")
            if self.person in ("x", "y"):
                raise ValueError(f"person: {self.person} holds features or labels; allowed: another array")
            if self.identifier is not None:
                raise ValueError(
                    "identifier: arrays have no columns; their records are known by their values"
                )
            return self
        names = [column.column for column in self.features]
        if not names or label.column is None:
            raise ValueError("label, features: a table needs label.column and at least one feature")
        if label.column in names:
            raise ValueError(f"features: {label.column} is the label, a model must not see it")
        if self.person is not None and self.person in (label.column, *names):
            what = "the label" if self.person == label.column else "a feature"
            raise ValueError(
                f"person: {self.person} is {what}, too; who a person is must not be learnt or predicted"
            )
        if self.identifier is not None and self.person is not None:
            raise ValueError("identifier: records are known by their person already; allowed: one of both")
        if self.identifier == label.column:
            raise ValueError(f"identifier: {label.column} is the label, which identifies nobody")
        if len(set(names)) < len(names):
            raise ValueError(f"features: {max(names, key=names.count)} is declared twice")
        return self

    def as_task(self) -> Task:
        """The task it poses."""
        features, classes = self.features, self.label.classes
        shape = (
            features.shape
            if isinstance(features, ArrayFeatures)
            else (sum(column.width for column in features),)
        )
        if self.task == "regression":
            return Task("regression", shape, 0, error_cap=self.error_cap or _ERROR_CAP)
        return Task("classification", shape, len(classes) if isinstance(classes, tuple) else classes or 0)

    def preprocessing(self) -> Preprocessing:
        """How features and labels are scaled."""
        if not isinstance(self.features, ArrayFeatures):
            return Preprocessing(inputs=TableInputs(columns=self.features), label=self.label)
        low, high = self.features.range
        steps = ("clip", (low, high)), ("divide", (max(abs(low), abs(high)),))
        return Preprocessing.of_array(self.as_task(), *steps, label=self.label)

    @property
    def caveats(self) -> tuple[str, ...]:
        """What a guarantee for records that are declared so must add."""
        return (TAKEN_FROM_DATA,) if self.declared == "from-data" else ()


def to_fill_in(declared: Mapping[str, Any]) -> list[str]:
    """What a draft leaves to be declared: the name of each column with the keys that are open."""
    features = declared.get("features")
    columns = [declared.get("label"), *(features if isinstance(features, list | tuple) else [features])]
    return [
        f"{own.get('column', 'features')} ({', '.join(keys)})"
        for own in columns
        if isinstance(own, dict) and (keys := [key for key, value in own.items() if _is_open(value)])
    ]


def _is_open(value: object) -> bool:
    return value == FILL_IN or (isinstance(value, list | tuple) and FILL_IN in value)


def read_folder(path: Path) -> Dataset:
    """Every client of the folder, with its features scaled as declared."""
    if not path.is_dir():
        raise DataError(f"data.path: {path}; allowed: a folder with {DECLARATION} and a file per client")
    declaration = read_declaration(path / DECLARATION)
    preprocessing, clipped = declaration.preprocessing(), Clipped()
    files = client_files(path, formats(preprocessing))
    known_by = KnownBy(declaration.identifier)
    raw = {
        file.stem: read_client(file, preprocessing, clipped, declaration.person, known_by=known_by)
        for file in files
    }
    clipped.tell(path)
    return as_dataset(path, declaration, raw)


def as_dataset(path: Path, declaration: Declaration, raw: Mapping[str, RawRecords]) -> Dataset:
    """The records of every client under what is declared about them."""
    preprocessing, records, whose = declaration.preprocessing(), {}, list[str]()
    for client, own in raw.items():
        assert own.targets is not None
        features = preprocessing.inputs.features(own.raw)
        records[client] = Records(features, own.targets, identity=own.identity)
        whose += own.persons
    dataset = Dataset.of_owners(
        path.resolve().name,
        records,
        declaration.as_task(),
        f"the files of {path}; scaled by the ranges that {DECLARATION} declares",
        preprocessing=preprocessing,
        caveats=declaration.caveats,
    )
    if declaration.person is None:
        return dataset
    return replace(dataset, persons=Persons(np.unique(whose, return_inverse=True)[1]))


def read_declaration(path: Path) -> Declaration:
    """What a folder declares about its records."""
    if not path.exists():
        raise DataError(f"{path.parent}: no {DECLARATION}, which declares task, label and features")
    with reading(path, UnicodeDecodeError):
        text = regular(path).read_text(encoding="utf-8")
    return parse_declaration(path, text)


def parse_declaration(path: Path, text: str) -> Declaration:
    """What the text declares that stands, or will stand, in this file."""
    try:
        return Declaration.model_validate(parse_yaml(text))
    except ValidationError as error:
        raise DataError(f"{path}: {explain(error, Declaration)}") from error
    except ValueError as problem:
        raise DataError(f"{path}: not YAML, {problem}") from problem
