"""What is pushed twice, since the answer to the first time was lost, is there once; nobody ends over it."""

from __future__ import annotations

import itertools
import logging
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message

from coterie.engines.flower import internals as flower
from coterie.engines.flower import messages, node
from coterie.engines.flower.node import Endpoint, SiteKey, SiteNode
from coterie.engines.flower.pieces import PUSHES, NotTaken
from coterie.engines.flower.runtime import PromptGrid


class Link:
    """Takes a piece that is lacking in the session in which it was announced, and no other; as Flower's does.

    Answers to pushes of pieces are lost as often as said.
    """

    def __init__(self, lost: int) -> None:
        self.lost, self.heads = lost, 0
        self.pieces: dict[str, bytes] = {}
        self._lacking: dict[str, set[str]] = {}
        self._numbers = itertools.count()

    def PushMessages(self, request: Any) -> Any:
        self.heads += 1
        announced = {
            each.object_id
            for tree in request.message_object_trees
            for each in flower.iterate_object_tree(tree)
        }
        session, lacking = str(next(self._numbers)), announced - self.pieces.keys()
        self._lacking[session] = set(lacking)
        identities = [head.metadata.message_id for head in request.messages_list]
        return SimpleNamespace(session_id=session, objects_to_push=sorted(lacking), message_ids=identities)

    def PushObject(self, request: Any) -> Any:
        lacking = self._lacking[request.session_id]
        stored = request.object_id in lacking
        if stored:
            lacking.remove(request.object_id)
            self.pieces[request.object_id] = request.object_content
        if self.lost and stored:
            self.lost -= 1
            raise httpx.ReadError("the answer is lost")
        return SimpleNamespace(stored=stored)

    def close(self) -> None:
        pass


class PatientLink(Link):
    """The same, asked again by whoever calls it, as Flower's own clients do."""

    def PushObject(self, request: Any) -> Any:
        try:
            return super().PushObject(request)
        except httpx.ReadError:
            return super().PushObject(request)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Message:
    monkeypatch.setattr(node.time, "sleep", lambda seconds: None)
    flower.TaskIdentity.run_id, flower.TaskIdentity.node_id, flower.TaskIdentity.task_id = 1, 1, 1
    made = Message(messages.pack({}), 100, messages.FACTS, ttl=60)
    made.metadata.__dict__["_message_id"] = made.object_id
    return made


def site_at(link: Link, monkeypatch: pytest.MonkeyPatch) -> SiteNode:
    built = SimpleNamespace(from_server_address=lambda *arguments, **options: link)
    monkeypatch.setattr(flower, "FleetHttpClient", built)
    made = SiteNode(Endpoint("127.0.0.1:9", None), SiteKey(ec.generate_private_key(ec.SECP384R1())))
    made._node = flower.Node(node_id=100)
    return made


@pytest.mark.parametrize("lost", [0, 1, 3])
def test_a_site_whose_answer_was_taken_and_not_confirmed_goes_on(
    asked: Message, monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    """A connection that was cut while an answer was pushed ended the site's process."""
    link = Link(lost)
    content = messages.pack({"closed": "x" * 64})
    site_at(link, monkeypatch).reply(asked, content)
    assert content.object_id in link.pieces
    assert link.heads == 1 + lost  # each time only what is lacking


def test_an_answer_that_is_never_taken_ends_no_site(
    asked: Message, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    link = Link(0)
    monkeypatch.setattr(link, "PushObject", lambda request: SimpleNamespace(stored=False))
    with caplog.at_level(logging.WARNING):
        site_at(link, monkeypatch).reply(asked, messages.pack({"closed": "x"}))
    assert link.heads == PUSHES
    assert "an answer to a message of type query.facts was not taken" in caplog.messages


def grid_at(link: Link, monkeypatch: pytest.MonkeyPatch) -> PromptGrid:
    monkeypatch.setattr(PromptGrid, "_runtime_client", link, raising=False)
    monkeypatch.setattr(PromptGrid, "node", flower.Node(node_id=1), raising=False)
    made = PromptGrid(token="any")
    made._run = SimpleNamespace(run_id=1)
    return made


@pytest.mark.parametrize("lost", [0, 1, 3])
def test_a_server_whose_message_was_taken_and_not_confirmed_goes_on(
    asked: Message, monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    link = PatientLink(lost)
    both = [asked, Message(messages.pack({"closed": "x" * 64}), 101, messages.FACTS, ttl=60)]
    assert grid_at(link, monkeypatch).push_messages(both) == [each.object_id for each in both]
    assert {each.object_id for each in both} <= link.pieces.keys()


def test_a_link_that_takes_nothing_is_named(asked: Message, monkeypatch: pytest.MonkeyPatch) -> None:
    link = Link(0)
    monkeypatch.setattr(link, "PushObject", lambda request: SimpleNamespace(stored=False))
    with pytest.raises(NotTaken, match="the link does not take all pieces of a message; --resume goes on"):
        grid_at(link, monkeypatch).push_messages([asked])
