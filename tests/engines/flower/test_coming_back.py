"""A site finds its server again wherever it is, or says why it cannot; who comes later waits for its turn."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from google.protobuf.message import DecodeError
from memory_federation import QUICK, MemoryFederation, experiment

from coterie.engines.flower import attending, network, node
from coterie.engines.flower import internals as flower
from coterie.engines.flower.attending import Connection, attend
from coterie.engines.flower.node import Endpoint, SiteKey, SiteNode, Trouble
from coterie.engines.flower.transport import Transport
from coterie.errors import InputError
from coterie.experiment.callbacks import Callbacks
from coterie.experiment.sites import Sites

# --- a connection to a server that is gone --------------------------------------------------------------


class Server:
    """What a node hears: a relay before it may keep connections open though nobody is behind it any more."""

    def __init__(self) -> None:
        self.known: bool | int = True
        self.activated: httpx.Response | None = None
        self.beats = threading.Semaphore(0)

    def ActivateNode(self, request: Any) -> Any:
        if self.activated is not None:
            self.activated.raise_for_status()
        return SimpleNamespace(node_id=7)

    def SendNodeHeartbeat(self, request: Any) -> Any:
        self.beats.release()
        if isinstance(self.known, bool):
            return SimpleNamespace(success=self.known)
        raise httpx.HTTPStatusError("", request=ASKED, response=httpx.Response(self.known, request=ASKED))

    def PullMessages(self, request: Any) -> Any:
        return SimpleNamespace(messages_list=[])

    def DeactivateNode(self, request: Any) -> None:
        pass

    def close(self) -> None:
        pass


ASKED = httpx.Request("POST", "http://127.0.0.1:9/")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    made = Server()
    built = SimpleNamespace(from_server_address=lambda *arguments, **options: made)
    monkeypatch.setattr(flower, "FleetHttpClient", built)
    monkeypatch.setattr(node, "BEATS_EVERY", 0.001)
    return made


def connection() -> SiteNode:
    made = SiteNode(Endpoint("127.0.0.1:9", None), SiteKey(ec.generate_private_key(ec.SECP384R1())))
    made._registers = False
    return made


@pytest.mark.parametrize("said", [False, 403])
def test_a_server_that_does_not_know_a_connection_any_more_is_left(server: Server, said: bool | int) -> None:
    """Killed behind a relay and started again, it has no such node; the site asked it for ever."""
    made = connection()
    with made.connected():
        assert made.receive() is None
        server.known = said
        for _ in range(server.beats._value + 3):
            server.beats.acquire()
        made._lost.wait(60)
        with pytest.raises(Trouble, match="does not know this connection any more"):
            made.receive()


def test_a_server_in_trouble_for_a_moment_is_not_left(server: Server) -> None:
    made = connection()
    with made.connected():
        server.known = 503
        for _ in range(5):
            server.beats.acquire()
        assert made.receive() is None


def test_a_key_that_is_in_use_is_said_to_be(server: Server) -> None:
    server.activated = httpx.Response(409, request=ASKED)
    with (
        pytest.raises(Trouble, match="this key is in use: another process is connected"),
        connection().connected(),
    ):
        pass


# --- going on elsewhere ---------------------------------------------------------------------------------


class Site:
    """Is finished with the first message that it gets."""

    finished = False

    def handle(self, message: Any, peer: Any) -> Any:
        self.finished = True


class Places:
    """Servers at several addresses, of which some cannot be worked with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gone: dict[str, list[Exception]] = {}
        self.greeted: list[str] = []
        self.offset = 0.0
        places = self

        class Node:
            def __init__(self, endpoint: Endpoint, key: SiteKey) -> None:
                self.address = endpoint.address

            @contextlib.contextmanager
            def connected(self) -> Iterator[None]:
                yield

            def receive(self) -> Any:
                for trouble in places.gone.get(self.address, [])[:1]:
                    places.gone[self.address].pop(0)
                    raise trouble
                return "finished"

            def reply(self, message: Any, content: Any) -> None:
                pass

            def is_open(self, message: Any) -> bool:
                return False

        def greet(endpoint: Endpoint, key: SiteKey) -> Any:
            self.greeted.append(endpoint.address)
            key.offset = self.offset
            if endpoint.address in self.gone and not self.gone[endpoint.address]:
                raise Trouble(f"{endpoint.address}: no connection; is the server running?")
            return SimpleNamespace(serving="in round 3 of 12")

        monkeypatch.setattr(attending, "SiteNode", Node)
        monkeypatch.setattr(attending, "greet", greet)
        monkeypatch.setattr(attending, "FIRST_WAIT", 0.001)


