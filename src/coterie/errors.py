"""Mistakes that the command line reports in one line, with the exit code of each kind."""

import os
import sys
from contextlib import suppress
from pathlib import Path
from traceback import walk_tb

from coterie.privacy.errors import BudgetError, CoterieError, LedgerError, PlanError
from coterie.privacy.ranges import Range

__all__ = [
    "BudgetError",
    "CoterieError",
    "DataError",
    "InputError",
    "LedgerError",
    "ModelError",
    "PlanError",
    "check_memory",
    "one_line",
    "where",
]

_OURS = ("builtins", "torch", "numpy", "coterie")


class InputError(CoterieError):
    """Something the user wrote is wrong: it names the key or file, the value and what is allowed."""

    exit_code = 2

    @classmethod
    def unless_within(cls, allowed: Range, option: str, value: float | None) -> None:
        """Refuse a number outside its range; None is none that was given."""
        cls.when(
            value is not None and value not in allowed, f"{option}: {value} is not allowed, {allowed} is"
        )

    @classmethod
    def unless_a(cls, kinds: type | tuple[type, ...], argument: str, value: object, allowed: str) -> None:
        """Refuse an argument of another type; True and False are no numbers."""
        fits = isinstance(value, kinds) and not isinstance(value, bool)
        cls.when(not fits, f"{argument}: {value!r:.80}; allowed: {allowed}")

    @classmethod
    def path_of(cls, argument: str, value: object, allowed: str = "a path") -> Path:
        """The path that somebody gave as an argument."""
        cls.unless_a((str, os.PathLike), argument, value, allowed)
        return Path(value)  # type: ignore[arg-type]


class DataError(InputError):
    """A data file or record that cannot be used as it is."""


class ModelError(InputError):
    """A user's own model failed on records: said without a value, a shape or a number of them."""


def check_memory(what: str, needed: float) -> None:
    """Refuse what would take more bytes than this machine has, before any of them is taken."""
    here = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # no container, or one without a limit
        here = min(here, int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")))
    takes = f"{needed / 2**30:,.1f} GiB of memory, this machine has {here / 2**30:,.1f}"
    InputError.when(needed > here, f"{what} would take {takes}")


def one_line(mistake: BaseException) -> str:
    """Kind and first line of a mistake that somebody else's code made."""
    return ": ".join([type(mistake).__name__, *str(mistake).strip().splitlines()[:1]])


def where(mistake: BaseException) -> str:
    """The kind of a mistake and its place, in a user's code if it passed there; not its text.

    The text of a mistake that was made on records may repeat their values or their number.
    """
    torch = getattr(sys.modules.get("torch"), "__file__", None) or __file__
    libraries = (str(Path(__file__).parent), str(Path(torch).parent))
    passed = [(frame.f_code.co_filename, line) for frame, line in walk_tb(mistake.__traceback__)]
    # The name of code that was made up while it ran could be anything.
    places = [(file, line) for file, line in passed if Path(file).is_file()]
    users = [(file, line) for file, line in places if not file.startswith(libraries)]
    # The name of a user's own class could say anything, too: the nearest above it that is not theirs.
    kind = next(kind for kind in type(mistake).__mro__ if kind.__module__.partition(".")[0] in _OURS)
    return kind.__name__ + "".join(f" at {file}:{line}" for file, line in (users or places)[-1:])
