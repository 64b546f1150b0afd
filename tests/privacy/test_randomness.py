"""The keystream, its encoding, and the distributions drawn from it.

Statistical tests have fixed seeds, so they are repeatable; each check rejects at p < 1e-6, so that a
correct generator under a new seed would fail anywhere in this file about once in five thousand times.
"""

import hashlib
import itertools
import math
import struct

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given
from hypothesis import strategies as st
from scipy import special, stats

from coterie.privacy.errors import PrivacyInputError
from coterie.privacy.randomness import (
    RandomStream,
    SecretKey,
    encode_fields,
    gumbels,
    open_uniforms,
    standard_normals,
)

P_THRESHOLD = 1e-6
GOLDEN = [1.65554677063144, 0.6178501638136593, -0.1649310129465781]
Z_THRESHOLD = float(stats.norm.isf(P_THRESHOLD / 2))
KEY = SecretKey.from_seed(20240607)
NAMES = {"purpose": "noise", "subject": "client 0", "round": 1, "release": "training", "input_hash": "00"}


def stream(key: SecretKey = KEY, **changes: str | int) -> RandomStream:
    names = {**NAMES, **changes}
    return key.stream(
        str(names["purpose"]),
        subject=str(names["subject"]),
        round=int(names["round"]),
        release=str(names["release"]),
        input_hash=str(names["input_hash"]),
    )


def words(*values: int) -> np.ndarray:
    return np.array(values, dtype="<u8")


# --- the key ---------------------------------------------------------------------------------------


def test_two_keys_from_the_system_differ_and_are_no_simulation():
    first, second = SecretKey.from_os(), SecretKey.from_os()
    assert first.to_hex() != second.to_hex()
    assert not first.simulation


def test_a_seeded_key_repeats_and_says_that_it_is_a_simulation():
    assert SecretKey.from_seed(7).to_hex() == SecretKey.from_seed(7).to_hex()
    assert SecretKey.from_seed(7).to_hex() != SecretKey.from_seed(-7).to_hex()
    assert SecretKey.from_seed(7).simulation


@pytest.mark.parametrize("key", [SecretKey.from_os(), SecretKey.from_seed(3)])
def test_a_written_key_reads_back_with_the_same_streams_and_the_same_caveat(key):
    again = SecretKey.from_hex(key.to_hex() + "\n")
    assert again.simulation is key.simulation
    assert stream(again).uniform(5).tolist() == stream(key).uniform(5).tolist()


def test_neither_repr_nor_str_nor_format_shows_the_key():
    for key in (SecretKey.from_os(), SecretKey.from_seed(3)):
        secret = key.to_hex().removeprefix("simulation:")
        for text in (repr(key), str(key), f"{key}", repr(stream(key)), repr([key])):
            assert secret not in text
            assert len(text) < 60


@pytest.mark.parametrize("text", ["", "zz" * 32, "ab" * 31, "ab" * 33, "simulation:", "ab" * 31 + "a"])
def test_a_text_that_is_no_key_is_refused_without_being_repeated(text):
    with pytest.raises(PrivacyInputError, match="64 hexadecimal digits") as caught:
        SecretKey.from_hex(text)
    assert not text or text not in str(caught.value)


# --- which stream is which -------------------------------------------------------------------------


def decode_fields(data: bytes) -> tuple[bytes, ...]:
    """The inverse of the encoding: that it exists proves that no two tuples share one."""
    (count,) = struct.unpack_from("<Q", data)
    position, fields = 8, []
    for _ in range(count):
        (length,) = struct.unpack_from("<Q", data, position)
        fields.append(data[position + 8 : position + 8 + length])
        position += 8 + length
    assert position == len(data)
    return tuple(fields)


@given(st.lists(st.binary(max_size=12), max_size=7))
def test_the_encoding_of_fields_can_be_undone(fields):
    assert decode_fields(encode_fields(*fields)) == tuple(fields)


