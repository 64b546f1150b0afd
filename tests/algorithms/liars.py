"""Clients of a simulation that lie as loudly as the server would believe them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from coterie.algorithms.protocol import Train, Updates
from coterie.engines.flower.server import largest_release
from coterie.engines.local import LocalEngine
from coterie.privacy import RecordSums, Released


@contextmanager
def lying(liars: Collection[str], loud: float = 0.999, *, quiet: bool = False) -> Iterator[None]:
    """Let these clients release, in place of each update, the largest that is admitted, turned around.

    Args:
        quiet: release the update itself, turned around: nobody can tell it from an honest one by its length.
    """
    answer = LocalEngine.answer

    def lied(self: LocalEngine, request: Any, round: int) -> Any:
        reply = answer(self, request, round)
        if not isinstance(request, Train) or not isinstance(reply, Updates):
            return reply
        found = dict(reply.by_client)
        for job in request.jobs:
            mechanism = self.plan.planned(RecordSums, request.release, job.client)
            if job.client in liars and job.client in found and mechanism.projected is None:
                said = found[job.client]
                most = loud * largest_release(job, mechanism, self.facts.lr)
                value = -said.value if quiet else (-most * np.sign(said.value)).astype(np.float32)
                found[job.client] = Released(value, said.noise_std, said.norm_bound)
        return Updates(found)

    LocalEngine.answer = lied  # type: ignore[method-assign]
    try:
        yield
    finally:
        LocalEngine.answer = answer  # type: ignore[method-assign]
