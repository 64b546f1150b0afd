"""No site holds up the others: cut-off replies, lost messages, sleepers, full disks."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from flwr.app import Error, Message
from flwr.proto.control_pb2 import ListNodesResponse
from flwr.proto.node_pb2 import NodeInfo
from memory_federation import QUICK, MemoryFederation, experiment
from tiny_site import contract, deliver, joined, training

from coterie.engines.flower import attending, messages, runtime
from coterie.engines.flower import internals as flower
from coterie.engines.flower.runtime import PromptGrid
from coterie.engines.flower.transport import TOO_LATE, Timeouts, Transport
from coterie.errors import CoterieError

# --- the grid waits for nothing -----------------------------------------------------------------------


class Link:
    """A link with replies whose pieces come when they come."""

    def __init__(self) -> None:
        self.heads: list[Any] = []
        self.pieces: dict[str, bytes] = {}
        self.gone: set[str] = set()
        self.asked: list[list[str]] = []

    def PullMessages(self, request: Any) -> Any:
        self.asked.append(list(request.message_ids))
        heads, self.heads = self.heads, []
        return SimpleNamespace(
            messages_list=[head for head, _ in heads], message_object_trees=[tree for _, tree in heads]
        )

    def PullObject(self, request: Any) -> Any:
        found = request.object_id not in self.gone
        content = self.pieces.get(request.object_id, b"")
        return SimpleNamespace(object_found=found, object_available=bool(content), object_content=content)

    def ConfirmMessageReceived(self, request: Any) -> None:
        pass


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Link:
    made = Link()
    monkeypatch.setattr(PromptGrid, "_runtime_client", made, raising=False)
    monkeypatch.setattr(PromptGrid, "run", SimpleNamespace(run_id=1), raising=False)
    monkeypatch.setattr(PromptGrid, "node", flower.Node(node_id=1), raising=False)
    return made


def answered(link: Link, to: str, *, whole: bool) -> dict[str, bytes]:
    """Let the head of a reply arrive, and all of its pieces or none, which are returned."""
    flower.TaskIdentity.run_id, flower.TaskIdentity.node_id, flower.TaskIdentity.task_id = 1, 1, 1
    asked = Message(messages.pack({}), 100, messages.FACTS, ttl=60)
    asked.metadata.__dict__["_message_id"] = to
    reply = Message(messages.pack({"closed": to}), reply_to=asked)
    reply.metadata.__dict__["_message_id"] = reply.object_id
    with flower.no_object_id_recompute():
        tree, objects = flower.get_object_tree(reply), flower.get_all_nested_objects(reply)
        contents = {name: each.deflate() for name, each in objects.items()}
    head = flower.message_to_proto(flower.remove_content_from_message(reply))
    link.heads.append((head, tree))
    link.pieces.update(contents if whole else {})
    return contents


def test_a_reply_that_is_cut_off_holds_up_nobody(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower's own grid waited here until the upload's session ended, after minutes."""
    grid = PromptGrid(token="any")
    answered(link, "slow", whole=False)
    answered(link, "quick", whole=True)
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("somebody was waited for"))
    [reply] = grid.pull_messages(["slow", "quick"])
    assert reply.metadata.reply_to_message_id == "quick"
    assert grid.pull_messages(["slow"]) == []
    assert link.asked == [["quick", "slow"]]  # its head has come: it is not asked for again
    monkeypatch.setattr(runtime, "UNFINISHED_SECONDS", 0.0)
    [lost] = grid.pull_messages(["slow"])
    assert (lost.metadata.reply_to_message_id, lost.error.code) == ("slow", 3)


def test_a_reply_whose_pieces_come_later_is_taken_when_it_is_whole(link: Link) -> None:
    grid = PromptGrid(token="any")
    later = answered(link, "slow", whole=False)
    assert grid.pull_messages(["slow"]) == []
    link.pieces.update(later)
    [reply] = grid.pull_messages(["slow"])
    assert messages.plain_of(reply.content, {"closed": str}) == {"closed": "slow"}


