"""Sums of clipped contributions, of records or of persons: the only door from records to anything released.

One record moves the sum by at most the clip, whatever its values. Norms and sums are float64 (some kernels
of a GPU begin them in float32), and the clip is shrunk by a margin that covers their rounding
(`contributions.py` has the bound). A record that produces
anything non-finite contributes zero (and noise is added all the same). Between neighbours a record's
contribution becomes zero, or another's, in the same place of the same batch: the arithmetic of all others is
untouched. The same holds of a person, whose contribution is the clipped sum of its records' gradients; it
takes as many places of a batch as a person may have records, whether it needs them or not.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from coterie.privacy.ranges import CLIP
from coterie.training import kernels
from coterie.training.bookkeeping import Bookkeeping
from coterie.training.contributions import Contribution, Rows, add_client_sums
from coterie.training.learner import Batch, Learner
from coterie.training.tiles import Tiles
from coterie.training.views import DrawnViews

MARGIN = 1.0 - 2.0**-16
_SMALL = 1024
_NUMBERS_AT_ONCE = 2**20
_AGAIN = 2.0**-32
"""By how much a clipped row may seem longer than it was made, for rounding; far inside the margin."""


def largest_norm(clip: float) -> float:
    """Of what a record may add: the clip, less the margin for rounding."""
    CLIP.check("clip", clip)
    return clip * MARGIN


def clip_scales(norms: Tensor, clip: float | Tensor) -> Tensor:
    """What to multiply contributions of these norms (float64) by; zero where a norm is not finite.

    Clips of the range that is allowed are normal numbers, and so is what they scale: nothing here rounds by
    more than the margin. A tensor of clips was checked when it was loaded.
    """
    most = clip * MARGIN if isinstance(clip, Tensor) else largest_norm(clip)
    scales = norms.reciprocal().mul_(most).clamp_(max=1.0)  # of a norm of zero: one
    return torch.where(norms < math.inf, scales, 0.0)  # norms are not negative, or not a number


def clip_rows(rows: Tensor, clip: float) -> Tensor:
    """Each row scaled to norm at most `clip`, in float64; rows with a non-finite entry become zero.

    A row that was clipped before keeps its bits: whoever adds up can clip again what members have clipped.
    """
    exact = rows.double()
    norms = torch.linalg.vector_norm(exact, dim=1)
    scales = torch.where(norms <= clip * MARGIN * (1.0 + _AGAIN), 1.0, clip_scales(norms, clip))
    return torch.where(torch.isfinite(norms)[:, None], exact * scales[:, None], 0.0)


def clipped_row_sum(rows: Tensor, clip: float) -> Tensor:
    """The sum of `clip_rows`, of a few at a time: all of them would take six times the memory of the rows."""
    total = rows.new_zeros(rows.shape[1], dtype=torch.float64)
    for part in torch.split(rows, max(1, _NUMBERS_AT_ONCE // max(1, rows.shape[1]))):
        total += clip_rows(part, clip).sum(dim=0)
    return total


@torch.no_grad()
def stacked_clipped_sum(
    book: Bookkeeping,
    stacked: Tensor,
    batch: Batch,
    tiles: Tiles,
    clip: float | Tensor,
    present: Tensor | None = None,
    copies: int = 1,
    persons: Tensor | None = None,
    into: Tensor | None = None,
) -> Tensor:
    """Sum over each client's records, or persons, of the clipped gradient, in float64: (clients, parameters).

    Args:
        stacked: parameters by client, (clients, parameters).
        batch: the records of all clients, in the order of the tiles.
        clip: one for all, or one for each record.
        present: bool (records,), false where a tile is padded; None when every record counts.
        copies: views of each record, which follow one another in the batch; a record's gradient is the
            mean of theirs.
        persons: where what tiles hold are persons, whose places follow one another in the batch: which of
            these are a record's, bool (persons, places). A person's gradient is the sum of its records'.
        into: what the sums are added to, and which is returned; zeros if not given.
    """
    several = copies * (1 if persons is None else persons.shape[1])
    views = tiles if several == 1 else replace(tiles, size=several * tiles.size)
    found = book.contributions(stacked, batch.features, batch.targets, views)
    if copies > 1:
        found = {name: part.averaged(copies) for name, part in found.items()}
    if persons is not None:
        found = {name: part.summed(persons) for name, part in found.items()}
    parts = _joined(found) if tiles.single else {(name,): part for name, part in found.items()}
    scales, usable = _scales([part.squared_norms() for part in parts.values()], clip, present, tiles)
    sums = torch.zeros_like(stacked, dtype=torch.float64) if into is None else into
    if not tiles.single:
        return add_client_sums(found, book.layout, scales, usable, tiles, sums)
    own = dict(zip(book.layout.shapes, torch.split(sums, book.layout.sizes, dim=1), strict=True))
    for names, part in parts.items():
        if len(names) == 1:
            part.add_to(own[names[0]], scales, usable, tiles)
            continue
        total = part.scaled_sum(scales, usable, tiles)
        widths = [own[name].shape[1] for name in names]
        for name, piece in zip(names, torch.split(total, widths, dim=1), strict=True):
            own[name] += piece
    return sums


def _joined(found: Mapping[str, Contribution]) -> dict[tuple[str, ...], Contribution]:
    """Small parts as one: a vector of biases takes the same few calls as a million numbers."""
    small = {name: part for name, part in found.items() if isinstance(part, Rows) and part.width <= _SMALL}
    joined: dict[tuple[str, ...], Contribution] = {
        (name,): part for name, part in found.items() if name not in small
    }
    if small:
        joined[tuple(small)] = Rows(torch.cat([part.rows() for part in small.values()], dim=1))
    return joined


def _scales(
    squares: Sequence[Tensor], clip: float | Tensor, present: Tensor | None, tiles: Tiles
) -> tuple[Tensor, Tensor | None]:
    """What to scale each record's gradient by, and whether it is finite (None: all are).

    Args:
        squares: squared norms in float64, by parameter.
    """
    if tiles.bounds is not None and isinstance(clip, Tensor) and present is not None:
        return kernels.clip_scales(squares, clip, present, MARGIN)
    total = torch.stack(list(squares)).sum(dim=0)
    scales = clip_scales(total.sqrt(), clip)
    if present is not None:
        scales = torch.where(present, scales, 0.0)
    usable = total < math.inf  # false for what is not a number, too
    return scales, None if tiles.dynamic and bool(usable.all()) else usable


def _unit_rows(learner: Learner, parameters: Tensor, records: Batch, part: Batch, copies: int) -> Tensor:
    """The gradient of each record, or person, before the clip; of one large person in parts.

    Args:
        part: the flat batch of all views of the records.
    """
    present = records.present
    if present is None or len(records) > 1 or len(part) <= learner.row_batch:
        return _summed_rows(learner.gradients(parameters, part), copies, present)
    views, found = copies * max(1, learner.row_batch // copies), []
    for first in range(0, len(part), views):
        rows = learner.gradients(parameters, part.take(slice(first, first + views)))
        own = slice(first // copies, (first + views) // copies)
        found.append(_summed_rows(rows, copies, present[:, own]))
    return torch.stack(found).sum(dim=0)


def _summed_rows(rows: Tensor, copies: int, present: Tensor | None) -> Tensor:
    """Means over the views of each record, and sums over the records of each person."""
    if copies > 1:
        rows = rows.view(len(rows) // copies, copies, -1).mean(dim=1)
    return rows if present is None else Rows(rows).summed(present).rows()


def clipped_sum(
    learner: Learner,
    parameters: Tensor,
    batch: Batch,
    clip: float,
    project: Callable[[Tensor], Tensor] | None = None,
    views: DrawnViews | None = None,
) -> Tensor:
    """Sum over records of the clipped gradient (or of its clipped projection), in float64.

    Of a batch of persons: over persons, of the clipped sum of a person's gradients (or of its projection).
    Micro-batches bound the memory; their boundaries depend on the number of rows alone.

    Args:
        views: of each record, whose gradients are averaged before the clip.
    """
    total: Tensor | None = None
    copies = 1 if views is None else views.augmentation.copies
    # One person may have more records than fit the memory at a time: its rows are added up in parts.
    large = batch.present is not None and copies * batch.places > learner.micro_batch
    book = learner.book if project is None and not large else None
    head = learner.narrow_head if project is None and views is None and batch.present is None else None
    most = largest_norm(clip)
    affordable = learner.row_batch if book is None else learner.micro_batch
    first = 0
    for records in batch.split(max(1, affordable // (copies * batch.places))):
        part = records.flat if views is None else views.of(records, first)
        first += len(records)
        if head is not None:
            partial = head.clipped_sum(parameters, part.features, part.targets, most)
            total = partial if total is None else total.add_(partial)
        elif book is not None:
            whole = (parameters[None], part, Tiles(1, len(records), coarse=learner.coarse), clip)
            into = None if total is None else total[None]
            total = stacked_clipped_sum(book, *whole, copies=copies, persons=records.present, into=into)[0]
        else:
            rows = _unit_rows(learner, parameters, records, part, copies)
            partial = clipped_row_sum(rows if project is None else project(rows), clip)
            total = partial if total is None else total + partial
    if total is None:
        width = parameters[None] if project is None else project(parameters[None])
        return torch.zeros(width.shape[1], dtype=torch.float64, device=parameters.device)
    return total
