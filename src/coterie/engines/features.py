"""Records as a network behind public features sees them: computed once, kept in a file, read where needed.

A transform takes every record by itself (`models/features.py`), in the code that is installed where the
records are. What it makes of them takes more memory than they do, so it lies in a file that is mapped, and a
step reads the records that it drew.
"""

import hashlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from pathlib import Path
from typing import IO
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from coterie.data import Client, Federation, Records, Task
from coterie.data.records import Array
from coterie.engines.feature_cache import Draft, FeatureCache
from coterie.errors import ModelError
from coterie.models import PublicFeatures, public_features
from coterie.models.check import one_thread
from coterie.training.isolation import Isolation
from coterie.training.learner import Batch, on_device, random_batch
from coterie.training.parameters import Layout
from coterie.training.proof import NotProven, proven_apart

log = logging.getLogger(__name__)

AT_ONCE = {"cpu": 8, "cuda": 512}
"""Records of a call; on a CPU a record's features have the same bits in any of them."""
_WORTH_SAYING = 3.0
"""Seconds from which it is said how long computing takes."""

Encode = Callable[[Tensor], Tensor]
_tables: "WeakValueDictionary[tuple[str, int, str], Tensor]" = WeakValueDictionary()


@dataclass(frozen=True)
class Featured:
    """A federation as its network sees it.

    Args:
        mapped: the features of all, in a file; None where records are what the network sees.
    """

    federation: Federation
    mapped: "MappedFeatures | None" = None

    @property
    def digest(self) -> str:
        """Of the features' bits, to which noise is bound."""
        return "" if self.mapped is None else self.mapped.digest

    def table(self, device: torch.device) -> Batch | None:
        """The training records of all clients, one client after the other, where they lie in a file."""
        if self.mapped is None:
            return None
        train = [client.train for client in self.federation.clients]
        rows, width = sum(map(len, train)), train[0].features.shape[1:]
        places = sum(own.features.size for own in train) // max(1, math.prod(self.mapped.features.shape[1:]))
        # Runs on the same records share one copy of them on a GPU.
        key = (self.mapped.digest, places, str(device))
        features = _tables.get(key)
        if features is None:
            features = on_device(self.mapped.features[:places].reshape(rows, *width), device)
            _tables[key] = features
        beside = [name for name in train[0].arrays if name != "features"]
        rest = [np.concatenate([own.arrays[name] for own in train]) for name in beside]
        file = self.mapped.path if device.type == "cpu" else None
        return Batch(features, *(on_device(part, device) for part in rest), file=file)


def featured(federation: Federation, name: str, device: torch.device, cache: FeatureCache) -> Featured:
    """The federation with the features of this name in place of its records' own."""
    public = public_features(name, federation.task)
    if public is None:
        return Featured(federation)
    clients = federation.clients
    # All that clients train on stands first, one client after the other: the table that engines read.
    parts = [getattr(each, part) for part in ("train", "validation", "test") for each in clients]
    found, table = _mapped(parts, public, federation.task, device, cache)
    count = len(clients)
    made = tuple(Client(one.name, *found[place::count]) for place, one in enumerate(clients))
    return Featured(replace(federation, clients=made, task=public.task), table)


def encoded(
    records: Records, name: str, task: Task, device: torch.device, cache: FeatureCache | None = None
) -> Records:
    """Records with the features of this name: from the cache, or computed for now where there is none."""
    public = public_features(name, task)
    if public is None:
        return records
    if cache is not None:
        [found], _ = _mapped([records], public, task, device, cache)
        return found
    lead, flat = _places(records, task)
    width = public.task.shape
    made = np.concatenate([np.zeros((0, *width), np.float32), *_computed([flat], public, task, device)])
    return replace(records, features=made.reshape(*lead, *width))


@dataclass(frozen=True)
class MappedFeatures:
    """Features of several sets of records, one after the other, in a file that stays while `held` is open."""

    features: np.memmap[tuple[int, ...], np.dtype[np.float32]]
    path: Path
    digest: str
    held: IO[bytes]


def _places(records: Records, task: Task) -> tuple[tuple[int, ...], Array]:
    """How many records there are, or persons and places of each; and the features of all, a row each."""
    lead = records.features.shape[: records.features.ndim - len(task.shape)]
    return lead, records.features.reshape(math.prod(lead), *task.shape)


