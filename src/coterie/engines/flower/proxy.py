"""The proxy before the link: passes what registered sites need, and nothing else.

Flower's link serves three kinds of callers on one port: sites, operators and the server's own task. Only
sites prove who they are. So the link listens on loopback, and this proxy in front of it passes exactly the
paths that a registered site uses, by name; whatever else there is, or a later release adds, stays inside.
Who asks is known from a request's head: of strangers no body is read. Uvicorn, Starlette and httpx, which
come with Flower, do the work; `guard` decides about connections.
"""

import asyncio
import contextlib
import json
import socket
import threading
import time
from asyncio.sslproto import SSLProtocol
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from coterie import __version__
from coterie.engines.flower.bell import Bell
from coterie.engines.flower.guard import Guard, GuardedSocket
from coterie.engines.flower.internals import PROTOBUF_MEDIA_TYPE, ActivateNodeResponse
from coterie.engines.flower.keys import is_loopback
from coterie.engines.flower.processes import Upstream
from coterie.engines.flower.proof import (
    HELLO,
    MESSAGE_HEADER,
    OPEN,
    PROTOCOL,
    Greeting,
    KeyRing,
    Visitor,
    flower_version,
    who_asks,
)
from coterie.errors import CoterieError

_FLEET = (
    b"activate-node deactivate-node send-node-heartbeat pull-messages push-messages get-run get-fab "
    b"pull-object push-object confirm-message-received"
)
HEALTH = ("GET", b"/health")
METRICS = ("GET", b"/metrics")
FLEET = frozenset(("POST", b"/v1/fleet/" + name) for name in _FLEET.split())
OURS = frozenset({HEALTH, METRICS, ("GET", HELLO), ("GET", OPEN)})
"""What the proxy answers itself."""
ALLOWED = FLEET | OURS
SELF_REGISTRATION = frozenset({("POST", b"/v1/fleet/register-node"), ("POST", b"/v1/fleet/unregister-node")})
"""Needed where nodes have no keys, in the plaintext mode; else the operator registers a site's key."""
HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization te trailer transfer-encoding upgrade "
    b"host content-length".split()
)
PULL = b"/v1/fleet/pull-messages"
PUSHES = frozenset({b"/v1/fleet/push-messages", b"/v1/fleet/push-object"})
"""What the link keeps on its disk."""
LARGEST_BODY = 16 * 2**20
"""Flower cuts arrays into pieces of 5 MiB."""
MOST_AT_ONCE, MOST_AT_ONCE_EACH = 16 * LARGEST_BODY, 4 * LARGEST_BODY
"""Bytes of bodies that are read at a time: in all, and of one site."""
FIRST_BYTES, TIMES_ASKED, EACH_MESSAGE = 4 * 2**20, 4, 2**18
"""What a node may push: so much at first, and for every message so many times its size and so much beside. An
update is at most twice the size of the models that were sent for it; a retry pushes it again."""
BODY_SECONDS = 60.0
SECONDS = 60.0
SWEEP_SECONDS = 1.0
TLS_BUFFER = 2**14
"""Bytes that a connection has for what comes in: one TLS record. Asyncio's 256 KiB would be a siege's for the
asking, before anybody has proven anything."""


@dataclass
class ServerStatus:
    """What the server lets others know of what it does.

    Args:
        health: its state, for whoever watches over the machine.
        metrics: numbers for Prometheus, by name; none that tells of a record.
        is_open: whether the answer to a message is still waited for.
        last_polls: when each site last asked for messages, by our own clock.
        troubles: why a site was last refused.
        arrivals: how often each site has come.
        bell: tells sites that there is something for them, and the server that a site has answered.
    """

    health: Callable[[], dict[str, object]] = dict
    metrics: Callable[[], dict[str, float]] = dict
    is_open: Callable[[str], bool] = lambda identity: True
    last_polls: dict[str, float] = field(default_factory=dict)
    troubles: dict[str, str] = field(default_factory=dict)
    arrivals: Counter[str] = field(default_factory=Counter)
    bell: Bell = field(default_factory=Bell)


