"""Folders of data, of runs and of comparisons, with something wrong in them."""

from __future__ import annotations

import functools
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
from case import FIFO, Case, Content
from experiments import HARMLESS, TINY, WILD, Tree, as_yaml, bases, options, put
from hypothesis import strategies as st

DECLARED: Tree = {
    "task": "classification",
    "label": {"column": "y", "classes": ["no", "yes"]},
    "features": [
        {"column": "a", "range": [0, 1]},
        {"column": "b", "range": [-5, 5], "missing": "indicator"},
        {"column": "c", "categories": ["u", "v"]},
    ],
}
OF_PERSONS: Tree = {**DECLARED, "person": "p"}
ARRAYS: Tree = {
    "task": "classification",
    "label": {"classes": 2},
    "features": {"shape": [2], "range": [-5, 5]},
}
HELD: Tree = {
    **TINY,
    "data": {"name": "folder", "path": "d"},
    "federation": {"kind": "natural"},
    "evaluation": {},
}
PERSONS: Tree = {"unit": "person", "records_per_person": 3}
KEYS = options({**TINY, "data": {"name": "digits"}, "model": {"name": "softmax"}})
CELLS = [
    "",
    "nan",
    "inf",
    "-inf",
    "1e999",
    "1e308",
    "x",
    "0x10",
    "1_0",
    " 1",
    "١",
    "=cmd()",
    '"',
    "\r",
    "\0",
    "0",
]
CELLS += ["9" * 400, "0.5", "1", "u", "yes", "-0.0", "é"]
ODD_NAMES = [
    "c9.CSV",
    "c9.parquet/part-0.parquet",
    "x.csv/part.csv",
    ".c9.csv",
    "c9.tsv",
    "c9.csv.gz",
    "a\nb.csv",
]
ODD_NAMES += ["c\udcff.csv", "-c.csv", "c0.parquet", "=cmd.csv", "c 9.csv", "c|9.csv", "<b>.csv", "c9.csv~"]
ODD_NAMES += ["n" * 200 + ".csv", "ö.csv", "c0.csv.csv", "federation.json", "README.md", "sub/c9.csv"]


@functools.cache
def tables(ending: str) -> dict[str, bytes]:
    """A small federation of three clients as a user keeps one: a declaration and a file each."""
    files = {"d/federation.yaml": as_yaml(ARRAYS if ending == "npz" else DECLARED)}
    for number in range(3):
        rng = np.random.default_rng(number)
        a, b, c = rng.uniform(0, 1, 60), rng.uniform(-5, 5, 60), rng.choice(["u", "v"], 60)
        y, p = np.where(a > 0.5, "yes", "no"), 100 * number + np.sort(rng.integers(0, 30, 60))
        buffer = io.BytesIO()
        if ending == "csv":
            rows = [f"{r[0]:.4f},{r[1]:.4f},{r[2]},{r[3]},{r[4]}" for r in zip(a, b, c, y, p, strict=True)]
            buffer.write("\n".join(["a,b,c,y,p", *rows, ""]).encode())
        elif ending == "parquet":
            parquet.write_table(pa.table({"a": a, "b": b, "c": c, "y": y, "p": p}), buffer)
        else:
            np.savez(buffer, x=np.stack([a, b], 1).astype(np.float32), y=(a > 0.5).astype(np.int64))
        files[f"d/c{number}.{ending}"] = buffer.getvalue()
    return files


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """The content with bytes flipped, cut off, repeated or put in."""
    where = draw(st.integers(0, max(len(content) - 1, 0)))
    kind = draw(st.sampled_from(["flip", "flip", "cut", "twice", "insert", "nothing", "garbage"]))
    if kind == "flip" and content:
        changed = bytearray(content)
        changed[where] ^= 1 << draw(st.integers(0, 7))
        return bytes(changed)
    if kind == "cut":
        return content[:where]
    if kind == "twice":
        return content + content
    if kind == "insert":
        return content[:where] + draw(st.binary(min_size=1, max_size=8)) + content[where:]
    return b"" if kind == "nothing" else draw(st.binary(max_size=100))


