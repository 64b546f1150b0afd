"""Experiments that nobody would write, derived from the schema: every key, with all kinds of values."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from case import Case
from hypothesis import strategies as st
from pydantic import BaseModel, TypeAdapter, ValidationError

from coterie.algorithms import algorithm_names, find_algorithm
from coterie.data import DataSettings
from coterie.errors import InputError
from coterie.experiment.schema import Experiment
from coterie.models import ModelSettings
from coterie.privacy import Unit

Tree = dict[str, Any]

TINY: Tree = {
    "federation": {"sizes": [2, 2], "records_per_client": 40, "test_per_client": 10},
    "schedule": {"rounds": 2, "batch": 20},
    "evaluation": {"references": False},
    "engine": {"workers": 1},
    "seeds": {"noise": 0},
    "algorithm": {"name": "global"},
}
"""What changes are made to: the smallest run there is."""

UNITS: dict[Unit, Tree] = {
    Unit.RECORD: TINY,
    Unit.CLIENT: {
        **TINY,
        "federation": {"sizes": [20, 20], "records_per_client": 10, "test_per_client": 5},
        "privacy": {"unit": "client"},
        "algorithm": {"name": "dp-fedavg"},
    },
    Unit.WORKER: {
        **TINY,
        "federation": {"kind": "groups", "workers": 4, "groups": 4, "records_per_client": 40},
        "privacy": {"unit": "worker"},
        "algorithm": {"name": "dp-ogl"},
    },
}

SMALL_NUMBERS: list[Any] = [0, 1, 2, 3, 5, 8, 20, 0.001, 0.1, 0.25, 0.5, 0.9, 1.5, 40]
"""What a number may be without making a run long."""
NUMBERS: list[Any] = [0, -1, 0.5, 1e-12, 5e-324, 1e308, -1e308, float("nan"), float("inf"), -0.0, 7.5, 1.0]
NUMBERS += [2**31, 2**63, 2**64, 10**12, 10**30, -(10**30), 1e6, 10**6, 10**9, 1e-6, 64]
TEXTS: list[Any] = ["", " ", "auto", "none", "null", "yes", "1", "1e3", "0x10", "a" * 5000, "a\nb", "a\x00b"]
TEXTS += ["../..", "/", "\ud800", "=cmd", "|", "<b>", "coterie.models:make", "os:getcwd", "é\u202e", "1:30"]
OTHERS: list[Any] = [None, True, False, [], {}, [1], [[1]], {"a": 1}, [None], [float("nan")], ["x"] * 50]
OTHERS += [{"client-0": {"epsilon": 1}}, {"epsilon": float("inf")}, [2, 2], [0], [-1], [10**30]]
WILD = st.one_of(
    st.sampled_from(NUMBERS),
    st.sampled_from(NUMBERS),
    st.sampled_from(TEXTS),
    st.sampled_from(OTHERS),
    st.integers(),
    st.floats(),
    st.text(max_size=12),
)
LONG = (64, "1e3", 10**6, 1e6)
"""Values that are allowed for rounds and epochs, and that a run takes its time for."""
HARMLESS = st.sampled_from([value for value in [*TEXTS, *OTHERS, *NUMBERS] if value not in LONG])
"""Values that are refused, or small: a run with them ends soon."""


@dataclass(frozen=True)
class Option:
    """A key of an experiment, where it stands and which values are of its type."""

    path: tuple[str, ...]
    values: tuple[Any, ...]

    @property
    def key(self) -> str:
        return ".".join(self.path)


def options(tree: Tree) -> tuple[Option, ...]:
    """Every key that may stand in an experiment with the names and kinds that this one has."""
    unit = Unit(tree.get("privacy", {}).get("unit", "record"))
    kind = tree["federation"].get("kind", "clusters")
    return _options(unit, tree["algorithm"]["name"], kind, tree["data"]["name"], tree["model"]["name"])


@functools.cache
def _options(unit: Unit, algorithm: str, federation: str, data: str, model: str) -> tuple[Option, ...]:
    found: dict[str, Option] = {}
    for name, field in Experiment.model_fields.items():
        models = _models_in(field.rebuild_annotation())
        if name == "algorithm":
            models = [find_algorithm(unit, algorithm).settings_type]
        elif name == "federation":
            models = [each for each in models if each.model_fields["kind"].default == federation]
        for each in models:
            found |= {option.key: option for option in _options_of(each, (name,))}
    for settings, name in ((DataSettings, data), (ModelSettings, model)):
        section = "data" if settings is DataSettings else "model"
        for option in settings.model_fields:
            if option != "name" and not settings.takes(name, option):
                found.pop(f"{section}.{option}", None)
    # Each worker is a process that imports everything anew, which takes it seconds.
    found["engine.workers"] = Option(("engine", "workers"), (1,))
    return tuple(found.values())


def _options_of(model: type[BaseModel], path: tuple[str, ...]) -> Iterator[Option]:
    for name, field in model.model_fields.items():
        kind = field.rebuild_annotation()
        for inner in _models_in(kind):
            yield from _options_of(inner, (*path, name))
        words = re.findall(r"(?:^|\| |: )([a-z0-9-]+)(?= \||$| \()", field.description or "")
        tried = [*_of_type(kind), *(words if _holds_text(kind) else [])]
        checked: TypeAdapter[Any] = TypeAdapter(kind)
        fitting = tuple(value for value in tried if _fits(checked, value))
        if fitting:
            yield Option((*path, name), fitting)


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) not in (None, Annotated, Union, UnionType):
        return []
    return [model for part in get_args(annotation) for model in _models_in(part)]


def _holds_text(annotation: Any) -> bool:
    return annotation is str or any(_holds_text(part) for part in get_args(annotation))


def _fits(checked: TypeAdapter[Any], value: Any) -> bool:
    try:
        checked.validate_python(value)
    except (ValidationError, TypeError):
        return False
    return True


def _of_type(annotation: Any) -> list[Any]:
    """Values to try for a type; those outside its own limits are sorted out afterwards."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _of_type(parts[0])
    if origin is Literal:
        return list(parts)
    if origin in (Union, UnionType):
        return [value for part in parts for value in _of_type(part)]
    if origin is tuple:
        inner = _of_type(parts[0])
        return [inner[:1], inner[1:3], inner[2:3], inner[1:2] * 2, inner[-2:]]
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        return [{}, {"client-0": {"epsilon": 2.0}}, {"client-1": {"epsilon": 9.0, "delta": 1e-4}}]
    if annotation in (NoneType, None):
        return [None]
    if annotation is bool:
        return [True, False]
    if annotation in (int, float):
        return [value for value in SMALL_NUMBERS if annotation is float or isinstance(value, int)]
    if isinstance(annotation, type) and hasattr(annotation, "__members__"):
        return [member.value for member in annotation]  # type: ignore[attr-defined]
    return []


