"""Scattering features of images: wavelets and moduli that are known before any record is, nothing learnt.

Second-order scattering of Mallat (2012) and Bruna and Mallat (2013) with J = 2 scales and L = 8 orientations.
Every colour x of an image is padded by reflection and convolved, on the torus of the padded size,

    S0 = x * phi,    S1 = |x * psi_j,l| * phi,    S2 = ||x * psi_0,l| * psi_1,m| * phi,

with Morlet wavelets psi_j,l (sigma = 0.8 * 2^j, frequency 3 pi / 4 / 2^j, slant 4 / L, angles pi / 8 apart)
and the Gaussian phi (sigma = 1.6), and every fourth value in both directions is kept: 1 + 16 + 64 = 81
channels. A signal that passed a wavelet of scale 1 is kept at every second place before phi averages it, as
wavelets of that scale pass no faster change. Then groups of nine channels are normalised within the record,
and all is divided by the square root of how many numbers there are, so that a record has norm 1 (less where
a group is nearly constant). Of other records nothing is used.
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from coterie.data.records import Task
from coterie.errors import InputError

VERSION = 1
"""Of the numbers that come out: another one is another transform, of which nothing in a cache serves."""
PADDING, STEP = 8, 4
ORIENTATIONS, CHANNELS, GROUP = 8, 81, 9
SMALLEST = 12
FLOOR = 1e-8
"""Of the variance that a group is divided by: pixels from 0 to 1 give second-order channels of about 1e-5."""
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


class Scattering(nn.Module):
    """Images (n, colours, height, width) as features (n, 81 * colours, height / 4, width / 4)."""

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
        self.eval()

    def _keep(self, name: str, values: Reals) -> None:
        self.register_buffer(name, torch.from_numpy(values.astype(np.float32)), persistent=False)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of one record's features."""
        return self.colours * CHANNELS, self.height // STEP, self.width // STEP

    def forward(self, images: Tensor) -> Tensor:
        padded = functional.pad(images, (PADDING,) * 4, mode="reflect")
        spectrum = torch.fft.fft2(padded)[:, :, None]
        fine = torch.fft.ifft2(spectrum * self.psi_0).abs()
        coarse = torch.fft.ifft2(_folded(spectrum * self.psi_1)).abs()
        waves = torch.fft.fft2(fine)[:, :, :, None]
        paths = torch.fft.ifft2(_folded(waves * self.psi_1)).abs().flatten(2, 3)
        channels = torch.cat(
            [
                self._mean(padded[:, :, None], 0),
                self._mean(fine, 0),
                self._mean(coarse, 1),
                self._mean(paths, 1),
            ],
            dim=2,
        )
        flat = channels.reshape(images.shape[0], *self.shape)
        normal = functional.group_norm(flat, flat.shape[1] // GROUP, eps=FLOOR)
        return normal / math.sqrt(math.prod(self.shape))

    def _mean(self, signal: Tensor, scale: int) -> Tensor:
        """The Gaussian means at every fourth place inside the padding."""
        means: Tensor = getattr(self, f"rows_{scale}") @ signal @ getattr(self, f"columns_{scale}")
        return means


def _folded(spectrum: Tensor) -> Tensor:
    """The spectrum of every second value in both directions."""
    rows, columns = (side // 2 for side in spectrum.shape[-2:])
    halves = spectrum.reshape(*spectrum.shape[:-2], 2, rows, 2, columns)
    return halves.sum(dim=(-4, -2)) / 4.0
