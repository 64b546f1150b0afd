"""The one converter: what it writes is read back, anything else is refused in one line that says where."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal

import pytest

from coterie.privacy import PlanError
from coterie.privacy.plain import Key, MalformedError, Plain, codec


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Point:
    name: str
    at: tuple[float, float]


@dataclass(frozen=True)
class Drawing(Plain):
    called = "drawing"
    count: int
    width: Annotated[float, Key("line_width")]
    colour: Colour
    style: Literal["solid", "dashed"]
    filled: bool
    points: Annotated[tuple[Point, ...], Key(by="name")]
    weights: Mapping[str, float]
    note: str | None = None
    limit: float | Colour = math.inf


ONE = Drawing(
    2,
    1,
    Colour.RED,
    "solid",
    True,
    (Point("a", (0, 1.5)), Point("b", (2.0, 3.0))),
    {"x": 0.5},
    limit=Colour.BLUE,
)


def test_every_kind_of_value_is_written_in_the_order_of_its_fields_and_read_back() -> None:
    written = ONE.to_json()
    assert json.dumps(written) == (
        '{"count": 2, "line_width": 1.0, "colour": "red", "style": "solid", "filled": true, '
        '"points": {"a": {"at": [0.0, 1.5]}, "b": {"at": [2.0, 3.0]}}, "weights": {"x": 0.5}, '
        '"note": null, "limit": "blue"}'
    )
    assert Drawing.from_json(json.loads(json.dumps(written))) == ONE
    assert Drawing.from_json({**written, "limit": "inf"}).limit == math.inf


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("count", 2.0, "count: 2.0 is not allowed, an integer is"),
        ("count", True, "count: True is not allowed"),
        ("count", "2", "count: '2' is not allowed"),
        ("line_width", True, "line_width: True is not allowed, a number is"),
        ("line_width", math.nan, "line_width: nan is not allowed"),
        ("line_width", math.inf, "line_width: inf is not allowed"),
        ("line_width", 10**400, "line_width: 1000.* is not allowed, a number is"),
        ("colour", "green", "colour: 'green' is not allowed, one of red, blue is"),
        ("colour", [], r"colour: \[\] is not allowed"),
        ("style", "dotted", "style: 'dotted'"),
        ("filled", 1, "filled: 1 is not allowed, true or false is"),
        ("points", [], r"points: \[\] is not allowed, an object is"),
        ("points", {"a": {"at": [1]}}, r"points: a: at: \[1\] is not allowed, a list of 2 is"),
        ("points", {"a": {"at": [1, "x"]}}, "points: a: at: 1: 'x' is not allowed, a number is"),
        ("points", {"a": {"name": "b", "at": [1, 2]}}, "points: a: missing or unknown fields: name"),
        ("weights", {"x": None}, "weights: x: None is not allowed"),
        ("note", 3, "note: 3 is not allowed, a text is"),
        ("limit", "far", "limit: 'far' is not allowed"),
        ("more", 1, "missing or unknown fields: more"),
    ],
)
def test_what_does_not_fit_is_refused_by_the_name_of_its_key(key: str, value: Any, said: str) -> None:
    with pytest.raises(PlanError, match=f"^drawing: {said}"):
        Drawing.from_json({**ONE.to_json(), key: value})


def test_a_missing_key_and_something_else_altogether_are_refused() -> None:
    written = ONE.to_json()
    del written["note"]
    with pytest.raises(PlanError, match="missing or unknown fields: note"):
        Drawing.from_json(written)
    for data in (None, [], "text", 3):
        with pytest.raises(PlanError, match="an object is"):
            Drawing.from_json(data)


def test_a_long_value_is_not_repeated_in_full() -> None:
    with pytest.raises(MalformedError) as found:
        codec(int).read("x" * 10_000)
    assert len(str(found.value)) < 100