def test_a_piece_that_is_gone_is_an_unfinished_reply(link: Link) -> None:
    grid = PromptGrid(token="any")
    link.gone |= set(answered(link, "slow", whole=False))
    [lost] = grid.pull_messages(["slow"])
    assert lost.error.code == 3


# --- the link on our own machine ------------------------------------------------------------------------

HANDSHAKE = httpx.ConnectTimeout("_ssl.c:989: The handshake operation timed out")
"""What a link says that has no time for us, as OpenSSL puts it."""


def calls_to(
    monkeypatch: pytest.MonkeyPatch, answers: list[httpx.Response | Exception], patience: runtime.Patience
) -> Any:
    """A client of the link's control API, whose link answers so."""
    monkeypatch.setattr(runtime, "LINK_PAUSE", 0.0)

    def answer(request: httpx.Request) -> httpx.Response:
        found = answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    client = runtime.Caller("127.0.0.1:9", patience=patience).client(flower.ControlHttpClient, "test")
    client._client = httpx.Client(transport=httpx.MockTransport(answer))
    return client


def test_a_link_that_is_too_slow_or_fails_inside_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower's own clients ask once here; its grid takes a slow handshake for a wrong certificate."""
    empty = httpx.Response(200)
    first = [HANDSHAKE, httpx.Response(500), httpx.ConnectError("refused"), empty]
    client = calls_to(monkeypatch, first, runtime.Patience())
    assert runtime.register(client, {}) == {}
    assert first == []


def test_a_site_whose_registration_was_answered_to_nobody_is_registered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = ListNodesResponse(nodes_info=[NodeInfo(node_id=7, public_key=b"key")])
    twice = [httpx.Response(200), HANDSHAKE, httpx.Response(409), listing := httpx.Response(200)]
    listing._content = known.SerializeToString()
    assert runtime.register(calls_to(monkeypatch, twice, runtime.Patience()), {"a": b"key"}) == {"a": 7}


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (HANDSHAKE, r"did not answer for 0 s \(it is too slow: ConnectTimeout\).*link.log.*--resume"),
        (httpx.Response(503), r"\(it failed with status 503\)"),
        (httpx.ConnectError("refused"), r"\(no connection: ConnectError\)"),
    ],
)
def test_a_link_that_does_not_answer_is_named_with_the_cause(
    monkeypatch: pytest.MonkeyPatch, answer: httpx.Response | Exception, said: str
) -> None:
    monkeypatch.setattr(runtime, "LINK_SECONDS", 0.0)
    client = calls_to(monkeypatch, [answer], runtime.Patience(told=Path("run.link/link.log")))
    with pytest.raises(runtime.Unreachable, match=said):
        runtime.register(client, {})


def test_a_link_that_ended_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    client = calls_to(monkeypatch, [HANDSHAKE], runtime.Patience(lambda: True))
    with pytest.raises(CoterieError, match=r"flower-superlink ended; .*--resume"):
        runtime.register(client, {})


def test_what_the_link_refuses_is_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    client = calls_to(monkeypatch, [httpx.Response(403)], runtime.Patience())
    with pytest.raises(httpx.HTTPStatusError):
        runtime.register(client, {})


def test_a_grid_has_our_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "LINK_PAUSE", 0.0)
    grid, patience = PromptGrid(insecure=True, token="any"), runtime.Patience()
    answers = [HANDSHAKE, httpx.Response(200)]

    def answer(request: httpx.Request) -> httpx.Response:
        found = answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    grid._connect()
    patience.of_grid(grid)
    assert grid._client is not None
    grid._client._client = httpx.Client(transport=httpx.MockTransport(answer))
    assert list(grid.get_node_ids()) == []
    assert answers == []


# --- who did not answer is asked again ----------------------------------------------------------------


@pytest.fixture
def federation(tmp_path: Path) -> Any:
    made = MemoryFederation(experiment(algorithm={"name": "global"}), tmp_path / "sites")
    yield made
    made.close()


