"""The proxy before the link: passes what sites need, and nothing else.

Flower's link serves three kinds of callers on one port: sites, operators and the server's own task. Only
sites prove who they are. So the link listens on loopback, and this proxy in front of it passes exactly the
paths that a registered site uses, by name; whatever else there is, or a later release adds, stays inside.
Uvicorn, Starlette and httpx, which come with Flower, do the work.
"""

import contextlib
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from coterie.engines.flower.internals import PUBLIC_KEY_HEADER
from coterie.engines.flower.processes import Upstream
from coterie.errors import CoterieError

_FLEET = (
    b"activate-node deactivate-node send-node-heartbeat pull-messages push-messages get-run get-fab "
    b"pull-object push-object confirm-message-received"
)
ALLOWED = frozenset([("GET", b"/health"), *(("POST", b"/v1/fleet/" + name) for name in _FLEET.split())])
SELF_REGISTRATION = frozenset({("POST", b"/v1/fleet/register-node"), ("POST", b"/v1/fleet/unregister-node")})
"""Needed where nodes have no keys, in the plaintext mode; else the operator registers a site's key."""
HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization te trailer transfer-encoding upgrade "
    b"host content-length".split()
)
PUSHES = frozenset({b"/v1/fleet/push-messages", b"/v1/fleet/push-object"})
"""What the link keeps on its disk."""
KEY_HEADER = PUBLIC_KEY_HEADER.encode()
"""Under which a node's key travels; the link checks that it is the sender's own."""
LARGEST_BODY = 16 * 2**20
"""Flower cuts arrays into pieces of 5 MiB."""
FIRST_BYTES, TIMES_ASKED, EACH_MESSAGE = 4 * 2**20, 4, 2**18
"""What a node may push: so much at first, and for every message so many times its size and so much beside. An
update is at most twice the size of the models that were sent for it; a retry pushes it again."""
MOST_CONNECTIONS = 512
SECONDS = 60.0


class AllowlistProxy:
    """The proxy as an ASGI application."""

    def __init__(self, upstream: Upstream, *, self_registration: bool = False) -> None:
        self._upstream = upstream
        self._allowed = ALLOWED | (SELF_REGISTRATION if self_registration else frozenset())
        self._client: httpx.AsyncClient | None = None
        self._allowance = FIRST_BYTES
        self._pushed: Counter[bytes] = Counter()
        self.passed = 0

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
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})

    async def _pass(self, request: Request) -> Response:
        # The raw path, compared as a whole: nothing is decoded, joined or normalised on the way.
        path: bytes = request.scope["raw_path"]
        if (request.method, path) not in self._allowed or request.scope["query_string"]:
            return Response(status_code=404)
        # The key of a node that pushes what the link will keep. Nodes without keys are on this machine.
        pusher = dict(request.headers.raw).get(KEY_HEADER) if path in PUSHES else None
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > LARGEST_BODY:
                break
        over = pusher is not None and self._pushed[pusher] + len(body) > self._allowance
        if len(body) > LARGEST_BODY or over:
            return Response(status_code=413)
        assert self._client is not None
        url, headers = f"{self._upstream.url}{path.decode()}", _passed_on(request.headers.raw)
        try:
            answer = await self._client.request(request.method, url, headers=headers, content=bytes(body))
        except httpx.HTTPError:
            return Response(status_code=502)
        if pusher is not None and answer.is_success:  # the link found that the key is the sender's own
            self._pushed[pusher] += len(body)
        self.passed += len(body) + len(answer.content)
        reply = Response(answer.content, answer.status_code)
        headers = _passed_on(answer.headers.raw)
        reply.raw_headers += [(name, value) for name, value in headers if name.lower() != b"content-encoding"]
        return reply


def _passed_on(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in headers if name.lower() not in HOP_BY_HOP]


@contextlib.contextmanager
def listening(
    application: AllowlistProxy, host: str, port: int, certificate: Path | None, key: Path | None
) -> Iterator[int]:
    """Let the proxy listen, in a thread of this process; the port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as opened:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            opened.bind((host, port))
        except OSError as trouble:
            raise CoterieError(f"{host}:{port}: cannot listen there ({trouble.strerror})") from None
        found: int = opened.getsockname()[1]
        config = uvicorn.Config(
            application,
            http="h11",
            ws="none",
            lifespan="on",
            ssl_certfile=None if certificate is None else str(certificate),
            ssl_keyfile=None if key is None else str(key),
            log_config=None,
            log_level="critical",
            access_log=False,
            server_header=False,
            limit_concurrency=MOST_CONNECTIONS,
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
            server.should_exit = True
            thread.join(timeout=10)
