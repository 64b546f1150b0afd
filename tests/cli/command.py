"""Run the command in this process and catch what it prints."""

import sys
from dataclasses import dataclass

import pytest
import typer
from typer.testing import CliRunner

from coterie.cli.main import main
from coterie.errors import CoterieError


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


def invoke(app: typer.Typer, *arguments: object, fails: int | None = None) -> str:
    """Standard output of a part of the command line, or the mistake that it would report."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if isinstance(result.exception, CoterieError):
        code, text = result.exception.exit_code, str(result.exception)
    else:
        code, text = result.exit_code, result.stdout if fails is None else result.output
    assert code == (fails or 0), result.output + str(result.exception)
    return text
