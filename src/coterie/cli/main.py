"""`coterie`: which commands there are, and how mistakes are reported.

To add a command, write `cli/NAME.py` with a function `NAME` (or, for a command with parts, a Typer called
`NAME_app`) and register it in `COMMANDS`; the tests of all commands then ask for its cases. What does the
work is imported in the function, so that help needs none of it.
"""

import errno
import itertools
import os
import re
import signal
import sys
import threading
from importlib import import_module
from inspect import unwrap
from typing import Annotated, Any, NoReturn, get_type_hints

import typer
from typer.core import TyperCommand

from coterie import __version__, notices

COMMANDS = {
    "run": "Train under differential privacy, find the clusters, print the guarantee, write a report.",
    "init": "Turn a table into a federation: a file per client, what is public about it, an experiment.",
    "compare": "Run a grid of experiments and put them side by side.",
    "reproduce": "Run a published experiment and put its printed figures beside ours.",
    "plan": "What an experiment will cost, release by release; budget to noise and noise to budget.",
    "leakage": "Who can learn how much about whom in overlapping groups, and what would make it less.",
    "verify": "Check that every file is as it was written and that epsilon follows from what was charged.",
    "audit": "Attack every release of a plan through the engine that runs: is its epsilon contradicted?",
    "report": "Write the self-contained HTML report of a finished run, comparison or reproduction anew.",
    "predict": "What the models of a finished run say of new records, preprocessing included.",
    "export": "Write the models of a finished run for other programs, with a signature and a card.",
    "card": "What the privacy claim of a run must state, filled in: to read, as JSON, or for a registry.",
    "budget": "What records have paid in all experiments on them, and the most that they may.",
    "assign": "Let a newcomer choose its cluster by its own records, privately; every choice is charged.",
    "bench": "Measure this machine: ours against the peers that are installed, on the same work in one run.",
    "serve": "Serve an experiment to sites that keep their records, ledgers and noise to themselves "
    "(over Flower).",
    "join": "Take part with the records of one folder, spending at most what is allowed here (over Flower).",
    "keys": "Make a test authority, the server's certificate and sites' keys, or one site's own pair.",
}
"""What each command does, in the line that `coterie --help` prints."""

