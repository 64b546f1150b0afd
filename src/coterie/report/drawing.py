"""The one way to draw: matplotlib in one style, as SVG that follows a page's light and dark, as PDF or PNG.

A figure paints on matplotlib's own axes. Its colours are those of the style sheet: in an SVG each becomes the
variable it is called by there. Series differ in colour and in marker and dash, so that no colour has to be
told apart. Figures are registered by name; what draws them is looked up there and nowhere else.
"""

import io
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

from markupsafe import Markup, escape

from coterie.files import write_text

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

FORMATS = ("svg", "pdf", "png")
COLOURS = 8
MARKERS = "os^DvPX*"
GLYPHS = "●■▲◆▼✚✖★"
"""The markers as characters, for tables."""
WIDTH = 500.0
HEAD, ROW = 40.0, 21.0
HANDLE = 32.0
"""Room for the sample before an entry of the legend."""
_DASHES = ("", "7 3", "2 3", "9 3 2 3", "5 2", "12 4", "5 5", "6 2 1 2 1 2")
_TIPS = "tips:"
_COLOURED = {
    "text.color": "ink",
    "axes.edgecolor": "soft",
    "axes.labelcolor": "soft",
    "xtick.color": "soft",
    "ytick.color": "soft",
    "grid.color": "grid",
    "lines.markeredgecolor": "card",
}
HERE = Path(__file__).parent


# --- style ------------------------------------------------------------------------------------------


@cache
def style_sheet() -> str:
    return (HERE / "style.css").read_text(encoding="utf-8")


@cache
def _light() -> dict[str, str]:
    """The style sheet's colours by name, as they are in the light."""
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", style_sheet().partition("@media")[0]))


def colour(name: str | int) -> str:
    """A colour of the style sheet: by its name, or of a series."""
    return _light()[f"c{name % COLOURS}" if isinstance(name, int) else name]


def look(series: int, name: str = "") -> dict[str, Any]:
    """How a series is drawn; where colours repeat, the marker is another one."""
    dash = _DASHES[series % len(_DASHES)]
    return {
        "color": colour(series),
        "marker": MARKERS[shape_of(series)],
        "linestyle": (0, tuple(map(float, dash.split()))) if dash else "-",
        "label": key(name),
    }


def hollow(face: str, size: float, width: float = 1.5) -> dict[str, Any]:
    """A mark that lets others be seen beneath it."""
    inside = colour("card") if width == 1.5 else "none"
    edge = {"markeredgecolor": face, "markeredgewidth": width}
    return {"markersize": size, "markerfacecolor": inside, **edge, "linestyle": "none", "clip_on": False}


