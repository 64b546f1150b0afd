"""The proxy passes what registered sites need, byte for byte, and nothing else."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import time
from asyncio.sslproto import SSLProtocol
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from coterie.engines.flower.guard import (
    GRACE,
    HEARD,
    SECONDS,
    UNPROVEN,
    UNPROVEN_EACH,
    UNPROVEN_OF_SITES,
    Guard,
)
from coterie.engines.flower.internals import ActivateNodeResponse
from coterie.engines.flower.keys import KeyFolder, make_keys
from coterie.engines.flower.processes import Upstream, environment, keep_loopback_direct
from coterie.engines.flower.proof import (
    HELLO,
    MESSAGE_HEADER,
    OPEN,
    PROTOCOL,
    Greeting,
    public_bytes,
    sign,
)
from coterie.engines.flower.proxy import (
    FIRST_BYTES,
    FLEET,
    LARGEST_BODY,
    MOST_AT_ONCE_EACH,
    TLS_BUFFER,
    AllowlistProxy,
    ServerStatus,
    listening,
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


KEYS = {name: ec.generate_private_key(ec.SECP384R1()) for name in ("a", "b", "gone", "stranger")}


class Ring:
    """Knows a and b; somebody else's key was revoked."""

    def status(self, key: bytes) -> tuple[str | None, str | None]:
        names = {public_bytes(own): name for name, own in KEYS.items()}
        found = names.get(key, "stranger")
        if found in ("a", "b"):
            return found, None
        return None, "key revoked" if found == "gone" else "key unknown"


def signed(name: str, now: float | None = None) -> list[tuple[bytes, bytes]]:
    found = sign(KEYS[name], time.time() if now is None else now)
    return [(header.encode(), value.encode()) for header, value in found.items()]


class Visit:
    """One request at a proxy: what it was answered, and how much of its body was read."""

    def __init__(
        self,
        proxy: AllowlistProxy,
        method: str,
        path: bytes,
        body: bytes = b"",
        headers: list[tuple[bytes, bytes]] | None = None,
        *,
        query: bytes = b"",
        length: bool = True,
        client: tuple[str, int] = ("10.0.0.7", 999),
    ) -> None:
        self.read = 0
        sent: list[dict[str, Any]] = []
        pieces = [body[start : start + 65536] for start in range(0, len(body), 65536)] or [b""]

        async def receive() -> dict[str, Any]:
            self.read += len(pieces[0])
            return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

        async def send(event: Any) -> None:
            sent.append(event)

        common = [(b"host", b"public"), (b"x-signature", b"abc"), (b"connection", b"close")]
        announced = [(b"content-length", str(len(body)).encode())] if length else []
        scope = {
            "type": "http",
            "method": method,
            "path": "/",
            "raw_path": path,
            "query_string": query,
            "client": client,
            "headers": [*common, *announced, *(signed("a") if headers is None else headers)],
        }
        asyncio.run(proxy(scope, receive, send))
        self.status: int = sent[0]["status"]
        self.body: bytes = sent[1]["body"]


def proxied(**options: Any) -> tuple[AllowlistProxy, Inside]:
    inside = Inside()
    proxy = AllowlistProxy(Upstream("127.0.0.1:1", None), options.pop("keys", Ring()), **options)
    proxy._client = httpx.AsyncClient(transport=httpx.MockTransport(inside))
    return proxy, inside


def knock(method: str, path: bytes, body: bytes = b"", **options: Any) -> tuple[int, bytes, Inside]:
    """One request at a proxy of its own: the status, the body, and what was inside."""
    proxy, inside = proxied(**({"keys": None} if options.pop("without_keys", False) else {}))
    visit = Visit(proxy, method, path, body, **options)
    return visit.status, visit.body, inside


