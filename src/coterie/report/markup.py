"""HTML and SVG as nested calls: whatever was not built here is text, and text is escaped."""

import html
from collections.abc import Iterable
from typing import TypeAlias


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


Child: TypeAlias = "str | Iterable[Child] | None"
"""What may stand inside an element: markup as it is, any other text escaped."""

_EMPTY = frozenset({"br", "circle", "col", "hr", "line", "meta", "path", "rect"})


def render(*children: Child) -> Markup:
    """Children one after the other; the one place that decides what is escaped."""
    parts: list[str] = []
    for child in children:
        if child is None:
            continue
        if isinstance(child, Markup):
            parts.append(child)
        elif isinstance(child, str):
            parts.append(html.escape(child))
        else:
            parts.append(render(*child))
    return Markup("".join(parts))


def tag(name: str, /, *children: Child, **attributes: str | float | None) -> Markup:
    """An element. `class_` and `for_` lose their underscore, others turn it into a hyphen.

    Example:
        >>> str(tag("p", "a < b", class_="note"))
        '<p class="note">a &lt; b</p>'
    """
    written = "".join(
        f' {_attribute(key)}="{html.escape(value if isinstance(value, str) else number(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _EMPTY and not children:
        return Markup(
            f"<{name}{written}/>" if name not in {"br", "col", "hr", "meta"} else f"<{name}{written}>"
        )
    return Markup(f"<{name}{written}>{render(*children)}</{name}>")


def number(value: float) -> str:
    """A coordinate: two decimals at most, no trailing zeros, never minus zero."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def _attribute(key: str) -> str:
    return key.rstrip("_").replace("_", "-")
