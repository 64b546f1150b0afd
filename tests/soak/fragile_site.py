"""`coterie join` that pushes only a part of an answer and dies, whenever it is told to. Started by the soak.

    python fragile_site.py FILE join --data ...

While FILE exists, the next answer to a request for a release is pushed without some of its pieces: FILE says
how many of them are pushed. Then FILE is deleted and the process killed, as by a loss of power.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from flwr.app import Message, RecordDict

from coterie.cli.main import main
from coterie.engines.flower import internals, messages
from coterie.engines.flower.node import SiteNode

RELEASES = (messages.TRAIN, messages.SELECT, messages.EVALUATE)


def make_fragile(told: Path) -> None:
    whole_reply, push_all = SiteNode.reply, internals.push_objects

    def push_some(objects: dict[str, Any], push: Any, *, object_ids_to_push: set[str], **more: Any) -> None:
        some = set(sorted(object_ids_to_push)[: int(told.read_text())])
        push_all(objects, push, object_ids_to_push=some, **more)
        told.unlink()
        os.kill(os.getpid(), signal.SIGKILL)

    def reply(self: SiteNode, message: Message, content: RecordDict) -> None:
        breaks = told.exists() and message.metadata.message_type in RELEASES
        internals.push_objects = push_some if breaks else push_all
        whole_reply(self, message, content)

    SiteNode.reply = reply  # type: ignore[method-assign]


if __name__ == "__main__":
    make_fragile(Path(sys.argv.pop(1)))
    main()
