"""What a federation is made of: records, the task they pose, and the dataset they come in."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from coterie.settings import Acts

if TYPE_CHECKING:
    from coterie.data.preprocessing import Preprocessing

Array = NDArray[Any]


@dataclass(frozen=True)
class Records:
    """Features and targets, one row per record.

    Features are float32 of shape (n, *shape), or int64 tokens of shape (n, length);
    targets are int64 class indices, or float32 for regression.

    Args:
        identity: a digest of each raw record, by which it is known again (`identity`), where somebody asks.
    """

    features: Array
    targets: Array
    identity: Array | None = field(default=None, kw_only=True)

    def __len__(self) -> int:
        return len(self.targets)

    def __repr__(self) -> str:
        return f"Records({len(self)} of shape {self.features.shape[1:]}, {self.features.dtype})"

    def take(self, indices: Array | slice) -> "Records":
        """The records at these positions, in this order."""
        identity = None if self.identity is None else self.identity[indices]
        return Records(self.features[indices], self.targets[indices], identity=identity)

    def identified(self, identity: Array) -> "Records":
        """The same records, known again by these digests."""
        return replace(self, identity=identity)

    @property
    def arrays(self) -> dict[str, Array]:
        """All that they are made of, by name."""
        return {"features": self.features, "targets": self.targets}

    @property
    def flat(self) -> "Records":
        """One row per record, also where a row is a person."""
        return self

    @classmethod
    def joined(cls, parts: Iterable["Records"]) -> "Records":
        """The records of all parts, one part after the other."""
        several = list(parts)
        known = [part.identity for part in several if part.identity is not None]
        return cls(
            np.concatenate([part.features for part in several]),
            np.concatenate([part.targets for part in several]),
            identity=np.concatenate(known) if len(known) == len(several) else None,
        )


@dataclass(frozen=True)
class Task:
    """What a model is asked to predict; public, like everything a model's shape depends on.

    Args:
        shape: shape of one record's features.
        classes: number of classes, 0 for regression.
        vocabulary: number of tokens, for text.
        error_cap: for regression, tau of the bounded score 1 - min(error^2, tau) / tau.
    """

    kind: Literal["classification", "regression"]
    shape: tuple[int, ...]
    classes: int
    vocabulary: int | None = None
    error_cap: float | None = None

    @property
    def outputs(self) -> int:
        """Width of a model's output: one logit per class, or one number."""
        return self.classes if self.kind == "classification" else 1


@dataclass(frozen=True)
class Owners:
    """Who holds each record where clients are natural: a hospital, a school, a speaking role.

    Args:
        names: one per owner.
        train: index into `names` for every training record.
        test: the same for the test records, where the dataset has its own.
        clusters: of each owner, where it is known: records are drawn, or it is public (a school's type).
    """

    names: tuple[str, ...]
    train: Array
    test: Array | None = None
    clusters: Array | None = None


@dataclass(frozen=True)
class Persons:
    """Whose each record is: an integer, the same for all records of a person, at whichever client.

    Args:
        train: for every training record.
        test: for the test records, where the dataset has its own.
    """

    train: Array
    test: Array | None = None


@dataclass(frozen=True)
class Dataset:
    """Records with their task, before anyone decides who holds which.

    Args:
        test: held-out records where the source publishes them; else None, and the federation holds some out.
        note: where the records come from and by which public constants they are scaled.
        owners: the natural clients, where there are any.
        preprocessing: how raw values became these features; None where records come as a network sees them.
        caveats: what a guarantee for these records must add because of how they were declared.
        persons: whose each record is, where the source says so.
    """

    name: str
    train: Records
    test: Records | None
    task: Task
    note: str
    owners: Owners | None = None
    preprocessing: "Preprocessing | None" = None
    caveats: tuple[str, ...] = ()
    persons: Persons | None = None

    def __repr__(self) -> str:
        held_out = "none" if self.test is None else len(self.test)
        clients = "none" if self.owners is None else len(self.owners.names)
        return f"Dataset({self.name}: train {len(self.train)}, test {held_out}, natural clients {clients})"

    def with_parts(self, train: Records, test: Records | None = None) -> "Dataset":
        """The same, of these records."""
        return replace(self, train=train, test=test)

    @classmethod
    def of_owners(
        cls,
        name: str,
        train: Mapping[str, Records],
        task: Task,
        note: str,
        test: Mapping[str, Records] | None = None,
        preprocessing: "Preprocessing | None" = None,
        caveats: tuple[str, ...] = (),
    ) -> "Dataset":
        """From the records of each natural client; `test` has the same clients."""
        held_out = None if test is None else Records.joined(test.values())
        owners = Owners(tuple(train), _owner(train), None if test is None else _owner(test))
        records = Records.joined(train.values())
        return cls(name, records, held_out, task, note, owners, preprocessing, caveats)


def _owner(parts: Mapping[str, Records]) -> Array:
    """The place of the owner of each record, where the owners' records follow one another."""
    return np.repeat(np.arange(len(parts)), [len(part) for part in parts.values()])


UNDIVIDED = Acts("data that have no test records of their own", lambda _, run: run.data.undivided)
"""Of options that say how many records are held out for tests."""


def stream(seed: int, *key: int) -> np.random.Generator:
    """An independent generator for each key, so that one more cluster leaves the others as they were."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))
