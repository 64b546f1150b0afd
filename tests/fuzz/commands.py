"""Command lines that nobody would type, derived from what the commands say they take."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import typer
from case import Case
from experiments import TINY, as_yaml
from hypothesis import strategies as st

from coterie.cli.main import COMMANDS, load

WORDS = ["", " ", ".", "-", "--", "nowhere", "e.yaml", "s.yaml", "d", "run", "a b", "*", "~", "a\nb"]
WORDS += ["\udcff", "\udced\udca0\udc80"]  # bytes that are no text
WORDS += ["0", "1", "-1", "2", "3", "10", "0.5", "1e-12", "5e-324", "1e308", "nan", "inf"]
WORDS += [
    "-inf",
    "1e999",
    "0x10",
    "1_0",
    "١",
    "9" * 20,
    "9" * 5000,
    "0x" + "f" * 5000,
    "true",
    "null",
    "auto",
]
WORDS += [
    "é\u202e",
    "ring",
    "global",
    "string",
    "clustered",
    "0,1",
    "1,2,3",
    "2,2,2,2",
    "a=b",
]
WORDS += ["schedule.rounds=1", "=", "a" * 300, "local", "127.0.0.1:1", "/dev/full", "f.svg", "x/y/f.png"]
MODEST = ["1", "2", "3", "8", "0.5", "0.1", "1.5", "20", "100", "f.svg", "new", "0,1", "ring", "1e-5"]
"""Words that a number, a name or a file may well be."""

SENSIBLE: dict[str, str] = {
    "plan sample": "--records 600 --batch 30 --rounds 3 --delta 1e-4 --epsilon 3",
    "plan client": "--clients 100 --rate 0.1 --rounds 3 --delta 1e-3 --epsilon 3",
    "plan experiment": "e.yaml",
    "leakage": "--structure ring --workers 4 --groups 4 --period 2 --epochs 3 --rate 1 --noise 2 --delta .1",
    "reproduce": "no-such-experiment --out out",  # those there are take minutes
    "run": "e.yaml --out out",
    "compare": "s.yaml --out out --workers 1",
    "keys": "k",
    "verify": "run",
    "report": "run",
    "predict": "run --held-out",
    "export": "run --out new",
    "init": "--data t.csv --client who --label y --confirm --out new",
}
"""Arguments that work, so that one that does not is all that is wrong."""

SHORT = {"audit": ["--trials", "400"]}
"""What ends a command soon that plays for a minute unless it is told otherwise."""

ENDLESS = {"serve", "join", "bench"}
"""What waits for others, or measures for minutes, when it is asked properly: these get bad arguments only."""
SWEEP = {
    "base": {**TINY, "federation": {"sizes": [2], "records_per_client": 40, "test_per_client": 10}},
    "grid": {"algorithm.name": ["local"]},
}
TABLE = "who,age,y\n" + "".join(f"{'ab'[row % 2]},{row % 50},{row % 3 // 2}\n" for row in range(80))
FILES = {"e.yaml": as_yaml(TINY), "s.yaml": as_yaml(SWEEP), "t.csv": TABLE.encode()}


@functools.cache
def parameters() -> dict[str, list[Any]]:
    """The options and arguments of every command, under its full name."""
    found = {}
    for name in COMMANDS:
        command = typer.main.get_command(load(name))
        parts = getattr(command, "commands", None)
        for inner, part in [("", command)] if parts is None else parts.items():
            found[f"{name} {inner}".strip()] = part.params
    return found


@st.composite
def command_lines(draw: st.DrawFn, finished: Path) -> Case:
    """A command as it should be with up to two options more, and in half of them something strange."""
    name = draw(st.sampled_from(list(parameters())))
    arguments = SENSIBLE.get(name, "").split() if draw(st.integers(0, 9)) else []
    for _ in range(draw(st.sampled_from([0, 1, 1, 2]))):
        arguments += _given(draw, name, MODEST)
    strange = draw(st.integers(0, 9))
    if strange == 0 and arguments:
        del arguments[draw(st.integers(0, len(arguments) - 1))]
    elif strange <= 2 and arguments:
        arguments[draw(st.integers(0, len(arguments) - 1))] = draw(st.sampled_from(WORDS))
    elif strange <= 4 or name in ENDLESS:
        arguments += _given(draw, name, WORDS)
    if name in SHORT and SHORT[name][0] not in arguments:
        arguments += SHORT[name]
    if name in ENDLESS:
        arguments += [f"--{draw(st.sampled_from(['slow', 'set', 'x']))}-nothing"]
    return Case("command", (*name.split(), *arguments), FILES, finished.parent)


def _given(draw: st.DrawFn, name: str, words: list[str]) -> list[str]:
    """An option with a value, of its own kind or not; an argument without a name."""
    option = draw(st.sampled_from(parameters()[name]))
    choices = [str(choice) for choice in getattr(option.type, "choices", None) or []]
    value = draw(st.sampled_from([*choices, *choices, *words] if choices else words))
    if option.param_type_name == "argument":
        return [value]
    flag = draw(st.sampled_from(list(option.opts)))
    return [flag] if getattr(option, "is_flag", False) else [flag, value]
