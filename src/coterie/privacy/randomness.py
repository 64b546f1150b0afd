"""Secret randomness: a key, and one independent stream for every release it protects.

A stream is the keystream of AES-256 in counter mode under a key of its own: SHAKE-256 over the secret key
and an unambiguous encoding of what the stream is for. So the same release of the same input repeats the same
noise after a restart, and anything else gets fresh noise: the same noise on two different inputs would cancel
in their difference. AES is there for speed: processors have instructions for it, and one training step of a
small network needs half a megabyte.
"""

import hashlib
import math
import operator
import secrets
import struct
from collections.abc import Callable, Sequence
from typing import Self

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from coterie.privacy.errors import PrivacyInputError

Shape = int | tuple[int, ...]
Floats = npt.NDArray[np.float64]
_Words = npt.NDArray[np.uint64]

_KEY_BYTES = 32
_SIMULATION_PREFIX = "simulation:"
# Large draws are made in pieces that stay in the processor's cache.
_PIECE = 32_768
# Normals are made in blocks, so that no operation runs on few numbers; what is left waits for the next draw.
_NORMALS = 1024
# The bits of 2^84 and 2^52, whose last 32 and 52 bits are free.
_EXPONENT_84, _EXPONENT_52 = 0x4530000000000000, 0x4330000000000000
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

    @property
    def fingerprint(self) -> str:
        """What books keep of their key, so that they know it again; nothing follows from it."""
        return hashlib.sha256(encode_fields(b"coterie key fingerprint", self.to_hex().encode())).hexdigest()

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

    def uniforms(
        self, purpose: str, *, subjects: Sequence[str], round: int, release: str, input_hash: str
    ) -> Floats:
        """The first uniform of the stream of every subject, for populations."""
        streams = (
            self.stream(purpose, subject=subject, round=round, release=release, input_hash=input_hash)
            for subject in subjects
        )
        return open_uniforms(np.array([stream.integers(64) for stream in streams], dtype="<u8"))


def encode_fields(*fields: bytes) -> bytes:
    """Join byte strings so that different tuples never meet: their number, then each with its length."""
    return struct.pack("<Q", len(fields)) + b"".join(struct.pack("<Q", len(each)) + each for each in fields)


