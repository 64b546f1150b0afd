"""Messages travel in pieces, and a piece that is pushed twice is refused the second time.

Where the answer to a push was lost, whoever pushes cannot know whether the piece was taken, and pushes it
again. The head of a message may be pushed as often as one likes: the link answers with what it lacks.
"""

from collections.abc import Callable
from typing import TypeVar

from coterie.engines.flower import internals as flower
from coterie.errors import CoterieError

T = TypeVar("T")

PUSHES = 4
"""Of one message, from its head on."""


class NotTaken(CoterieError):
    """A message of which the link does not take all pieces."""


def push_whole(push: Callable[[], T]) -> T:
    """Push a message, and what is lacking of it once more where a piece was refused.

    Args:
        push: its head, and then the pieces that the link says it lacks.
    """
    for _ in range(PUSHES):
        try:
            return push()
        except flower.ObjectPushError:
            continue
    raise NotTaken("the link does not take all pieces of a message; --resume goes on")