DATA: list[Tree] = [{"name": "digits"}] * 3 + [{"name": "glyphs", "size": 900}, {"name": "lines"}]
MODELS: list[Tree] = [{"name": "softmax"}] * 4 + [{"name": "cnn"}, {"name": "mcmahan-cnn", "hidden": 16}]


@st.composite
def bases(draw: st.DrawFn) -> Tree:
    """A small experiment of any unit with any of its algorithms, as somebody would write it."""
    unit = draw(st.sampled_from([Unit.RECORD, Unit.RECORD, Unit.CLIENT, Unit.WORKER]))
    algorithm = draw(st.sampled_from(algorithm_names(unit)))
    tree = {**copy.deepcopy(UNITS[unit]), "algorithm": {"name": algorithm}}
    tree["data"], tree["model"] = dict(draw(st.sampled_from(DATA))), dict(draw(st.sampled_from(MODELS)))
    if tree["data"]["name"] == "lines":
        tree["model"] = {"name": "linear"}
        if unit is Unit.WORKER:
            tree["data"], tree["model"] = {"name": "digits"}, {"name": "softmax"}
        else:
            tree["federation"] = {"kind": "natural"}
    elif unit is not Unit.WORKER and algorithm != "oracle" and draw(st.integers(0, 4)) == 0:
        clients = 4 if unit is Unit.RECORD else 40
        tree["federation"] = {"kind": "dirichlet", "clients": clients, "alpha": 1.0, "records_per_client": 20}
    if algorithm == "rc-dpfl":
        tree["privacy"], tree["schedule"]["rounds"] = {"mode": "paper"}, 3
    if "period" in find_algorithm(unit, algorithm).settings_type.model_fields:
        tree["algorithm"]["period"] = 1
    return tree


