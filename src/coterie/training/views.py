"""Several views of a record whose gradients are averaged before the clip (De et al. 2022).

However many views there are, a record adds one vector of norm at most the clip to the sum, so sensitivity
and accounting are those of training without them. Views written into the data instead would be records of
their own: one person would then move the sum by as many clips.

Which view is drawn depends on a key, the step, the record's place and the number of the view, never on a
record's values, so a repeated round repeats its views and a neighbour changes nobody else's.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.training.augmentation import Augmentation
from coterie.training.learner import Batch

_STEP, _VIEW, _KEY = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB


def views_of(
    augmentation: Augmentation, batch: Batch, places: Tensor, step: int | Tensor, keys: int | Tensor
) -> Batch:
    """Every record's views, one record after the other.

    Args:
        batch: images, (records, channels, height, width).
        places: each record's place among its client's records.
        step: of the round.
        keys: 64 bits, one for all records or one for each.
    """
    drawn = _draw(augmentation, places, step, keys)
    features = batch.features.repeat_interleave(augmentation.copies, dim=0)
    height, width = features.shape[-2:]
    down, right, mirrored = (part.flatten()[:, None] for part in drawn)
    rows = (torch.arange(height, device=features.device) - down).clamp(0, height - 1)
    columns = torch.arange(width, device=features.device).expand(len(features), -1)
    columns = (torch.where(mirrored, width - 1 - columns, columns) - right).clamp(0, width - 1)
    record = torch.arange(len(features), device=features.device)[:, None, None]
    images = features.movedim(1, -1)[record, rows[:, :, None], columns[:, None, :]].movedim(-1, 1)
    return Batch(images.contiguous(), batch.targets.repeat_interleave(augmentation.copies, dim=0))


def _draw(
    augmentation: Augmentation, places: Tensor, step: int | Tensor, keys: int | Tensor
) -> tuple[Tensor, ...]:
    """Shift down, shift right and whether mirrored, of each view: (records, copies) each."""
    view = torch.arange(augmentation.copies, device=places.device)
    seed = _mixed(torch.as_tensor(keys, device=places.device) * _KEY + places)
    seed = _mixed(seed + torch.as_tensor(step, device=places.device) * _STEP)
    bits = _mixed(seed[:, None] + view * _VIEW)
    most = augmentation.shift
    shifts = ((_after(bits, skip) & 0xFFFFF) % (2 * most + 1) - most for skip in (0, 20))
    flipped = (_after(bits, 40) & 1).bool()
    mirrored = flipped if augmentation.flip else torch.zeros_like(flipped)
    return *shifts, mirrored


@dataclass(frozen=True)
class DrawnViews:
    """The views of a batch's records that are drawn in one step.

    Args:
        places: each record's place among its client's records.
        key: 64 bits, the client's own in this round.
    """

    augmentation: Augmentation
    places: Tensor
    step: int
    key: int

    def of(self, records: Batch, first: int) -> Batch:
        """Views of some of the records (of a person: all), the first of which has this place in the batch."""
        places = record_places(self.places[first : first + len(records)], records.places)
        return views_of(self.augmentation, records.flat, places, self.step, self.key)


def record_places(rows: Tensor, places: int) -> Tensor:
    """Places of single records, from those of rows that hold so many each."""
    if places == 1:
        return rows
    return (rows[:, None] * places + torch.arange(places, device=rows.device)).flatten()


def _after(bits: Tensor, skip: int) -> Tensor:
    """Shifted to the right with zeros from the left, which torch's shift of signed numbers does not do."""
    return (bits >> skip) & ((1 << (64 - skip)) - 1) if skip else bits


def _mixed(bits: Tensor) -> Tensor:
    """The finaliser of splitmix64 (Steele et al. 2014), whose output bits depend on all input bits."""
    bits = (bits ^ _after(bits, 30)) * -0x40A7B892E31B1A47
    bits = (bits ^ _after(bits, 27)) * -0x6B2FB644ECCEEE15
    return bits ^ _after(bits, 31)
