"""Several views of a record whose gradients are averaged before the clip: what an experiment may ask for.

How views are drawn is in `views`.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Augmentation:
    """Random views of images.

    Args:
        copies: views of each record.
        shift: largest shift along each axis, in pixels; the edge is repeated.
        flip: whether a view is mirrored, left to right, half of the time.
    """

    copies: int
    shift: int = 0
    flip: bool = False