@pytest.mark.parametrize("code", [3, 4])
def test_an_unfinished_reply_is_asked_for_again_and_paid_once(
    federation: MemoryFederation, tmp_path: Path, code: int
) -> None:
    first = min(federation.nodes.values())
    spoilt: list[Message] = []

    def spoil(message: Message, reply: Message) -> list[Message]:
        if message.metadata.message_type == messages.TRAIN and message.metadata.dst_node_id == first:
            if len(spoilt) % 2 == 0:
                spoilt.append(reply)
                return [Message(Error(code=code, reason="cut off"), reply_to=message)]
            spoilt.append(reply)
        return [reply]

    federation.grid.spoil = spoil
    result = federation.serve(tmp_path / "run")
    assert all(tally["missed"] == 0 for tally in result.participation.values())
    assert len(spoilt) == 10  # five rounds, each asked twice
    [name] = [name for name, node in federation.nodes.items() if node == first]
    lines = federation.sites[name].files.ledger.read_text().splitlines()
    assert len(lines) == 1 + 5


def test_a_message_that_a_restart_lost_is_sent_again(federation: MemoryFederation) -> None:
    """The site came anew after the message was sent: nobody will answer the first."""
    [name, *_] = federation.nodes
    transport = Transport(federation.grid, {name: federation.nodes[name]}, replace(QUICK, answer=20.0))
    pull, arrivals = federation.grid.pull_messages, [0]
    transport.arrivals = lambda site: arrivals[0]

    def lossy(identities: Any) -> Any:
        if arrivals[0] == 0:
            federation.grid._boxes.clear()
            arrivals[0] = 1
        return pull(identities)

    federation.grid.pull_messages = lossy  # type: ignore[method-assign]
    found = transport.ask(messages.FACTS, {name: messages.pack({})}, lambda site, content: content)
    assert set(found.by_client) == {name}  # within the time for an answer, and before it is asked anyway
    assert transport.timeouts.again > transport.timeouts.answer


def test_deadlines_mean_what_they_say_whatever_a_site_does(federation: MemoryFederation) -> None:
    federation.grid.spoil = lambda message, reply: [Message(Error(code=3, reason=""), reply_to=message)]
    transport = Transport(federation.grid, federation.nodes, replace(QUICK, answer=0.5))
    asked = dict.fromkeys(federation.nodes, messages.pack({}))
    found = transport.ask(messages.FACTS, asked, lambda site, content: content)
    assert set(found.missing.values()) == {TOO_LATE}
    assert Timeouts(answer=600).again == 60.0


def test_where_everybody_was_late_before_everybody_has_the_whole_time(federation: MemoryFederation) -> None:
    """Nobody was left to wait for, and so nobody was waited for: such a request ended at once."""
    transport = Transport(federation.grid, federation.nodes, replace(QUICK, answer=20.0))
    transport._late |= set(federation.nodes)
    pull, asked_at = federation.grid.pull_messages, time.monotonic()

    def slow(identities: Any) -> list[Message]:
        return pull(identities) if time.monotonic() - asked_at > 0.3 else []

    federation.grid.pull_messages = slow  # type: ignore[method-assign]
    asked = dict.fromkeys(federation.nodes, messages.pack({}))
    found = transport.ask(messages.FACTS, asked, lambda site, content: content)
    assert set(found.by_client) == set(federation.nodes)
    assert found.missing == {}


# --- a site that slept --------------------------------------------------------------------------------


class Server:
    """A server that has given up waiting, or whose clock differs."""

    def __init__(self, *, is_open: bool = True, ahead: float = 0.0) -> None:
        self.open, self.ahead, self.asked = is_open, ahead, 0

    def now(self) -> float:
        return time.time() + self.ahead

    def is_open(self, message: Message) -> bool:
        self.asked += 1
        return self.open


def test_a_woken_site_releases_nothing_that_nobody_waits_for(tmp_path: Path) -> None:
    made, gave_up = joined(tmp_path), Server(is_open=False)
    before = made.files.ledger.read_bytes()
    answer = deliver(lambda message: made.handle(message, gave_up), messages.TRAIN, training())
    assert messages.is_refusal(answer) == "passed"
    assert made.files.ledger.read_bytes() == before
    assert gave_up.asked == 1
    waiting = Server()
    answer = deliver(lambda message: made.handle(message, waiting), messages.TRAIN, training())
    assert messages.is_refusal(answer) is None
    made.close()


