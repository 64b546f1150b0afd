"""Sites hear of messages, and the server of answers, without asking again and again; none is lost by it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from typing import Any

import httpx
import pytest
from test_proxy import Ring, signed

from coterie.engines.flower import bell as bells
from coterie.engines.flower.bell import Bell
from coterie.engines.flower.processes import Upstream
from coterie.engines.flower.proxy import PULL, AllowlistProxy, ServerStatus

PUSH = b"/v1/fleet/push-object"


class Mailbox:
    """A link with messages for sites, which notes how often it was asked."""

    def __init__(self) -> None:
        self.messages: dict[bytes, list[bytes]] = {}
        self.asked = 0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.raw_path != PULL:
            return httpx.Response(200, content=b"taken")
        self.asked += 1
        return httpx.Response(200, content=b"".join(self.messages.pop(request.read(), [])))


class Site:
    """Asks a proxy on a loop, as long as nobody hangs up."""

    def __init__(self, proxy: AllowlistProxy, name: str) -> None:
        self.proxy, self.name = proxy, name
        self.hung_up = asyncio.Event()

    async def send(self, path: bytes = PULL) -> tuple[int, bytes]:
        body, sent = [self.name.encode()], list[dict[str, Any]]()

        async def receive() -> dict[str, Any]:
            if body:
                return {"type": "http.request", "body": body.pop(), "more_body": False}
            await self.hung_up.wait()
            return {"type": "http.disconnect"}

        async def send(event: Any) -> None:
            sent.append(event)

        length = [(b"content-length", str(len(self.name)).encode())]
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/",
            "raw_path": path,
            "query_string": b"",
            "client": ("10.0.0.7", 1),
            "headers": [*length, *signed(self.name)],
        }
        await self.proxy(scope, receive, send)
        return sent[0]["status"], sent[1]["body"]


@pytest.fixture
def link() -> Mailbox:
    return Mailbox()


def opened(link: Mailbox) -> AllowlistProxy:
    """A proxy on this loop, for whose bell somebody cares."""
    proxy = AllowlistProxy(Upstream("127.0.0.1:1", None), Ring(), status=ServerStatus())
    proxy._client = httpx.AsyncClient(transport=httpx.MockTransport(link))
    proxy.bell.attach(asyncio.get_running_loop())
    proxy.bell.used = True
    return proxy


def test_a_question_is_held_until_there_is_a_message(link: Mailbox) -> None:
    async def go() -> None:
        proxy = opened(link)
        site, other = Site(proxy, "a"), Site(proxy, "b")
        assert await site.send() == (200, b"")
        assert await other.send() == (200, b"")
        held = asyncio.create_task(site.send())
        others = asyncio.create_task(other.send())
        await asyncio.sleep(0.05)
        assert link.asked == 2  # nobody bothers the link
        link.messages[b"a"] = [b"train"]
        threading.Thread(target=proxy.bell.ring, args=(["a"],)).start()
        assert await asyncio.wait_for(held, 2) == (200, b"train")
        assert not others.done()
        others.cancel()
        assert await site.send() == (200, b"")  # at once: there might have been more

    asyncio.run(go())


def test_a_bell_that_rings_while_the_link_says_that_there_is_nothing_is_heard(link: Mailbox) -> None:
    async def go() -> None:
        proxy = opened(link)

        def slow(request: httpx.Request) -> httpx.Response:
            proxy.bell._wake(["a"])  # the message comes after the link has looked, and before we are told
            link.messages[b"a"] = [b"train"]
            return httpx.Response(200)

        proxy._client = httpx.AsyncClient(transport=httpx.MockTransport(slow))
        site = Site(proxy, "a")
        assert await site.send() == (200, b"")
        proxy._client = httpx.AsyncClient(transport=httpx.MockTransport(link))
        assert await asyncio.wait_for(site.send(), 1) == (200, b"train")

    asyncio.run(go())


def test_without_a_bell_a_question_is_answered_after_a_while(
    link: Mailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bells, "HOLD_SECONDS", 0.05)

    async def go() -> None:
        proxy = opened(link)
        site = Site(proxy, "a")
        await site.send()
        link.messages[b"a"] = [b"unheard"]
        assert await asyncio.wait_for(site.send(), 2) == (200, b"unheard")

    asyncio.run(go())


def test_no_message_is_taken_for_a_site_that_has_gone(link: Mailbox) -> None:
    async def go() -> None:
        proxy = opened(link)
        site = Site(proxy, "a")
        await site.send()
        held = asyncio.create_task(site.send())
        await asyncio.sleep(0.02)
        site.hung_up.set()
        assert (await held)[0] == 408
        link.messages[b"a"] = [b"train"]
        proxy.bell._wake(["a"])
        assert await Site(proxy, "a").send() == (200, b"train")

    asyncio.run(go())


def test_the_server_is_woken_when_a_site_has_sent_all_of_its_answer(link: Mailbox) -> None:
    async def go() -> None:
        proxy = opened(link)
        site = Site(proxy, "a")
        await site.send()
        assert not proxy.bell._answered.is_set()
        await site.send(PUSH)
        await site.send(PUSH)
        assert not proxy.bell._answered.is_set()
        asking = asyncio.create_task(site.send())
        await asyncio.sleep(0.02)
        assert proxy.bell._answered.is_set()
        proxy.bell.release()
        await asking

    asyncio.run(go())


def test_who_waits_for_answers_is_woken_or_looks_after_a_while() -> None:
    bell = Bell()
    began = time.monotonic()
    bell.wait(0.02)
    assert time.monotonic() - began >= 0.02
    threading.Timer(0.02, bell.arrived, args=("a",)).start()
    began, most = time.monotonic(), 600.0
    bell.wait(most)
    assert time.monotonic() - began < most
    bell.ring(["a"])  # nobody listens yet: nothing happens


def test_nobody_is_held_where_nobody_rings(link: Mailbox) -> None:
    async def go() -> None:
        proxy = opened(link)
        proxy.bell.used = False
        site = Site(proxy, "a")
        for _ in range(3):
            assert await asyncio.wait_for(site.send(), 1) == (200, b"")

    asyncio.run(go())
    assert link.asked == 3


def test_nobody_hears_of_a_message_before_all_of_it_was_sent(
    link: Mailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sites that heard of it asked for its pieces all the time, and sending those took the longer for it."""
    monkeypatch.setattr(bells, "HOLD_SECONDS", 0.01)
    monkeypatch.setattr(bells, "SENDING_SECONDS", 600.0)

    async def go() -> None:
        proxy = opened(link)
        site, other = Site(proxy, "a"), Site(proxy, "b")
        assert await other.send() == (200, b"")
        with proxy.bell.sending(["a"]):
            link.messages[b"a"] = [b"head"]
            held = asyncio.create_task(site.send())
            await asyncio.sleep(0.1)
            assert not held.done()
            assert await asyncio.wait_for(other.send(), 60) == (200, b"")  # there is nothing for it
            assert link.asked == 2
            link.messages[b"a"] = [b"head and pieces"]
        assert await asyncio.wait_for(held, 60) == (200, b"head and pieces")
        assert await asyncio.wait_for(site.send(), 60) == (200, b"")

    asyncio.run(go())


def test_a_message_that_cannot_be_sent_holds_nobody(link: Mailbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bells, "HOLD_SECONDS", 0.01)
    monkeypatch.setattr(bells, "SENDING_SECONDS", 0.01)

    async def go() -> None:
        proxy = opened(link)
        site = Site(proxy, "a")
        with contextlib.suppress(RuntimeError), proxy.bell.sending(["a"]):
            assert await asyncio.wait_for(site.send(), 60) == (200, b"")  # after a while, all the same
            raise RuntimeError
        assert await asyncio.wait_for(site.send(), 60) == (200, b"")

    asyncio.run(go())
