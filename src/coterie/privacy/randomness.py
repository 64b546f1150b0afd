"""Secret randomness: a key, and one independent stream for every release it protects.

A stream is the output of SHAKE-256 over an unambiguous encoding of what it is for, so the same release
of the same input repeats the same noise after a restart, and anything else gets fresh noise: the same
noise on two different inputs would cancel in their difference.
"""

import hashlib
import math
import operator
import secrets
import struct
from collections.abc import Callable
from typing import Self

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri

from coterie.privacy.errors import PrivacyInputError

Shape = int | tuple[int, ...]
Floats = npt.NDArray[np.float64]
_Words = npt.NDArray[np.uint64]

_KEY_BYTES = 32
_SIMULATION_PREFIX = "simulation:"
# 16 times the 136 bytes that one Keccak permutation yields: the cost of a hash object vanishes beside
# the permutations, and a small draw wastes at most five microseconds.
_BLOCK_BYTES = 16 * 136
# Large draws are made in pieces that stay in the processor's cache, a quarter faster than in one.
_PIECE = 2048
_LARGEST_BELOW_ONE = 1.0 - 2.0**-53


class SecretKey:
    """The key of all noise and sampling coins; whoever knows it can subtract the noise."""

    __slots__ = ("_key", "_simulation")

    def __init__(self, key: bytes, *, simulation: bool) -> None:
        if len(key) != _KEY_BYTES:
            raise PrivacyInputError(f"a noise key has {_KEY_BYTES} bytes, not {len(key)}")
        self._key = key
        self._simulation = simulation

    @classmethod
    def from_os(cls) -> Self:
        """A fresh key from the operating system's entropy."""
        return cls(secrets.token_bytes(_KEY_BYTES), simulation=False)

    @classmethod
    def from_seed(cls, seed: int) -> Self:
        """A repeatable key, private against nobody who can guess the seed."""
        material = encode_fields(b"coterie simulation key", str(operator.index(seed)).encode())
        return cls(hashlib.shake_256(material).digest(_KEY_BYTES), simulation=True)

    @classmethod
    def from_hex(cls, text: str) -> Self:
        """The key that `to_hex` wrote."""
        digits = text.strip().removeprefix(_SIMULATION_PREFIX)
        try:
            key = bytes.fromhex(digits)
        except ValueError:
            key = b""
        if len(key) != _KEY_BYTES:
            # The text may be most of a real key, so it is never repeated in the message.
            raise PrivacyInputError(f"a noise key is written as {2 * _KEY_BYTES} hexadecimal digits")
        return cls(key, simulation=text.strip().startswith(_SIMULATION_PREFIX))

    def to_hex(self) -> str:
        """The key as text, for a file that only its owner reads; a simulation key says that it is one."""
        return (_SIMULATION_PREFIX if self._simulation else "") + self._key.hex()

    @property
    def simulation(self) -> bool:
        """Whether the key came from a seed, so that the guarantee must carry that caveat."""
        return self._simulation

    def __repr__(self) -> str:
        return f"SecretKey({'simulation' if self._simulation else 'secret'})"

    def stream(
        self, purpose: str, *, subject: str, round: int, release: str, input_hash: str
    ) -> "RandomStream":
        """The one stream for this purpose, release and input; every call starts it from its beginning."""
        fields = (purpose, subject, str(operator.index(round)), release, input_hash)
        # surrogatepass: a client's name may come from a file name, and the encoding stays one-to-one.
        texts = (field.encode("utf-8", "surrogatepass") for field in fields)
        return RandomStream(encode_fields(b"coterie stream", self._key, *texts))


def encode_fields(*fields: bytes) -> bytes:
    """Join byte strings so that different tuples never meet: their number, then each with its length."""
    parts = [struct.pack("<Q", len(fields))]
    for field in fields:
        parts += (struct.pack("<Q", len(field)), field)
    return b"".join(parts)


