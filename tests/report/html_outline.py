"""What a page consists of, for tests to look at."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"meta", "br", "hr", "col", "input", "img", "link"}


class Outline(HTMLParser):
    """Checks that every element that opens closes, and collects what a reader sees."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self.ids += [value or "" for name, value in attrs if name == "id"]

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data


def outline(html: str) -> Outline:
    """Read a page; it is an error if it is not well-formed or uses an id twice."""
    parsed = Outline()
    parsed.feed(html)
    parsed.close()
    assert parsed.open == []
    assert len(set(parsed.ids)) == len(parsed.ids)
    return parsed
