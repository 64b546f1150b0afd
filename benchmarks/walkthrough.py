"""The walk-through of docs/deployment.md, followed literally: every command as it stands there, anew.

    python benchmarks/walkthrough.py [--write] [--data $COTERIE_DATA] [--out FOLDER]

A server and four sites in network namespaces, each with an address of its own on one bridge, as if they were
five machines; needs Linux, root and iproute2 (`ip`). The commands are read from the document: lines that
begin with the prompt of a machine (`server$`, `va$`, ...) in its section "Four hospitals". `serve` and
`join` go on while the next ones run; the hospitals that the document does not show join by the same command
under their own names. Every command is printed with what it printed; `--write` puts that into the document.
Exit code 1 where a command fails.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
DOCUMENT, SECTION = HERE / "docs" / "deployment.md", "## Four hospitals, from start to finish"
ADDRESSES = {
    "server": "10.77.0.1",
    "cleveland": "10.77.0.11",
    "hungarian": "10.77.0.12",
    "switzerland": "10.77.0.13",
    "va": "10.77.0.14",
}
SITES = tuple(name for name in ADDRESSES if name != "server")
SHOWN = "va"
"""The hospital whose commands stand in the document."""
PROMPT = re.compile(rf"({'|'.join(ADDRESSES)})\$ (.*)")
GOING_ON = ("coterie serve ", "coterie join ")
BESIDE = ("curl ",)
"""What is done while those go on; anything else is done when they have ended."""
SECONDS, LONGEST = 900.0, 200
"""For a command, and letters of a line: longer ones are cut."""


class Networks:
    """Namespaces with an address each, on one bridge; gone when it is closed."""

    def __init__(self) -> None:
        self._mark = f"ct{os.getpid() % 100000}"
        self._stack = ExitStack()
        self._do("link", "add", f"{self._mark}br", "type", "bridge")
        self._stack.callback(self._do, "link", "del", f"{self._mark}br", must=False)
        self._do("link", "set", f"{self._mark}br", "up")

    def __enter__(self) -> "Networks":
        for name, address in ADDRESSES.items():
            self._add(name, address)
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def _add(self, name: str, address: str) -> None:
        space, ours = self.called(name), f"{self._mark}{name[:4]}"
        self._do("netns", "add", space)
        self._stack.callback(self._do, "netns", "del", space, must=False)
        self._do("link", "add", ours, "type", "veth", "peer", "name", "eth0", "netns", space)
        self._do("link", "set", ours, "master", f"{self._mark}br", "up")
        self._do("-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            self._do("-n", space, "link", "set", device, "up")

    def called(self, name: str) -> str:
        return f"{self._mark}-{name}"

    @staticmethod
    def _do(*words: str, must: bool = True) -> None:
        subprocess.run(["ip", *words], check=must, stderr=None if must else subprocess.DEVNULL)


@dataclass
class Command:
    """One command of the document, and what became of it.

    Args:
        lines: as it stands there, prompt and continued lines included.
    """

    where: str
    lines: list[str]
    process: "subprocess.Popen[bytes] | None" = None
    log: Path = field(default_factory=Path)

    @property
    def text(self) -> str:
        first, *more = self.lines
        return " ".join([first.split("$ ", 1)[1], *more]).replace("\\ ", " ")

    def begin(self, networks: Networks, folder: Path, number: int) -> None:
        self.log = folder / f".said-{number}-{self.where}"
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                ["ip", "netns", "exec", networks.called(self.where), "bash", "-c", f"exec {self.text}"],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, "COLUMNS": "100"},
            )

    def said(self) -> list[str]:
        lines = self.log.read_text(errors="replace").rstrip().splitlines()
        return [line.rstrip() if len(line) <= LONGEST else f"{line[: LONGEST - 6]} [...]" for line in lines]

    def wait_for(self, words: str) -> None:
        assert self.process is not None
        until = time.monotonic() + SECONDS
        while words not in self.log.read_text(errors="replace"):
            if self.process.poll() is not None or time.monotonic() > until:
                sys.exit(f"{self.lines[0]}: never said {words!r}: {self.log.read_text()}")
            time.sleep(0.1)

    def finish(self) -> None:
        assert self.process is not None
        if self.process.wait(timeout=SECONDS):
            sys.exit(f"{self.lines[0]}: exit code {self.process.returncode}\n{self.log.read_text()}")


@dataclass
class Block:
    """A block of the document that has commands: from which line to which, and these."""

    first: int
    end: int
    commands: list[Command]

    def anew(self) -> list[str]:
        return [line for each in self.commands for line in (*each.lines, *each.said())]


def blocks_of(lines: list[str]) -> list[Block]:
    """The blocks with commands in the section of the walk-through."""
    begin = lines.index(SECTION)
    end = next(place for place in range(begin + 1, len(lines)) if lines[place].startswith("## "))
    fences = [place for place in range(begin, end) if lines[place].startswith("```")]
    found = []
    for opened, closed in zip(fences[::2], fences[1::2], strict=True):
        commands: list[Command] = []
        continued = False
        for line in lines[opened + 1 : closed]:
            prompt = PROMPT.match(line)
            if prompt is not None:
                commands.append(Command(prompt[1], [line]))
            elif continued:
                commands[-1].lines.append(line)
            continued = bool(commands) and (prompt is not None or continued) and line.endswith("\\")
        if commands:
            found.append(Block(opened + 1, closed, commands))
    return found


def walk(blocks: list[Block], networks: Networks, folder: Path) -> None:
    """Do everything in its order."""
    going_on: list[Command] = []
    for number, each in enumerate(command for block in blocks for command in block.commands):
        if not each.text.startswith((*GOING_ON, *BESIDE)):
            while going_on:
                going_on.pop().finish()
        if each.text.startswith("coterie join "):
            for other in (name for name in SITES if name != each.where):
                lines = [re.sub(rf"\b{each.where}\b", other, line) for line in each.lines]
                going_on.append(Command(other, lines))
                going_on[-1].begin(networks, folder, number)
                print("\n".join(lines), flush=True)
        each.begin(networks, folder, number)
        print("\n".join(each.lines), flush=True)
        if each.text.startswith("coterie serve "):
            each.wait_for("serving on")
        if each.text.startswith(GOING_ON):
            going_on.append(each)
        else:
            each.finish()
            print("\n".join(each.said()), flush=True)
    while going_on:
        going_on.pop().finish()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="put what was printed into the document")
    kept = Path(os.environ.get("COTERIE_DATA", HERE / "data"))
    parser.add_argument("--data", type=Path, default=kept, help="folder that has heart-disease/")
    parser.add_argument("--out", type=Path, help="folder in which everything stays")
    options = parser.parse_args()
    if os.geteuid() != 0 or shutil.which("ip") is None:
        sys.exit("network namespaces need root and iproute2")
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    os.environ["COTERIE_DATA"] = str(options.data.resolve())
    lines = DOCUMENT.read_text().splitlines()
    blocks = blocks_of(lines)
    with tempfile.TemporaryDirectory(prefix="coterie-walk-") as scratch, Networks() as networks:
        folder = (options.out or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("COTERIE_REGISTER", str(folder / "register"))
        shutil.copytree(HERE / "examples" / "heart-disease", folder / "examples" / "heart-disease")
        walk(blocks, networks, folder)
        for block in blocks:
            for each in block.commands:
                if each.text.startswith(GOING_ON):
                    print(f"\n{each.lines[0]}\n" + "\n".join(each.said()))
        if options.write:
            for block in reversed(blocks):
                lines[block.first : block.end] = block.anew()
            DOCUMENT.write_text("\n".join(lines) + "\n")
            print(f"\nwritten: {shlex.quote(str(DOCUMENT))}")


if __name__ == "__main__":
    main()