class RandomStream:
    """A keystream read in order: draws depend on what was drawn before, not on how calls were split."""

    def __init__(self, material: bytes) -> None:
        key = hashlib.shake_256(material).digest(32)
        # A key serves one stream only, so its counter may begin at zero.
        self._keystream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
        self._taken = 0
        self._normals: Floats = np.empty(0)
        self._ahead = 1

    def __repr__(self) -> str:
        return f"RandomStream({self._taken} bytes taken)"

    def uniform(self, shape: Shape) -> Floats:
        """Uniform values strictly between 0 and 1."""
        return self._draw(open_uniforms, shape)

    def normal(self, shape: Shape, std: float = 1.0) -> Floats:
        """Gaussian noise in float64 with mean 0 and this standard deviation."""
        if not 0.0 <= std < math.inf:
            raise PrivacyInputError(f"std: {std} is not allowed, a finite number of at least 0 is")
        if std == 0.0:
            return np.zeros(shape)
        noise: Floats = np.empty(shape)
        flat = noise.reshape(-1)
        filled = 0
        while filled < flat.size:
            if not self._normals.size:
                self._normals = self._more_normals()
            used = min(self._normals.size, flat.size - filled)
            # Scaled piece by piece, while the piece is in the nearest caches.
            np.multiply(self._normals[:used], std, out=flat[filled : filled + used])
            self._normals = self._normals[used:]
            filled += used
        return noise

    def _more_normals(self) -> Floats:
        # Twice as many as the last time, whatever is wanted: who draws a few again and again is spared most
        # of the calls, and how many were made ahead depends on how many were drawn, not on how.
        blocks, self._ahead = self._ahead, min(2 * self._ahead, _PIECE // _NORMALS)
        words = np.frombuffer(self._take(16 * _NORMALS * blocks), dtype="<u8")
        return standard_normals(words.reshape(blocks, 4, _NORMALS // 2)).reshape(-1)

    def gumbel(self, shape: Shape) -> Floats:
        """Standard Gumbel noise: the argmax of scores plus scale times it is the exponential mechanism."""
        return self._draw(gumbels, shape)

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

    def _draw(self, transform: Callable[[_Words], Floats], shape: Shape) -> Floats:
        values: Floats = np.empty(shape)
        flat = values.reshape(-1)
        for start in range(0, flat.size, _PIECE):
            piece = flat[start : start + _PIECE]
            piece[:] = transform(np.frombuffer(self._take(8 * piece.size), dtype="<u8"))
        return values

    def _take(self, size: int) -> bytes:
        self._taken += size
        return self._keystream.update(bytes(size))


def open_uniforms(words: _Words) -> Floats:
    """Uniforms in (0, 1): steps of 2^-64 near 0, of a double near 1."""
    values = _nearest_doubles(words)
    values += 0.5
    values *= 2.0**-64
    # The topmost words round to 2^64; 1 itself must not appear.
    return np.minimum(values, _LARGEST_BELOW_ONE, out=values)


def _nearest_doubles(words: _Words) -> Floats:
    """Numpy's own conversion branches on the highest bit, which is a coin here: five times slower.

    The upper half of a word with 2^84 before it, and the lower with 2^52, are doubles as they stand. The
    difference of the first and both constants is exact; adding the second rounds, once.
    """
    values = ((words >> 32) | _EXPONENT_84).view(np.float64)
    values -= 2.0**84 + 2.0**52
    values += ((words & 0xFFFFFFFF) | _EXPONENT_52).view(np.float64)
    return values


def standard_normals(words: _Words) -> Floats:
    """Two normals from every four words: (..., 4, n) to (..., 2, n).

    Two points with normal coordinates (Box and Muller 1958) are added and divided by sqrt(2): two words give
    the points' distances from zero, with tail probabilities in steps of 2^-63, and two their directions.

    One point alone would do for statistics, but its coordinates are sparse among the doubles, and an observer
    who knows which values can occur can tell which inputs a noisy sum cannot have come from (Mironov 2012;
    Jin et al. 2022). Adding independent points closes that hole (Holohan and Braghin 2021): the sum of two
    has 2^256 preimages for some 2^112 outcomes, so the neighbours of an output are all reachable, and nearly
    equally often.
    """
    # As signed numbers words become doubles at once; without their signs they are uniform, and never zero.
    distances = words[..., :2, :].view("<i8").astype(np.float64)
    distances += 0.5
    np.abs(distances, out=distances)
    distances *= 2.0**-63
    np.log(distances, out=distances)
    distances *= -2.0
    np.sqrt(distances, out=distances)
    # From the tangent of half the angle, because numpy has a fast tangent and no fast sine: with
    # d = 2 / (1 + tan^2), the cosine is d - 1 and the sine is tan * d.
    tangents = words[..., 2:, :].view("<i8").astype(np.float64)
    tangents += 0.5
    tangents *= math.pi * 2.0**-64
    np.tan(tangents, out=tangents)
    across = np.square(tangents)
    across += 1.0
    np.divide(distances, across, out=across)
    across += across
    tangents *= across
    across -= distances
    sums = np.empty((*words.shape[:-2], 2, words.shape[-1]))
    for place, coordinate in enumerate((across, tangents)):
        np.add(coordinate[..., 0, :], coordinate[..., 1, :], out=sums[..., place, :])
    sums *= math.sqrt(0.5)  # which also fills the last bits of sums that cancelled
    return sums


def gumbels(words: _Words) -> Floats:
    """Standard Gumbel values, with the finest steps in the upper tail, where the argmax is decided."""
    # -log(-log U) with U = 1 - V: the largest values come from V near 0, where V has steps of 2^-64.
    values: Floats = np.log(-np.log1p(-open_uniforms(words)))
    return np.negative(values, out=values)
