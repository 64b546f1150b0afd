"""Execute notebooks from the top, each in an empty folder, and write what came of them as pages.

    python docs/site/execute.py build/notebooks docs/notebooks/*.ipynb

Notebooks are kept without outputs. A cell that fails, or a notebook that takes longer than it may, fails this
and is named; nothing is written of a notebook that failed.
"""

import os
import re
import resource
import sys
import tempfile
import textwrap
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError
from nbconvert import MarkdownExporter
from traitlets.config import Config

LIMIT = 120
"""Seconds of one processor that a notebook may take with all its processes: what a clock says also depends on
what else the machine does."""
PATIENCE = 900
"""Seconds by the clock after which a cell is taken to hang."""
LONG, WIDTH = 110, 88
ANSI = re.compile(r"\x1b\[[0-9;]*m")


def execute(source: Path, target: Path) -> float:
    """Write the page, its figures and the notebook with outputs; return how long that took."""
    notebook = nbformat.read(source, as_version=4)
    before = processor_seconds()
    with tempfile.TemporaryDirectory() as empty, tempfile.TemporaryDirectory() as sockets:
        # Over sockets that are files, which nobody else on the machine can reach.
        kernel = Config(KernelManager={"transport": "ipc", "ip": f"{sockets}/kernel"})
        place = {"metadata": {"path": empty}}
        os.environ["COTERIE_REGISTER"] = f"{sockets}/register"  # of this notebook alone, in nobody's home
        client = NotebookClient(
            notebook, timeout=PATIENCE, resources=place, config=kernel, coalesce_streams=True
        )
        client.execute()
    seconds = processor_seconds() - before
    if seconds > LIMIT:
        raise TimeoutError(f"took {seconds:.0f} s of processor time; allowed: {LIMIT}")
    target.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, target / source.name)
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            if output.output_type == "stream":
                output.text = "\n".join(map(wrapped, ANSI.sub("", output.text).split("\n")))
    exporter = MarkdownExporter()
    figures = f"{source.stem}-figures"
    text, made = exporter.from_notebook_node(
        notebook, resources={"output_files_dir": figures, "unique_key": source.stem}
    )
    heading, _, rest = text.lstrip().partition("\n")
    link = f'[Download this notebook, executed]({source.name} "with its outputs")'
    download = f"{link}; here it took {seconds:.0f} s of one processor."
    (target / figures).mkdir(exist_ok=True)
    for name, content in made["outputs"].items():
        (target / name).write_bytes(content)
    (target / f"{source.stem}.md").write_text(
        f"{heading}\n\n{download}\n{ANSI.sub('', rest)}", encoding="utf-8"
    )
    return seconds


def wrapped(line: str) -> str:
    """A printed sentence that is longer than a page is wide, in several lines; a table stays as it is."""
    return textwrap.fill(line, WIDTH) if len(line) > LONG and "│" not in line else line


def processor_seconds() -> float:
    """What all processes took that ended by now and were begun here."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main(target: Path, sources: list[Path]) -> int:
    # `coterie` in a notebook's shell is the one of this environment.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for source in sources:
        try:
            print(f"{source}: {execute(source, target):.0f} s of one processor", flush=True)
        except (CellExecutionError, CellTimeoutError, TimeoutError) as failure:
            print(f"{source}: {ANSI.sub('', str(failure))}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]]))
