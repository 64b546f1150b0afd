"""A Flower grid in memory: messages go to sites in this process, as bytes, and come back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

Handler = Callable[[Message], RecordDict]


class MemoryGrid(Grid):  # type: ignore[misc]
    """Delivers when replies are pulled. `spoil` may change, drop or repeat replies on their way."""

    def __init__(self, handlers: dict[int, Handler]) -> None:
        # A message outside a Flower process must be told where it comes from.
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
        self.handlers = handlers
        self.offline: set[int] = set()
        self.spoil: Callable[[Message, Message], list[Message]] = lambda message, reply: [reply]
        self.sent: list[Message] = []
        self.received: list[Message] = []
        self.bytes_sent = 0
        self.bytes_received = 0
        self._boxes: dict[str, Message] = {}

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def create_message(self, *arguments: Any, **options: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> list[int]:
        return [node for node in self.handlers if node not in self.offline]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        identities = []
        for message in messages:
            identity = f"message-{len(self.sent)}"
            message.metadata.__dict__["_message_id"] = identity
            self.sent.append(message)
            self._boxes[identity] = message
            identities.append(identity)
        return identities

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        replies = []
        for identity in message_ids:
            message = self._boxes.get(identity)
            if message is None or message.metadata.dst_node_id in self.offline:
                continue
            del self._boxes[identity]
            delivered, size = through_bytes(message)
            self.bytes_sent += size
            handler = self.handlers[message.metadata.dst_node_id]
            reply, size = through_bytes(Message(handler(delivered), reply_to=delivered))
            self.bytes_received += size
            replies += self.spoil(message, reply)
        self.received += replies
        return replies

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        return self.pull_messages(self.push_messages(messages))


def through_bytes(message: Message) -> tuple[Message, int]:
    """The message as the other side reads it from bytes, and their number."""
    with no_object_id_recompute():
        contents = {identity: thing.deflate() for identity, thing in get_all_nested_objects(message).items()}
        root = get_object_tree(message).object_id
    size = sum(len(content) for content in contents.values())
    copy = inflate_object_from_contents(root, dict(contents))
    assert isinstance(copy, Message)
    copy.metadata.__dict__["_message_id"] = message.metadata.message_id
    return copy, size