@given(st.lists(st.binary(max_size=4), max_size=4), st.lists(st.binary(max_size=4), max_size=4), st.binary())
def test_no_encoding_is_a_prefix_of_another(first, second, tail):
    if first != second:
        assert encode_fields(*first) + tail != encode_fields(*second)


TEXTS = st.text(alphabet="a1\x00:é\ud800", max_size=3)
TUPLES = st.tuples(TEXTS, TEXTS, st.integers(-2, 120), TEXTS, TEXTS)


@given(TUPLES, TUPLES)
def test_streams_agree_only_when_every_name_agrees(first, second):
    draws = [
        KEY.stream(purpose, subject=subject, round=number, release=release, input_hash=digest).integers(256)
        for purpose, subject, number, release, digest in (first, second)
    ]
    assert (draws[0] == draws[1]) == (first == second)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ({"purpose": "noise", "subject": "1"}, {"purpose": "noise1", "subject": ""}),
        ({"subject": "client 1", "round": 12}, {"subject": "client 11", "round": 2}),
        ({"round": 1, "release": "2a"}, {"round": 12, "release": "a"}),
        ({"release": "train", "input_hash": "ing00"}, {"release": "training", "input_hash": "00"}),
        ({"subject": "a\x00b", "release": ""}, {"subject": "a", "release": "\x00b"}),
        ({"subject": "\u00e9"}, {"subject": "e\u0301"}),
    ],
)
def test_names_that_concatenate_alike_have_different_streams(left, right):
    assert stream(**left).integers(256) != stream(**right).integers(256)


def test_the_coins_of_a_population_are_the_first_of_everybodys_own_stream():
    key = SecretKey.from_seed(3)
    names = [f"client {number}" for number in range(50)]
    where = {"round": 2, "release": "sums", "input_hash": "ab"}
    coins = key.uniforms("coins", subjects=names, **where)
    own = [key.stream("coins", subject=name, **where).uniform(1)[0] for name in names]
    np.testing.assert_array_equal(coins, own)
    assert key.uniforms("coins", subjects=[], **where).shape == (0,)


def test_another_key_gives_another_stream():
    assert stream(SecretKey.from_seed(1)).integers(256) != stream(SecretKey.from_seed(2)).integers(256)


def test_the_same_names_repeat_the_same_noise():
    assert stream().normal((3, 4)).tolist() == stream().normal((3, 4)).tolist()


