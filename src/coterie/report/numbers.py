"""Numbers as a reader wants them: few digits, and an epsilon never rounded down."""

import math
from collections.abc import Sequence

from coterie.privacy.units import round_up, short_number
from coterie.table import NONE

_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def epsilon(value: float) -> str:
    return "∞" if math.isinf(value) else round_up(value)


def delta(value: float) -> str:
    """A probability: by its power of ten where it is small; never less than it is."""
    text = short_number(value)
    mantissa, _, exponent = text.partition("e")
    if int(exponent) >= -2:
        return f"{float(text):g}"
    power = f"10{exponent.translate(_SUPERSCRIPT)}"
    return power if mantissa == "1" else f"{mantissa} × {power}"


def fixed(value: float | None, digits: int = 3) -> str:
    return NONE if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    """A probability that is never quite one."""
    if value is None:
        return NONE
    return "> 99.9%" if value > 0.999 else f"{100 * value:.1f}%"


def count(value: int, noun: str, plural: str | None = None) -> str:
    return f"{value:,} {noun if value == 1 else plural or noun + 's'}"


def capitalised(text: str) -> str:
    """With a capital letter, and the others as they are: `RMSE`, `Base rate`."""
    return text[:1].upper() + text[1:]


def span(values: Sequence[int]) -> str:
    """`239`, or `120 to 4,000` where values differ."""
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def seconds(value: float) -> str:
    if math.isnan(value):
        return NONE
    if value < 120:
        return f"{value:.{int(value < 10)}f} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 120:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def listed(words: Sequence[str]) -> str:
    """`a, b and c`."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"
