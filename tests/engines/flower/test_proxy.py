"""The proxy passes what registered sites need, byte for byte, and nothing else."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import httpx
import pytest
from flwr.common.constant import PUBLIC_KEY_HEADER

from coterie.engines.flower.processes import Upstream, environment, keep_loopback_direct
from coterie.engines.flower.proxy import (
    ALLOWED,
    FIRST_BYTES,
    KEY_HEADER,
    LARGEST_BODY,
    AllowlistProxy,
)


class Inside:
    """A link that notes what reaches it."""

    def __init__(self) -> None:
        self.reached: list[tuple[str, str, bytes, dict[str, str]]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.reached.append(
            (request.method, request.url.raw_path.decode(), request.read(), dict(request.headers))
        )
        return httpx.Response(200, content=b"from inside", headers={"x-flower": "yes"})


def knock(
    method: str, path: bytes, body: bytes = b"", query: bytes = b"", **options: bool
) -> tuple[int, bytes, Inside]:
    """One request at the proxy: the status, the body, and what was inside."""
    inside = Inside()
    proxy = AllowlistProxy(Upstream("127.0.0.1:1", None), **options)
    proxy._client = httpx.AsyncClient(transport=httpx.MockTransport(inside))
    sent: list[dict[str, Any]] = []
    pieces = [body[start : start + 65536] for start in range(0, len(body), 65536)] or [b""]

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

    async def send(event: Any) -> None:
        sent.append(event)

    scope = {
        "type": "http",
        "method": method,
        "path": "/",
        "raw_path": path,
        "query_string": query,
        "headers": [(b"host", b"public"), (b"x-signature", b"abc"), (b"connection", b"close")],
    }
    asyncio.run(proxy(scope, receive, send))
    return sent[0]["status"], sent[1]["body"], inside


@pytest.mark.parametrize(("method", "path"), sorted(ALLOWED))
def test_what_a_site_needs_passes_unchanged(method: str, path: bytes) -> None:
    status, body, inside = knock(method, path, b"\x00\xff" * 70_000)
    assert (status, body) == (200, b"from inside")
    [(found_method, found_path, found_body, headers)] = inside.reached
    assert (found_method, found_path.encode(), found_body) == (method, path, b"\x00\xff" * 70_000)
    assert headers["x-signature"] == "abc"
    assert headers["host"] == "127.0.0.1:1"


STRANGE = [
    ("POST", b"/v1/control/start-run"),
    ("POST", b"/v1/control/register-node"),
    ("POST", b"/v1/runtime/acquire-task"),
    ("POST", b"/v1/runtime/pull-task-input"),
    ("GET", b"/docs"),
    ("GET", b"/openapi.json"),
    ("GET", b"/"),
    ("POST", b"/v1/fleet/register-node"),
    ("POST", b"/v1/fleet/unregister-node"),
    ("POST", b"/v1/fleet/"),
    ("POST", b"/v1/fleet/pull-messages/"),
    ("POST", b"/v1/fleet/../control/start-run"),
    ("POST", b"/v1/fleet/%2e%2e/control/start-run"),
    ("POST", b"/v1/fleet/pull-messages/../../control/start-run"),
    ("POST", b"/v1/fleet/pull-messages%00"),
    ("POST", b"/v1/fleet/pull-messages;x"),
    ("POST", b"//v1/fleet/pull-messages"),
    ("POST", b"/V1/fleet/pull-messages"),
    ("POST", b"http://inside/v1/control/start-run"),
    ("GET", b"/v1/fleet/pull-messages"),
    ("POST", b"/health"),
    ("HEAD", b"/health"),
    ("OPTIONS", b"*"),
    ("CONNECT", b"127.0.0.1:22"),
]


@pytest.mark.parametrize(("method", "path"), STRANGE)
def test_nothing_else_reaches_the_link(method: str, path: bytes) -> None:
    status, body, inside = knock(method, path, b"anything")
    assert (status, body) == (404, b"")
    assert inside.reached == []


def test_a_query_does_not_pass() -> None:
    assert knock("POST", b"/v1/fleet/pull-messages", query=b"x=1")[0] == 404


def test_a_body_that_no_site_sends_does_not_pass() -> None:
    status, _, inside = knock("POST", b"/v1/fleet/push-object", bytes(LARGEST_BODY + 1))
    assert status == 413
    assert inside.reached == []


def pushing(proxy: AllowlistProxy, key: bytes, size: int, path: bytes = b"/v1/fleet/push-object") -> int:
    """The status that a node with this key gets for so many bytes."""
    sent: list[dict[str, Any]] = []
    headers = [(KEY_HEADER, key)]

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": bytes(size), "more_body": False}

    async def send(event: Any) -> None:
        sent.append(event)

    scope = {"type": "http", "method": "POST", "raw_path": path, "query_string": b"", "headers": headers}
    asyncio.run(proxy(scope, receive, send))
    status: int = sent[0]["status"]
    return status


def test_a_site_cannot_fill_the_servers_disk() -> None:
    """A few megabytes at first, then a few times what it was sent; what others push counts for them."""
    inside = Inside()
    proxy = AllowlistProxy(Upstream("127.0.0.1:1", None))
    proxy._client = httpx.AsyncClient(transport=httpx.MockTransport(inside))
    assert pushing(proxy, b"a", FIRST_BYTES) == 200
    assert pushing(proxy, b"a", 1) == 413
    assert pushing(proxy, b"a", 1, b"/v1/fleet/push-messages") == 413
    assert pushing(proxy, b"a", 10**6, b"/v1/fleet/pull-messages") == 200
    assert pushing(proxy, b"b", FIRST_BYTES) == 200
    model = 650 * 4
    proxy.expect(model)
    assert pushing(proxy, b"a", 2 * model + 10_000) == 200  # an update in float64, and what goes with it
    assert pushing(proxy, b"a", 2 * model + 10_000) == 200  # and again, where a connection was lost
    assert pushing(proxy, b"a", 2**20) == 413
    assert len(inside.reached) == 5


def test_a_stranger_cannot_use_up_what_a_site_may_push() -> None:
    """The link answers 401 to who sends another's key: that counts for nobody."""
    proxy = AllowlistProxy(Upstream("127.0.0.1:1", None))
    proxy._client = httpx.AsyncClient(transport=httpx.MockTransport(lambda request: httpx.Response(401)))
    for _ in range(3):
        assert pushing(proxy, b"a", FIRST_BYTES) == 401
    proxy._client = httpx.AsyncClient(transport=httpx.MockTransport(Inside()))
    assert pushing(proxy, b"a", FIRST_BYTES) == 200


