"""What helps at the keyboard: completion, a description of everything, tables that fit and are not cut."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from coterie.algorithms import algorithm_names
from coterie.cli import console, leakage, plan
from coterie.cli.main import COMMANDS, command_of
from coterie.cli.options import complete_setting
from coterie.privacy import Unit


def commands() -> Iterator[tuple[str, Any]]:
    for name in COMMANDS:
        whole = command_of(name)
        for part, command in getattr(whole, "commands", {"": whole}).items():
            yield f"{name} {part}".strip(), command


@pytest.mark.parametrize(("name", "command"), list(commands()), ids=lambda value: str(value)[:30])
def test_every_argument_and_option_says_what_it_is(name: str, command: Any) -> None:
    silent = [each.name for each in command.params if not (getattr(each, "help", None) or "").strip()]
    assert not silent, f"{name}: no description of {', '.join(silent)}"


def completed(*words: str) -> list[str]:
    asked = {"_COTERIE_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(words)}
    asked["COMP_CWORD"] = str(len(words) - 1)
    code = (
        "import sys; sys.argv = ['coterie']; from coterie.cli.main import main\n"
        "try: main()\n"
        "finally: print('torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **asked}, capture_output=True, text=True, check=True
    )
    assert done.stderr.split() == ["False"], "completion imports torch"
    return done.stdout.split()


def test_commands_their_parts_and_their_options_complete() -> None:
    assert completed("coterie", "re") == ["reproduce", "report"]
    assert {"--set", "--resume", "--out", "--json"} <= set(completed("coterie", "run", "--"))
    assert "sample" in completed("coterie", "plan", "s")


def test_algorithms_complete_as_they_are_registered() -> None:
    known = {f"algorithm.name={name}" for unit in Unit for name in algorithm_names(unit)}
    assert set(complete_setting("algorithm.name=")) == known
    assert complete_setting("algorithm.name=r-") == ["algorithm.name=r-dpcfl"]
    assert complete_setting("schedule") == []


# --- tables ---------------------------------------------------------------------------------------------


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> Console:
    narrow = Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    monkeypatch.setattr(console, "out", narrow)
    return narrow


def whole(text: str, cells: list[str]) -> None:
    """Nothing is wider than 80, nothing is cut, every word of every cell is there unbroken."""
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "…" not in text
    words = set(re.split(r"[\s│┃]+", text))
    missing = [word for cell in cells for word in cell.split() if word not in words]
    assert not missing


WIDE = {
    "fits": (["figure", "value"], [["mean accuracy", "98.1%"]]),
    "wraps": (
        ["release", "times", "noise", "epsilon alone"],
        [
            [
                "training: noisy sums of clipped gradients of Poisson batches",
                "30",
                "1.2 of the clip",
                "3.1",
            ]
        ],
    ),
    "loses its frame": (
        [
            "algorithm",
            "epsilon",
            "accuracy",
            "worst client",
            "worst cluster",
            "clusters found",
            "noise",
            "seconds",
        ],
        [["km-cdpfl", "8.0", "98.1 ± 0.2", "91.1", "92.2", "3 of 3", "0.812", "1200.1"]],
    ),
    "becomes blocks": ([f"a-rather-long-heading-{n}" for n in range(6)], [["[b]x", "1", "2", "3", "4", "5"]]),
}


@pytest.mark.parametrize("case", WIDE)
def test_no_table_is_wider_than_the_terminal_or_cut(case: str, printed: Console) -> None:
    headings, body = WIDE[case]
    console.print_table(headings, body, "a title")
    text = printed.export_text().replace(":", " ") if case == "becomes blocks" else printed.export_text()
    whole(text, [*headings, *body[0]] if case == "becomes blocks" else [*headings, *body[0], "a title"])
    assert ("│" in text) == (case in ("fits", "wraps"))
    if case == "loses its frame":
        assert "98.1 ± 0.2" in text


def test_tables_of_commands_fit_eighty_columns(printed: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (plan, leakage):
        monkeypatch.setattr(module, "say", lambda text: None)
    sample = {"records": 600, "batch": 30, "rounds": 3, "delta": 1e-4, "epsilon": 3.0}
    plan.sample(**sample, selections=2, selection_epsilon=0.1)
    plan.client(clients=100, rate=0.1, rounds=3, delta=1e-3, noise=2.0)
    leakage.leakage(
        structure="ring", workers=40, groups=40, period=2, epochs=9, rate="0.5", noise="2", delta=1e-5
    )
    text = printed.export_text()
    assert text.count("epsilon") >= 3
    whole(text, ["release", "divergence", "pairs", "counts"])