@st.composite
def data_folders(draw: st.DrawFn) -> Case:
    """A federation of tables or arrays in which one thing is off, planned or trained on."""
    ending = draw(st.sampled_from(["csv", "csv", "parquet", "npz"]))
    files: dict[str, Content] = dict(tables(ending))
    client = f"d/c{draw(st.integers(0, 2))}.{ending}"
    content = tables(ending)[client]
    kind = draw(
        st.sampled_from(["bytes", "cell", "cell", "declaration", "text", "name", "place", "experiment"])
    )
    tree = json.loads(json.dumps(HELD))
    declaration = ARRAYS if ending == "npz" else DECLARED
    if ending != "npz" and draw(st.integers(0, 2)) == 0:
        declaration, tree["privacy"] = OF_PERSONS, dict(PERSONS)
        files["d/federation.yaml"] = as_yaml(declaration)
    if kind == "bytes":
        files[client] = draw(damaged(content))
    elif kind == "cell":
        files[client] = _with_cell(draw, content) if ending == "csv" else _arrays(draw, ending)
    elif kind == "declaration":
        declared = json.loads(json.dumps(declaration))
        change(draw, declared)
        files["d/federation.yaml"] = as_yaml(declared)
    elif kind == "text":
        files["d/federation.yaml"] = draw(damaged(as_yaml(declaration)))
    elif kind == "name":
        files[f"d/{draw(st.sampled_from(ODD_NAMES))}"] = content
    elif kind == "place":
        odd: list[Content] = [FIFO, None, "nowhere", "/dev/zero", "/dev/null", ".", f"c9.{ending}"]
        files[client] = draw(st.sampled_from([*odd, f"c1.{ending}"]))
    else:
        option = draw(st.sampled_from(KEYS))
        put(tree, option.path, draw(st.one_of(st.sampled_from(option.values), HARMLESS)))
    command = draw(
        st.sampled_from([("plan", "e.yaml"), ("plan", "e.yaml"), ("run", "e.yaml", "--out", "out")])
    )
    as_json = ("--json",) if draw(st.booleans()) else ()
    return Case("data", (*command, *as_json), {**files, "e.yaml": as_yaml(tree)})


def _with_cell(draw: st.DrawFn, content: bytes) -> bytes:
    """A table with one cell changed."""
    lines = content.decode().splitlines()
    row = draw(st.integers(0, len(lines) - 1))
    cells = lines[row].split(",")
    cells[draw(st.integers(0, 4))] = draw(st.one_of(st.sampled_from(CELLS), st.text(max_size=6)))
    lines[row] = ",".join(cells)
    return "\n".join([*lines, ""]).encode("utf-8", "surrogatepass")


def _arrays(draw: st.DrawFn, ending: str) -> bytes:
    """Columns or arrays of other shapes and kinds, or a header that claims more rows than there are."""
    buffer = io.BytesIO()
    if ending == "parquet":
        column = draw(st.sampled_from(["a", "b", "c", "y", "p", "z"]))
        kind = draw(
            st.sampled_from([pa.int64(), pa.float64(), pa.string(), pa.bool_(), pa.date32(), pa.null()])
        )
        table = parquet.read_table(io.BytesIO(tables("parquet")["d/c0.parquet"]))
        empty = pa.nulls(table.num_rows, kind)
        place = table.schema.get_field_index(column)
        table = table.append_column(column, empty) if place < 0 else table.set_column(place, column, empty)
        parquet.write_table(table, buffer)
        return buffer.getvalue()
    kinds = ["f4", "f8", "i8", "u1", "?", "c8", "U3", "O", "f2", "M8[s]"]
    if draw(st.booleans()):
        rows, shape = draw(st.sampled_from([0, 1, 30, 60])), draw(st.lists(st.integers(0, 3), max_size=3))
        x = np.zeros([rows, *shape], draw(st.sampled_from(kinds)))
        np.savez(buffer, x=x, y=np.zeros(rows, draw(st.sampled_from(kinds))))
        return buffer.getvalue()
    np.savez(buffer, x=np.zeros((60, 2), "f4"), y=np.zeros(60, "i8"))
    claimed = draw(
        st.sampled_from(["(10**9", "(1e9,2)", "(99999,", "(61, 2)", "(59, 2)", "(0, 2) ", "(60,-2)"])
    )
    return buffer.getvalue().replace(b"(60, 2)", claimed.encode().ljust(7)[:7])


def change(draw: st.DrawFn, tree: Any) -> None:
    """One value somewhere inside, replaced or removed."""
    while True:
        keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
        if not keys:
            return
        key = draw(st.sampled_from(keys))
        inner = tree[key]
        if isinstance(inner, dict | list) and draw(st.integers(0, 3)):
            tree = inner
            continue
        if draw(st.integers(0, 4)) == 0:
            del tree[key]
        else:
            tree[key] = draw(WILD)
        return


READERS = [
    ("verify",),
    ("verify", "--json"),
    ("report",),
    ("report", "--public"),
    ("report", "--figures", "f"),
]
RUN_READERS = [*READERS, ("run", "--resume", "--out"), ("run", "--resume", "--json", "--out")]
SWEEP_READERS = [*READERS, ("compare", "s.yaml", "--resume", "--out")]


