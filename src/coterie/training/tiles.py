"""How the records of many clients lie in one flat batch."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tiles:
    """A flat batch cut into tiles of equal size, each holding records of one client only.

    Weights are then gathered once per tile, never once per record.

    Args:
        count: number of tiles.
        size: records per tile, padding included.
        owner: position of each tile's client among the stacked weights; None when tile k is client k's.
        dynamic: whether Python may look at values (to skip work that is rarely needed); a step that is
            traced or captured once and replayed may not.
        bounds: where each client's tiles begin, and where the last end: (clients + 1,). Given where tiles
            are sorted by client and the kernels of `kernels.py` are to be used.
        present: which records there are, bool (records,), those of a tile before its padding; kernels skip
            the others, of which anything may be read then. None where nothing is to be skipped.
        coarse: whether layers of many channels may round what they read and hand on to bfloat16.
        most: tiles that a client has at most, where a sum must not depend on where among others they lie.
    """

    count: int
    size: int
    owner: Tensor | None = None
    dynamic: bool = True
    bounds: Tensor | None = None
    present: Tensor | None = None
    coarse: bool = False
    most: int | None = None

    @property
    def records(self) -> int:
        return self.count * self.size

    @property
    def single(self) -> bool:
        """Whether one client's weights serve the whole batch, so that torch's own kernels apply."""
        return self.count == 1 and self.owner is None

    def gather(self, stacked: Tensor) -> Tensor:
        """Values of each tile's client, from values stacked by client."""
        return stacked if self.owner is None else stacked.index_select(0, self.owner)

    def by_record(self, values: Tensor) -> Tensor:
        """Each record's client's value, or row, from one for each client."""
        own = self.gather(values)
        return own[:, None].expand(-1, self.size, *own.shape[1:]).flatten(0, 1)

    def by_client(self, tile_sums: Tensor, clients: int) -> Tensor:
        """Sums of each client's tiles, in an order that repeats, as that of atomic additions would not.

        Where `most` is known, a client's tiles are added in its own order, one by one: not a bit depends on
        who else there is. Else by a matrix product. A zero times what is not finite is not zero: that stays
        with the client whose tile it is in.
        """
        if self.owner is None:
            return tile_sums
        rows = torch.arange(clients, device=self.owner.device)
        theirs = rows[:, None] == self.owner[None, :]
        if self.most is not None:
            turn, total = theirs.cumsum(dim=1), tile_sums.new_zeros(clients, tile_sums.shape[1])
            for number in range(1, self.most + 1):
                its = (theirs & (turn == number)).long()
                there, place = its.max(dim=1)
                total += torch.where(there[:, None] > 0, tile_sums[place], 0.0)
            return total
        own, finite = theirs.to(tile_sums.dtype), torch.isfinite(tile_sums)
        sums, lost = own @ torch.where(finite, tile_sums, 0.0), own @ (~finite).to(tile_sums.dtype)
        return torch.where(lost > 0.0, torch.nan, sums)


def tiles_of(
    owner: Tensor,
    size: int,
    clients: int,
    present: Tensor | None,
    *,
    coarse: bool = False,
    most: int | None = None,
) -> Tiles:
    """Args:
    present: which records there are, for our kernels; None for torch's.
    coarse: as in `Tiles`, for our kernels.
    most: as in `Tiles`.
    """
    bounds = None
    if present is not None:
        filled = torch.where(present[::size], owner, clients)  # tiles that stayed empty are nobody's
        bounds = torch.searchsorted(filled, torch.arange(clients + 1, device=owner.device))
    coarse = coarse and present is not None
    return Tiles(len(owner), size, owner, False, bounds, present, coarse, most)