@pytest.mark.parametrize(("method", "path"), sorted(FLEET))
def test_what_a_site_needs_passes_unchanged(method: str, path: bytes) -> None:
    status, body, inside = knock(method, path, b"\x00\xff" * 70_000)
    assert (status, body) == (200, b"from inside")
    [(found_method, found_path, found_body, headers)] = inside.reached
    assert (found_method, found_path.encode(), found_body) == (method, path, b"\x00\xff" * 70_000)
    assert headers["x-signature"] == "abc"
    assert headers["host"] == "127.0.0.1:1"


# --- who asks -----------------------------------------------------------------------------------------


DISBELIEVED: dict[str, tuple[list[tuple[bytes, bytes]], str]] = {
    "nobody": ([], "signature"),
    "a stranger": (signed("stranger"), "key unknown"),
    "somebody whose key was revoked": (signed("gone"), "key revoked"),
    "a clock ahead": (signed("a", time.time() + 3600), "clock"),
    "a clock behind": (signed("a", time.time() - 3600), "clock"),
    "another's key": ([*signed("a")[:1], *signed("b")[1:]], "signature"),
}


@pytest.mark.parametrize(("headers", "why"), DISBELIEVED.values(), ids=DISBELIEVED.keys())
def test_of_whom_it_does_not_believe_no_body_is_read(headers: list[tuple[bytes, bytes]], why: str) -> None:
    proxy, inside = proxied()
    visit = Visit(proxy, "POST", b"/v1/fleet/push-object", bytes(2**20), headers)
    assert (visit.status, visit.read) == (401, 0)
    assert json.loads(visit.body)["refused"] == why
    assert inside.reached == []


def test_how_far_a_clock_is_off_is_told() -> None:
    visit = Visit(proxied()[0], "POST", b"/v1/fleet/pull-messages", headers=signed("a", time.time() + 60))
    assert json.loads(visit.body)["ahead"] == pytest.approx(60, abs=5)


def test_whoever_asks_is_told_who_the_server_is_and_of_their_own_key_alone() -> None:
    for headers, site, refused in (
        (signed("a"), "a", None),
        (signed("gone"), None, "key revoked"),
        (signed("stranger"), None, "key unknown"),
        ([], None, None),
    ):
        visit = Visit(proxied()[0], "GET", HELLO, headers=headers)
        told = Greeting.from_json(visit.body)
        assert told is not None
        assert (told.site, told.refused, told.protocol) == (site, refused, PROTOCOL)
        assert told.time == pytest.approx(time.time(), abs=5)


def test_a_site_is_told_whether_its_answer_is_still_waited_for() -> None:
    status = ServerStatus(is_open=lambda identity: identity == "open")
    proxy, _ = proxied(status=status)
    for identity, is_open in (("open", True), ("given up", False), ("", False)):
        headers = [*signed("a"), (MESSAGE_HEADER.encode(), identity.encode())]
        assert json.loads(Visit(proxy, "GET", OPEN, headers=headers).body) == {"open": is_open}
    assert Visit(proxy, "GET", OPEN, headers=signed("stranger")).status == 401


def test_numbers_are_for_the_servers_own_machine() -> None:
    status = ServerStatus(
        health=lambda: {"state": "in round 2", "sites": ["a"]}, metrics=lambda: {"coterie_round": 2}
    )
    proxy, _ = proxied(status=status)
    here, there = ("127.0.0.1", 1), ("10.0.0.7", 1)
    assert b"coterie_round 2" in Visit(proxy, "GET", b"/metrics", headers=[], client=here).body
    assert Visit(proxy, "GET", b"/metrics", headers=[], client=there).status == 404
    found = json.loads(Visit(proxy, "GET", b"/health", headers=[], client=here).body)
    assert found == {"state": "in round 2", "sites": ["a"]}
    shown = json.loads(Visit(proxy, "GET", b"/health", headers=[], client=there).body)
    assert shown == {"state": "in round 2"}


# --- what does not pass -------------------------------------------------------------------------------

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
    proxy, inside = proxied()
    visit = Visit(proxy, "POST", b"/v1/fleet/push-object", bytes(LARGEST_BODY + 1))
    assert (visit.status, visit.read) == (413, 0)
    assert Visit(proxy, "POST", b"/v1/fleet/push-object", b"x", length=False).status == 411
    assert inside.reached == []


