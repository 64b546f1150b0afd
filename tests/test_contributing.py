"""The way of a record that CONTRIBUTING describes is the way through the code."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
WALK = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## The way of one record")[2]
STEPS = re.findall(r"`([a-z_/]+\.py): ([A-Za-z_.]+)`", WALK.partition("\n## ")[0])


def test_every_station_is_named_with_its_file() -> None:
    assert len(STEPS) >= 18


@pytest.mark.parametrize(("file", "name"), STEPS, ids=[name for _, name in STEPS])
def test_each_step_is_a_function_that_does_more_than_forward(file: str, name: str) -> None:
    inside: ast.AST = ast.parse((ROOT / "src" / "coterie" / file).read_text(encoding="utf-8"))
    for part in name.split("."):
        inside = next(
            node
            for node in ast.iter_child_nodes(inside)
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == part
        )
    assert isinstance(inside, ast.FunctionDef), f"{name} is not a function"
    body = [node for node in inside.body if not isinstance(node, ast.Expr)]
    if len(body) == 1 and isinstance(body[0], ast.Return) and isinstance(body[0].value, ast.Call):
        call = body[0].value
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        assert not all(isinstance(argument, ast.Name) for argument in given), f"{name} only forwards"
