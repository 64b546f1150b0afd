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
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

from markupsafe import Markup, escape

from coterie.files import write_bytes, write_text

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes as Axes
    from matplotlib.figure import Figure as Canvas
else:
    Axes = Any  # matplotlib is imported when something is drawn

FORMATS = ("svg", "pdf", "png")
COLOURS = 8
MARKERS = "os^DvPX*"
GLYPHS = "●■▲◆▼✚✖★"
"""The markers as characters, for tables."""
WIDTH = 500.0
ROW = 21.0
LONGEST = 46
"""Letters in a line of the legend, also where a narrow page enlarges them."""
_wrapped = partial(textwrap.wrap, width=LONGEST, break_on_hyphens=False)
_DASHES = ("", "7 3", "2 3", "9 3 2 3", "5 2", "12 4", "5 5", "6 2 1 2 1 2")
_TIPS = "tips:"
_METADATA: dict[str, dict[str, Any]] = {
    "svg": {"Date": None, "Creator": None, "Format": None, "Type": None},
    "pdf": {"CreationDate": None},
    "png": {"Software": None},
}
"""Left out, so that the same figure gives the same bytes."""
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
STYLE_SHEET = (HERE / "style.css").read_text(encoding="utf-8")
_LIGHT: dict[str, str] = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", STYLE_SHEET.partition("@media")[0]))
"""The style sheet's colours by name, as they are in the light."""
_NAMES = {value: name for name, value in _LIGHT.items()}


# --- style ------------------------------------------------------------------------------------------


def colour(name: str | int) -> str:
    """A colour of the style sheet: by its name, or of a series."""
    return _LIGHT[f"c{name % COLOURS}" if isinstance(name, int) else name]


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
    mark = '<span style="color: var(--c{})" aria-hidden="true">{}</span>'
    return Markup(f'<span class="chip">{mark} {{}}</span>').format(
        series % COLOURS, GLYPHS[shape_of(series)], text
    )


def tips(artist: "Artist", texts: Sequence[str]) -> None:
    """What each mark says when it is pointed at."""
    artist.set_gid(_TIPS + "/".join(quote(text, safe="") for text in texts))


@contextmanager
def _style(salt: str) -> Iterator[None]:
    import matplotlib

    style: dict[Any, Any] = {name: colour(of) for name, of in _COLOURED.items()}
    with matplotlib.rc_context({**style, "svg.hashsalt": salt}, fname=HERE / "style.mplstyle"):
        yield


# --- figures ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figure:
    """What is drawn, its heading, and what to see in it, also for those who cannot see the drawing.

    Args:
        name: letters, digits and hyphens; unlike that of any other figure on the page.
        paint: draws on the axes; artists with a label stand in the legend.
        outside: whether no guarantee covers what it shows.
        margins: left, right, top and bottom of the axes, in pixels.
    """

    name: str
    heading: str
    caption: str
    paint: Callable[[Axes], None]
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
        text, height = self._drawn("svg")
        return self._element(text, f'viewBox="0 0 {WIDTH:g} {height:g}"')

    def write(self, folder: Path, kind: str = "svg") -> Path:
        """A file of its own, heading and legend included; an SVG follows light and dark by itself."""
        path = folder / f"{self.slug}.{kind}"
        content, height = self._drawn(kind, _wrapped(self.heading))
        if kind != "svg":
            write_bytes(path, content)
            return path
        size = f'width="{WIDTH:g}" height="{height:g}" viewBox="0 0 {WIDTH:g} {height:g}"'
        sheet = STYLE_SHEET.partition("* {")[0]
        letters = "svg { font-family: -apple-system, 'Segoe UI', Roboto, Arial, sans-serif; }\n"
        paper = '<rect width="100%" height="100%" rx="10" style="fill: var(--card)"/>'
        inside = Markup(f"<style>\n{sheet}{letters}</style>{paper}")
        drawn = self._element(content, f'xmlns="http://www.w3.org/2000/svg" {size}', inside)
        whole = re.sub(r"<[^>]*>", _with_plain_colours, str(drawn))
        write_text(path, f'<?xml version="1.0" encoding="utf-8"?>\n{whole}\n')
        return path

    def _element(self, content: bytes, attributes: str, inside: str = "") -> Markup:
        body = Markup(_for_pages(content.decode()))
        return Markup(
            '<svg {} role="img" aria-labelledby="{name}-title {name}-desc">'
            '<title id="{name}-title">{}</title><desc id="{name}-desc">{}</desc>{}{}</svg>'
        ).format(Markup(attributes), self.heading, self.caption, inside, body, name=self.name)

    def _drawn(self, kind: str, heading: Sequence[str] = ()) -> tuple[bytes, float]:
        """The file's bytes, and its height: headings and legends need room."""
        from matplotlib.figure import Figure as Canvas

        with _style(self.name):
            canvas = Canvas(dpi=72)
            axes = canvas.add_axes((0, 0, 1, 1))
            self.paint(axes)
            handles, labels = axes.get_legend_handles_labels()
            entries, legend = _arranged(labels)
            left, right, top, bottom = self.margins
            height = (20 + ROW * len(heading) if heading else 0) + self.height + legend
            canvas.set_size_inches(WIDTH / 72, height / 72)
            inner = WIDTH - left - right, self.height - top - bottom
            axes.set_position((left / WIDTH, (legend + bottom) / height, inner[0] / WIDTH, inner[1] / height))
            top_left = 22 / WIDTH, 1 - 14 / height
            canvas.text(*top_left, "\n".join(heading), fontsize=16, weight="bold", va="top")
            for handle, (text, x, y) in zip(handles, entries, strict=True):
                place = (10 + x) / WIDTH, (legend - y - 8) / height
                canvas.legend([handle], [text], loc="upper left", handlelength=1.9, bbox_to_anchor=place)
            return _saved(canvas, kind, "" if kind == "svg" else "card"), height