app = typer.Typer(
    name="coterie",
    help="Differentially private federated learning in clusters and groups, with guarantees that hold.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def load(name: str) -> typer.Typer:
    """A command from the module of its name."""
    module = import_module(f"coterie.cli.{name}")
    parts: typer.Typer | None = getattr(module, f"{name}_app", None)
    if parts is not None:
        return parts
    alone = typer.Typer(add_completion=False)
    alone.command(name, help=COMMANDS[name])(getattr(module, name))
    return alone


def _parts(command: Any) -> list[Any]:
    """The commands that one has inside, or itself."""
    return list(getattr(command, "commands", {"": command}).values())


def command_of(name: str) -> Any:
    """The command itself, every argument of it described."""
    whole = typer.main.get_command(load(name))
    for part in _parts(whole):
        told = get_type_hints(unwrap(part.callback), include_extras=True) if part.callback else {}
        for parameter in part.params:
            # Some versions of click forget what typer 0.20, which Flower asks for, says of an argument.
            if getattr(parameter, "help", None) is None and parameter.name in told:
                (said,) = told[parameter.name].__metadata__[:1]
                parameter.help = said.help
    return whole


class LazyCommand(TyperCommand):
    """A command whose module is imported when it is called: `coterie --help` needs none of them."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        command = command_of(self.name or "")
        _refuse_options_as_values(command, args)
        return command.make_context(info_name, args, parent=parent, **extra)


def _refuse_options_as_values(command: Any, arguments: list[str]) -> None:
    """Refuse `--out --json`: the value was forgotten, and the parser would take the next option for it."""
    options = [
        option for part in _parts(command) for option in part.params if option.param_type_name == "option"
    ]
    names = {"--help", *(name for option in options for name in (*option.opts, *option.secondary_opts))}
    valued = {name for option in options if not option.is_flag and not option.count for name in option.opts}
    plain = arguments[: arguments.index("--")] if "--" in arguments else arguments
    for name, value in itertools.pairwise(plain):
        if name in valued and value in names:
            raise _UsageError(
                f"{name} needs a value, and {value} after it is an option ({name}={value} if it is meant)"
            )


for _name, _help in COMMANDS.items():
    app.command(_name, help=_help, cls=LazyCommand)(lambda: None)


def _version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit()


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of every command."""


class Ended(BaseException):
    """Somebody asked this process to end; not an error, so that nobody takes it for one on its way up."""


def _end(signum: int, frame: object) -> None:
    raise Ended


_UsageError: type[Exception] = typer.BadParameter.__bases__[0]
"""What typer raises for an unknown command or option; in some versions click's, in others its own copy."""


def _usage_line(mistake: Exception) -> str:
    """A mistake on the command line in one line; empty where typer has printed the help instead."""
    text = " ".join(getattr(mistake, "format_message", lambda: str(mistake))().split()).rstrip(".")
    if not text:
        return ""
    text = re.sub(r"( Did you mean [^?]*\?)\1+", r"\1", text)  # typer and click both have an idea
    command = getattr(getattr(mistake, "ctx", None), "command_path", "coterie")
    return f"{text}; {command} --help says what is allowed"


_NAMES = {errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENOENT, errno.EACCES}
"""What the system says of a path that cannot be one, or is not ours; a full disk is nobody's mistake."""


def _explain(mistake: Exception) -> tuple[str, int]:
    """A mistake in one line, and the exit code of its kind; raised again for whoever looks for its place."""
    if isinstance(mistake, _UsageError):
        return _usage_line(mistake), 2
    from coterie.errors import CoterieError  # takes a second to import, which help must not

    debug = "COTERIE_DEBUG" in os.environ
    if isinstance(mistake, CoterieError):
        if debug and mistake.__cause__ is not None:
            raise mistake
        return " ".join(str(mistake).split()), mistake.exit_code
    if isinstance(mistake, OSError):
        printing = "standard output" if mistake.errno in (errno.ENOSPC, errno.EPIPE) else None
        where = mistake.filename or printing  # whoever writes into a file names it
        code = 2 if mistake.errno in _NAMES else 1
        return (f"{where}: " if where else "") + (mistake.strerror or str(mistake)), code
    if debug:
        raise mistake
    reason = " ".join(str(mistake).split())[:300]
    return f"{type(mistake).__name__}: {reason} (COTERIE_DEBUG=1 shows where)", 1


def _unprinted() -> str:
    """Why what was printed did not arrive; empty where it did."""
    try:
        sys.stdout.flush()
    except OSError as mistake:
        # Python would say so once more on its way out.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return f"standard output: {mistake.strerror}"
    return ""


def _leave(line: str) -> NoReturn:
    """End now: to take all apart that was imported takes seconds, and whoever held something let go of it."""
    print(line, file=sys.stderr, flush=True)
    _unprinted()
    os._exit(1)


def main() -> None:
    """Entry point: a mistake is one line on stderr and the exit code of its kind."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _end)
    line = ""
    notices.hold()
    try:
        code = app(prog_name="coterie", standalone_mode=False)
        notices.release()
    except Exception as mistake:
        notices.release(said=False)
        line, code = _explain(mistake)
    except (KeyboardInterrupt, Ended):
        notices.release()
        _leave("stopped; --resume continues")
    if unprinted := _unprinted():
        line, code = unprinted, 1
    if line:
        readable = line.encode("utf-8", "backslashreplace").decode()  # a path may be no text
        print(f"error: {readable}", file=sys.stderr)
    sys.exit(code if isinstance(code, int) else 0)