class AllowlistProxy:
    """The proxy as an ASGI application."""

    def __init__(
        self,
        upstream: Upstream,
        keys: KeyRing | None = None,
        *,
        guard: Guard | None = None,
        status: ServerStatus | None = None,
        node_of: Callable[[str], int | None] = lambda name: None,
    ) -> None:
        """Args:

        keys: of the sites that may pass; None where nodes have no keys, on this machine alone.
        node_of: the number under which the link knows a site.
        """
        self._upstream, self._keys, self._node_of = upstream, keys, node_of
        self._allowed = ALLOWED | (SELF_REGISTRATION if keys is None else frozenset())
        self._client: httpx.AsyncClient | None = None
        self._allowance = FIRST_BYTES
        self._pushed: Counter[bytes] = Counter()
        self._reading: Counter[bytes] = Counter()
        self.guard, self.status = guard or Guard(), status or ServerStatus()
        self.bell = self.status.bell
        self.passed = 0
        self.refused: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            with contextlib.suppress(ClientDisconnect):
                answer = await self._pass(Request(scope, receive))
                await answer(scope, receive, send)

    def expect(self, size: int) -> None:
        """A message of so many bytes was sent: every node may push as much more as an answer takes."""
        self._allowance += TIMES_ASKED * size + EACH_MESSAGE

    async def _live(self, receive: Receive, send: Send) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        async with httpx.AsyncClient(
            verify=self._upstream.verify, timeout=SECONDS, limits=limits, trust_env=False
        ) as self._client:
            await receive()
            self.bell.attach(asyncio.get_running_loop())
            await send({"type": "lifespan.startup.complete"})
            sweeping = asyncio.create_task(self._sweep())
            await receive()
            sweeping.cancel()
        await send({"type": "lifespan.shutdown.complete"})

    async def _sweep(self) -> None:
        while True:
            self.guard.sweep()
            await asyncio.sleep(SWEEP_SECONDS)

    async def _pass(self, request: Request) -> Response:
        # The raw path, compared as a whole: nothing is decoded, joined or normalised on the way.
        path: bytes = request.scope["raw_path"]
        if (request.method, path) not in self._allowed or request.scope["query_string"]:
            return self._refuse(404, "path")
        visitor = self._visitor(request)
        client = request.scope.get("client")
        if visitor is not None and visitor.refused is None:
            self.guard.trust(client, visitor.key)
        if (request.method, path) in OURS:
            return self._answer(path, request, visitor)
        if visitor is not None and visitor.refused is not None:
            return self._disbelieve(visitor)
        if visitor is None or visitor.name is None:
            return await self._forward(request, path, b"")
        if path == PULL:
            self.status.last_polls[visitor.name] = time.monotonic()
        answer = await self._forward(request, path, visitor.key, visitor.name)
        if path in PUSHES and answer.status_code == 200:
            self.bell.pushed(visitor.name)
        if path.endswith(b"/activate-node"):
            if 400 <= answer.status_code < 500 and not self.guard.in_use(visitor.key, client):
                answer = self._take_over(visitor.name) or answer
            if answer.status_code == 200:
                self.status.arrivals[visitor.name] += 1
                self.bell.arrived(visitor.name)
                self.status.troubles.pop(visitor.name, None)
        return answer

    def _take_over(self, name: str) -> Response | None:
        """Let a site that was killed or cut off go on as the node that it is in the link's eyes.

        The link believes that it is there until heartbeats have been missing for a while, and takes it for
        another with the same key. We know that nobody with that key is at the end of an open connection.
        """
        node = self._node_of(name)
        if node is None:
            return None
        told = ActivateNodeResponse(node_id=node).SerializeToString()
        return Response(told, media_type=PROTOBUF_MEDIA_TYPE)

    def _visitor(self, request: Request) -> Visitor | None:
        """Who asks, by the head of a request; None where nobody has a key."""
        return None if self._keys is None else who_asks(request.headers, self._keys, time.time())

    def _refuse(self, status: int, why: str) -> Response:
        self.refused[why] += 1
        return Response(status_code=status)

    def _disbelieve(self, visitor: Visitor) -> Response:
        """Say why a key is not believed, to whoever sent it."""
        assert visitor.refused is not None
        self.refused[visitor.refused] += 1
        if visitor.name is not None:
            self.status.troubles[visitor.name] = visitor.refused
        told = {"refused": visitor.refused, "ahead": visitor.ahead}
        return Response(json.dumps(told), 401, media_type="application/json")

    # --- what the proxy answers itself ------------------------------------------------------------------

    def _answer(self, path: bytes, request: Request, visitor: Visitor | None) -> Response:
        if path == OPEN:
            if visitor is not None and visitor.refused is not None:
                return self._disbelieve(visitor)
            waiting = self.status.is_open(request.headers.get(MESSAGE_HEADER, ""))
            return Response(json.dumps({"open": waiting}), media_type="application/json")
        if path == HELLO:
            return Response(self._greet(visitor).to_json(), media_type="application/json")
        client = request.scope.get("client")
        here = client is not None and is_loopback(client[0])
        if path == METRICS[1] and here:
            sites, others = self.guard.counts
            numbers = {
                **self.status.metrics(),
                "coterie_connections_of_sites": sites,
                "coterie_connections_of_others": others,
                "coterie_connections_closed_total": self.guard.closed,
                "coterie_connections_turned_away_total": self.guard.turned_away,
                "coterie_requests_refused_total": sum(self.refused.values()),
                "coterie_passed_bytes_total": self.passed,
            }
            lines = "".join(f"{name} {value:g}\n" for name, value in numbers.items())
            return Response(lines, media_type="text/plain; version=0.0.4")
        if path == METRICS[1]:  # for the server's own operator
            return self._refuse(404, "path")
        found = self.status.health()
        shown = found if here else {"state": found.get("state", "serving")}
        return Response(json.dumps(shown), media_type="application/json")

    def _greet(self, visitor: Visitor | None) -> Greeting:
        signed = visitor is not None and visitor.key != b""
        return Greeting(
            PROTOCOL,
            __version__,
            flower_version(),
            time.time(),
            visitor.name if visitor is not None else None,
            visitor.refused if visitor is not None and signed else None,
            str(self.status.health().get("state", "serving")),
        )

    # --- what goes on to the link -----------------------------------------------------------------------

    async def _forward(self, request: Request, path: bytes, key: bytes, name: str | None = None) -> Response:
        length = request.headers.get("content-length", "")
        if not length.isdigit():
            return self._refuse(411, "length")
        size = int(length)
        over = path in PUSHES and self._keys is not None and self._pushed[key] + size > self._allowance
        if size > LARGEST_BODY or over:
            return self._refuse(413, "size")
        if self._reading[key] + size > MOST_AT_ONCE_EACH or self._reading.total() + size > MOST_AT_ONCE:
            return self._refuse(503, "busy")
        self._reading[key] += size
        try:
            body = await asyncio.wait_for(self._body(request, size), BODY_SECONDS)
            if body is None:
                return self._refuse(413, "size")
            if path == PULL and name is not None:
                answer = await self._ask_for(name, request, body)
            else:
                answer = await self._send(request, path, body)
            if answer is None:
                return self._refuse(408, "gone")
        except TimeoutError:
            return self._refuse(408, "slow")
        except httpx.HTTPError:
            return self._refuse(502, "link")
        finally:
            self._reading[key] -= size
            self._reading += Counter()  # forgets who reads nothing
        if path in PUSHES and answer.is_success:
            self._pushed[key] += size
        self.passed += size + len(answer.content)
        reply = Response(answer.content, answer.status_code)
        headers = _passed_on(answer.headers.raw)
        reply.raw_headers += [(name, value) for name, value in headers if name.lower() != b"content-encoding"]
        return reply

    async def _ask_for(self, name: str, request: Request, body: bytes) -> httpx.Response | None:
        """What the link has for a site, when there is something, or after a while.

        None where the site has gone meanwhile: no message may be taken for nobody.
        """
        if not await self.bell.something_for(name, request.receive):
            return None
        rings = self.bell.rings(name)
        found = await self._send(request, PULL, body)
        if found.status_code == 200 and not found.content:
            self.bell.nothing_for(name, rings)
        return found

    @staticmethod
    async def _body(request: Request, size: int) -> bytes | None:
        """A body of the length that was announced; None where more came."""
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > size:
                return None
        return bytes(body)

    async def _send(self, request: Request, path: bytes, body: bytes) -> httpx.Response:
        assert self._client is not None
        url, headers = f"{self._upstream.url}{path.decode()}", _passed_on(request.headers.raw)
        return await self._client.request(request.method, url, headers=headers, content=body)


