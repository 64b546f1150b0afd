"""The door passes what registered sites need, byte for byte, and nothing else."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from coterie.engines.flower.proxy import ALLOWED, LARGEST_BODY, Door, Upstream


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
    """One request at the door: the status, the body, and what was inside."""
    inside = Inside()
    door = Door(Upstream("127.0.0.1:1", None), **options)
    door._client = httpx.AsyncClient(transport=httpx.MockTransport(inside))
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
    asyncio.run(door(scope, receive, send))
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


def test_sites_register_themselves_only_where_there_are_no_keys() -> None:
    assert knock("POST", b"/v1/fleet/register-node")[0] == 404
    assert knock("POST", b"/v1/fleet/register-node", self_registration=True)[0] == 200
