"""Whose records are whose: persons at a client, each with its records together, for privacy.unit person.

A person is protected with all records that it has at a client. So its records stay together: trained on, or
held out, whole. At most so many of them count, a public number; of more, that many are drawn. Who is drawn
from, and where, depends on the identifier and on the order of the records, never on what they say, and no
person's draw on any other's records.

Every person takes as many places as a person may have records, and those that it does not need are empty. A
table of persons thus has the same shape however many records anybody has, and whoever computes with it does
the same for everyone: neither a rounding nor the time it takes tells of another's records.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from coterie.data.records import Array, Dataset, Records, stream
from coterie.errors import DataError, InputError, check_memory
from coterie.notices import tell_here
from coterie.privacy import PersonBounds


@dataclass(frozen=True)
class PersonRecords(Records):
    """The records of persons, a row each: features (persons, places, *shape), targets (persons, places).

    Args:
        present: which places hold a record, bool (persons, places); what stands in the others is zero.
    """

    present: Array

    def __repr__(self) -> str:
        return f"PersonRecords({len(self)} persons, up to {self.present.shape[1]} records each)"

    def take(self, indices: Array | slice) -> "PersonRecords":
        """The persons at these positions, in this order."""
        known = None if self.identity is None else self.identity[indices]
        arrays = (self.features[indices], self.targets[indices], self.present[indices])
        return PersonRecords(*arrays, identity=known)

    @property
    def arrays(self) -> dict[str, Array]:
        return {**super().arrays, "present": self.present}

    @property
    def flat(self) -> Records:
        return Records(self.features[self.present], self.targets[self.present])


Own = Sequence[Any] | Array
"""A client's units: positions of its records, or for each of its persons those of that person's."""


@dataclass(frozen=True)
class Units:
    """The units that a client's records are cut into, here single records."""

    records: Records

    def at(self, client: int, positions: Array) -> Own:
        """The units of a client.

        Args:
            client: its place among the clients.
            positions: of its records.
        """
        return positions

    def take(self, own: Own, places: Array) -> Records:
        """A row for each of the client's units at these places."""
        return self.records.take(np.asarray(own)[places])


@dataclass
class _Dropped:
    """How many records do not count, and of how many persons: as private as the records are."""

    records: int = 0
    persons: int = 0


@dataclass(frozen=True)
class WholePersons(Units):
    """All records of a person together, or as many of them as count.

    Args:
        persons: whose each record is.
        most: records of a person that count at a client.
        seed: of the draw of those that count.
    """

    persons: Array
    most: int
    seed: int
    dropped: _Dropped = field(default_factory=_Dropped)

    def at(self, client: int, positions: Array) -> Own:
        """The positions of each person's records, persons in the order of their first ones."""
        if not len(positions):
            return []
        _, first, whose = np.unique(self.persons[positions], return_index=True, return_inverse=True)
        rank = np.argsort(np.argsort(first))[whose]
        order = np.argsort(rank, kind="stable")
        found = np.split(positions[order], np.searchsorted(rank[order], np.arange(1, len(first))))
        return [self._drawn(own, client, place) for place, own in enumerate(found)]

    def _drawn(self, own: Array, client: int, place: int) -> Array:
        """A person's records, or as many of them as count: drawn by a stream that is this person's own."""
        if len(own) <= self.most:
            return own
        self.dropped.persons += 1
        self.dropped.records += len(own) - self.most
        chosen = stream(self.seed, 2, client, place).permutation(len(own))[: self.most]
        return own[np.sort(chosen)]

    def take(self, own: Own, places: Array) -> Records:
        """Where one record of a person counts, persons are records."""
        people = [own[place] for place in places.tolist()]
        if self.most == 1:
            return self.records.take(np.array([each[0] for each in people], dtype=np.int64))
        arrays = (self.records.features, self.records.targets)
        needed = len(people) * self.most * sum(values[:1].nbytes for values in arrays)
        check_memory(f"privacy.records_per_person: {self.most}", needed)
        present = np.arange(self.most) < np.array([len(each) for each in people], dtype=np.int64)[:, None]
        positions = np.concatenate([np.zeros(0, dtype=np.int64), *people])
        filled = [np.zeros((*present.shape, *values.shape[1:]), dtype=values.dtype) for values in arrays]
        for place, values in zip(filled, arrays, strict=True):
            place[present] = values[positions]
        known = self.records.identity
        if known is not None:  # that of a person is the same for all of its records
            known = known[np.array([each[0] for each in people], dtype=np.int64)]
        return PersonRecords(filled[0], filled[1], present, identity=known)

    def named(self, own: Own) -> set[int]:
        """Who they are."""
        return {int(self.persons[each[0]]) for each in own}

    def tell(self) -> None:
        """Say to whoever holds the records, and to nobody else, how many do not count."""
        if self.dropped.records:
            one = "record" if self.most == 1 else "records"
            tell_here(
                f"note, for the holder of the records alone: {self.dropped.persons:,} persons have more than "
                f"{self.most} {one} at a client, and {self.dropped.records:,} of theirs are dropped "
                "(privacy.records_per_person)"
            )


def units_of(dataset: Dataset, bounds: PersonBounds | None, seed: int, *, test: bool = False) -> Units:
    """The units of a dataset's training records, or of its test records: persons where there are bounds."""
    records = dataset.test if test and dataset.test is not None else dataset.train
    if bounds is None:
        return Units(records)
    whose = None if dataset.persons is None else dataset.persons.test if test else dataset.persons.train
    if whose is None:
        raise InputError(
            f"privacy.unit: person; {dataset.name} does not say whose each record is (a folder does by a "
            "column, person: NAME in federation.yaml); allowed here: record, client"
        )
    return WholePersons(records, whose, bounds.records, seed)


def check_persons(
    bounds: PersonBounds,
    train: WholePersons,
    mine: Sequence[Own],
    test: WholePersons,
    tested: Sequence[Own],
) -> None:
    """Refuse persons at more clients than the bound allows, and such as are in two parts of one client.

    Args:
        train, mine: those to train on, and which of them each client has.
        test, tested: the same of test records that the data come with; else, those to train on once more.
    """
    at_client: list[Collection[int]] = []
    for own, others in zip(mine, tested, strict=True):
        found, held_out = train.named(own), test.named(others)
        if train is not test and not found.isdisjoint(held_out):
            raise DataError(
                "privacy.unit: person; some persons of a client are both among the training and among the "
                "test records that the data come with; allowed: persons in one of them"
            )
        at_client.append(found | held_out)
    check_clients(bounds, at_client)
    train.tell()
    if test is not train:
        test.tell()


def check_clients(bounds: PersonBounds, clients: Sequence[Collection[int]]) -> None:
    """Refuse persons at more clients than the bound allows; at how many, whoever holds the records is told.

    Args:
        clients: the persons of each.
    """
    counts = Counter(person for persons in clients for person in persons)
    if (most := max(counts.values(), default=0)) > bounds.clients:
        tell_here(f"note, for the holder of the records alone: somebody has records at {most} clients")
        raise DataError(
            f"privacy.clients_per_person: {bounds.clients}; there are persons with records at more clients, "
            "whose cost would not be counted; allowed: at least as many as anybody has records at"
        )
