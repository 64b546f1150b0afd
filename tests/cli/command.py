"""Run the command in this process and catch what it prints."""

import sys
from dataclasses import dataclass

import pytest

from coterie.cli.main import main


@dataclass(frozen=True)
class Printed:
    code: int
    out: str
    err: str


def coterie(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Printed:
    monkeypatch.setattr(sys, "argv", ["coterie", *arguments])
    code = 0
    try:
        main()
    except SystemExit as stop:
        code = int(stop.code or 0)
    printed = capsys.readouterr()
    return Printed(code, printed.out, printed.err)