def shape_of(series: int) -> int:
    return (series + series // COLOURS) % len(MARKERS)


def key(name: str) -> str:
    """A name for the legend; matplotlib leaves out what begins with an underscore."""
    return f"\u2060{name}" if name.startswith("_") else name


def chip(text: str, series: int) -> Markup:
    """The name of a series beside its mark, for tables."""
    mark = Markup('<span class="s{}" aria-hidden="true">{}</span>').format(
        series % COLOURS, GLYPHS[shape_of(series)]
    )
    return Markup('<span class="chip">{} {}</span>').format(mark, text)


def tips(artist: "Artist", texts: Sequence[str]) -> None:
    """What each mark says when it is pointed at."""
    artist.set_gid(_TIPS + "/".join(quote(text, safe="") for text in texts))


@contextmanager
def _style(salt: str) -> Iterator[None]:
    import matplotlib

    sheet = matplotlib.rc_params_from_file(HERE / "style.mplstyle", use_default_template=False)
    style: dict[Any, Any] = dict(sheet)
    style |= {name: colour(of) for name, of in _COLOURED.items()}
    with matplotlib.rc_context({**style, "svg.hashsalt": salt}):
        yield


# --- figures ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figure:
    """What is drawn, its heading, and what to see in it.

    Args:
        name: letters, digits and hyphens; unlike that of any other figure on the page.
        paint: draws on the axes; artists with a label stand in the legend.
        description: what a reader is told who cannot see the drawing; by default the caption.
        outside: whether no guarantee covers what it shows.
        margins: left, right, top and bottom of the axes, in pixels.
    """

    name: str
    heading: str
    caption: str
    paint: Callable[["Axes"], None]
    description: str = ""
    outside: bool = False
    height: float = 300
    margins: tuple[float, float, float, float] = (52, 16, 30, 48)

    @property
    def slug(self) -> str:
        """The heading as a file name; an algorithm's plus must not get lost."""
        return re.sub(r"[^a-z0-9]+", "-", self.heading.lower().replace("+", "-plus")).strip("-")

    @cached_property
    def svg(self) -> Markup:
        """The drawing inside a page: it scales with its box and has the page's colours and letters."""
        text, height = self._drawn("svg", head=0.0)
        return self._element(text, f'viewBox="0 0 {WIDTH:g} {height:g}"')

    def write(self, folder: Path, kind: str = "svg") -> Path:
        """A file of its own, heading and legend included; an SVG follows light and dark by itself."""
        path = folder / f"{self.slug}.{kind}"
        content, height = self._drawn(kind, head=HEAD)
        if kind != "svg":
            path.write_bytes(content)
            return path
        size = f'width="{WIDTH:g}" height="{height:g}" viewBox="0 0 {WIDTH:g} {height:g}"'
        sheet = style_sheet().partition("* {")[0]
        letters = "svg { font-family: -apple-system, 'Segoe UI', Roboto, Arial, sans-serif; }\n"
        paper = '<rect width="100%" height="100%" rx="10" fill="var(--card)"/>'
        inside = Markup(f"<style>\n{sheet}{letters}</style>{paper}")
        drawn = self._element(content, f'xmlns="http://www.w3.org/2000/svg" {size}', inside)
        write_text(path, f'<?xml version="1.0" encoding="utf-8"?>\n{drawn}\n')
        return path

    def _element(self, content: bytes, attributes: str, inside: str = "") -> Markup:
        body = Markup(_for_pages(content.decode()))
        told = self.description or self.caption
        return Markup(
            '<svg {} role="img" aria-labelledby="{name}-title {name}-desc">'
            '<title id="{name}-title">{}</title><desc id="{name}-desc">{}</desc>{}{}</svg>'
        ).format(Markup(attributes), self.heading, told, inside, body, name=self.name)

    def _drawn(self, kind: str, head: float) -> tuple[bytes, float]:
        """The file's bytes, and its height: legends need room."""
        from matplotlib.figure import Figure as Canvas

        with _style(self.name):
            canvas = Canvas(dpi=72)
            axes = canvas.add_axes((0, 0, 1, 1))
            self.paint(axes)
            rows = _rows(*axes.get_legend_handles_labels())
            left, right, top, bottom = self.margins
            height = head + self.height + ROW * len(rows) + (8 if rows else 0)
            canvas.set_size_inches(WIDTH / 72, height / 72)
            floor = height - head - self.height + bottom
            axes.set_position(
                (
                    left / WIDTH,
                    floor / height,
                    1 - (left + right) / WIDTH,
                    (self.height - top - bottom) / height,
                )
            )
            if head:
                canvas.text(22 / WIDTH, 1 - 28 / height, self.heading, fontsize=16, weight="bold")
            for place, row in enumerate(rows):
                canvas.legend(
                    handles=[handle for handle, _ in row], labels=[text for _, text in row],
                    loc="upper left", ncols=len(row), handlelength=1.9,
                    columnspacing=_gap(*(text for _, text in row)),
                    bbox_to_anchor=(10 / WIDTH, (ROW * (len(rows) - place)) / height),
                )  # fmt: skip
            return _saved(canvas, kind, "" if kind == "svg" else "card"), height


def write_figures(figures: Sequence[Figure], folder: Path, kind: str = "svg") -> list[Path]:
    """Each figure as a file; no folder where there is nothing to draw."""
    if figures:
        folder.mkdir(parents=True, exist_ok=True)
    return [figure.write(folder, kind) for figure in figures]


def _rows(handles: Sequence["Artist"], labels: Sequence[str]) -> list[list[tuple["Artist", str]]]:
    """The entries of a legend, as many to a row as fit, also where a narrow page enlarges the letters."""
    rows: list[list[tuple[Artist, str]]] = []
    room = 0.0
    for handle, text in zip(handles, labels, strict=True):
        needed = HANDLE + sum(8.4 if letter.isupper() or letter.isdigit() else 7.0 for letter in text)
        if not rows or needed > room:
            rows.append([])
            room = WIDTH - 16
        rows[-1].append((handle, text))
        room -= needed + 13 * _gap(text)
    return rows


def _gap(*texts: str) -> float:
    """What stays free after an entry, in letters."""
    return 0.9 + 0.05 * max(map(len, texts))


def _saved(canvas: "Canvas", kind: str, ground: str) -> bytes:
    """The bytes of a file; the same figure gives the same bytes."""
    dates = {"svg": "Date", "pdf": "CreationDate", "png": "Software"}
    kept = {"Creator": None, "Format": None, "Type": None} if kind == "svg" else {}
    content = io.BytesIO()
    face = colour(ground) if ground else "none"
    metadata = {dates[kind]: None, **kept}
    canvas.savefig(content, format=kind, dpi=144 if kind == "png" else 72, facecolor=face, metadata=metadata)
    return content.getvalue()


def _for_pages(svg: str) -> str:
    """The inner part of matplotlib's SVG: variables for colours, the page's letters, titles on marks."""
    body = svg[svg.index('<g id="figure') : svg.rindex("</svg>")]
    body = re.sub(r"<defs>\s*<clipPath.*?</defs>", "", body, flags=re.DOTALL)
    body = re.sub(rf'<g id="{_TIPS}([^"]*)">(.*?)</g>', _with_titles, body, flags=re.DOTALL)
    # Tags only: what clients are called is text, and in texts < and > are escaped.
    return re.sub(r"<[^>]*>", _tag, body)


def _with_titles(group: re.Match[str]) -> str:
    said, kind = map(unquote, group[1].split("/")), "use" if "<use" in group[2] else "path"
    inner = re.sub(
        rf"<{kind}((?: [^>]*)?)/>",
        lambda mark: f"<{kind}{mark[1]}><title>{escape(next(said, ''))}</title></{kind}>",
        group[2],
    )
    return f"<g>{inner}</g>"


def _tag(match: re.Match[str]) -> str:
    names = {value: name for name, value in _light().items()}
    tag = re.sub(r' (?:clip-path|type)="[^"]*"| transform="rotate\(-0 [^"]*"', "", match[0])
    tag = re.sub(r'^<g id="[^"]*"', "<g", tag).replace("xlink:href", "href")
    tag = re.sub(r"font-family: [^;\"]*;? ?", "", tag)
    tag = re.sub(
        r"#[0-9a-f]{6}\b", lambda found: f"var(--{names[found[0]]})" if found[0] in names else found[0], tag
    )
    return re.sub(r"-?\d+\.\d+", lambda found: f"{float(found[0]):.2f}".rstrip("0").rstrip("."), tag).replace(
        "\n", " "
    )


def panels(path: Path, figures: Sequence[Figure], caption: str, columns: int = 3) -> None:
    """Several figures in one file, each under its heading, and a caption beneath them."""
    from matplotlib.figure import Figure as Canvas

    with _style(path.stem):
        rows = -(-len(figures) // columns)
        canvas = Canvas(figsize=(16, 0.6 + 5 * rows), dpi=72, layout="constrained")
        for place, figure in enumerate(figures):
            axes = canvas.add_subplot(rows, columns, place + 1)
            figure.paint(axes)
            axes.set_title(textwrap.fill(figure.heading, 46))
            if axes.get_legend_handles_labels()[0]:
                axes.legend(fontsize=11)
        canvas.supxlabel(textwrap.fill(caption, 190), fontsize=10, x=0.01, ha="left")
        path.write_bytes(_saved(canvas, path.suffix[1:].lower(), "paper"))
