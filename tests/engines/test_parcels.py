"""Messages whose large arrays lie in shared memory."""

from collections.abc import Iterator

import numpy as np
import pytest

from coterie.engines.parcels import LARGE, SLOTS, Parcels, nameless_file


@pytest.fixture
def two_ends() -> Iterator[tuple[Parcels, ...]]:
    files = [nameless_file() for _ in range(SLOTS)]
    yield tuple(Parcels([file.fileno() for file in files]) for _ in range(2))
    for file in files:
        file.close()


def test_what_is_unpacked_is_what_was_packed(two_ends: tuple[Parcels, Parcels]) -> None:
    here, there = two_ends
    rng = np.random.default_rng(0)
    large = rng.normal(size=(LARGE // 8 + 3, 2))
    for message in (
        ("train", (large, large[::2], large.astype(np.float32), np.arange(3))),
        {"small": np.ones(5), "large": np.arange(LARGE, dtype=np.int64)},
        (True, None),
        np.asfortranarray(large),
    ):
        np.testing.assert_equal(there.unpack(here.pack(message)), message)
    assert len(here.pack((large, [large]))[1]) < LARGE


def test_a_message_that_was_unpacked_outlives_those_after_it(two_ends: tuple[Parcels, Parcels]) -> None:
    here, there = two_ends
    found = []
    for turn in range(2 * SLOTS):  # so many are under way at a time as there are slots
        sent = [here.pack(np.full(LARGE + 1000 * turn, 2 * turn + each)) for each in range(SLOTS)]
        found += [there.unpack(one) for one in sent]
    for number, array in enumerate(found):
        assert array.flags.writeable
        assert (array == number).all()
