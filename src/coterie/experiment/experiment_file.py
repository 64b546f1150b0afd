"""Reading and writing YAML experiment files, and overriding single keys."""

import os
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import BaseModel

from coterie.data.client_files import DECLARATION
from coterie.errors import InputError
from coterie.experiment.schema import Experiment
from coterie.files import LARGEST_YAML, parse_yaml, regular, yaml_text
from coterie.settings import RECORDED

Tree = dict[str, Any]
"""Nested sections as YAML gives them: validated before anything else looks inside."""

ExperimentSource: TypeAlias = Experiment | Mapping[str, Any] | str | Path | None
"""What a function takes for an experiment: itself, its sections, its file, or None for the built-in one."""

SELECTORS = ("data.name", "federation.kind", "model.name", "algorithm.name", "engine.name")
"""Keys that decide which other keys their section has."""


def read_yaml(path: Path) -> Tree:
    """The mapping in a YAML file; anything else in it is one clear line."""
    try:
        with regular(path).open(encoding="utf-8") as file:
            content = parse_yaml(file.read(LARGEST_YAML + 1))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: not YAML: it is no text in UTF-8") from None
    except ValueError as problem:
        raise InputError(f"{path}: not YAML, {problem}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise InputError(
            f"{path}: should hold sections (data, federation, ...), not a {type(content).__name__}"
        )
    return content


def read_experiment(path: Path | None, overrides: Iterable[str] = ()) -> Experiment:
    """The experiment in a file (or the built-in default), with `key=value` overrides applied."""
    tree = at_home(read_yaml(path), path) if path is not None else {}
    return Experiment.model_validate(override(tree, parse_overrides(overrides)))


def experiment_of(source: ExperimentSource) -> Experiment:
    """The experiment itself, the one in a file or in sections, or the built-in default."""
    if isinstance(source, Experiment):
        return source
    if isinstance(source, Mapping):
        return Experiment.model_validate(override(source, {}))
    if source is None:
        return read_experiment(None)
    return read_experiment(InputError.path_of("experiment", source, "a file, sections as a dict, or None"))


def at_home(tree: Tree, file: Path) -> Tree:
    """The tree, in which a folder that lies beside the file is found from here, too.

    A relative `data.path` is looked for from the file's own folder first, then from where we are.
    """
    data = tree.get("data")
    given = data.get("path") if isinstance(data, dict) else None
    if isinstance(given, str) and os.path.isfile(file.parent / given / DECLARATION):
        return override(tree, {"data.path": str(file.parent / given)})
    return tree


def read_recorded(path: Path) -> Experiment:
    """What a run was begun with, to be looked at: no code is imported that its file names."""
    return Experiment.model_validate(read_yaml(path), context=RECORDED)


def parse_overrides(texts: Iterable[str]) -> Tree:
    """Keys and values of `key=value` texts, of which the last of a key counts; no section hides a key."""
    changes = dict(map(parse_override, texts))
    # In this order a key stands right after one that it stands inside of.
    for other, key in pairwise(sorted(changes, key="{}.".format)):
        if within(key, other):
            raise InputError(f"--set: {key} is set beside {other}; allowed: one of them")
    return changes


def within(key: str, other: str) -> bool:
    """Whether a dotted key is the other, or stands inside its section."""
    return f"{key}.".startswith(f"{other}.")


def parse_override(text: str) -> tuple[str, Any]:
    """`schedule.rounds=40` as a key and a value."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise InputError(f"--set: '{text}' is not of the form section.key=value")
    try:
        return key.strip(), parse_yaml(value)
    except ValueError as problem:
        raise InputError(f"--set: the value of '{text}' is not YAML, {problem}") from None


def override(tree: Mapping[str, Any], changes: Mapping[str, Any]) -> Tree:
    """A copy of the tree with dotted keys replaced.

    Changing a selector (`algorithm.name`) drops the section's other keys, which belonged to the old choice.
    """
    changed = _copied(tree)
    for key in sorted(changes, key=lambda key: key not in SELECTORS):
        if key in SELECTORS and _chosen(changed, key) != changes[key]:
            changed[key.partition(".")[0]] = {}
        _put(changed, key, changes[key])
    return changed


def dropped_by(tree: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, str]:
    """Which keys of the tree `override` drops with an old choice and nothing gives anew, and why."""
    found = {}
    for selector in SELECTORS:
        section, _, name = selector.partition(".")
        if selector in changes and (old := _chosen(tree, selector)) != changes[selector]:
            for key in (f"{section}.{other}" for other in _section(tree, section, "") if other != name):
                if not any(within(key, given) for given in changes):
                    found[key] = f"{key} stands beside {selector} {old}, and is lost with it"
    return found


def _chosen(tree: Mapping[str, Any], selector: str) -> Any:
    section, _, name = selector.partition(".")
    return _section(tree, section, "").get(name, getattr(getattr(Experiment(), section), name, None))


def without(tree: Mapping[str, Any], path: str) -> Tree:
    """A copy of the tree that does not have a dotted key."""
    first, _, rest = path.partition(".")
    if rest and isinstance(tree.get(first), dict):
        return {**tree, first: without(tree[first], rest)}
    return {key: value for key, value in tree.items() if key != first}


def _copied(tree: Mapping[str, Any]) -> Tree:
    """With sections of its own, also where two keys named one."""
    return {key: _copied(value) if isinstance(value, dict) else value for key, value in tree.items()}


def _put(tree: Tree, path: str, value: Any, inside: str = "") -> None:
    first, _, rest = path.partition(".")
    if rest:
        section = tree[first] = _section(tree, first, inside)
        _put(section, rest, value, f"{inside}{first}.")
    else:
        tree[first] = value


def _section(tree: Mapping[str, Any], name: str, inside: str) -> Tree:
    """The keys under a name, where there may be none; of a section inside another, null is none."""
    found = tree.get(name, {})
    if found is None and inside:
        return {}
    if not isinstance(found, dict):
        raise InputError(f"{inside}{name}: {found!r} is not allowed, should be a section of keys and values")
    return found


def to_yaml(experiment: Experiment) -> str:
    """The whole experiment, every default written out, as stored in a run folder."""
    whole = experiment.model_dump(mode="json")
    return yaml_text(whole, default_flow_style=None, width=100)


def commented_default() -> str:
    """The built-in experiment as a file to start from: every key with what it means."""
    lines = [
        "# A Coterie experiment. Run it with: coterie run FILE.yaml",
        "# Every key is optional; what stands here is the default.",
    ]
    experiment = Experiment()
    for section, values in experiment.model_dump(mode="json").items():
        settings: type[BaseModel] = type(getattr(experiment, section))
        lines += ["", f"# {(settings.__doc__ or '').strip().splitlines()[0]}", f"{section}:"]
        for name, field in settings.model_fields.items():
            value = yaml_text(values[name], default_flow_style=True).strip().removesuffix("...").strip()
            entry = f"  {name}: {value}"
            lines.append(f"{entry:<44}# {field.description}" if field.description else entry)
    return "\n".join(lines) + "\n"
