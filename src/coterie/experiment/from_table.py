"""A table becomes a federation: a folder with a file for each client, and the two files that a run needs."""

import filecmp
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from coterie.algorithms.settings import PrivacySettings
from coterie.data.client_files import DECLARATION
from coterie.data.drafting import Bound, Drafting, FederationDraft, TaskKind
from coterie.data.folder import read_declaration, read_folder
from coterie.data.frames import Tabular, deal, read_clients, read_whole
from coterie.data.records import Task
from coterie.data.tables import ClientTable
from coterie.errors import InputError
from coterie.experiment.folder import new_folder
from coterie.experiment.schema import AUTO, Experiment
from coterie.files import Json, check_place, write_text, yaml_text

EXPERIMENT = "experiment.yaml"
ENOUGH = 13
"""Records of a client of which at least ten are left to train on, when a fifth is held out."""


@dataclass(frozen=True)
class NewFederation:
    """A folder that a run can begin with, or a draft of one.

    Args:
        clients: how many records each has; where persons are named, how many persons.
        fill_in: columns of `federation.yaml` of which something must be declared before a run.
        from_data: whether ranges or categories were taken from the records.
    """

    path: Path
    clients: Mapping[str, int]
    task: Task | None
    fill_in: Sequence[str] = field(default=())
    from_data: bool = False
    person: str | None = None

    @property
    def rows(self) -> str:
        """What is counted of each client."""
        return "records" if self.person is None else "persons"

    @property
    def experiment(self) -> Path:
        """The file to run."""
        return self.path / EXPERIMENT

    @property
    def declaration(self) -> Path:
        """What is public about the records."""
        return self.path / DECLARATION

    def to_json(self) -> Json:
        return {
            "folder": str(self.path),
            "experiment": str(self.experiment),
            "clients": dict(self.clients),
            self.rows: sum(self.clients.values()),
            "task": None if self.task is None else self.task.kind,
            "features": None if self.task is None else self.task.shape[0],
            "classes": None if self.task is None else self.task.classes,
            "declared": "from-data" if self.from_data else "in-advance",
            "fill_in": list(self.fill_in),
        }

    def __repr__(self) -> str:
        rows = f"{sum(self.clients.values())} {self.rows}"
        state = f"to fill in: {', '.join(self.fill_in)}" if self.fill_in else "ready to run"
        taken = ", bounds from the data" if self.from_data else ""
        return f"NewFederation({self.path}: {len(self.clients)} clients, {rows}{taken}; {state})"


def federation(
    data: Tabular,
    *,
    client: str | None = None,
    label: str,
    bounds: Mapping[str, Bound] | Bound | None = None,
    missing: Sequence[str] = (),
    leave_out: Sequence[str] = (),
    task: TaskKind | None = None,
    person: str | None = None,
    epsilon: float = 8.0,
    out: str | Path | None = None,
) -> NewFederation:
    """Turn a table into a folder with a file per client, a `federation.yaml` and an `experiment.yaml`.

    What is declared about a column must be known without looking at the records. What nobody declares
    stands as FILL-IN in `federation.yaml`, and no run begins before it is filled in.

    Args:
        data: a CSV or parquet file, a data frame, an Arrow table, arrays by column, or a folder with a file
            for each client.
        client: the column that says whose record a row is; None for a folder.
        label: the column to predict.
        bounds: of each column `(low, high)`, `("2001-01-01", "2020-12-31")`, a list of categories, or "data";
            or a pair for all columns of numbers; or "data", which takes everything from the records, and
            every guarantee will say so.
        missing: columns in which values may be missing.
        leave_out: columns that are no features: identifiers, free text.
        task: classification or regression, where the label does not tell.
        person: the column that says whose a record is, where a person may have several: the experiment then
            protects persons, each with all its records at a client.
        epsilon: the budget of every record, or person.
        out: the folder to write; by default beside a file, under its name. One that is there already is left
            as it is: unless it is the same, that is an error.

    Example:
        >>> import coterie as ct
        >>> rows = {"ward": ["a", "a", "b", "b"], "age": [30, 70, 41, 65], "ill": ["no", "yes", "no", "yes"]}
        >>> public = {"age": (18, 100), "ill": ["no", "yes"]}
        >>> ct.federation(rows, client="ward", label="ill", bounds=public, out="wards")  # doctest: +SKIP
        NewFederation(wards: 2 clients, 4 records; ready to run)
    """
    tables = read_tables(data, client, leave_out)
    draft = Drafting(tables, label, bounds, missing, task, person).draft()
    target = place_of(data, out)
    return write_federation(draft, target, epsilon, suffix=suffix_of(data))


def is_declared(data: Path) -> bool:
    """Whether it is a folder that says already what is public about its records."""
    return os.path.isfile(data / DECLARATION)


