"""Users' own code, by name: `package.module:name`, or a short name that an installed package announces.

One place finds it for every key of an experiment that may name it, and tells which code it was. A short name
is an entry point of the group that belongs to the key; names of ours come first. Names are looked up without
running anything; `find` imports.
"""

import difflib
import hashlib
import re
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, reduce
from importlib import import_module, metadata, util
from pathlib import Path
from typing import Any

from coterie.errors import InputError, one_line

_FORM = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_digests: dict[str, str | None] = {}
"""Of the code behind each module when it was imported: what is edited later runs on as it was."""


@dataclass(frozen=True)
class PluginKind:
    """What may be a user's own.

    Args:
        key: the key of an experiment that names it.
        group: entry points under which packages announce theirs.
        form: how one that is not announced is written.
    """

    key: str
    group: str
    form: str = "package.module:function"

    def target(self, name: str) -> str | None:
        """The `module:name` that a name stands for; None where it stands for nothing."""
        if ":" in name:
            return name if _FORM.fullmatch(name) else None
        found = sorted({entry.value for entry in metadata.entry_points(group=self.group, name=name)})
        if len(found) > 1:
            raise InputError(
                f"{self.key}: '{name}' is announced by several packages, as {' and as '.join(found)}; "
                f"allowed: {self.form} of one of them"
            )
        return found[0].partition("[")[0].strip() if found else None

    def unknown(self, name: str, ours: Collection[str]) -> str:
        """What is wrong with a name that is neither ours nor stands for anything, and what is allowed."""
        known = [*ours, *sorted(metadata.entry_points(group=self.group).names - set(ours))]
        near = difflib.get_close_matches(name, known, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        return f"{name!r}{hint}; allowed: {', '.join(known)} or {self.form}"

    def find(self, name: str) -> Any:
        """Import what a name stands for; one line where that goes wrong, in whatever way."""
        target = self.target(name)
        if target is None:
            raise InputError(f"{self.key}: {self.unknown(name, ())}")
        module_name, _, path = target.partition(":")
        try:
            with _working_directory_first():
                if module_name not in _digests:
                    _digests[module_name] = _digest(module_name.partition(".")[0])
                return reduce(getattr, path.split("."), import_module(module_name))
        except (Exception, SystemExit) as error:  # anything may go wrong in a user's module
            _digests.pop(module_name, None)
            raise InputError(f"{self.key}: {name}: {one_line(error)}") from error

    def installed(self, name: str) -> tuple[str | None, str | None, str | None]:
        """Package and version that a name comes from, and a hash of its files; nothing of it is run."""
        module_name = (self.target(name) or name).partition(":")[0].partition(".")[0]
        with _working_directory_first():
            return (*_distribution(module_name), _digest(module_name))

    def code_of(self, name: str) -> dict[str, str | None]:
        """Which code a name stands for here: its place, its package and version, a hash of its files."""
        self.find(name)
        target = self.target(name) or name
        module_name = target.partition(":")[0]
        package, version = _distribution(module_name.partition(".")[0])
        return {
            "name": name,
            "target": target,
            "package": package,
            "version": version,
            "sha256": _digests[module_name],
        }


ALGORITHM = PluginKind("algorithm.name", "coterie.algorithms", "package.module:Class")
DATA = PluginKind("data.name", "coterie.data")
FEDERATION = PluginKind("federation.kind", "coterie.federations")
MODEL = PluginKind("model.name", "coterie.models")
FEATURES = PluginKind("model.features", "coterie.features")


@contextmanager
def _working_directory_first() -> Iterator[None]:
    """Find a user's module where the command is run, where an installed command would not look.

    Afterwards that folder is the last to be looked in, for what the module imports later, or a worker does.
    """
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)
        if here not in sys.path:
            sys.path.append(here)


def _digest(top: str) -> str | None:
    """Over the Python files of a package, or the one file of a module; None where it has none."""
    digest, files = hashlib.sha256(), dict(_files(top))
    for name, path in sorted(files.items()):
        content = path.read_bytes()
        digest.update(f"{name} {len(content)} ".encode() + content)
    return digest.hexdigest() if files else None


def _files(top: str) -> Iterator[tuple[str, Path]]:
    module = sys.modules.get(top)  # one that was made while a program ran has no spec to find
    spec = util.find_spec(top) if module is None else None
    folders = getattr(module, "__path__", None) if spec is None else spec.submodule_search_locations
    file = getattr(module, "__file__", None) if spec is None else spec.origin
    if folders is None and file is not None and Path(file).is_file():
        yield "", Path(file)
    for folder in map(Path, folders or ()):
        yield from ((path.relative_to(folder).as_posix(), path) for path in folder.rglob("*.py"))


@cache
def _distribution(top: str) -> tuple[str | None, str | None]:
    """Name and version of the installed package that a top-level module comes from, where one says so."""
    names = metadata.packages_distributions().get(top) or [top]
    try:
        return names[0], metadata.version(names[0])
    except metadata.PackageNotFoundError:
        return None, None
