"""Fingerprints of records under the register's key, and the files that they are kept in.

A fingerprint is 64 bits of a keyed hash. Two records with the same one (one in 37 million, among a million of
them) count as one record, which charges them more than they paid, never less.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from dp_accounting import DpEvent
from numpy.typing import NDArray

from coterie.errors import LedgerError
from coterie.files import digest_bytes, replacing, sync
from coterie.privacy.events import composed, event_to_json
from coterie.privacy.plan import canonical_json
from coterie.register.lines import ChargedGroup
from coterie.register.place import OWNER_ALONE, RECORDS

Fingerprints = NDArray[np.uint64]
_SIZE = 8


@dataclass(frozen=True)
class Use:
    """What is computed from some of the records that somebody holds.

    Args:
        holder: a client, or a site.
        identity: a digest of each record, in rows of bytes.
        event: what it costs each of them.
    """

    holder: str
    identity: NDArray[Any]
    event: DpEvent


@dataclass(frozen=True)
class RecordGroups:
    """Records by what is charged to them, each in one group."""

    fingerprints: tuple[Fingerprints, ...]
    groups: tuple[ChargedGroup, ...]

    @property
    def content(self) -> bytes:
        """Of the file that keeps them."""
        return b"".join(each.astype("<u8").tobytes() for each in self.fingerprints)

    @property
    def digest(self) -> str:
        return digest_bytes(self.content)

    @property
    def together(self) -> Fingerprints:
        """All of them, in ascending order."""
        return np.sort(np.concatenate([np.empty(0, np.uint64), *self.fingerprints]))


def fingerprints_of(identity: NDArray[Any], key: bytes) -> Fingerprints:
    """Of records by their digests, in the same order."""
    whole, width = np.ascontiguousarray(identity, dtype=np.uint8).tobytes(), identity.shape[1]
    keyed = hashlib.blake2b(key=key, digest_size=_SIZE)
    found = bytearray()
    for place in range(0, len(whole), width):
        one = keyed.copy()
        one.update(whole[place : place + width])
        found += one.digest()
    return np.frombuffer(bytes(found), dtype="<u8").astype(np.uint64)


def grouped(uses: Sequence[Use], key: bytes, *, shared: bool) -> RecordGroups:
    """Every record once, with what it pays in all of its uses.

    Args:
        shared: whether a record that several hold is the same one: then it pays for all of them. Otherwise
            rows that are alike are different records, of which each pays for its own use.
    """
    events: dict[str, DpEvent] = {}
    prints: list[Fingerprints] = [np.empty(0, np.uint64)]
    kinds: list[NDArray[np.int64]] = [np.empty(0, np.int64)]
    holders: list[NDArray[np.int64]] = [np.empty(0, np.int64)]
    names = {name: place for place, name in enumerate(dict.fromkeys(use.holder for use in uses))}
    for use in uses:
        own = np.unique(fingerprints_of(use.identity, key))
        text = canonical_json(event_to_json(use.event))
        events.setdefault(text, use.event)
        prints.append(own)
        kinds.append(np.full(len(own), list(events).index(text), dtype=np.int64))
        holders.append(np.full(len(own), names[use.holder], dtype=np.int64))
    printed, kind, holder = np.concatenate(prints), np.concatenate(kinds), np.concatenate(holders)
    order = np.lexsort((kind, holder, printed))
    printed, kind, holder = printed[order], kind[order], holder[order]
    first = np.flatnonzero(np.diff(printed, prepend=printed[:1] ^ np.uint64(1))) if len(printed) else order
    times = np.diff(first, append=len(printed))
    known = list(events.values())
    members: dict[tuple[int, ...], list[Fingerprints]] = {}
    alone = first[times == 1]
    for each in np.unique(kind[alone]).tolist():
        members[(each,)] = [printed[alone][kind[alone] == each]]
    costs: dict[tuple[int, ...], tuple[DpEvent, ...]] = {
        (each,): (known[each],) for each in range(len(known))
    }
    for start, count in zip(first[times > 1].tolist(), times[times > 1].tolist(), strict=True):
        own_kinds = kind[start : start + count].tolist()
        several = len(set(holder[start : start + count].tolist())) > 1
        if shared and several:
            several_kinds = (-1, *sorted(own_kinds))
            costs.setdefault(several_kinds, (composed([known[each] for each in sorted(own_kinds)]),))
        else:
            several_kinds = tuple(sorted(set(own_kinds)))
            costs.setdefault(several_kinds, tuple(known[each] for each in several_kinds))
        members.setdefault(several_kinds, []).append(printed[start : start + 1])
    found = {kinds_: np.sort(np.concatenate(parts)) for kinds_, parts in members.items()}
    return RecordGroups(
        tuple(found.values()), tuple(ChargedGroup(len(own), costs[each]) for each, own in found.items())
    )


class RecordFiles:
    """The files of fingerprints beside a register, named by their digests: the same records, one file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / RECORDS
        self._read: dict[str, Fingerprints] = {}

    def write(self, groups: RecordGroups) -> str:
        """Keep fingerprints; when this returns, they survive any crash."""
        digest, content = groups.digest, groups.content
        path = self._folder / digest
        if not path.exists():
            self._folder.mkdir(mode=0o700, exist_ok=True)
            with replacing(path, mode=OWNER_ALONE) as draft:
                draft.write_bytes(content)
            sync(self._folder)
        return digest

    def read(self, digest: str) -> Fingerprints:
        """What a file holds, group after group."""
        if digest not in self._read:
            path = self._folder / digest
            try:
                content = path.read_bytes()
            except OSError as problem:
                lost = f"the register needs these fingerprints ({problem.strerror}); put them back"
                raise LedgerError(f"{path}: {lost}") from None
            LedgerError.when(digest_bytes(content) != digest, f"{path}: changed or damaged; put it back")
            self._read[digest] = np.frombuffer(content, dtype="<u8").astype(np.uint64)
        return self._read[digest]


class Histories:
    """Records in groups of the same history: for each group, the charges that it shares."""

    def __init__(self, prints: Fingerprints) -> None:
        """Args:
        prints: of the records, in ascending order, each once.
        """
        self.prints = prints
        self.labels = np.zeros(len(prints), dtype=np.int64)
        self.paid: list[tuple[object, ...]] = [()]
        self._known: dict[tuple[object, ...], int] = {(): 0}

    def places(self, others: Fingerprints) -> NDArray[np.int64]:
        """Where those of the records are that are among others."""
        if not len(self.prints):
            return np.empty(0, np.int64)
        found = np.minimum(np.searchsorted(self.prints, others), len(self.prints) - 1)
        here: NDArray[np.int64] = found[self.prints[found] == others].astype(np.int64)
        return here

    def add(self, where: NDArray[np.int64], charge: object) -> None:
        """Charge the records at these places."""
        if not len(where):
            return
        before, inverse = np.unique(self.labels[where], return_inverse=True)
        after = np.array([self._label((*self.paid[label], charge)) for label in before.tolist()])
        self.labels[where] = after[inverse]

    def _label(self, paid: tuple[object, ...]) -> int:
        if paid not in self._known:
            self._known[paid] = len(self.paid)
            self.paid.append(paid)
        return self._known[paid]

    def groups(self) -> Mapping[tuple[object, ...], int]:
        """How many records share each history."""
        labels, counts = np.unique(self.labels, return_counts=True)
        return {
            self.paid[label]: count for label, count in zip(labels.tolist(), counts.tolist(), strict=True)
        }