@st.composite
def written_folders(draw: st.DrawFn, folder: Path) -> Case:
    """A finished or unfinished run, or a comparison, with one of its files changed, and a command on it."""
    compared = (folder / "sweep.yaml").exists()
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    files: dict[str, Content] = {}
    if draw(st.integers(0, 9)):
        name = draw(st.sampled_from(names))
        files[f"{folder.name}/{name}"] = draw(_changed(name, (folder / name).read_bytes()))
    command = draw(st.sampled_from(SWEEP_READERS if compared else RUN_READERS))
    command = (command[0], folder.name, *command[1:]) if command[-1] == "f" else (*command, folder.name)
    return Case("comparison" if compared else "run folder", command, files, folder.parent)


UNPROTECTED = ("timing.jsonl", "participation.jsonl")
"""Files that no claim depends on, of which nobody keeps a digest; what stands beside a cell is like them."""


@st.composite
def flips(draw: st.DrawFn, folder: Path) -> Case:
    """A run or a comparison with one bit of one file flipped: `verify` has to see it."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    sealed = [path for path in files if path.name not in UNPROTECTED and path.parent.name != "cells"]
    path = draw(st.sampled_from(sealed))
    content = bytearray(path.read_bytes())
    content[draw(st.integers(0, len(content) - 1))] ^= 1 << draw(st.integers(0, 7))
    name = f"{folder.name}/{path.relative_to(folder)}"
    return Case("flip", ("verify", folder.name), {name: bytes(content)}, folder.parent, broken=True)


@st.composite
def _changed(draw: st.DrawFn, name: str, content: bytes) -> Content:
    """A file of a run with bytes or a value changed, or something else in its place."""
    kind = draw(st.sampled_from(["bytes", "bytes", "value", "value", "place"]))
    if kind == "value" and name.endswith((".json", ".jsonl")) and content:
        lines = content.decode().splitlines() if name.endswith(".jsonl") else [content.decode()]
        place = draw(st.integers(0, len(lines) - 1))
        tree = json.loads(lines[place])
        change(draw, tree)
        lines[place] = json.dumps(tree)
        return ("\n".join(lines) + "\n").encode("utf-8", "surrogatepass")
    if kind == "place":
        return draw(st.sampled_from([None, "nowhere", ".", FIFO]))
    return draw(damaged(content))


@st.composite
def sweeps(draw: st.DrawFn) -> Case:
    """A grid of one or two tiny runs, with a change in its base, grid or parts."""
    base = json.loads(json.dumps({**TINY, "federation": {"sizes": [2], "records_per_client": 40}}))
    tree: Tree = {"base": base, "grid": {"algorithm.name": ["local"]}}
    known = KEYS
    kind = draw(st.sampled_from(["base", "grid", "grid", "cells", "parts", "anything", "nothing"]))
    if kind == "base":
        option = draw(st.sampled_from(known))
        put(base, option.path, draw(st.one_of(st.sampled_from(option.values), HARMLESS)))
    elif kind == "grid":
        option = draw(st.sampled_from(known))
        tree["grid"][option.key] = draw(
            st.lists(st.one_of(st.sampled_from(option.values), HARMLESS), max_size=2)
        )
    elif kind == "cells":
        many = draw(st.sampled_from([10, 1000, 10**6]))
        tree["grid"]["seeds.simulation"] = list(range(min(many, 1000)))
        tree["grid"]["privacy.epsilon"] = list(range(1, 1 + many // 1000)) or draw(HARMLESS)
        tree["grid"]["nothing.here"] = [1]
    elif kind == "parts":
        part = {"label": draw(HARMLESS), "grid": tree.pop("grid")}
        if draw(st.booleans()):
            part["set"] = {draw(st.sampled_from(["algorithm.name", "privacy.clip", "x"])): draw(HARMLESS)}
        tree["parts"] = [part] * draw(st.integers(0, 2))
    elif kind == "anything":
        change(draw, tree)
    as_json = ("--json",) if draw(st.booleans()) else ()
    arguments = ("compare", "s.yaml", "--out", "out", "--workers", "1", *as_json)
    return Case("sweep", arguments, {"s.yaml": as_yaml(tree)})


@st.composite
def full_disks(draw: st.DrawFn, written: Path) -> Case:
    """A command that works, on a disk that has room for small files only."""
    room = 4_000 + draw(st.integers(0, 400_000)) // draw(st.sampled_from([1, 4, 20]))
    tree = draw(bases())
    commands = [("run", "e.yaml", "--out", "out", *json) for json in ((), ("--json",))] * 3
    commands += [("compare", "s.yaml", "--out", "new", "--workers", "1"), ("report", "run", "--figures", "f")]
    commands += [("plan", "e.yaml"), ("verify", "run"), ("run", "--resume", "--out", "run")]
    command = draw(st.sampled_from(commands))
    base = written / ("unfinished" if "--resume" in command else "finished")
    files = {
        "e.yaml": as_yaml(tree),
        "s.yaml": as_yaml({"base": TINY, "grid": {"algorithm.name": ["local"]}}),
    }
    return Case("full disk", command, files, base, room=room)