def _passed_on(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in headers if name.lower() not in HOP_BY_HOP]


@contextlib.contextmanager
def listening(
    application: AllowlistProxy, host: str, port: int, certificate: Path | None, key: Path | None
) -> Iterator[int]:
    """Let the proxy listen, in a thread of this process; the port."""
    SSLProtocol.max_size = TLS_BUFFER
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with GuardedSocket(family, socket.SOCK_STREAM) as opened:
        opened.guard = application.guard
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            opened.bind((host, port))
        except OSError as trouble:
            raise CoterieError(f"{host}:{port}: cannot listen there ({trouble.strerror})") from None
        found: int = opened.getsockname()[1]
        config = uvicorn.Config(
            application,
            http="h11",
            loop="asyncio",  # which asks our socket for connections
            ws="none",
            lifespan="on",
            ssl_certfile=None if certificate is None else str(certificate),
            ssl_keyfile=None if key is None else str(key),
            log_config=None,
            log_level="critical",
            access_log=False,
            server_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=3,
        )
        server = uvicorn.Server(config)
        run = {"sockets": [opened]}
        thread = threading.Thread(target=server.run, kwargs=run, name="proxy", daemon=True)
        thread.start()
        try:
            until = time.monotonic() + 30
            while not server.started:
                dead = not thread.is_alive() or time.monotonic() > until
                CoterieError.when(dead, "the proxy in front of the link did not start")
                time.sleep(0.05)
            yield found
        finally:
            application.bell.release()
            server.should_exit = True
            thread.join(timeout=10)
