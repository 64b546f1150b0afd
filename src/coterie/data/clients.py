"""Clients and the federation they form, and what makes a federation unusable."""

import hashlib
from dataclasses import dataclass

import numpy as np

from coterie.data.preprocessing import Preprocessing
from coterie.data.records import Array, Records, Task
from coterie.errors import DataError
from coterie.groups import Structure


@dataclass(frozen=True)
class Client:
    """One participant and its records; validation may be empty."""

    name: str
    train: Records
    validation: Records
    test: Records

    def __repr__(self) -> str:
        sizes = f"train {len(self.train)}, validation {len(self.validation)}, test {len(self.test)}"
        return f"Client({self.name}: {sizes})"


@dataclass(frozen=True)
class Federation:
    """All clients and their common task.

    Args:
        truth: the cluster each client was built from, where it is known. For evaluation only: nothing
            that trains or clusters may see it.
        structure: who is in which group, where clients work in groups; it numbers them in their order.
        preprocessing: how raw values became features, before any shift between clusters.
        caveats: what a guarantee for these records must add.
        records_per_person: where rows are persons, how many records of one count; else None.
        everyone: digests of all records of the data, also of those that nobody was dealt; or None.
    """

    clients: tuple[Client, ...]
    task: Task
    truth: tuple[int, ...] | None = None
    structure: Structure | None = None
    preprocessing: Preprocessing | None = None
    caveats: tuple[str, ...] = ()
    records_per_person: int | None = None
    everyone: Array | None = None

    def __repr__(self) -> str:
        records = sum(len(client.train) for client in self.clients)
        rows = "training records" if self.records_per_person is None else "persons to train on"
        return f"Federation({len(self.clients)} clients, {records} {rows}, {self.task})"

    def fingerprint(self) -> str:
        """SHA-256 over names, task, truth, groups and every array: equal only for equal federations."""
        digest = hashlib.sha256(repr((self.task, self.truth, len(self.clients))).encode())
        if self.structure is not None:
            digest.update(repr(self.structure.groups).encode())
        for client in self.clients:
            digest.update(repr(client.name).encode())
            for records in (client.train, client.validation, client.test):
                for array in records.arrays.values():
                    # Shape and type first: the same bytes cut differently are other data.
                    digest.update(repr((array.shape, array.dtype.str)).encode())
                    digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        return digest.hexdigest()


def client_name(index: int, clients: int, kind: str = "client") -> str:
    """A name for a client that has none of its own, padded so that names sort as clients are numbered."""
    return f"{kind}-{index:0{len(str(clients - 1))}d}"


def check_federation(federation: Federation, *, held_out: bool = True) -> None:
    """Refuse, in one line that names the client, what no model could learn from or no engine could run.

    Args:
        held_out: whether every client must hold records out.
    """
    if not all(isinstance(client, Client) for client in federation.clients):
        raise DataError("the clients of the federation are not all of type Client")
    names = [client.name for client in federation.clients]
    if not names:
        raise DataError("the federation has no clients")
    for name in names:
        if names.count(name) > 1:
            raise DataError(f"client {name}: {names.count(name)} clients have this name")
    if federation.truth is not None and len(federation.truth) != len(names):
        raise DataError(f"the truth names a cluster for {len(federation.truth)} of {len(names)} clients")
    if federation.structure is not None and federation.structure.names != tuple(names):
        raise DataError("the groups name other workers than the federation has")
    for client in federation.clients:
        parts = {"training": client.train, "validation": client.validation, "test": client.test}
        for part, records in parts.items():
            if not len(records) and (part == "training" or (part == "test" and held_out)):
                raise DataError(f"client {client.name}: no {part} records")
            check_records(records.flat, federation.task, f"client {client.name}, {part} records")


def check_records(records: Records, task: Task, where: str) -> None:
    """Refuse records that are not of the task's shapes, types and values; the line begins with `where`."""
    features, targets = records.features, records.targets
    for array in (features, targets):
        if not isinstance(array, np.ndarray):
            raise DataError(f"{where}: a {type(array).__name__}; allowed: numpy arrays")
    if targets.shape != features.shape[:1]:
        raise DataError(f"{where}: {len(features)} rows of features, targets of shape {targets.shape}")
    if features.shape[1:] != task.shape:
        raise DataError(f"{where}: features of shape {features.shape[1:]}, the task has {task.shape}")
    needed = (
        np.dtype(np.float32 if task.vocabulary is None else np.int64),
        np.dtype(np.int64 if task.kind == "classification" else np.float32),
    )
    if (features.dtype, targets.dtype) != needed:
        raise DataError(
            f"{where}: features of type {features.dtype}, targets of type {targets.dtype}; "
            f"allowed: {needed[0]}, {needed[1]}"
        )
    _check_values(features, "feature" if task.vocabulary is None else "token", task.vocabulary, where)
    labels = task.kind == "classification"
    _check_values(targets, "label" if labels else "target", task.classes if labels else None, where)


def _check_values(values: Array, what: str, limit: int | None, where: str) -> None:
    """Every value finite, or an index below the limit."""
    wrong = ~np.isfinite(values) if limit is None else (values < 0) | (values >= limit)
    if wrong.any():
        position = tuple(np.argwhere(wrong)[0])
        allowed = "finite numbers" if limit is None else f"0 to {limit - 1}"
        raise DataError(f"{where}: row {position[0]} has {what} {values[position]}; allowed: {allowed}")
