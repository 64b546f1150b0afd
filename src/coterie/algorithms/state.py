"""What an algorithm carries from one round to the next, and what must be true of it whoever wrote it down."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import numpy as np

Rng: TypeAlias = np.random.Generator


@dataclass(frozen=True)
class State:
    """Everything an algorithm carries from one round to the next: public or released values only.

    Fields of a subclass are numpy arrays or plain JSON values (numbers, strings, None, tuples, mappings
    with string keys), which is all that a checkpoint stores.

    Args:
        round: rounds completed.
        seed: seed of the server's own public randomness, combined with the round.
    """

    fixed: ClassVar[frozenset[str]] = frozenset({"clients", "seed"})
    """Fields that no round changes."""
    growing: ClassVar[Mapping[str, int]] = {}
    """Arrays of which rounds decide how long this axis is: as long as those of the others."""

    round: int
    clients: tuple[str, ...]
    seed: int

    def check(self) -> None:
        """Raise a ValueError where the parts of the state do not fit each other."""

    def rng(self) -> Rng:
        """The server's randomness for the round that follows this state."""
        return np.random.default_rng([self.seed, self.round])

    @property
    def replaced_after(self) -> int:
        """The round after which a model was last replaced by another, not moved: none, unless one says so."""
        return 0
