"""A bell between the server's loop and the proxy, so that neither server nor sites have to keep asking.

All messages to sites are sent by this very process, and all answers pass its proxy. So a site's question for
messages is held until there is one, and the server is woken when a site has answered. Both look after a few
seconds all the same: nothing depends on a bell that was not heard.
"""

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator

HOLD_SECONDS, SENDING_SECONDS = 5.0, 20.0
"""How long a site's question is held where there is nothing for it, and how much longer while something is
being sent to it."""


class Bell:
    """Rung by the server, in its thread, and heard by the proxy, on its loop; and the other way round."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._quiet: dict[str, asyncio.Event] = {}
        """Those for whom there was nothing when they last asked."""
        self._rings: Counter[str] = Counter()
        self._pushed: set[str] = set()
        self._sending: frozenset[str] = frozenset()
        self._answered = threading.Event()
        self.used = False
        """Whether somebody rings: else no question is held."""

    # --- the server's loop ------------------------------------------------------------------------------

    def ring(self, names: Iterable[str]) -> None:
        """There is something for these sites."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake, list(names))

    @contextlib.contextmanager
    def sending(self, names: Collection[str]) -> Iterator[None]:
        """Send messages to these sites, and ring when all of it is there.

        Who hears of a message before would ask for its pieces again and again, while they are being sent.
        """
        self._sending = frozenset(names)
        try:
            yield
        finally:
            self._sending = frozenset()
            self.ring(names)

    def wait(self, seconds: float) -> None:
        """Until somebody has answered, and at most for so long."""
        self._answered.wait(seconds)
        self._answered.clear()

    # --- the proxy's loop -------------------------------------------------------------------------------

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def release(self) -> None:
        """Hold nobody any more."""
        self.used = False
        self.ring(list(self._quiet))

    def _wake(self, names: list[str]) -> None:
        for name in names:
            self._rings[name] += 1
            if (event := self._quiet.pop(name, None)) is not None:
                event.set()

    async def something_for(self, name: str, gone: Callable[[], Awaitable[object]]) -> bool:
        """Wait until there may be something for a site; False where the one who asks has gone meanwhile."""
        if name in self._pushed:  # who asks for more has sent all of its answer
            self._pushed.discard(name)
            self._answered.set()
        event = self._quiet.get(name)
        if name in self._sending:
            event = self._quiet.setdefault(name, asyncio.Event())
        if event is None or not self.used:
            return True
        ringing, leaving = asyncio.ensure_future(event.wait()), asyncio.ensure_future(gone())
        first = asyncio.FIRST_COMPLETED
        try:
            done, _ = await asyncio.wait({ringing, leaving}, timeout=HOLD_SECONDS, return_when=first)
            if not done and name in self._sending:
                await asyncio.wait({ringing, leaving}, timeout=SENDING_SECONDS, return_when=first)
            return not leaving.done()
        finally:
            ringing.cancel()
            leaving.cancel()

    def rings(self, name: str) -> int:
        """How often it was rung for a site."""
        return self._rings[name]

    def nothing_for(self, name: str, rings: int) -> None:
        """The link had nothing for a site that asked when it had been rung for it so often."""
        if self._rings[name] == rings:
            self._quiet.setdefault(name, asyncio.Event())

    def arrived(self, name: str) -> None:
        """A site has come, or come again: whoever waits for its answer will want to send it something."""
        self._wake([name])
        self._answered.set()

    def pushed(self, name: str) -> None:
        """A site has sent a part of an answer."""
        self._pushed.add(name)