def put(tree: Tree, path: tuple[str, ...], value: Any) -> None:
    """Set a key, and make the sections above it where there are none."""
    for name in path[:-1]:
        inner = tree.get(name)
        tree[name] = inner = inner if isinstance(inner, dict) else {}
        tree = inner
    tree[path[-1]] = value


@st.composite
def trees(draw: st.DrawFn, wild: st.SearchStrategy[Any] = WILD) -> Tree:
    """An experiment with up to two ordinary changes, and in half of them one thing that is strange."""
    tree = draw(bases())
    known = options(tree)
    for _ in range(draw(st.sampled_from([0, 0, 1, 1, 2]))):
        option = draw(st.sampled_from(known))
        put(tree, option.path, draw(st.sampled_from(option.values)))
    strange = draw(st.integers(0, 24))
    if strange < 8:
        put(tree, draw(st.sampled_from(known)).path, draw(wild))
    elif strange == 8:
        tree[draw(st.sampled_from(list(tree)))] = draw(wild)
    elif strange == 9:
        put(tree, (draw(st.sampled_from(list(tree))), draw(st.text(min_size=1, max_size=8))), draw(wild))
    return tree


def as_yaml(tree: Mapping[str, Any]) -> bytes:
    return yaml.safe_dump(dict(tree), allow_unicode=False).encode("utf-8", "surrogatepass")


def _json(draw: st.DrawFn) -> tuple[str, ...]:
    return ("--json",) if draw(st.booleans()) else ()


@st.composite
def planned(draw: st.DrawFn) -> Case:
    return Case("plan", ("plan", "e.yaml", *_json(draw)), {"e.yaml": as_yaml(draw(trees()))})


@st.composite
def trained(draw: st.DrawFn) -> Case:
    tree = draw(trees(HARMLESS))
    if isinstance(tree.get("model"), dict) and tree["model"].get("name") == "resnet18":
        # Eleven million weights: a few records are work enough for the seconds that a case has.
        tree["federation"] = {"records_per_client": 4, "sizes": [2, 2], "test_per_client": 2}
        put(tree, ("schedule", "batch"), 2)
        put(tree, ("schedule", "rounds"), 1)
    files = {"e.yaml": as_yaml(tree)}
    out = draw(st.sampled_from(["out"] * 20 + ["a/b/out", "ö", "out ", "x" * 250, ".", "e.yaml", ""]))
    return Case("run", ("run", "e.yaml", "--out", out, *_json(draw)), files)


@st.composite
def single_options(draw: st.DrawFn) -> Case:
    """One key with a value of its type: if it is accepted, it has to make a difference."""
    tree = draw(bases())
    option = draw(st.sampled_from(options(tree)))
    before = Case("option", ("plan", "e.yaml", "--json"), {"e.yaml": as_yaml(tree)})
    experiment = Experiment.model_validate(tree)
    put(tree, option.path, draw(st.sampled_from(option.values)))
    with suppress(InputError):
        if Experiment.model_validate(tree) == experiment:  # it said its default
            return before
    files = {"e.yaml": as_yaml(tree)}
    return Case("option", before.arguments, files, option=option.key, without=before)


