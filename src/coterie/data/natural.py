"""The clients that the data come with: hospitals, schools, speaking roles, the files of a folder."""

from typing import Annotated, Literal

import numpy as np
from pydantic import Field, PositiveInt

from coterie.data.clients import Client, Federation
from coterie.data.persons import WholePersons, check_persons, units_of
from coterie.data.records import UNDIVIDED, Array, Dataset, stream
from coterie.errors import DataError, InputError
from coterie.notices import note
from coterie.privacy import PersonBounds
from coterie.privacy.ranges import RECORDS
from coterie.settings import Settings


class NaturalFederation(Settings):
    """One client per owner of records."""

    kind: Literal["natural"] = Field("natural", description="clusters | dirichlet | natural | groups")
    clients: PositiveInt | Literal["enough"] | None = Field(
        None,
        description="how many to draw of those with enough records | enough (all of those) | null (everyone; "
        "a client with too few is refused)",
    )
    minimum_records: PositiveInt = Field(
        10, le=RECORDS.most, description="training records (unit person: persons) that are enough"
    )
    validation_share: float = Field(
        0.0, ge=0, lt=1, description="share of its training records that a client keeps apart"
    )
    test_share: Annotated[float, UNDIVIDED] = Field(
        0.2,
        ge=0,
        lt=1,
        description="share of a client's records held out, if the dataset has no test records; 0: none, with "
        "evaluation.kind none",
    )

    def build(self, dataset: Dataset, seed: int, persons: PersonBounds | None = None) -> Federation:
        """Give every owner its records, split into training, validation and test; persons are split whole."""
        owners = dataset.owners
        if owners is None:
            raise InputError(
                f"federation.kind: natural; {dataset.name} has no natural clients, "
                "allowed: clusters, dirichlet, groups"
            )
        count = len(owners.names)
        shares = self if owners.test is None else self.model_copy(update={"test_share": 0.0})
        units = tested = units_of(dataset, persons, seed)
        held = tests = [units.at(index, own) for index, own in enumerate(_positions(owners.train, count))]
        parts = [split_records(np.arange(len(own)), shares, seed, index) for index, own in enumerate(held)]
        if owners.test is not None:
            tested = units_of(dataset, persons, seed, test=True)
            tests = [tested.at(index, own) for index, own in enumerate(_positions(owners.test, count))]
            parts = [
                (train, apart, np.arange(len(test)))
                for (train, apart, _), test in zip(parts, tests, strict=True)
            ]
        drawn = _drawn(dataset, self, parts, seed, "records" if persons is None else "persons")
        if persons is not None and isinstance(units, WholePersons) and isinstance(tested, WholePersons):
            mine, others = ([every[index] for index in drawn] for every in (held, tests))
            check_persons(persons, units, mine, tested, others)
        return Federation(
            tuple(
                Client(
                    owners.names[index],
                    train=units.take(held[index], parts[index][0]),
                    validation=units.take(held[index], parts[index][1]),
                    test=tested.take(tests[index], parts[index][2]),
                )
                for index in drawn
            ),
            dataset.task,
            None if owners.clusters is None else tuple(int(owners.clusters[index]) for index in drawn),
            records_per_person=None if persons is None else persons.records,
        )


def split_records(
    positions: Array, settings: NaturalFederation, seed: int, index: int
) -> tuple[Array, Array, Array]:
    """An owner's records as training, validation and test.

    It depends on the seed and the owner's own place only, not on who else is there: a site that has no
    records but its own divides them as a simulation of all sites would.
    """
    mine = stream(seed, 1, index).permutation(positions)
    tested = min(len(mine), max(1, round(settings.test_share * len(mine)))) if settings.test_share else 0
    test, mine = mine[:tested], mine[tested:]
    apart = round(settings.validation_share * len(mine))
    return mine[apart:], mine[:apart], test


def _positions(owner: Array, count: int) -> list[Array]:
    """For every owner, where its records are."""
    order = np.argsort(owner, kind="stable")
    return np.split(order, np.searchsorted(owner[order], np.arange(1, count)))


def _drawn(
    dataset: Dataset,
    settings: NaturalFederation,
    parts: list[tuple[Array, Array, Array]],
    seed: int,
    rows: str,
) -> list[int]:
    """The owners that take part, in the dataset's order.

    Args:
        rows: what each has so many of, in words.
    """
    names = dataset.owners.names if dataset.owners else ()
    needed = int(dataset.test is not None or settings.test_share > 0)
    enough = [
        k
        for k, (train, _, test) in enumerate(parts)
        if len(train) >= settings.minimum_records and len(test) >= needed
    ]
    if settings.clients is None and len(enough) < len(parts):
        short = min(set(range(len(parts))) - set(enough))
        raise DataError(
            f"client {names[short]}: {len(parts[short][0])} training and {len(parts[short][2])} test "
            f"{rows}; federation.minimum_records asks for {settings.minimum_records} "
            "(federation.clients: enough leaves such clients out)"
        )
    if not enough:
        raise DataError(
            f"federation.minimum_records: {settings.minimum_records}; no client of {dataset.name} has so "
            f"many training {rows}"
        )
    if not isinstance(settings.clients, int):
        left_out = [names[k] for k in sorted(set(range(len(parts))) - set(enough))]
        if left_out:
            shown = ", ".join(left_out[:3]) + (", ..." if len(left_out) > 3 else "")
            note(
                f"federation.clients: enough: {len(left_out)} of {len(parts)} clients are left out, with "
                f"fewer than {settings.minimum_records} training {rows}: {shown}"
            )
        return enough
    if settings.clients > len(enough):
        raise InputError(
            f"federation.clients: {settings.clients}; {len(enough)} clients of {dataset.name} have "
            f"federation.minimum_records = {settings.minimum_records} training {rows}"
        )
    return sorted(stream(seed, 0).choice(enough, settings.clients, replace=False).tolist())
