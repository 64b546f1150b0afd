"""The scattering transform against its definition, summed up in another way; and a record against others."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from coterie.data import Task
from coterie.errors import InputError
from coterie.models import scattering
from coterie.models.check import one_thread
from coterie.models.scattering import Scattering

SHAPE = (1, 12, 16)


def transform(shape: tuple[int, ...] = SHAPE) -> Scattering:
    return Scattering(Task("classification", shape, 3))


def images(count: int, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    return torch.rand(count, *shape, generator=torch.Generator().manual_seed(3))


# --- the definition, value by value -------------------------------------------------------------------


def wave(y: int, x: int, scale: int, angle: float, frequency: float) -> complex:
    """A Gaussian, longer across its direction than along it, times a plane wave, at a place of the plane."""
    sigma, slant = 0.8 * 2**scale, 0.5
    turned = np.array([[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]]) @ [y, x]
    bell = math.exp(-(turned[0] ** 2 + (slant * turned[1]) ** 2) / (2 * sigma**2))
    return complex(bell * slant / (2 * math.pi * sigma**2) * np.exp(1j * frequency * turned[0]))


def wavelet(scale: int, turn: int, size: tuple[int, int]) -> np.ndarray:
    """On the torus: what lies around it comes from all its turns; and of mean zero."""
    angle, frequency = (3 - turn) * math.pi / 8, 3 * math.pi / 4 / 2**scale
    found = np.zeros((2, *size), dtype=complex)
    for y, x in itertools.product(range(-2 * size[0], 2 * size[0]), range(-2 * size[1], 2 * size[1])):
        if max(abs(y), abs(x)) < 24:  # beyond that a wave of these scales is below 1e-12
            found[0, y % size[0], x % size[1]] += wave(y, x, scale, angle, frequency)
            found[1, y % size[0], x % size[1]] += wave(y, x, scale, angle, 0.0)
    centred: np.ndarray = found[0] - found[1] * found[0].sum() / found[1].sum()
    return centred


def convolved(signal: np.ndarray, filtered: np.ndarray) -> np.ndarray:
    """Sum over all places of the torus, for each of them."""
    total = np.zeros(signal.shape, dtype=complex)
    for y, x in itertools.product(range(signal.shape[0]), range(signal.shape[1])):
        total += filtered[y, x] * np.roll(signal, (y, x), axis=(0, 1))
    return total


def means(signal: np.ndarray, step: int) -> np.ndarray:
    """Gaussian means at every fourth place inside the padding, of a signal known at every `step`-th place."""
    rows, columns = signal.shape
    found = np.zeros(((rows - 16) // 4, (columns - 16) // 4))
    y, x = np.mgrid[0:rows:step, 0:columns:step]
    for place in np.ndindex(*found.shape):
        down, across = 8 + 4 * place[0] - y, 8 + 4 * place[1] - x
        # The shorter way around; the longer ones add less than 1e-12 on a torus of 28 or more.
        down, across = down - rows * np.round(down / rows), across - columns * np.round(across / columns)
        weights = np.exp(-(down**2 + across**2) / (2 * 1.6**2)) / (2 * math.pi * 1.6**2)
        found[place] = step**2 * np.sum(weights * signal[::step, ::step])
    return found


SECOND = [(0.0173, 0.0073), (0.0155, 0.0063), (0.0124, 0.0050), (0.0104, 0.0043), (0.0099, 0.0042)]


def slowly(image: np.ndarray) -> np.ndarray:
    """Scattering of one record in double precision."""
    channels = []
    image, kinds = image.astype(np.float64), ["grey"] * len(image)
    if len(image) == 3:
        red, green, blue = image
        image = np.stack(
            [(red + green + blue) / 3**0.5, (red - green) / 2**0.5, (red + green - 2 * blue) / 6**0.5]
        )
        kinds = ["light", "difference", "difference"]
    size = (image.shape[1] + 16, image.shape[2] + 16)
    filters = {(scale, turn): wavelet(scale, turn, size) for scale in (0, 1) for turn in range(8)}
    for kind, colour in zip(kinds, image, strict=True):
        middle, contrast = {"grey": (0.5, 0.21), "light": (0.5 * 3**0.5, 0.21 * 3**0.5)}.get(
            kind, (0.0, 0.07)
        )
        padded = np.pad((colour - middle) / contrast, 8, mode="reflect")
        fine = [np.abs(convolved(padded, filters[0, turn])) for turn in range(8)]
        coarse = [np.abs(convolved(padded, filters[1, turn])) for turn in range(8)]
        paths = [np.abs(convolved(first, filters[1, turn])) for first in fine for turn in range(8)]
        channels += [means(padded, 1) / 0.63, *((means(one, 1) - 0.143) / 0.036 for one in fine)]
        channels += [(means(one, 2) - 0.139) / 0.053 for one in coarse]
        for at, path in enumerate(paths):
            turns = abs(at // 8 - at % 8)
            mean, spread = SECOND[min(turns, 8 - turns)]
            channels.append((means(path, 2) - mean) / spread)
    record = np.stack(channels)
    scaled: np.ndarray = (record - record.mean()) / np.sqrt(record.var() + 1e-8) / math.sqrt(record.size)
    return scaled


@pytest.mark.parametrize("colours", [1, 3])
def test_the_transform_is_its_definition(colours: int) -> None:
    shape = (colours, *SHAPE[1:])
    [image] = images(1, shape)
    found, expected = transform(shape)(image[None])[0].numpy(), slowly(image.numpy())
    assert found.shape == expected.shape == (81 * colours, 3, 4)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert np.abs(expected).max() > 1e-2, "values that a mistake of 1e-5 would not hide in"


def test_constants_are_those_of_random_images() -> None:
    """Of a spectrum that falls like one over the frequency, in every colour; of data there is nothing."""
    random, frequencies = np.random.default_rng(0), np.fft.fftfreq(32)
    radius = np.maximum(np.hypot(frequencies[:, None], frequencies[None, :]), 1 / 32)
    images = np.fft.ifft2(np.fft.fft2(random.normal(size=(96, 32, 32))) / radius).real
    images -= images.mean(axis=(1, 2), keepdims=True)
    images /= images.std(axis=(1, 2), keepdims=True)
    made = transform((1, 32, 32))
    found = made.channels(torch.from_numpy(0.5 + 0.21 * images).float()[:, None])[:, 0].double()
    means, spreads = scattering.channel_constants(1)
    whole = found.std(dim=(0, 2, 3)).numpy()
    np.testing.assert_allclose(found.mean(dim=(0, 2, 3)).numpy()[1:], means[0, 1:], rtol=0.2)
    np.testing.assert_allclose(whole, spreads[0], rtol=0.3)
    for order in (slice(1, 9), slice(9, 17), slice(17, 81)):
        assert np.mean(whole[order] / spreads[0, order]) == pytest.approx(1.0, abs=0.08)
    light, difference = scattering.channel_constants(3)[1][:2]
    assert light == pytest.approx(3**0.5 * spreads[0])
    assert difference == pytest.approx(spreads[0] * 0.07 / 0.21)


def test_features_of_a_record_have_norm_one_at_most() -> None:
    flat = torch.stack([torch.zeros(SHAPE), torch.ones(SHAPE), 1e4 * torch.rand(SHAPE), images(1)[0]])
    norms = transform()(flat).flatten(1).norm(dim=1)
    assert norms.max() <= 1.0 + 1e-6
    assert norms[3] > 0.95


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32)])
@one_thread()  # as features are computed: several threads share the work by the size of a batch
def test_a_record_has_the_same_bits_in_any_company(shape: tuple[int, ...]) -> None:
    given, made = images(11, shape), transform(shape)
    alone = torch.cat([made(record) for record in torch.split(given, 1)])
    order = torch.randperm(len(given), generator=torch.Generator().manual_seed(1))
    for size in (2, 3, 8, 11):
        together = torch.cat([made(part) for part in torch.split(given[order], size)])
        assert torch.equal(together, alone[order]), f"batches of {size}"
    spoiled = given.clone()
    spoiled[3] = torch.nan
    kept = torch.arange(len(given)) != 3
    assert torch.equal(made(spoiled)[kept], made(given)[kept])


def test_a_quarter_turn_of_an_image_moves_places_and_orientations() -> None:
    """Nothing prefers a direction: norms of whole orders are those of the turned image."""
    square = images(1, (1, 16, 16))
    made = transform((1, 16, 16))
    found = [made(torch.rot90(square, turn, (2, 3))) for turn in (0, 2)]
    for order in (slice(0, 1), slice(1, 17), slice(17, 81)):
        norms = [float(one[:, order].norm()) for one in found]
        assert norms[0] == pytest.approx(norms[1], rel=0.2)


@pytest.mark.parametrize("shape", [(5,), (1, 8, 8), (1, 30, 30), (1, 12, 8)])
def test_what_has_no_scattering_is_refused_in_one_line(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=r"model.features: scattering; it needs images whose sides"):
        transform(shape)