@st.composite
def overrides(draw: st.DrawFn) -> Case:
    """Changes on the command line, over a small file."""
    tree = draw(bases())
    known = options(tree)
    changes: list[tuple[str, str]] = []
    for _ in range(draw(st.sampled_from([0, 1, 1, 2]))):
        option = draw(st.sampled_from(known))
        changes.append((option.key, _spelled(draw(st.sampled_from(option.values)))))
    if not changes or draw(st.integers(0, 2)) == 0:
        odd = ["schedule", "nothing.here", "schedule.bogus", "..", "", "privacy.budgets.client-0.epsilon"]
        keys = st.sampled_from(known).map(lambda option: option.key)
        key = draw(st.one_of(keys, keys, keys, st.sampled_from(odd)))
        text = draw(st.one_of(WILD.map(str), WILD.map(_spelled), st.sampled_from(ODD_SCALARS)))
        changes.append((key, text))
    arguments = [part for key, text in changes for part in ("--set", f"{key}={text}".replace("\x00", ""))]
    return Case("--set", ("plan", "e.yaml", *arguments, *_json(draw)), {"e.yaml": as_yaml(tree)})


def _spelled(value: Any) -> str:
    """A value in one line of YAML."""
    text = str(yaml.safe_dump(value, default_flow_style=True, width=10**6))
    return text.removesuffix("\n").removesuffix("\n...")


ODD_SCALARS = ["yes", "no", "on", "off", "~", "017", "0o17", "1:30", "1_000", "0x1F", "1e3", ".5", "+1"]
ODD_SCALARS += [".inf", "-.inf", ".nan", "2020-01-01", "!!int '3'", "!!float 3", "!!binary aGk=", "!!set {a}"]
ODD_SCALARS += ["!!python/object:os.system {}", "&a [*a]", "*nobody", "{<<: *nobody}", "'", '"', "|", ">"]
ODD_SCALARS += ["- ", "? a", "%YAML 1.1", "\t1", "9" * 5000, "0x" + "f" * 5000, "{", "[1", "&a *a", "1.0"]


@st.composite
def yaml_texts(draw: st.DrawFn) -> Case:
    """The text of a file with something of YAML's own put into it, or bytes changed."""
    text = as_yaml(draw(st.sampled_from(list(UNITS.values())))).decode()
    content = bytearray(text.encode())
    choice = draw(st.integers(0, 7))
    if choice <= 3:
        lines = text.splitlines()
        place = draw(st.integers(0, len(lines) - 1))
        before, colon, _ = lines[place].partition(":")
        lines[place] = f"{before}{colon} {draw(st.sampled_from(ODD_SCALARS))}"
        content = bytearray("\n".join(lines).encode())
    elif choice <= 5:
        for _ in range(draw(st.integers(1, 2))):
            content[draw(st.integers(0, len(content) - 1))] = draw(st.integers(0, 255))
    elif choice == 6:
        depth, width = draw(st.integers(2, 9)), draw(st.integers(2, 12))
        bomb = draw(st.sampled_from([alias_bomb, merge_bomb, nested]))(depth, width)
        content = bytearray(bomb.encode() + content)
    else:
        content = bytearray(draw(st.binary(max_size=200)))
    return Case("YAML", ("plan", "e.yaml", *_json(draw)), {"e.yaml": bytes(content)})


def alias_bomb(depth: int, width: int) -> str:
    """Lists of lists of one list: short to write, endless to walk through."""
    lines = ["x0: &a0 [1, 1]"]
    for level in range(1, depth + 1):
        lines.append(f"x{level}: &a{level} [{', '.join([f'*a{level - 1}'] * width)}]")
    return "\n".join(lines) + "\n"


def merge_bomb(depth: int, width: int) -> str:
    """The same with merge keys, each of which is a copy."""
    lines = ["m0: &m0 {a: 1}"]
    for level in range(1, depth + 1):
        lines.append(f"m{level}: &m{level} {{<<: [{', '.join([f'*m{level - 1}'] * width)}]}}")
    return "\n".join(lines) + "\n"


def nested(depth: int, width: int) -> str:
    """Thousands of brackets."""
    many = int(10 ** (depth // 2))
    return "d: " + "[" * many + "]" * many + "\n"