def test_a_site_that_has_much_on_its_way_waits_and_others_do_not() -> None:
    proxy, _ = proxied()
    proxy.expect(2**30)
    proxy._reading[public_bytes(KEYS["a"])] = MOST_AT_ONCE_EACH
    assert Visit(proxy, "POST", b"/v1/fleet/push-object", b"x").status == 503
    assert Visit(proxy, "POST", b"/v1/fleet/push-object", b"x", signed("b")).status == 200


def pushing(proxy: AllowlistProxy, name: str, size: int, path: bytes = b"/v1/fleet/push-object") -> int:
    """The status that a site gets for so many bytes."""
    return Visit(proxy, "POST", path, bytes(size), signed(name)).status


def test_a_site_cannot_fill_the_servers_disk() -> None:
    """A few megabytes at first, then a few times what it was sent; what others push counts for them."""
    proxy, inside = proxied()
    assert pushing(proxy, "a", FIRST_BYTES) == 200
    assert pushing(proxy, "a", 1) == 413
    assert pushing(proxy, "a", 1, b"/v1/fleet/push-messages") == 413
    assert pushing(proxy, "a", 10**6, b"/v1/fleet/pull-messages") == 200
    assert pushing(proxy, "b", FIRST_BYTES) == 200
    model = 650 * 4
    proxy.expect(model)
    assert pushing(proxy, "a", 2 * model + 10_000) == 200  # an update in float64, and what goes with it
    assert pushing(proxy, "a", 2 * model + 10_000) == 200  # and again, where a connection was lost
    assert pushing(proxy, "a", 2**20) == 413
    assert len(inside.reached) == 5


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
    assert knock("POST", b"/v1/fleet/register-node", without_keys=True, headers=[])[0] == 200


# --- connections --------------------------------------------------------------------------------------


class Line:
    """A connection that notes when it is cut."""

    on_close: Any = None

    def __init__(self) -> None:
        self.cut = False

    def shutdown(self, how: int) -> None:
        self.cut = True