def keystream_by_blocks(material: bytes, size: int) -> bytes:
    """Counter mode spelled out: the counter, encrypted block by block."""
    cipher = Cipher(algorithms.AES(hashlib.shake_256(material).digest(32)), modes.ECB()).encryptor()
    return b"".join(cipher.update(block.to_bytes(16, "big")) for block in range(size // 16))


def box_muller(distance_word: int, direction_word: int) -> tuple[float, float]:
    """A point with normal coordinates, by the textbook."""
    near, towards = (word - 2**64 if word >= 2**63 else word for word in (distance_word, direction_word))
    distance = math.sqrt(-2.0 * math.log(abs(near + 0.5) / 2**63))
    angle = 2.0 * math.pi * (towards + 0.5) / 2**64
    return distance * math.cos(angle), distance * math.sin(angle)


def test_the_keystream_is_aes_256_under_a_hash_of_the_encoded_names():
    key = SecretKey.from_hex("0b" * 32)
    fields = [b"coterie stream", b"\x0b" * 32, b"noise", b"client 0", b"1", b"training", b"00"]
    material = struct.pack("<Q", 7) + b"".join(struct.pack("<Q", len(field)) + field for field in fields)
    expected = keystream_by_blocks(material, 16 * 1024)
    assert stream(key).integers(8 * 16 * 1024).to_bytes(16 * 1024, "little") == expected
    drawn = np.frombuffer(expected, dtype="<u8").reshape(4, 512)
    normals = stream(key).normal(1024)
    for column in (0, 1, 511):
        near_1, near_2, towards_1, towards_2 = (int(word) for word in drawn[:, column])
        first, second = box_muller(near_1, towards_1), box_muller(near_2, towards_2)
        assert normals[column] == pytest.approx((first[0] + second[0]) / 2**0.5, rel=1e-12, abs=1e-14)
        assert normals[512 + column] == pytest.approx((first[1] + second[1]) / 2**0.5, rel=1e-12, abs=1e-14)


def test_a_run_that_is_resumed_on_another_machine_repeats_this_noise():
    first, second, third = stream(SecretKey.from_seed(0)).normal(3)
    assert [first, second, third] == pytest.approx(GOLDEN, rel=1e-14)


@given(st.lists(st.integers(0, 400), min_size=1, max_size=12))
def test_draws_do_not_depend_on_how_calls_are_split(sizes):
    whole, split = stream(), stream()
    parts = [split.normal(size) for size in sizes]
    assert np.concatenate(parts).tolist() == whole.normal(sum(sizes)).tolist()


def test_a_long_draw_made_in_pieces_repeats_no_part_of_the_keystream():
    draws = stream().uniform(100_000)
    assert len(np.unique(draws)) == draws.size


# --- shapes and refusals ---------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [0, 5, (2, 3), (3, 0), ()])
def test_every_draw_has_the_asked_shape_and_type(shape):
    expected = np.empty(shape).shape
    for draw in (stream().normal(shape), stream().uniform(shape), stream().gumbel(shape)):
        assert draw.shape == expected
        assert draw.dtype == np.float64
    coins = stream().bernoulli(0.5, shape)
    assert np.shape(coins) == expected
    assert coins.dtype == np.bool_


def test_noise_without_spread_is_zero():
    assert stream().normal((2, 2), std=0.0).tolist() == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("std", [-1.0, float("nan"), float("inf")])
def test_a_standard_deviation_without_meaning_is_refused(std):
    with pytest.raises(PrivacyInputError, match="std"):
        stream().normal(3, std)


@pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan")])
def test_a_rate_that_is_no_probability_is_refused(rate):
    with pytest.raises(PrivacyInputError, match="rate"):
        stream().bernoulli(rate, 3)


@pytest.mark.parametrize("bits", [1, 7, 63, 64, 65, 200])
def test_integers_fill_exactly_their_bits(bits):
    source = stream()
    draws = [source.integers(bits) for _ in range(200)]
    assert max(draws).bit_length() == bits
    assert all(draw >= 0 for draw in draws)


def test_an_integer_of_no_bits_is_refused():
    with pytest.raises(PrivacyInputError, match="bits"):
        stream().integers(0)


# --- the ends of the keystream's range -------------------------------------------------------------


def test_uniforms_never_reach_zero_or_one():
    lowest, highest = open_uniforms(words(0, 2**64 - 1))
    assert 0.0 < lowest == 2.0**-65
    assert 1.0 > highest == 1.0 - 2.0**-53


HALFWAY = st.builds(
    lambda bits, shift, beside: min(2**64 - 1, ((2 * bits + 1) << shift) + beside),
    st.integers(2**52, 2**53 - 1),
    st.integers(0, 10),
    st.integers(-1, 1),
)


@given(st.lists(st.integers(0, 2**64 - 1) | HALFWAY, min_size=1))
def test_uniforms_come_from_the_nearest_double_of_a_word(drawn):
    """Python rounds integers right, ties to even; `HALFWAY` are such ties, and their neighbours."""
    expected = [min((float(word) + 0.5) * 2.0**-64, 1.0 - 2.0**-53) for word in drawn]
    assert open_uniforms(words(*drawn)).tolist() == expected


def points(*columns: tuple[int, int, int, int]) -> np.ndarray:
    return standard_normals(words(*(word for column in columns for word in column)).reshape(-1, 4).T)


def test_normals_stay_finite_at_the_ends_of_the_keystream():
    top, middle = 2**64 - 1, 2**63
    for column in itertools.product((0, 1, middle - 1, middle, top - 1, top), repeat=4):
        assert np.isfinite(points(column)).all()
    farthest = 2.0 * math.sqrt(64 * math.log(2.0))
    assert points((0, 0, 0, top)) == pytest.approx(np.array([[farthest], [0.0]]), abs=1e-12)
    assert points((0, 0, middle, middle - 1)) == pytest.approx(np.array([[-farthest], [0.0]]), abs=1e-12)
    quarter = 2**62
    assert points((0, 0, quarter, quarter)) == pytest.approx(np.array([[0.0], [farthest]]), abs=1e-12)
    # Two points opposite each other cancel.
    assert points((5, 5, quarter, 2**64 - 1 - quarter)) == pytest.approx(np.zeros((2, 1)), abs=1e-12)


WORD = st.one_of(st.integers(0, 2**64 - 1), st.integers(0, 100), st.integers(2**64 - 100, 2**64 - 1))


@given(st.tuples(WORD, WORD, WORD, WORD))
def test_normals_are_the_coordinates_of_two_points_added(column):
    first, second = (box_muller(column[k], column[2 + k]) for k in (0, 1))
    for got, one, other in zip(points(column)[:, 0], first, second, strict=True):
        # A distance near zero has few digits: 1 - u is known to 2^-53.
        assert got == pytest.approx((one + other) / 2**0.5, rel=1e-10, abs=5e-8)


def test_gumbels_stay_finite_and_reach_far_up():
    highest, lowest = gumbels(words(0, 2**64 - 1))
    assert highest == pytest.approx(65 * np.log(2), rel=1e-12)
    assert lowest == pytest.approx(-np.log(53 * np.log(2)), rel=1e-12)


def test_coins_of_rate_zero_never_fall_and_of_rate_one_always():
    assert not stream().bernoulli(0.0, 10_000).any()
    assert stream().bernoulli(1.0, 10_000).all()


# --- distributions ---------------------------------------------------------------------------------


def test_normals_have_the_distribution_of_a_standard_normal():
    draws = stream().normal(200_000)
    assert stats.kstest(draws, "norm").pvalue > P_THRESHOLD
    uniforms = np.sort(stats.norm.cdf(draws))
    ranks = np.arange(1, draws.size + 1)
    statistic = -draws.size - np.mean((2 * ranks - 1) * (np.log(uniforms) + np.log1p(-uniforms[::-1])))
    # Anderson-Darling with nothing estimated: the limit is a weighted sum of chi-squares, whose largest
    # weight of 1/2 gives the tail P(A^2 > x) ~ sqrt(3) erfc(sqrt(x)).
    assert np.sqrt(3) * special.erfc(np.sqrt(statistic)) > P_THRESHOLD


def test_normals_have_the_declared_mean_and_variance():
    std = 3.7
    draws = stream(round=2).normal(400_000, std)
    assert abs(draws.mean()) / (std / np.sqrt(draws.size)) < Z_THRESHOLD
    squares = float(np.sum((draws / std) ** 2))
    assert stats.chi2.cdf(squares, draws.size) > P_THRESHOLD
    assert stats.chi2.sf(squares, draws.size) > P_THRESHOLD


def test_normals_have_full_tails():
    draws = stream(round=3).normal(1_000_000)
    for threshold, side in itertools.product((3.0, 4.0, 4.5), (1, -1)):
        beyond = int(np.sum(side * draws > threshold))
        assert stats.binomtest(beyond, draws.size, stats.norm.sf(threshold)).pvalue > P_THRESHOLD


def test_the_low_bits_of_the_noise_are_fair():
    mantissas = stream(round=4).normal(100_000).view(np.uint64)
    for bit in range(8):
        ones = int(np.sum((mantissas >> np.uint64(bit)) & np.uint64(1)))
        assert stats.binomtest(ones, mantissas.size).pvalue > P_THRESHOLD


def test_uniforms_have_the_uniform_distribution():
    draws = stream(round=5).uniform(200_000)
    assert stats.kstest(draws, "uniform").pvalue > P_THRESHOLD
    assert stats.chisquare(np.bincount((draws * 256).astype(int), minlength=256)).pvalue > P_THRESHOLD


def test_gumbels_have_the_gumbel_distribution():
    draws = stream(round=6).gumbel(200_000)
    assert stats.kstest(draws, "gumbel_r").pvalue > P_THRESHOLD


def test_an_argmax_with_gumbel_noise_is_the_exponential_mechanism():
    scores = np.array([3.0, 1.0, 0.0, 2.5])
    epsilon = 0.8
    rows = 100_000
    choices = np.argmax(scores + stream(round=7).gumbel((rows, 4)) / epsilon, axis=1)
    weights = np.exp(epsilon * scores)
    expected = rows * weights / weights.sum()
    assert stats.chisquare(np.bincount(choices, minlength=4), expected).pvalue > P_THRESHOLD


@pytest.mark.parametrize("rate", [1e-4, 0.004, 0.1, 0.5, 0.7, 0.999])
def test_coins_fall_at_their_rate(rate):
    heads = int(stream(purpose="coins").bernoulli(rate, 300_000).sum())
    assert stats.binomtest(heads, 300_000, rate).pvalue > P_THRESHOLD


def test_coins_are_pairwise_independent():
    rate, steps, records = 0.3, 20_000, 6
    coins = stream(purpose="coins", round=2).bernoulli(rate, (steps, records))
    for first, second in itertools.combinations(range(records), 2):
        both = int(np.sum(coins[:, first] & coins[:, second]))
        assert stats.binomtest(both, steps, rate * rate).pvalue > P_THRESHOLD


# --- independence ----------------------------------------------------------------------------------


def correlation_score(first: np.ndarray, second: np.ndarray) -> float:
    """Standard normal, to a good approximation, when the two are independent standard normals."""
    return abs(float(first @ second)) / float(np.sqrt(first.size))


VARIANTS: list[dict[str, str | int]] = [
    {},
    {"subject": "client 1"},
    {"subject": "client 10"},
    {"round": 0},
    {"round": 2},
    {"release": "selection"},
    {"purpose": "coins"},
    {"input_hash": "01"},
]


def test_noise_of_other_clients_rounds_releases_purposes_and_inputs_is_independent():
    draws = [stream(**changes).normal(50_000) for changes in VARIANTS]
    draws.append(stream(SecretKey.from_seed(20240608)).normal(50_000))
    for first, second in itertools.combinations(draws, 2):
        assert correlation_score(first, second) < Z_THRESHOLD
        # Squares too: a shared magnitude with independent signs would not show in the values.
        squares = [(draw**2 - 1) / np.sqrt(2) for draw in (first, second)]
        assert correlation_score(*squares) < Z_THRESHOLD


def test_the_sum_over_many_clients_has_the_sum_of_their_variances():
    total = sum(stream(subject=f"client {number}").normal(20_000) for number in range(50))
    squares = float(np.sum(np.square(total) / 50))
    assert stats.chi2.cdf(squares, 20_000) > P_THRESHOLD
    assert stats.chi2.sf(squares, 20_000) > P_THRESHOLD


@pytest.mark.parametrize("lag", [1, 2, 3, 511, 512, 513, 1024, 8192])
def test_values_of_one_stream_are_independent_at_every_lag(lag):
    """At 512 stands the other coordinate of the same two points."""
    draws = stream(round=8).normal(100_000)
    assert correlation_score(draws[:-lag], draws[lag:]) < Z_THRESHOLD
    squares = (draws**2 - 1) / np.sqrt(2)
    assert correlation_score(squares[:-lag], squares[lag:]) < Z_THRESHOLD
