"""The page of a run between sites that goes on, for the server's operator: how far it is, who is there.

It has what the server tells its own machine anyway (`/health`), and no number that tells of a record.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from coterie.experiment.serving_status import RunStatus, SiteStatus
from coterie.files import replacing
from coterie.privacy.units import round_down
from coterie.report.numbers import seconds
from coterie.report.page import page
from coterie.table import NONE, Table

EVERY_SECONDS = 3.0
"""Between two versions of the page, which a browser loads again as often."""


def live_page(status: RunStatus, *, over: bool = False) -> str:
    """The page as it is now.

    Args:
        over: nothing will change any more.
    """
    sites = status.sites()
    least = min(status.left.values(), default=None)
    return page(
        "live",
        status.state[:1].upper() + status.state[1:],
        status.algorithm or "not agreed yet",
        status=status,
        here=sum(site.here for site in sites),
        sites=sites,
        table=Table.of([_row(site) for site in sites], words=("Here", "Last error")),
        left=NONE if least is None else round_down(least),
        at=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        again=None if over else int(EVERY_SECONDS),
    )


def _row(site: SiteStatus) -> dict[str, str]:
    seen = "never came" if site.seen is None else f"{seconds(site.seen)} ago"
    error = NONE if site.error is None else site.error
    if site.error_round is not None:
        error = f"{error} (round {site.error_round})"
    return {
        "Site": site.name,
        "Here": "yes" if site.here else f"no, {seen}",
        "Came": str(site.arrivals),
        "Epsilon left": NONE if site.left is None else round_down(site.left),
        "Last error": error,
    }


@contextmanager
def kept_page(status: RunStatus, target: Path) -> Iterator[None]:
    """Keep a page of a run up to date while it goes on, and leave it as the run ended.

    Readable by its owner alone: it names sites, and why they were missing.
    """
    done = threading.Event()

    def write(*, over: bool = False) -> None:
        with replacing(target, mode=0o600) as draft:
            draft.write_text(live_page(status, over=over), encoding="utf-8")

    def keep() -> None:
        while not done.wait(EVERY_SECONDS):
            write()

    write()
    thread = threading.Thread(target=keep, name="page", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(timeout=10)
        write(over=True)
