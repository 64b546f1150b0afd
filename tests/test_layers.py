"""Doors open downwards only: which room may import which."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import coterie.privacy

SOURCE = Path(__file__).resolve().parents[1] / "src" / "coterie"

BELOW_ENGINES = {
    "algorithms",
    "groups",
    "training",
    "data",
    "models",
    "privacy",
    "errors",
    "settings",
    "files",
    "plugins",
    "register",
}
# The rooms that each room may use. `errors`, `settings` and `files` are open to all but privacy.
DOORS: dict[str, set[str]] = {
    "privacy": set(),
    "clustering": {"privacy"},
    "register": {"privacy", "errors", "files"},
    "groups": {"privacy", "errors", "files"},
    "data": {"groups", "privacy", "errors", "settings", "files", "notices", "plugins"},
    "models": {"data", "errors", "settings", "plugins"},
    "training": {"data", "models", "privacy", "errors"},
    "algorithms": {"clustering", "groups", "privacy", "errors", "settings", "plugins"},
    "engines": BELOW_ENGINES,
    "experiment": {"table", "engines", *BELOW_ENGINES},
    "report": {"table", "files", "experiment", "groups", "algorithms", "data", "models", "privacy", "errors"},
    "bench": {"experiment", "engines", *BELOW_ENGINES} - {"groups", "settings"},
    "reproduce": {"report", "table", "experiment", "engines", "clustering", *BELOW_ENGINES},
    "audit": {"report", "table", "experiment", "engines", *BELOW_ENGINES} - {"settings", "plugins"},
    "testing": {"algorithms", "engines", "experiment", "groups", "privacy", "errors"},
    "estimators": {"api", "experiment", "algorithms", "data", "models", "files", "errors"},
    "api": {"experiment", "report", "reproduce", "privacy", "errors"},
    "cli": {
        "api",
        "audit",
        "bench",
        "reproduce",
        "experiment",
        "engines",
        "report",
        "groups",
        "privacy",
        "register",
        "errors",
        "files",
        "notices",
    },
    "errors": {"privacy"},
    "settings": {"plugins"},
    "plugins": {"errors"},
    "table": set(),
    "notices": set(),
    "files": {"errors"},
}


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports(path: Path) -> frozenset[str]:
    """Dotted names below `coterie` that a file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            if node.module == "coterie":
                found |= {alias.name for alias in node.names if alias.name != "__version__"}
            elif node.module and node.module.startswith("coterie."):
                found.add(node.module.removeprefix("coterie."))
        elif isinstance(node, ast.Import):
            names = (alias.name for alias in node.names)
            found |= {name.removeprefix("coterie.") for name in names if name.startswith("coterie.")}
    return frozenset(found)


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).with_suffix("").parts[0]


FILES = [path for path in sorted(SOURCE.rglob("*.py")) if room_of(path) not in ("__init__", "__main__")]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_room_imports_only_through_its_doors(path: Path) -> None:
    room = room_of(path)
    used = {name.partition(".")[0] for name in imports(path)} - {room}
    assert used <= DOORS[room], f"{path.name} goes through a wall to {used - DOORS[room]}"


def test_engines_know_only_the_protocol_of_algorithms() -> None:
    for path in (SOURCE / "engines").rglob("*.py"):
        used = {name for name in imports(path) if name.startswith("algorithms")}
        assert used <= {"algorithms.protocol"}, path


def test_algorithms_never_touch_data_models_or_torch() -> None:
    for path in (SOURCE / "algorithms").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert "torch" not in text, path


def test_privacy_can_be_used_alone() -> None:
    code = (
        "import sys, coterie.privacy; "
        "sys.exit(str(sorted({'torch', 'sklearn', 'matplotlib', 'pydantic'} & set(sys.modules))) "
        "if {'torch', 'sklearn', 'matplotlib', 'pydantic'} & set(sys.modules) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_nothing_reads_pickles_but_a_program_apart() -> None:
    apart = SOURCE / "data" / "unpickling.py"  # a child process with a list of what a pickle may call
    for path in SOURCE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert "import unpickling" not in text, path
        assert "data.unpickling" not in text, path
        if path == apart:
            assert "class FrameUnpickler(pickle.Unpickler)" in text
            assert "pickle.load" not in text
            continue
        for word in ("import pickle", "torch.load(", "allow_pickle=True", "joblib.load", "cloudpickle"):
            assert word not in text, f"{path}: {word}"


# --- what keeps the house small ------------------------------------------------------------------------


def trees() -> list[tuple[Path, ast.Module]]:
    return [(path, parsed(path)) for path in sorted(SOURCE.rglob("*.py"))]


def test_no_file_grows_beyond_what_one_sitting_reads() -> None:
    lengths = {
        str(path.relative_to(SOURCE)): path.read_text(encoding="utf-8").count("\n")
        for path in SOURCE.rglob("*.py")
    }
    assert not {name: length for name, length in lengths.items() if length > 450}


def test_no_class_name_stands_twice() -> None:
    places: dict[str, list[str]] = {}
    for path, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(str(path.relative_to(SOURCE)))
    assert not {name: found for name, found in places.items() if len(found) > 1}


def test_what_differs_between_mechanisms_is_a_method_of_theirs() -> None:
    """A question of kind outside `privacy` is one more place that a new mechanism must be taught."""
    kinds, found = set(), [coterie.privacy.Mechanism]
    while found:
        kind = found.pop()
        kinds.add(kind.__name__)
        found += kind.__subclasses__()
    asked = [
        f"{path.relative_to(SOURCE)}:{node.lineno}"
        for path, tree in trees()
        if not path.is_relative_to(SOURCE / "privacy")
        for node in ast.walk(tree)
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("isinstance", "issubclass")
            and {part.id for part in ast.walk(node.args[1]) if isinstance(part, ast.Name)} & kinds
        )
        or (isinstance(node, ast.MatchClass) and isinstance(node.cls, ast.Name) and node.cls.id in kinds)
    ]
    assert len(kinds) > 5
    assert len(asked) <= 10, asked


def test_no_function_named_run_only_forwards() -> None:
    for path, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name == "run":
                body = [
                    part
                    for part in node.body
                    if not (isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant))
                    and not isinstance(part, ast.Import | ast.ImportFrom)
                ]
                assert len(body) > 1, f"{path}:{node.lineno} forwards"


@pytest.mark.parametrize("room", sorted(path.parent for path in SOURCE.rglob("*/__init__.py")), ids=str)
def test_every_room_says_what_belongs_there(room: Path) -> None:
    said = ast.get_docstring(ast.parse((room / "__init__.py").read_text(encoding="utf-8")))
    assert said is not None
    assert len(said.split()) >= 12, said