def test_the_key_is_read_where_flower_puts_it() -> None:
    assert KEY_HEADER.decode() == PUBLIC_KEY_HEADER


def test_what_stays_on_this_machine_passes_no_proxy_of_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower's clients ask the environment for a proxy, and so does httpx: loopback goes past it."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("NO_PROXY", "intranet.example,127.0.0.1")
    monkeypatch.delenv("no_proxy", raising=False)
    assert httpx.Client()._transport_for_url(httpx.URL("http://localhost:9")) is not httpx.Client()._transport
    keep_loopback_direct()
    keep_loopback_direct()
    assert os.environ["NO_PROXY"] == "intranet.example,127.0.0.1,localhost,::1"
    assert os.environ["no_proxy"] == "127.0.0.1,localhost,::1"
    client = httpx.Client()
    for url in ("http://127.0.0.1:9", "https://localhost:9", "http://[::1]:9"):
        assert client._transport_for_url(httpx.URL(url)) is client._transport
    assert client._transport_for_url(httpx.URL("http://elsewhere.example")) is not client._transport
    assert environment(tmp_path)["NO_PROXY"] == os.environ["NO_PROXY"]


def test_sites_register_themselves_only_where_there_are_no_keys() -> None:
    assert knock("POST", b"/v1/fleet/register-node")[0] == 404
    assert knock("POST", b"/v1/fleet/register-node", self_registration=True)[0] == 200
