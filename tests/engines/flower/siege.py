"""Strangers who want the server's port for themselves: all they have is the authority's certificate."""

from __future__ import annotations

import asyncio
import contextlib
import random
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec

from coterie.engines.flower.proof import sign

HALF_OPEN, SLOW, OVERSIZED, UNKNOWN = 300, 100, 30, 10
"""How many of each kind there are at a time."""
BODY = 15 * 2**20
PUSH = "/v1/fleet/push-object"


class Siege:
    """Holds as many connections as it gets, of four kinds, until it is lifted.

    - half-open: connects and says nothing;
    - slow: a handshake, then one letter of a request after the other;
    - oversized: the head of a request with a large body, and as much of that as is taken;
    - unknown: whole requests, signed with a key that the server does not know.

    Half of them come from addresses of their own, the other half from the one that the sites have, too.
    """

    def __init__(self, port: int, authority: Path) -> None:
        self.port = port
        self._tls = ssl.create_default_context(cafile=str(authority))
        self.tried: Counter[str] = Counter()
        self.statuses: Counter[str] = Counter()
        self._draw, self._key = random.Random(0), ec.generate_private_key(ec.SECP384R1())
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="siege", daemon=True)
        self._tasks: list[asyncio.Task[None]] = []

    def __enter__(self) -> Siege:
        self._thread.start()
        kinds = {self._half_open: HALF_OPEN, self._slow: SLOW, self._oversized: OVERSIZED}
        for kind, count in {**kinds, self._unknown: UNKNOWN}.items():
            for _ in range(count):
                self._loop.call_soon_threadsafe(self._begin, kind)
        return self

    def __exit__(self, *exception: object) -> None:
        async def end() -> None:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)

    def _begin(self, kind: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._tasks.append(self._loop.create_task(self._again_and_again(kind)))

    async def _again_and_again(self, kind: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while True:
            self.tried[kind.__name__.strip("_")] += 1
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
                await kind()
            await asyncio.sleep(self._draw.uniform(0.5, 2.0))

    async def _connect(self, *, tls: bool = True) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        own = f"127.0.{self._draw.randint(1, 9)}.{self._draw.randint(1, 250)}"
        source = own if self._draw.random() < 0.5 else "127.0.0.1"
        options: dict[str, Any] = {"ssl": self._tls, "server_hostname": "127.0.0.1"} if tls else {}
        return await asyncio.open_connection("127.0.0.1", self.port, local_addr=(source, 0), **options)

    async def _half_open(self) -> None:
        reader, writer = await self._connect(tls=False)
        try:
            await reader.read()  # until the other side has had enough
        finally:
            writer.transport.abort()

    async def _slow(self) -> None:
        reader, writer = await self._connect()
        try:
            for letter in f"POST {PUSH} HTTP/1.1\r\nhost: here\r\nx: {'y' * 10_000}":
                writer.write(letter.encode())
                await writer.drain()
                if reader.at_eof():
                    return
                await asyncio.sleep(1.0)
        finally:
            writer.transport.abort()

    async def _oversized(self) -> None:
        reader, writer = await self._connect()
        try:
            writer.write(f"POST {PUSH} HTTP/1.1\r\nhost: here\r\ncontent-length: {BODY}\r\n\r\n".encode())
            for _ in range(BODY // 65536):
                if reader.at_eof() or writer.is_closing():
                    break
                writer.write(b"x" * 65536)
                await writer.drain()
                await asyncio.sleep(0)
            await self._note(reader)
        finally:
            writer.transport.abort()

    async def _unknown(self) -> None:
        reader, writer = await self._connect()
        try:
            signed = sign(self._key, time.time())
            head = "\r\n".join(
                f"{name}: {value}" for name, value in {"content-length": "2", **signed}.items()
            )
            writer.write(f"POST {PUSH} HTTP/1.1\r\nhost: here\r\n{head}\r\n\r\n{{}}".encode())
            await self._note(reader)
        finally:
            writer.transport.abort()

    async def _note(self, reader: asyncio.StreamReader) -> None:
        line = await asyncio.wait_for(reader.readline(), 60)
        words = line.decode(errors="replace").split()
        self.statuses[words[1] if len(words) > 1 else "closed"] += 1
