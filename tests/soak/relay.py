"""A network between sites and their server that can be cut and frozen: TCP relays in their own thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Relay:
    """Passes on what comes to its port; see `Network`, on whose loop all of this runs."""

    def __init__(self, target: int) -> None:
        self.target, self.port = target, 0
        self.cut = False
        self._moving = asyncio.Event()
        self._moving.set()
        self._open: set[asyncio.StreamWriter] = set()

    async def listen(self) -> int:
        server = await asyncio.start_server(self._meet, "127.0.0.1", 0)
        self.port = int(server.sockets[0].getsockname()[1])
        return self.port

    async def set_cut(self, cut: bool) -> None:
        """While it is cut, connections end as soon as they begin; those that are open end now."""
        self.cut = cut
        for writer in self._open if cut else ():
            writer.transport.abort()

    async def set_frozen(self, frozen: bool) -> None:
        """While it is frozen, connections stay open, and nothing moves."""
        if frozen:
            self._moving.clear()
        else:
            self._moving.set()

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            if self.cut:
                return
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target)
            self._open.add(far_writer)
            try:
                ways = (self._pump(reader, far_writer), self._pump(far_reader, writer))
                tasks = [asyncio.create_task(way) for way in ways]
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            finally:
                self._open.discard(far_writer)
                far_writer.transport.abort()
        except OSError:
            pass  # nobody listens there now
        finally:
            self._open.discard(writer)
            writer.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            await self._moving.wait()
            writer.write(data)
            await writer.drain()


class Network:
    """Relays of many sites, on a loop of their own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relays", daemon=True)
        self._thread.start()

    def relay_to(self, target: int) -> Relay:
        relay = Relay(target)
        self._do(relay.listen())
        return relay

    def cut(self, relay: Relay, cut: bool) -> None:
        self._do(relay.set_cut(cut))

    def freeze(self, relay: Relay, frozen: bool) -> None:
        self._do(relay.set_frozen(frozen))

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def close(self) -> None:
        async def end() -> None:
            others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        with contextlib.suppress(TimeoutError):
            self._do(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
