"""Where games are played: the engine that runs, with clients of our making, a plan of the release, a fresh
key."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from coterie.algorithms import AnyAlgorithm
from coterie.algorithms.protocol import PublicFacts, Vector
from coterie.data import Client, Federation
from coterie.data.persons import PersonRecords
from coterie.data.records import Records
from coterie.engines.local import LocalEngine
from coterie.groups import Observer
from coterie.privacy import Budget, Ledger, PlannedRelease, PrivacyPlan, SecretKey, UnitPlan
from coterie.training.augmentation import Augmentation
from coterie.training.learner import Learner

if TYPE_CHECKING:
    from coterie.engines.flower.contract import TrustedWork

_MEMORY = Path("/dev/shm")
"""Where ledgers of games lie, if there is such a place: every charge waits until it is written."""


@dataclass(frozen=True)
class Audited:
    """What is attacked: a plan, and the code that executes it. No record is part of it.

    Args:
        initial: parameters of a freshly initialised model.
        deltas: at which each subject's epsilon is stated.
        algorithm: which asks for the releases; None at a site, which sees requests only.
        facts: what the algorithm is told.
        observer: who sees what, where workers observe each other.
        trusted: at a site, what it does for a server that it trusts.
    """

    plan: PrivacyPlan
    learner: Learner
    lr: float
    public_seed: int
    augmentation: Augmentation | None
    initial: Vector
    deltas: Mapping[str, float]
    accountant: str
    algorithm: AnyAlgorithm | None = None
    facts: PublicFacts | None = None
    observer: Observer | None = None
    trusted: "TrustedWork | None" = None


def client_of(name: str, train: Records, test: Records | None = None) -> Client:
    """A client of the games."""
    return Client(name, train, train.take(slice(0, 0)), train.take(slice(0, 0)) if test is None else test)


def as_units(client: Client, plan: PrivacyPlan) -> Client:
    """The client with a row for each unit: where units are persons, each has as many copies of a record as
    count.

    That is the most that one can do: all of them pull the same way, and are clipped together.
    """
    if plan.persons is None:
        return client
    places = plan.persons.records

    def persons(records: Records) -> PersonRecords:
        features, targets = (np.repeat(part[:, None], places, axis=1) for part in records.arrays.values())
        return PersonRecords(features, targets, np.ones(targets.shape, dtype=np.bool_))

    return Client(client.name, *map(persons, (client.train, client.validation, client.test)))


@contextmanager
def engine_of(
    audited: Audited,
    clients: Sequence[Client],
    releases: Mapping[str, Sequence[PlannedRelease]],
    key: SecretKey | None = None,
) -> Iterator[LocalEngine]:
    """The engine that runs, for these clients under a plan of these releases.

    Args:
        key: of noise and coins; by default a fresh one from the operating system.
    """
    units = tuple(UnitPlan(subject, tuple(own)) for subject, own in releases.items())
    plan = replace(audited.plan, units=units, caveats=())
    place = str(_MEMORY) if _MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="coterie-audit-", dir=place) as folder:
        path, key = Path(folder) / "ledger.jsonl", key or SecretKey.from_os()
        with Ledger.open(path, plan, budget=Budget(1.0, 0.1), accountant=audited.accountant) as ledger:
            engine = LocalEngine(
                Federation(tuple(as_units(client, plan) for client in clients), audited.learner.task),
                audited.learner,
                audited.lr,
                plan,
                ledger,
                noise_key=key,
                coin_key=key,
                public_seed=audited.public_seed,
                context="audit",
                workers=1,
                augmentation=audited.augmentation,
            )
            try:
                yield engine
            finally:
                engine.close()


def finite(values: object) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Scores in which what is not a number counts as the clearest sign of the canary: nothing else makes
    it."""
    found = np.asarray(values, dtype=np.float64)
    return np.nan_to_num(found, nan=1e30, posinf=1e30, neginf=-1e30)
