"""Whether the kernels of `kernels.py` work here, and what they take: tried on records that are nobody's."""

import logging
import math

import torch
from torch import Tensor

from coterie.training import kernels
from coterie.training.clipping import stacked_clipped_sum
from coterie.training.head import StackedHead
from coterie.training.isolation import MOST_ROUNDED, MOST_ROUNDED_OF_ONE, off_by
from coterie.training.learner import Learner, precision
from coterie.training.tiles import tiles_of

log = logging.getLogger(__name__)

_PROBE_CLIP = 0.01
"""Shorter than the gradients of random records, so that all are clipped."""
_PROBED_RECORDS = 64
_LEAST_SHARE = 16


def kernels_agree(
    learner: Learner, tile: int, *, tf32: bool = True, wide_head: bool = False, coarse: bool = False
) -> bool:
    """Whether our kernels run here and agree with torch's operations, on records that are nobody's.

    And whether a record that is alone adds no more than its clip: what is summed then has the norm that was
    taken.

    Args:
        wide_head: try what computes the whole step of a wide head, instead of the layer rules.
        coarse: let layers hand on bfloat16.
    """
    device, book = learner.device, learner.book
    if not kernels.available(device) or book is None:
        return False
    ours = "kernels of our own" + (" that hand on bfloat16" if coarse else "")
    try:
        owner = torch.tensor([0, 0, 1, 2, 2], device=device)
        probe = learner.random_batch(len(owner) * tile)
        stacked = torch.tensor([[1.0], [0.9], [1.1]], device=device) * learner.initial()
        present = torch.arange(len(probe), device=device) % tile < 1 + tile // 2
        present[-tile:] = False
        alone = torch.zeros_like(present)
        alone[[0, 2 * tile, 3 * tile]] = True
        clips = torch.full((len(probe),), _PROBE_CLIP, dtype=torch.float64, device=device)
        places = torch.arange(len(probe), device=device)
        made = StackedHead.of(learner, probe) if wide_head else None

        def sums(shown: Tensor, own: Tensor | None) -> Tensor:
            tiles = tiles_of(owner, tile, 3, own, coarse=coarse)
            if made is not None and own is not None:
                return made.clipped_sum(stacked, places, tiles, clips, shown)
            return stacked_clipped_sum(book, stacked, probe, tiles, clips, shown)

        with precision(tf32=tf32):
            fast, slow, one_each = sums(present, present), sums(present, None), sums(alone, alone)
        error, worst = off_by(fast, slow, book.layout.sizes)
        longest = float(one_each.norm(dim=1).max())
    except Exception as reason:  # whatever a compiler or a driver may raise
        if lacks_memory(reason):  # of others' making, perhaps: a resumed run would compute in another way
            raise
        log.warning("%s do not run here, others do: %s", ours, " ".join(str(reason).split()))
        return False
    if not (error < MOST_ROUNDED and worst < MOST_ROUNDED_OF_ONE):
        log.warning("%s are off by %.1e here, a parameter by %.1e, and not used", ours, error, worst)
        return False
    if not longest <= _PROBE_CLIP:
        log.warning("%s clip to %.9f instead of %s here and are not used", ours, longest, _PROBE_CLIP)
        return False
    return True


def lacks_memory(reason: Exception) -> bool:
    """Whether a GPU, or the machine, has no memory left, as torch, a library or a compiler says it."""
    said = str(reason).lower()
    return isinstance(reason, torch.OutOfMemoryError | MemoryError) or any(
        words in said for words in ("out of memory", "alloc_failed")
    )


def kernel_bytes(learner: Learner, tile: int, *, tf32: bool = True, coarse: bool = False) -> int:
    """Bytes that a record takes in a pass with our kernels, which keep less than torch's operations do.

    Measured as what twice as many records take more, which among few may be too little: parameters then take
    most at another time. So it is at least a fraction of what torch's operations keep, which is known.
    """
    device, book = learner.device, learner.book
    assert book is not None

    def peak(count: int) -> int:
        present = torch.ones(count * tile, dtype=torch.bool, device=device)
        owner = torch.zeros(count, dtype=torch.int64, device=device)
        tiles = tiles_of(owner, tile, 1, present, coarse=coarse)
        probe = learner.random_batch(len(present))
        clips = torch.ones(len(present), dtype=torch.float64, device=device)
        torch.cuda.reset_peak_memory_stats(device)
        with precision(tf32=tf32):
            stacked_clipped_sum(book, learner.initial()[None], probe, tiles, clips, present)
        return torch.cuda.max_memory_allocated(device)

    few = max(1, _PROBED_RECORDS // tile)
    more = math.ceil((peak(2 * few) - peak(few)) / (few * tile))
    return max(more, learner.bytes_per_record // _LEAST_SHARE, 1)
