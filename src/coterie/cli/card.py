"""`coterie card`: everything that the privacy claim of a run must state, filled in."""

import sys
from typing import Annotated, Literal

import typer

from coterie.cli.console import print_json, say
from coterie.cli.options import Run


def card(
    run: Run,
    kind: Annotated[
        Literal["md", "json", "registry"],
        typer.Option("--format", help="md (to read) | json (all fields) | registry (OpenDP's, as YAML)."),
    ] = "md",
) -> None:
    from coterie.experiment.card import write_card
    from coterie.experiment.card_answers import ask
    from coterie.experiment.registry_card import registry
    from coterie.experiment.site_card import card_of
    from coterie.files import finite, yaml_text
    from coterie.report.card import card_markdown

    found = card_of(run)
    if sys.stdin.isatty() and sys.stdout.isatty():
        say("What only you can know; an empty line leaves it open. Answers are kept in card.yaml.")
        ask(run, found.promise.unit, lambda text: str(typer.prompt(text, default="", show_default=False)))
    content = write_card(found)
    if kind == "json":
        print_json(finite(content))
    elif kind == "registry":
        print(yaml_text(registry(found), default_flow_style=False, width=100, allow_unicode=True), end="")
    else:
        print(card_markdown(found), end="")
