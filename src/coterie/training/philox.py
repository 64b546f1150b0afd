"""Counter-based random numbers as tensor arithmetic: Philox 4x32-10 (Salmon et al. 2011).

A number depends on a key and on its place alone, not on which clients are computed together or in which
order, so that a round repeated on a GPU repeats its coins and its noise. Philox is fast, not cryptographic: a
guarantee that rests on it carries that caveat.
"""

import math

import torch
from torch import Tensor

COINS, NOISE = 1, 2
"""Streams of one key that must never meet."""
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four 32-bit words (in int64) for each counter of four words and key of two; everything broadcasts."""
    a, b, c, d = counter
    first, second = key
    for _ in range(10):
        # A product of two 32-bit words wraps in a signed int64; its halves are right all the same.
        low, high = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, b, c, d = (
            ((high >> 32) & _MASK) ^ b ^ first,
            high & _MASK,
            ((low >> 32) & _MASK) ^ d ^ second,
            low & _MASK,
        )
        first, second = (first + _WEYL[0]) & _MASK, (second + _WEYL[1]) & _MASK
    return a, b, c, d


def split_keys(keys: list[int], device: torch.device | None = None) -> Tensor:
    """Keys of 64 bits as two columns of 32-bit words."""
    words = [[key & _MASK, (key >> 32) & _MASK] for key in keys]
    return torch.tensor(words, dtype=torch.int64, device=device)


def places(count: int, each: int, device: torch.device) -> Tensor:
    """Counters for this many values, `each` of them from one counter."""
    return torch.arange(math.ceil(count / each), device=device)


def coins(keys: Tensor, rates: Tensor, steps: Tensor, blocks: Tensor) -> Tensor:
    """Independent coins of every step, client and record: bool (steps, clients, 4 x blocks).

    Args:
        keys: (clients, 2), of `split_keys`.
        rates: float64 (clients,). Rounded down to a multiple of 2^-32: a lower rate costs no more.
        steps: int64 (steps,), their numbers.
        blocks: `places(records, 4)`; coins beyond the last record are to be ignored.
    """
    words = torch.stack(_words(keys, blocks, steps[:, None, None], COINS), dim=-1)
    thresholds = (rates * 2.0**32).floor().to(torch.int64)
    return (words < thresholds[:, None, None]).flatten(2)


def normals(keys: Tensor, step: Tensor, pairs: Tensor) -> Tensor:
    """Standard normal values for every client at one step: float64 (clients, 2 x pairs).

    Args:
        step: int64 (1,), a tensor so that a captured program can advance it.
        pairs: `places(values, 2)`.
    """
    a, b, c, d = _words(keys, pairs, step, NOISE)
    first, second = _uniform(a, b), _uniform(c, d)
    radius, angle = (-2.0 * first.log()).sqrt(), 2.0 * math.pi * second
    return torch.stack((radius * angle.cos(), radius * angle.sin()), dim=-1).flatten(1)


def _words(keys: Tensor, place: Tensor, step: Tensor, stream: int) -> tuple[Tensor, ...]:
    counter = (place, step, torch.zeros_like(step), torch.full_like(step, stream))
    return philox(counter, (keys[:, 0, None], keys[:, 1, None]))


def _uniform(low: Tensor, high: Tensor) -> Tensor:
    """Uniform in (0, 1), from 64 bits; the largest values stay below 1."""
    exact = (low.double() + 0.5) * 2.0**-64 + high.double() * 2.0**-32
    return exact.clamp(max=1.0 - 2.0**-53)