HOME, AWAY = "127.0.0.1:9", "127.0.0.1:10"


@pytest.mark.parametrize(
    "ended",
    [
        Trouble(f"{HOME}: the server does not know this connection any more"),
        httpx.ReadError("cut"),
        httpx.HTTPStatusError("", request=ASKED, response=httpx.Response(403, request=ASKED)),
        DecodeError("Error parsing message"),
    ],
    ids=["forgotten", "cut", "refused", "garbage"],
)
def test_a_server_that_moved_is_followed_to_its_other_address(
    monkeypatch: pytest.MonkeyPatch, ended: Exception
) -> None:
    places, site = Places(monkeypatch), Site()
    places.gone[HOME] = [ended]
    attend(Connection(f"{HOME},{AWAY}", None, None), site)
    assert places.greeted == [HOME, AWAY]
    assert site.finished


def test_a_server_that_comes_back_is_found_at_the_same_address(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    places = Places(monkeypatch)
    places.gone[HOME] = []
    tried = len(places.greeted)

    def back(seconds: float) -> None:
        if len(places.greeted) - tried > 3:
            places.gone.clear()

    monkeypatch.setattr(attending, "time", SimpleNamespace(sleep=back, monotonic=time.monotonic))
    with caplog.at_level(logging.INFO):
        attend(Connection(HOME, None, None), Site())
    assert len(places.greeted) == 5
    # Said once, however often it was tried.
    assert [line for line in caplog.messages if "no connection" in line] == [
        f"{HOME}: no connection; is the server running?; trying on"
    ]
    assert any("connected to" in line for line in caplog.messages)


@pytest.mark.parametrize(("offset", "said"), [(61.2, "61 s behind"), (-3600.0, "3600 s ahead of")])
def test_how_many_seconds_a_clock_is_off_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, offset: float, said: str
) -> None:
    places = Places(monkeypatch)
    places.offset = offset
    attend(Connection(HOME, None, None), Site())
    assert [line for line in caplog.messages if f"this machine's clock is {said} the server's" in line]


# --- who comes later, and who claims too much -----------------------------------------------------------


def test_a_key_that_is_added_while_serving_is_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    class Keys:
        def __init__(self) -> None:
            self.known = {b"1": "amber"}

        def names(self) -> dict[bytes, str]:
            return dict(self.known)

    keys: Any = Keys()
    admitted, seen = threading.Event(), list[str]()

    def admit() -> None:
        seen.extend(keys.names().values())
        admitted.set()

    monkeypatch.setattr(network, "WATCH_SECONDS", 0.001)
    with network._watching(keys, admit):
        keys.known[b"2"] = "birch"
        assert admitted.wait(60)
    assert seen == ["amber", "birch"]


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[MemoryFederation]:
    made = MemoryFederation(experiment(algorithm={"name": "global"}), tmp_path / "sites")
    yield made
    made.close()


def test_a_site_that_is_added_to_a_run_that_has_begun_is_let_in_and_not_asked(
    federation: MemoryFederation, tmp_path: Path
) -> None:
    asked: list[Any] = []

    def come(*report: Any) -> None:
        federation.nodes["newcomer"] = 999
        federation.grid.handlers[999] = lambda message: asked.append(message)  # type: ignore[assignment]

    result = federation.serve(tmp_path / "run", callbacks=Callbacks(on_round=come))
    assert 999 in federation.grid.get_node_ids()
    assert asked == []
    assert "newcomer" not in result.participation
    assert all(each["missed"] == 0 for each in result.participation.values())


def test_a_site_that_claims_more_records_than_the_operator_believes_is_refused(
    federation: MemoryFederation,
) -> None:
    """What one may release grows with the number that it claims."""
    wire = Transport(federation.grid, federation.nodes, QUICK)
    found = Sites.gather(wire)
    most = max(found.records[name] + found.held_out[name] for name in found.records)
    assert Sites.gather(wire, most).records == found.records
    with pytest.raises(InputError, match=rf"claims {most} records; allowed by --most-records: {most - 1}"):
        Sites.gather(wire, most - 1)
