"""`coterie join` as somebody else's program: the same site, made odd in chosen rounds. Started by tests.

    python odd_site.py '{"slow": 3}' join --data ...

- slow ROUND: says in its folder that it trains (`training`), after the charge, and then takes its time.
- nan, huge, garbage ROUND: answers that, after having computed and been charged like everybody else.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Message, RecordDict

from coterie.cli.main import main
from coterie.engines import clients
from coterie.engines.flower import messages
from coterie.engines.flower.session import SiteSession
from coterie.engines.flower.site import AT_HOME, Peer, Site

SECONDS = 600.0


def make_odd(oddities: dict[str, int]) -> None:
    train, handle, once = clients.train_privately, Site.handle, SiteSession._once  # type: ignore[attr-defined]
    current: list[int] = [0]

    def noted_once(self: SiteSession, wanted: Any, *rest: Any) -> Any:
        current[0] = wanted.round
        return once(self, wanted, *rest)

    def slow_train(*arguments: Any, **options: Any) -> Any:
        marker = Path("training-" + str(current[0]))
        if current[0] == oddities.get("slow") and not marker.exists():
            marker.touch()
            time.sleep(SECONDS)
        return train(*arguments, **options)

    def odd_handle(self: Site, message: Message, peer: Peer = AT_HOME) -> RecordDict:
        answer = handle(self, message, peer)
        plain = dict(answer.config_records["coterie"])
        if message.metadata.message_type != messages.TRAIN or "refused" in plain:
            return answer
        wanted = messages.RequestId(plain["contract"], plain["round"], plain["release"])
        value = answer.array_records["arrays"]["value"].numpy()
        if wanted.round == oddities.get("nan"):
            return messages.answer(wanted, value=value * np.float32("nan"))
        if wanted.round == oddities.get("huge"):
            return messages.answer(wanted, value=value * np.float32(1e6))
        if wanted.round == oddities.get("garbage"):
            return RecordDict({})
        return answer

    clients.train_privately = slow_train  # type: ignore[attr-defined]
    SiteSession._once = noted_once  # type: ignore[method-assign,assignment]
    Site.handle = odd_handle  # type: ignore[method-assign]


if __name__ == "__main__":
    make_odd(json.loads(sys.argv.pop(1)))
    main()
