"""Messages whose large arrays lie in shared memory."""

import itertools
import os
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.engines.parcels import LARGE, Parcels, nameless_file


@pytest.fixture
def two_ends() -> Iterator[tuple[Parcels, Parcels]]:
    with nameless_file() as file:
        yield Parcels(file.fileno()), Parcels(file.fileno())


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
    for turn in range(4):
        found.append(there.unpack(here.pack(np.full(LARGE + 1000 * turn, turn))))
    for number, array in enumerate(found):
        assert array.flags.writeable
        assert (array == number).all()


def test_a_message_that_tells_of_more_than_there_is_cannot_be_read(two_ends: tuple[Parcels, Parcels]) -> None:
    here, there = two_ends
    first, (size,), head = here.pack(np.zeros(LARGE, np.uint8))
    with pytest.raises(EOFError, match="more bytes than the shared memory holds"):
        there.unpack((first, [size + 1], head))


@settings(deadline=None, max_examples=50)
@given(sizes=st.lists(st.sampled_from([0, 1, 2, 3, 7]), min_size=3, max_size=12))
def test_a_message_is_packed_before_the_last_one_is_unpacked(sizes: list[int]) -> None:
    """Whatever is larger or smaller than what came before; and the memory does not grow and grow."""
    with nameless_file() as file:
        here, there = Parcels(file.fileno()), Parcels(file.fileno())
        messages = [[np.full(LARGE, number, np.uint8)] * size for number, size in enumerate(sizes)]
        messages = [[array.copy() for array in arrays] for arrays in messages]
        waiting = here.pack(messages[0])
        for last, message in itertools.pairwise(messages):
            sent = here.pack(message)
            np.testing.assert_equal(there.unpack(waiting), last)
            waiting = sent
        np.testing.assert_equal(there.unpack(waiting), messages[-1])
        assert os.fstat(file.fileno()).st_size <= 3 * LARGE * max(sizes)