def write_figures(figures: Sequence[Figure], folder: Path, kind: str = "svg") -> list[Path]:
    """Each figure as a file; no folder where there is nothing to draw."""
    if figures:
        folder.mkdir(parents=True, exist_ok=True)
    return [figure.write(folder, kind) for figure in figures]


def _arranged(labels: Sequence[str]) -> tuple[list[tuple[str, float, float]], float]:
    """The entries of a legend, each in lines and at its place, as many to a row as fit; and its height."""
    entries, x, y, bottom = [], 0.0, 0.0, 0.0
    for label in labels:
        lines = _wrapped(label) or [""]
        letters = max(
            sum(8.4 if each.isupper() or each.isdigit() else 7.0 for each in line) for line in lines
        )
        if x and x + 32 + letters > WIDTH - 16:
            x, y = 0.0, bottom
        entries.append(("\n".join(lines), x, y))
        bottom = max(bottom, y + ROW * len(lines))
        x += 52 + 1.09 * letters  # a narrow page enlarges its letters
    return entries, bottom + (8 if entries else 0)


def _saved(canvas: "Canvas", kind: str, ground: str) -> bytes:
    content, face = io.BytesIO(), colour(ground) if ground else "none"
    dpi = 144 if kind == "png" else 72
    canvas.savefig(content, format=kind, dpi=dpi, facecolor=face, metadata=_METADATA[kind])
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
    tag = re.sub(r' (?:clip-path|type)="[^"]*"| transform="rotate\(-0 [^"]*"', "", match[0])
    tag = re.sub(r'^<g id="[^"]*"', "<g", tag).replace("xlink:href", "href").replace("\n", " ")
    tag = re.sub(r"font-family: [^;\"]*;? ?", "", tag)
    tag = re.sub(r"#[0-9a-f]{6}\b", lambda it: f"var(--{_NAMES[it[0]]})" if it[0] in _NAMES else it[0], tag)
    return re.sub(r"-?\d+\.\d+", lambda it: f"{float(it[0]):.2f}".rstrip("0").rstrip("."), tag)


def _with_plain_colours(tag: re.Match[str]) -> str:
    """A tag with its colours as attributes, too: all that programs see that know no variables."""
    named = re.findall(r"\b(fill|stroke): var\(--([\w-]+)\)", tag[0])
    plain = "".join(f' {attribute}="{_LIGHT[name]}"' for attribute, name in dict(named).items())
    return re.sub(r"(?=\s*/?>$)", plain, tag[0], count=1)


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
        write_bytes(path, _saved(canvas, path.suffix[1:].lower(), "paper"))