class RandomStream:
    """A keystream read in order: draws depend on what was drawn before, not on how calls were split."""

    def __init__(self, material: bytes) -> None:
        self._hash = hashlib.shake_256(material)
        self._counter = 0
        self._rest = b""

    def __repr__(self) -> str:
        return f"RandomStream(block {self._counter})"

    def uniform(self, shape: Shape) -> Floats:
        """Uniform values strictly between 0 and 1."""
        return self._draw(open_uniforms, 1, shape)

    def normal(self, shape: Shape, std: float = 1.0) -> Floats:
        """Gaussian noise in float64 with mean 0 and this standard deviation."""
        if not 0.0 <= std < math.inf:
            raise PrivacyInputError(f"std: {std} is not allowed, a finite number of at least 0 is")
        if std == 0.0:
            return np.zeros(shape)
        noise = self._draw(standard_normals, 2, shape)
        noise *= std
        return noise

    def gumbel(self, shape: Shape) -> Floats:
        """Standard Gumbel noise: the argmax of scores plus scale times it is the exponential mechanism."""
        return self._draw(gumbels, 1, shape)

    def bernoulli(self, rate: float, shape: Shape) -> npt.NDArray[np.bool_]:
        """Independent coins that are true at this rate (exact to 2^-53; never at 0, always at 1)."""
        if not 0.0 <= rate <= 1.0:
            raise PrivacyInputError(f"rate: {rate} is not allowed, a number from 0 to 1 is")
        return self.uniform(shape) < rate

    def integers(self, bits: int = 64) -> int:
        """One uniform integer of this many bits, for example to seed a fast generator."""
        if bits < 1:
            raise PrivacyInputError(f"bits: {bits} is not allowed, an integer of at least 1 is")
        whole = int.from_bytes(self._take(8 * math.ceil(bits / 64)), "little")
        return whole & ((1 << bits) - 1)

    def _draw(self, transform: Callable[[_Words], Floats], words_each: int, shape: Shape) -> Floats:
        values: Floats = np.empty(shape)
        flat = values.reshape(-1)
        for start in range(0, flat.size, _PIECE):
            piece = flat[start : start + _PIECE]
            piece[:] = transform(np.frombuffer(self._take(8 * words_each * piece.size), dtype="<u8"))
        return values

    def _take(self, size: int) -> bytes:
        parts = [self._rest]
        missing = size - len(self._rest)
        while missing > 0:
            block = self._hash.copy()
            block.update(struct.pack("<Q", self._counter))
            self._counter += 1
            parts.append(block.digest(_BLOCK_BYTES))
            missing -= _BLOCK_BYTES
        pool = b"".join(parts)
        self._rest = pool[size:]
        return pool[:size]


def open_uniforms(words: _Words) -> Floats:
    """Uniforms in (0, 1): steps of 2^-64 near 0, of a double near 1."""
    values = words.astype(np.float64)
    values += 0.5
    values *= 2.0**-64
    # The topmost words round to 2^64; 1 itself must not appear.
    return np.minimum(values, _LARGEST_BELOW_ONE, out=values)


def standard_normals(words: _Words) -> Floats:
    """One normal from two words each.

    Each word gives a normal by inversion: its sign and a tail probability in steps of 2^-64, so both tails
    reach to 9.2 standard deviations at full resolution. One such value is one of 2^64 numbers, sparse among
    the doubles near zero, and an observer who knows them can tell which inputs a noisy sum cannot have come
    from (Mironov 2012; Jin et al. 2022). Adding independent normals closes that hole (Holohan and Braghin
    2021): a sum of two has 2^128 preimages for some 2^56 outcomes, so the neighbours of an output are all
    reachable, and nearly equally often. They add four where a sampler draws pairs from shared uniforms, as
    Box-Muller does; inversion shares none. Four would also take twice the time.
    """
    fractions = words.view("<i8").astype(np.float64)
    fractions += 0.5
    fractions *= 2.0**-64
    normals: Floats = ndtri(np.abs(fractions))
    np.copysign(normals, fractions, out=normals)
    combined = normals[0::2] + normals[1::2]
    combined *= math.sqrt(0.5)
    return combined


def gumbels(words: _Words) -> Floats:
    """Standard Gumbel values, with the finest steps in the upper tail, where the argmax is decided."""
    # -log(-log U) with U = 1 - V: the largest values come from V near 0, where V has steps of 2^-64.
    values: Floats = np.log(-np.log1p(-open_uniforms(words)))
    return np.negative(values, out=values)
