"""The page around every report: one file, no script, nothing fetched; what templates are given is escaped."""

from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from coterie import __version__
from coterie.report.drawing import STYLE_SHEET
from coterie.report.numbers import count, delta, epsilon, fixed, seconds

TEMPLATES = Path(__file__).parent / "templates"

GLOSSARY = {
    "epsilon": "how much one unit (a record, say) can change the odds of anything released; 0 is nothing",
    "delta": "the probability with which epsilon may fail to bound that",
    "replace-one": "neighbouring data differ by another unit in the place of one; the stricter way to count",
    "zero-out": "neighbouring data differ by one unit that counts for nothing",
    "add-remove": "neighbouring data differ by one client, there or not",
    "release": "a noisy value that leaves whom it is about: an update, a choice, a count or a sum",
    "ledger": "the list of everything released, charged before it was; a run stops where its plan ends",
    "noise": "what is added to every release, in units of the clip: the most one unit may contribute",
    "separation score": "how far apart the closest two clusters are, in units of what blurs them",
    "disparity": "the distance between the best and the worst client",
    "outside the guarantee": "computed without noise, for those who may see the records anyway",
}
"""What a page says of its terms, if it uses them."""


def _glossary(body: str) -> list[tuple[str, str]]:
    """The terms that a page uses; of figures outside the guarantee it speaks where one is marked."""
    outside = "outside the guarantee"
    used = body.replace(outside, "").lower() + outside * ('"badge"' in body)
    return [(term.capitalize(), told) for term, told in GLOSSARY.items() if term in used]


@cache
def _environment(folder: Path) -> Environment:
    environment = Environment(
        loader=FileSystemLoader([folder, TEMPLATES]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.globals.update({each.__name__: each for each in (count, delta, epsilon, fixed, seconds)})
    environment.globals.update(glossary=_glossary, style=Markup(STYLE_SHEET), version=__version__)
    return environment


def page(kind: str, title: str, name: str, folder: Path = TEMPLATES, **content: Any) -> str:
    """A whole document with its style sheet inside.

    Args:
        kind: `run`, `comparison`, `live` and so on; the template of that name writes it.
        name: what it is about: a folder.
        folder: where that template is.
    """
    template = _environment(folder).get_template(f"{kind}.html.j2")
    return template.render(kind=kind, title=title, name=name, **content)