def test_whether_a_message_is_late_is_told_by_the_servers_clock(tmp_path: Path) -> None:
    made = joined(tmp_path)
    late = Server(ahead=120.0)
    answer = deliver(lambda message: made.handle(message, late), messages.TRAIN, training())
    assert messages.is_refusal(answer) == "late"
    made.close()


def test_what_is_open_is_what_is_waited_for(federation: MemoryFederation) -> None:
    transport = Transport(federation.grid, federation.nodes, QUICK)
    seen: list[bool] = []
    pull = federation.grid.pull_messages

    def looking(identities: Any) -> Any:
        seen.extend(transport.is_open(identity) for identity in identities)
        return pull(identities)

    federation.grid.pull_messages = looking  # type: ignore[method-assign]
    asked = dict.fromkeys(federation.nodes, messages.pack({}))
    transport.ask(messages.FACTS, asked, lambda site, content: content)
    assert len(seen) == len(federation.nodes)
    assert all(seen)
    assert not any(transport.is_open(str(sent.metadata.message_id)) for sent in federation.grid.sent)


def test_what_was_given_up_stays_so_while_something_else_is_sent(federation: MemoryFederation) -> None:
    """A site may have a message before the server knows its number; who woke with an old one released it."""
    transport = Transport(federation.grid, federation.nodes, replace(QUICK, answer=0.1))
    asked = dict.fromkeys(federation.nodes, messages.pack({}))
    federation.grid.spoil = lambda message, reply: []
    transport.ask(messages.FACTS, asked, lambda site, content: content)
    old = [str(sent.metadata.message_id) for sent in federation.grid.sent]
    push, seen = federation.grid.push_messages, list[bool]()

    def looking(sent: Any) -> list[str]:
        seen.extend(transport.is_open(identity) for identity in [*old, "new"])
        return push(sent)

    federation.grid.push_messages = looking  # type: ignore[method-assign]
    transport.ask(messages.FACTS, asked, lambda site, content: content)
    assert seen == [*(False for _ in old), True]


# --- a full disk --------------------------------------------------------------------------------------


def test_without_room_for_the_answer_nothing_is_charged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = joined(tmp_path)
    before = made.files.ledger.read_bytes()

    def full(handle: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("coterie.engines.flower.session.os.posix_fallocate", full)
    assert messages.is_refusal(deliver(made, messages.TRAIN, training())) == "disk"
    assert made.files.ledger.read_bytes() == before
    monkeypatch.undo()
    nearly = SimpleNamespace(f_bavail=1, f_frsize=1024)
    monkeypatch.setattr("coterie.engines.flower.session.os.statvfs", lambda path: nearly)
    assert messages.is_refusal(deliver(made, messages.TRAIN, training())) == "disk"
    assert made.files.ledger.read_bytes() == before
    monkeypatch.undo()
    assert messages.is_refusal(deliver(made, messages.TRAIN, training())) is None
    assert [path.name for path in made.files.answers.iterdir() if path.name.startswith(".")] == []
    assert contract().rounds >= 1
    made.close()


# --- the last answer ----------------------------------------------------------------------------------


def test_a_site_stays_until_the_server_has_its_last_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a node that has left, the link passes no answer on: the server would wait for it in vain."""
    told: list[str] = []

    class Node:
        def __init__(self, endpoint: Any, key: Any) -> None:
            self.waiting = 3

        def connected(self) -> Any:
            return contextlib.nullcontext()

        def receive(self) -> Any:
            return "finished"

        def reply(self, message: Any, content: Any) -> None:
            told.append("replied")

        def is_open(self, message: Any) -> bool:
            self.waiting -= 1
            told.append("asked")
            return self.waiting > 0

    class Ending:
        finished = False

        def handle(self, message: Any, peer: Any) -> Any:
            self.finished = True

    greeting = SimpleNamespace(serving="handing out the models")
    monkeypatch.setattr(attending, "SiteNode", Node)
    monkeypatch.setattr(attending, "greet", lambda endpoint, key: greeting)
    attending.attend(attending.Connection("127.0.0.1:9", None, None), Ending())
    assert told == ["replied", "asked", "asked", "asked"]
