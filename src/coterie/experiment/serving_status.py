"""What a server tells of a run while it goes on: to whoever watches over it, never a number of a record's."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from coterie.engines.flower.proxy import ServerStatus
from coterie.engines.flower.transport import Transport
from coterie.experiment.callbacks import Callbacks, RoundReport, RunStart

HERE_SECONDS = 10.0
"""A site that has not asked for messages for so long is away: its questions are held for half of that."""


@dataclass(frozen=True)
class SiteStatus:
    """What the server's operator can know of a site.

    Args:
        seen: seconds since it last asked for messages; None: it never did, or has no key to be known by.
        arrivals: how often it came.
        left: epsilon, of what it agreed to.
        error: why it was last refused, or did not answer.
        error_round: in which round that was; None: at the door.
    """

    name: str
    seen: float | None
    arrivals: int
    left: float | None
    error: str | None
    error_round: int | None

    @property
    def here(self) -> bool:
        return self.seen is not None and self.seen < HERE_SECONDS


@dataclass
class RunStatus:
    """How far a run is.

    Args:
        state: in words.
        missing: why a site did not answer, the last time that it did not; empty where that is a secret.
        missed: in which round that was.
        guarantee: the line that the sites agreed to.
    """

    state: str = "waiting for sites"
    round: int = 0
    rounds: int = 0
    answers_missing: int = 0
    missing: dict[str, str] = field(default_factory=dict)
    missed: dict[str, int] = field(default_factory=dict)
    algorithm: str = ""
    guarantee: str = ""
    left: dict[str, float] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)
    transport: Transport | None = None
    proxy: ServerStatus | None = None

    def watching(self, callbacks: Callbacks) -> Callbacks:
        """Callbacks that keep this up to date, and tell the others as before."""

        def joined(records: object) -> None:
            self.state = "waiting for the sites to agree"

        def start(started: RunStart) -> None:
            self.round, self.rounds = started.done, started.experiment.schedule.rounds
            self.algorithm, self.guarantee = started.experiment.algorithm.name, started.guarantee
            self.state = f"in round {min(self.round + 1, self.rounds)} of {self.rounds}"

        def finished_round(report: RoundReport) -> None:
            self.round, self.missing = report.round, {**self.missing, **report.missing}
            self.missed |= dict.fromkeys(report.missing, report.round)
            self.answers_missing += len(report.missing)
            self.left = {name: report.budget[name] - spent for name, spent in report.spent.items()}
            over = report.round == report.rounds
            self.state = (
                "handing out the models" if over else f"in round {report.round + 1} of {report.rounds}"
            )

        return replace(
            callbacks,
            on_joined=_both(joined, callbacks.on_joined),
            on_start=_both(start, callbacks.on_start),
            on_round=_both(finished_round, callbacks.on_round),
        )

    def attach(self, transport: Transport, status: ServerStatus) -> None:
        """Let the proxy tell all this, and ask the transport what is still waited for."""
        self.transport, self.proxy = transport, status
        transport.bell, status.bell.used = status.bell, True
        status.health, status.metrics = self.health, self.metrics
        status.is_open = transport.is_open
        transport.arrivals = lambda name: status.arrivals[name]

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Say in the end how it ended."""
        try:
            yield
            self.state = "finished"
        except BaseException:
            self.state = f"stopped {self.state}; --resume goes on"
            raise

    def sites(self) -> list[SiteStatus]:
        """Every site that may come, as the server knows it now."""
        if self.transport is None or self.proxy is None:
            return []
        now, found = time.monotonic(), []
        for name in sorted(self.transport.nodes):
            polled, refused = self.proxy.last_polls.get(name), self.proxy.troubles.get(name)
            error = self.missing.get(name) if refused is None else f"refused at the door: {refused}"
            found.append(
                SiteStatus(
                    name,
                    None if polled is None else now - polled,
                    self.proxy.arrivals[name],
                    self.left.get(name),
                    error,
                    None if refused is not None else self.missed.get(name),
                )
            )
        return found

    def health(self) -> dict[str, object]:
        return {
            "state": self.state,
            "round": self.round,
            "rounds": self.rounds,
            "sites": sorted(self.transport.nodes) if self.transport is not None else [],
            "missing": self.missing,
            "epsilon_left": self.left,
            "seconds": round(time.monotonic() - self.began, 1),
        }

    def metrics(self) -> dict[str, float]:
        return {
            "coterie_round": self.round,
            "coterie_rounds": self.rounds,
            "coterie_sites": len(self.transport.nodes) if self.transport is not None else 0,
            "coterie_answers_missing_total": self.answers_missing,
            "coterie_serving_seconds": time.monotonic() - self.began,
        }


def _both(first: Callable[..., object], second: Callable[..., object] | None) -> Callable[..., None]:
    def told(*arguments: object) -> None:
        first(*arguments)
        if second is not None:
            second(*arguments)

    return told
