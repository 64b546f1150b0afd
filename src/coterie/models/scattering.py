"""Scattering features of images: wavelets and moduli that are known before any record is, nothing learnt.

Second-order scattering of Mallat (2012) and Bruna and Mallat (2013) with J = 2 scales and L = 8 orientations.
Every colour x of an image is padded by reflection and convolved, on the torus of the padded size,

    S0 = x * phi,    S1 = |x * psi_j,l| * phi,    S2 = ||x * psi_0,l| * psi_1,m| * phi,

with Morlet wavelets psi_j,l (sigma = 0.8 * 2^j, frequency 3 pi / 4 / 2^j, slant 4 / L, angles pi / 8 apart)
and the Gaussian phi (sigma = 1.6), and every fourth value in both directions is kept: 1 + 16 + 64 = 81
channels. A signal that passed a wavelet of scale 1 is kept at every second place before phi averages it, as
wavelets of that scale pass no faster change.

Of three colours, the lightness and two differences are taken first (an orthonormal turn: most of what colours
have in common is in one of them). Every channel is then centred and scaled by what it is in random images
whose spectrum falls like one over the frequency, as that of photographs does, and each record by its own mean
and spread, so that it has norm 1. Of other records nothing is used, and of data nothing at all.
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from coterie.data.records import Task
from coterie.errors import InputError

VERSION = 2
"""Of the numbers that come out: another one is another transform, of which nothing in a cache serves."""
PADDING, STEP = 8, 4
ORIENTATIONS, CHANNELS = 8, 81
SMALLEST = 12
FLOOR = 1e-8
"""Of the variance that a record is divided by, which is about 1."""
MIDDLE, CONTRAST = 0.5, 0.21
"""Of pixels in random images, the light ones (three colours together: sqrt(3) times as much)."""
DIFFERENCE = 0.07
"""The contrast of differences between colours in them; their middle is zero."""
FIRST_MEANS, FIRST_SPREADS = (0.143, 0.139), (0.036, 0.053)
SECOND_MEANS, SECOND_SPREADS = (
    (0.0173, 0.0155, 0.0124, 0.0104, 0.0099),
    (0.0073, 0.0063, 0.0050, 0.0043, 0.0042),
)
"""Channels of random images of middle 0 and contrast 1: of the first order by scale, of the second by how
many eighths of half a turn lie between their two wavelets."""
AVERAGE_SPREAD = 0.63
"""The spread of S0 in them."""
OPPONENTS = ((1.0, 1.0, 1.0), (1.0, -1.0, 0.0), (1.0, 1.0, -2.0))
_PERIODS = range(-2, 3)
"""How often a filter is laid around the torus; what is farther away is below the last digit."""

Complexes = NDArray[np.complex128]
Reals = NDArray[np.float64]


def gabor(rows: int, columns: int, sigma: float, theta: float, xi: float, slant: float) -> Complexes:
    """A plane wave under a slanted Gaussian, on a torus."""
    cosine, sine = math.cos(theta), math.sin(theta)
    wave = np.zeros((rows, columns), dtype=np.complex128)
    for turn in _PERIODS:
        for other in _PERIODS:
            y = np.arange(rows)[:, None] + turn * rows
            x = np.arange(columns)[None, :] + other * columns
            along, across = y * cosine + x * sine, x * cosine - y * sine
            wave += np.exp(-(along**2 + slant**2 * across**2) / (2.0 * sigma**2) + 1j * xi * along)
    scaled: Complexes = wave * slant / (2.0 * math.pi * sigma**2)
    return scaled


def morlet(rows: int, columns: int, scale: int, orientation: int) -> Complexes:
    """A wavelet of mean zero."""
    sigma, xi, slant = 0.8 * 2.0**scale, 0.75 * math.pi / 2.0**scale, 4.0 / ORIENTATIONS
    theta = (ORIENTATIONS // 2 - 1 - orientation) * math.pi / ORIENTATIONS
    wave = gabor(rows, columns, sigma, theta, xi, slant)
    envelope = gabor(rows, columns, sigma, theta, 0.0, slant)
    centred: Complexes = wave - envelope * (wave.sum() / envelope.sum())
    return centred


def gaussian_line(size: int) -> Reals:
    """One of the two equal factors of phi, on a circle."""
    places = np.arange(size)
    turns = (np.exp(-((places + turn * size) ** 2) / (2.0 * 1.6**2)) for turn in _PERIODS)
    line: Reals = np.sum(list(turns), axis=0) / (math.sqrt(2.0 * math.pi) * 1.6)
    return line


def averaging(size: int, kept: int) -> Reals:
    """What takes a line of which every `kept`-th value is there to its Gaussian means inside the padding."""
    line, there = gaussian_line(size), np.arange(0, size, kept)
    means = np.arange(PADDING, size - PADDING, STEP)
    weights: Reals = kept * line[(means[:, None] - there[None, :]) % size]
    return weights


def channel_constants(colours: int) -> tuple[Reals, Reals]:
    """Mean and spread of every channel in random images: (colours, 81) each."""
    apart = [min(turn, ORIENTATIONS - turn) for turn in range(ORIENTATIONS)]
    pairs = [apart[abs(first - second)] for first in range(ORIENTATIONS) for second in range(ORIENTATIONS)]
    first = np.repeat([FIRST_MEANS, FIRST_SPREADS], ORIENTATIONS, axis=1)
    second = np.array([SECOND_MEANS, SECOND_SPREADS])[:, pairs]
    means, spreads = np.concatenate([[[0.0], [AVERAGE_SPREAD]], first, second], axis=1)
    if colours != len(OPPONENTS):
        middles, contrasts = np.full(colours, MIDDLE), np.full(colours, CONTRAST)
    else:
        light = math.sqrt(colours)
        middles = np.array([light * MIDDLE, 0.0, 0.0])
        contrasts = np.array([light * CONTRAST, DIFFERENCE, DIFFERENCE])
    all_means = contrasts[:, None] * means
    all_means[:, 0] += middles
    return all_means, contrasts[:, None] * spreads


class Scattering(nn.Module):
    """Images (n, colours, height, width) as features (n, 81 * colours, height / 4, width / 4)."""

    means: Tensor
    spreads: Tensor
    turn: Tensor

    def __init__(self, task: Task) -> None:
        super().__init__()
        shape = task.shape
        image = task.vocabulary is None and len(shape) == 3
        if not image or any(side < SMALLEST or side % STEP for side in shape[1:]):
            kind = "text" if task.vocabulary is not None else task.kind
            raise InputError(
                f"model.features: scattering; it needs images whose sides are multiples of {STEP} and at "
                f"least {SMALLEST} pixels, the data are {kind} with records of shape {shape}"
            )
        self.colours, self.height, self.width = shape
        rows, columns = (side + 2 * PADDING for side in shape[1:])
        for scale in (0, 1):
            bank = np.stack(
                [np.fft.fft2(morlet(rows, columns, scale, turn)).real for turn in range(ORIENTATIONS)]
            )
            self._keep(f"psi_{scale}", bank)
            self._keep(f"rows_{scale}", averaging(rows, 2**scale))
            self._keep(f"columns_{scale}", averaging(columns, 2**scale).T)
        means, spreads = channel_constants(self.colours)
        self._keep("means", means[:, :, None, None])
        self._keep("spreads", spreads[:, :, None, None])
        turn = np.array(OPPONENTS)
        self._keep("turn", turn / np.linalg.norm(turn, axis=1, keepdims=True))
        self.eval()

    def _keep(self, name: str, values: Reals) -> None:
        self.register_buffer(name, torch.from_numpy(values.astype(np.float32)), persistent=False)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of one record's features."""
        return self.colours * CHANNELS, self.height // STEP, self.width // STEP

    def forward(self, images: Tensor) -> Tensor:
        standard = (self.channels(images) - self.means) / self.spreads
        flat = standard.reshape(images.shape[0], *self.shape)
        return functional.group_norm(flat, 1, eps=FLOOR) / math.sqrt(math.prod(self.shape))

    def channels(self, images: Tensor) -> Tensor:
        """Scattering of every colour, before anything is scaled: (n, colours, 81, height / 4, width / 4)."""
        if self.colours == len(OPPONENTS):
            # Number by number: a matrix product may sum in another order for another number of records.
            weighed = self.turn[:, :, None, None] * images[:, None]
            images = weighed[:, :, 0] + weighed[:, :, 1] + weighed[:, :, 2]
        padded = functional.pad(images, (PADDING,) * 4, mode="reflect")
        spectrum = torch.fft.fft2(padded)[:, :, None]
        fine = torch.fft.ifft2(spectrum * self.psi_0).abs()
        coarse = torch.fft.ifft2(_folded(spectrum * self.psi_1)).abs()
        waves = torch.fft.fft2(fine)[:, :, :, None]
        paths = torch.fft.ifft2(_folded(waves * self.psi_1)).abs().flatten(2, 3)
        # Never a single matrix: processors may sum its product in another order than those of many.
        signals = (torch.cat([padded[:, :, None], fine], dim=2), torch.cat([coarse, paths], dim=2))
        return torch.cat([self._mean(signal, scale) for scale, signal in enumerate(signals)], dim=2)

    def _mean(self, signal: Tensor, scale: int) -> Tensor:
        """The Gaussian means at every fourth place inside the padding."""
        means: Tensor = getattr(self, f"rows_{scale}") @ signal @ getattr(self, f"columns_{scale}")
        return means


def _folded(spectrum: Tensor) -> Tensor:
    """The spectrum of every second value in both directions."""
    rows, columns = (side // 2 for side in spectrum.shape[-2:])
    halves = spectrum.reshape(*spectrum.shape[:-2], 2, rows, 2, columns)
    return halves.sum(dim=(-4, -2)) / 4.0