def _mapped(
    parts: Sequence[Records], public: PublicFeatures, task: Task, device: torch.device, cache: FeatureCache
) -> tuple[list[Records], MappedFeatures]:
    leads, rows = zip(*(_places(part, task) for part in parts), strict=True)
    sizes = [len(flat) for flat in rows]
    shape = (sum(sizes), *public.task.shape)

    def fill(draft: Draft) -> None:
        made = _computed(rows, public, task, device)
        for chunk in _told(public, shape[0], made):
            draft.write(chunk)

    key = _key(rows, public, device)
    entry = cache.entry(key, 4 * math.prod(shape), fill, f"model.features: {public.name}")
    # What is written into a private mapping stays in this process.
    features = np.memmap(entry.path, np.float32, mode="c", shape=shape)
    ends = list(accumulate(sizes, initial=0))
    found = [
        replace(part, features=features[first:last].reshape(*lead, *shape[1:]))
        for part, lead, first, last in zip(parts, leads, ends, ends[1:], strict=False)
    ]
    return found, MappedFeatures(features, entry.path, entry.digest, entry.held)


def _key(parts: Sequence[Array], public: PublicFeatures, device: torch.device) -> str:
    """What decides the bits of features: the records, the transform, and what computes it."""
    digest = hashlib.sha256(f"{public.identity} {torch.__version__} {device.type}".encode())
    for part in parts:
        digest.update(repr((part.shape, part.dtype.str)).encode())
        digest.update(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _told(public: PublicFeatures, records: int, made: Iterator[Array]) -> Iterator[Array]:
    """The same, with a word now and then on how long it takes."""
    began = said = time.monotonic()
    done = 0
    for part in made:
        yield part
        done += len(part)
        now = time.monotonic()
        first = said == began
        if now - said > (_WORTH_SAYING if first else 10 * _WORTH_SAYING):
            said, left = now, (now - began) * (records - done) / done
            log.info(
                "computing %s features of %s records, once: %.0f %% done, about %s left",
                public.name,
                f"{records:,}",
                100 * done / records,
                f"{left:.0f} s" if left < 120 else f"{left / 60:.0f} min",
            )
    if said != began:
        log.info("%s features are computed and kept: %.0f s", public.name, time.monotonic() - began)


# --- computing --------------------------------------------------------------------------------------------


def _computed(
    parts: Sequence[Array],
    public: PublicFeatures,
    task: Task,
    device: torch.device,
) -> Iterator[Array]:
    """Features of all records in their order, some at a time."""
    with _encoder(public, task, device) as (encode, at_once):
        chunks = (part[first : first + at_once] for part in parts for first in range(0, len(part), at_once))

        @torch.no_grad()
        def work(chunk: Array) -> Array:
            given = torch.from_numpy(np.ascontiguousarray(chunk)).to(device)
            made: Array = encode(given).to("cpu", torch.float32).numpy()
            return made

        if device.type != "cpu":
            yield from map(work, chunks)
            return
        threads = torch.get_num_threads()
        with one_thread(), ThreadPoolExecutor(threads) as pool:
            # So many at a time that all threads have something to do, and little waits in memory.
            while waiting := list(islice(chunks, 8 * threads)):
                yield from pool.map(work, waiting)


@contextmanager
def _encoder(public: PublicFeatures, task: Task, device: torch.device) -> Iterator[tuple[Encode, int]]:
    """What computes a transform here, and how many records it is given at a time."""
    if not public.own:
        module = public.module.to(device)
        try:
            yield module, AT_ONCE[device.type]
        finally:
            module.to("cpu")
        return
    encode, at_once = _apart(public, task, device)
    try:
        yield encode, at_once
    except ModelError as mistake:
        raise ModelError(f"model.features: {public.name}: {mistake}") from None


def _apart(public: PublicFeatures, task: Task, device: torch.device) -> tuple[Encode, int]:
    """A user's own encoder, so that no record can reach another's features."""
    width = public.task.shape[0]
    try:
        proven = proven_apart(public.module, lambda size: random_batch(task, size).features).to(device)
    except NotProven as reason:
        log.info("records go through the encoder one after the other; it was not proven apart: %s", reason)
        module = public.module.to(device)
        alone = Isolation(module, Layout.of(module), lambda outputs, _: outputs[:, 0], width, mapped=False)
        return lambda records: alone.outputs(torch.zeros(0, device=device), records), 1
    # One record at a time where that decides the last bits.
    return proven, 1 if device.type == "cpu" else AT_ONCE[device.type]