def declared_federation(folder: Path, epsilon: float) -> NewFederation:
    """An experiment for a folder that has its declaration already."""
    dataset = read_folder(folder)
    assert dataset.owners is not None
    person = read_declaration(folder / DECLARATION).person
    whose = range(len(dataset.train)) if dataset.persons is None else dataset.persons.train.tolist()
    counts = Counter(owner for owner, _ in set(zip(dataset.owners.train.tolist(), whose, strict=True)))
    clients = {name: counts[place] for place, name in enumerate(dataset.owners.names)}
    target = folder / EXPERIMENT
    if target.exists():
        raise InputError(f"{target}: exists already; move it away to draft another")
    classification = dataset.task.kind == "classification"
    text = experiment_text(epsilon, classification=classification, clients=clients, person=person)
    write_text(target, text)
    return NewFederation(folder, clients, dataset.task, (), bool(dataset.caveats), person)


def read_tables(data: Tabular, client: str | None, leave_out: Sequence[str] = ()) -> dict[str, ClientTable]:
    """The table of each client, without the columns that are left out."""
    folder = isinstance(data, str | Path) and Path(data).is_dir() and Path(data).suffix != ".parquet"
    if folder:
        if client is not None:
            raise InputError(f"client: {client}; in a folder every file is a client; allowed there: none")
        tables = read_clients(Path(str(data)))
    else:
        whole = read_whole(data)
        if client is None:
            raise InputError("client: missing; name the column that says whose record a row is")
        tables = deal(whole, client)
    first = next(iter(tables.values()))
    for name in leave_out:
        first.column(name)
    kept = [name for name in first.columns if name not in leave_out]
    return {name: table.only(kept) for name, table in tables.items()}


def place_of(data: Tabular, out: str | Path | None) -> Path:
    """The folder to write: a folder's own, or one named like the file."""
    if out is not None:
        return Path(out)
    if not isinstance(data, str | Path):
        raise InputError("out: missing; name the folder to write for a table that is in no file")
    path = Path(data)
    return path if path.is_dir() and path.suffix != ".parquet" else Path(path.stem)


def suffix_of(data: Tabular) -> str:
    """How the clients' files end: text stays text, everything else is parquet."""
    csv = isinstance(data, str | Path) and (Path(data).is_dir() or Path(data).suffix == ".csv")
    return ".csv" if csv else ".parquet"


def write_federation(draft: FederationDraft, target: Path, epsilon: float, *, suffix: str) -> NewFederation:
    """Write the folder in one step; one that holds the clients' files already gets the two files only."""
    fill_in = draft.fill_in
    # Before anything is written: what is declared must be possible, and the records as declared.
    task = None if fill_in else draft.dataset(target).task
    person = draft.declared.get("person")
    clients = {
        name: len(table if person is None else set(table.words(person)))
        for name, table in sorted(draft.tables.items())
    }
    classification = draft.declared["task"] == "classification"
    files = {
        DECLARATION: draft.text,
        EXPERIMENT: experiment_text(epsilon, classification=classification, clients=clients, person=person),
    }
    check_place(target, "--out")
    at_home = target.is_dir() and any(
        table.source.resolve().parent == target.resolve() for table in draft.tables.values()
    )
    if at_home:
        for name in files:
            if (target / name).exists():
                raise InputError(f"{target / name}: exists already; move it away to draft another")
        for name, text in files.items():
            write_text(target / name, text)
    else:
        _write_whole(draft, target, files, suffix)
    from_data = "declared" in draft.declared
    return NewFederation(target, clients, task, tuple(fill_in), from_data, person)


def _write_whole(draft: FederationDraft, target: Path, files: Mapping[str, str], suffix: str) -> None:
    def fill(scratch: Path) -> None:
        for name, text in files.items():
            (scratch / name).write_text(text, encoding="utf-8")
        draft.write_tables(scratch, suffix)

    if target.is_dir() and any(target.iterdir()):
        with TemporaryDirectory(dir=target.parent, prefix=f".{target.name[:40]}-") as scratch:
            fill(Path(scratch))
            names = [path.name for path in Path(scratch).iterdir()]
            if len(filecmp.cmpfiles(scratch, target, names, shallow=False)[0]) < len(names):
                raise InputError(f"{target}: holds something else already; --out names another folder")
        return
    with new_folder(target) as draft_folder:
        fill(draft_folder)


def experiment_text(
    epsilon: float, *, classification: bool, clients: Mapping[str, int], person: str | None = None
) -> str:
    """An experiment on the folder that it lies in; for persons, where a column names them."""
    few = any(count < ENOUGH for count in clients.values())
    most = PrivacySettings().records_per_person
    by_person = {"unit": "person", "records_per_person": most, "epsilon": epsilon, "clip": AUTO}
    content = {
        "data": {"name": "folder", "path": "."},
        "federation": {"kind": "natural", **({"clients": "enough"} if few else {})},
        "model": {"name": "softmax" if classification else "linear"},
        "privacy": {"unit": "record", "epsilon": epsilon, "clip": AUTO} if person is None else by_person,
        "algorithm": {"name": "r-dpcfl" if len(clients) > 2 else "global"},
        "schedule": {"rounds": AUTO, "batch": AUTO, "lr": AUTO, "averaging": AUTO},
    }
    Experiment.model_validate(content)
    heading = (
        "# Run it from anywhere with: coterie run FOLDER/experiment.yaml. What it costs, and whether that\n"
        "# is usable: coterie plan FOLDER/experiment.yaml. All keys: coterie run --print-default\n"
    )
    return heading + yaml_text(content, default_flow_style=None, width=100)