class Door:
    """A guard with a clock of its own, and lines through it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.guard = Guard(lambda: self.now)

    def come(self, host: str, port: int = 1, key: bytes | None = None) -> Line | None:
        """A connection from there, which proves a key or nothing; None where it is turned away."""
        line = Line()
        if not self.guard.admit(line, (host, port)):  # type: ignore[arg-type]
            return None
        if key is not None:
            self.guard.trust((host, port), key)
        return line


def test_who_proves_nothing_is_cut_off_and_sites_are_not() -> None:
    door = Door()
    site, stranger = door.come("10.0.0.1", key=b"a"), door.come("10.0.0.9")
    assert site is not None
    assert stranger is not None
    door.now = SECONDS + 1
    door.guard.sweep()
    assert (site.cut, stranger.cut) == (False, True)
    assert door.guard.counts == (1, 0)
    site.on_close()
    assert door.guard.counts == (0, 0)


def test_a_siege_from_many_addresses_leaves_room_for_one_more() -> None:
    door = Door()
    lines = [door.come(f"10.0.{n // 200}.{n % 200}") for n in range(UNPROVEN)]
    door.now = GRACE
    newcomer = door.come("10.9.9.9")
    assert newcomer is not None
    assert [line.cut for line in lines if line is not None].count(True) == 1
    assert door.guard.counts == (0, UNPROVEN)
    door.guard.trust(("10.9.9.9", 1), b"a")
    assert not newcomer.cut


def test_one_address_cannot_take_the_room_of_others() -> None:
    door = Door()
    other = door.come("10.0.0.2")
    lines = []
    for port in range(3 * UNPROVEN_EACH):
        door.now += GRACE / UNPROVEN_EACH
        lines.append(door.come("10.0.0.1", port))
    assert all(lines)
    assert sum(not line.cut for line in lines if line is not None) == UNPROVEN_EACH
    assert other is not None
    assert not other.cut


def test_who_comes_from_elsewhere_finds_room_at_once_however_fast_strangers_are() -> None:
    door = Door()
    for host in range(UNPROVEN // UNPROVEN_EACH):
        for port in range(UNPROVEN_EACH):
            assert door.come(f"10.0.0.{host}", port) is not None
    assert door.come("10.0.0.1", 999) is None
    assert door.come("10.9.9.9") is not None


def test_strangers_who_come_fast_push_nobody_out_before_it_could_prove_who_it_is() -> None:
    """With the oldest cut off for each that came, a handshake never ended among strangers of its address."""
    door = Door()
    kept = 0
    for second in range(20):
        site = door.come("10.0.0.1", 10_000 + second)
        for port in range(2000):  # ten times as many as there is room for, in half a second
            door.now = second + port / 4000
            door.come("10.0.0.1", port)
        if site is not None:
            assert not site.cut
            door.guard.trust(("10.0.0.1", 10_000 + second), b"a")
            kept += 1
        door.now = second + 1.0
    assert kept >= 10


def test_an_address_from_which_a_site_has_come_has_more_room() -> None:
    door = Door()
    door.come("10.0.0.1", 1, key=b"a")
    assert all(door.come("10.0.0.1", port) for port in range(2, 2 + UNPROVEN_OF_SITES))
    assert door.come("10.0.0.1", 9999) is None
    assert sum(door.come("10.0.0.2", port) is not None for port in range(1000)) == UNPROVEN_EACH


def test_a_connection_has_a_small_buffer_before_anything_has_come(tmp_path: Path) -> None:
    """Asyncio gives 256 KiB to each; another Python might call that otherwise."""
    keys = make_keys(tmp_path / "keys", [], ["a"])
    assert hasattr(SSLProtocol, "max_size")
    with listening(proxied()[0], "127.0.0.1", 0, keys.certificate, keys.key):
        assert SSLProtocol.max_size == TLS_BUFFER == len(SSLProtocol(*made_of(keys))._ssl_buffer)


def made_of(keys: KeyFolder) -> tuple[Any, ...]:
    """What asyncio makes a connection of, for one that is served."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(keys.certificate, keys.key)
    loop = asyncio.new_event_loop()
    loop.close()
    return loop, asyncio.Protocol(), context, None, True


# --- a site that comes again --------------------------------------------------------------------------


def returning(*, heard: float, closed: bool) -> tuple[Visit, AllowlistProxy]:
    """A site that comes again, when the link believes that it is still there."""
    door = Door()
    proxy, _ = proxied(guard=door.guard, node_of={"a": 77}.get)
    refusing = httpx.MockTransport(lambda request: httpx.Response(409, content=b"not activated"))
    proxy._client = httpx.AsyncClient(transport=refusing)
    before = door.come("10.0.0.7", 1, key=public_bytes(KEYS["a"]))
    assert before is not None
    if closed:
        before.on_close()
    door.now = heard
    door.come("10.0.0.7", 999)
    return Visit(proxy, "POST", b"/v1/fleet/activate-node", b"{}"), proxy


@pytest.mark.parametrize(("heard", "closed"), [(0.5, True), (HEARD + 1, False)])
def test_a_site_that_was_killed_or_cut_off_need_not_wait_until_the_link_has_forgotten_it(
    heard: float, closed: bool
) -> None:
    visit, proxy = returning(heard=heard, closed=closed)
    assert visit.status == 200
    assert ActivateNodeResponse.FromString(visit.body).node_id == 77
    assert proxy.status.arrivals == {"a": 1}


def test_a_key_that_somebody_uses_on_an_open_connection_is_in_use() -> None:
    visit, proxy = returning(heard=HEARD - 1, closed=False)
    assert (visit.status, visit.body) == (409, b"not activated")
    assert proxy.status.arrivals == {}
