"""Tables of the documents from the files that hold their numbers.

python benchmarks/tables.py            # writes them again where a number differs
python benchmarks/tables.py --check    # only says where

A document has a table between lines such as

    <!-- table: mnist-budgets -->
    <!-- end -->

and `docs/tables.yaml` says under that name what stands in it. Our numbers come from the results that the
package keeps (`src/coterie/reproduce/results`), printed ones from `published` beside them, others from
`benchmarks/results`.

    mnist-budgets:
      corner: MNIST                        # heading of the first column
      cell: "{mean} / {minority}"          # figures of a row, by their keys
      columns:                             # what a column adds to each row
        epsilon 2: {epsilon: 2}
      rows:
        r-dpcfl: {results: rdpcfl-mnist-paper, row: r-dpcfl}
        printed: {printed: rc-dpfl-preprint, data: mnist, shift: rotation, row: rc-dpfl, cell: "*{mean}*"}
        told: {text: {epsilon 2: words}}   # cells that are words, with numbers as in a sentence

A cell may also come from a row of a file of `benchmarks/results` (`file: h200.json`): the first one that
has the values which the cell names under the file's own columns. A table straight from such a file has
`csv`, `by` (the column that names rows), `columns` (heading: format with names of the file's columns),
`where` (which rows) and, where rows of the file are spread over columns, `across`.

`sentences` are texts that a document must contain, with numbers in braces:

    {rdpcfl-mnist-paper; r-dpcfl; 3; mean}                    # ours, as documents show it
    {rc-dpfl-preprint; cifar10; rotation; rc-dpfl; 3; mean}   # what a publication prints
    {h200.json; variant=cnn peer: Opacus hooks loop; samples_per_second}    # of one row of a kept file
    {mean of client-clusters.csv; table=equal; accuracy[2] | .1%}    # of several: mean, sum, count
    {cpu.json#limits; name=matrix product, 1 threads; value | .0f}    # of another part than its rows
    {gpu-cnn; samples_per_second / gpu-cnn-plain; samples_per_second | .1f}    # + - * / ( ), in turn

`short` has names for the beginnings of such references, as in the last line.

`passages` are parts of documents, from one text to another, in which every number with a point or a comma
for thousands must stand in a table or a sentence, or among the `others` that the passage names: settings,
and what was measured and kept in no file.
"""

import argparse
import csv
import json
import math
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from coterie.files import parse_yaml, write_text
from coterie.reproduce.printed import read_publication
from coterie.reproduce.runs import QUANTITIES
from coterie.reproduce.stored import RESULTS, StoredTable
from coterie.table import NONE

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "benchmarks" / "results"
SPECIFIED = ROOT / "docs" / "tables.yaml"
END = "<!-- end -->"
FIGURES = {quantity.key: quantity for quantity in QUANTITIES}
NUMBER = re.compile(r"(?<![\w.,])\d+(?:,\d{3})*(?:\.\d+)?(?![\w]|[.,]\d)")
OPERATIONS = {"+": float.__add__, "-": float.__sub__, "*": float.__mul__, "/": float.__truediv__}
MANY: dict[str, Callable[[Sequence[float]], float]] = {"mean": statistics.mean, "sum": sum, "count": len}


class Several(list[float]):
    """Numbers of one cell, which are formatted alike."""

    def __format__(self, form: str) -> str:
        return " / ".join(f"{each:{form}}" for each in self)


@cache
def stored(name: str) -> StoredTable:
    reproduction, _, kind = name.rpartition("-")
    return StoredTable.read(RESULTS / f"{name}.csv", reproduction, kind)


publication_of = cache(read_publication)


@cache
def content() -> dict[str, Any]:
    """What docs/tables.yaml says."""
    specified: dict[str, Any] = parse_yaml(SPECIFIED.read_text(encoding="utf-8"))
    return specified


@cache
def kept(name: str) -> list[dict[str, Any]]:
    """The rows of a file of benchmarks or of results; of another part of a JSON file where one is named."""
    file, _, part = name.partition("#")
    path = KEPT / file if (KEPT / file).exists() else RESULTS / file
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        rows = json.loads(text)[part or "rows"]
        if isinstance(rows, dict):
            rows = [{"name": key, "value": value} for key, value in rows.items()]
        return list(rows)
    return [{key: number(value) for key, value in row.items()} for row in csv.DictReader(text.splitlines())]


def rows_of(name: str, conditions: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Those with these values in columns that the file has."""
    rows = kept(name)
    known = {
        key: str(value) for key, value in conditions.items() if key in {key for row in rows for key in row}
    }
    return [row for row in rows if all(str(row.get(key)) == value for key, value in known.items())]


def figures(spec: Mapping[str, Any]) -> dict[str, Any] | None:
    """The numbers of one cell by their keys, as documents show them; None where there are none."""
    if "file" in spec:
        return next(iter(rows_of(spec["file"], spec)), None)
    if "printed" in spec:
        publication, epsilon = publication_of(spec["printed"]), float(spec["epsilon"])
        found = {
            key: publication.printed(spec["data"], spec["shift"], spec["row"], key, epsilon)
            for key in FIGURES
        }
        known = {key: each.mean for key, each in found.items() if each is not None}
        return {key: FIGURES[key].text(mean) for key, mean in known.items() if mean is not None} or None
    for row in stored(spec["results"]).rows:
        if row.row == spec["row"] and ("epsilon" not in spec or row.epsilon == float(spec["epsilon"])):
            texts = {key: FIGURES[key].text(number.ours) for key, number in row.numbers.items()}
            return {**texts, "noise": f"{float(row.noise):.3f}"} if row.noise else texts
    return None


def pivot(spec: Mapping[str, Any]) -> list[list[str]]:
    """Rows of results, a column for each budget, data set or figure."""
    lines = [[spec["corner"], *spec["columns"]]]
    for label, row in spec["rows"].items():
        cells = []
        for heading, column in spec["columns"].items():
            own = {"cell": spec.get("cell"), **column, **row}
            if "kind" in row:
                own["results"] = own["results"].rpartition("-")[0] + f"-{row['kind']}"
            told = row.get("text", {}).get(heading)
            known = figures(own) if told is None else None
            text = own["cell"].format(**known) if known else own.get("none", NONE)
            cells.append(text if told is None else sentence(str(told)))
        lines.append([sentence(label), *map(str, cells)])
    return lines


def straight(spec: Mapping[str, Any]) -> list[list[str]]:
    """Columns of a file, or its rows spread over columns."""
    rows, by, across = rows_of(spec["csv"], spec.get("where", {})), spec["by"], spec.get("across")
    if across is None:
        head = [spec["corner"], *spec["columns"]]
        forms = list(spec["columns"].values())
        told = ([form.format_map(row).replace("%", "") for form in forms] for row in rows)
        return [head, *([str(row[by]), *cells] for row, cells in zip(rows, told, strict=True))]
    places = list(dict.fromkeys(row[across] for row in rows))
    names = list(dict.fromkeys(row[by] for row in rows))
    known = {(row[by], row[across]): spec["cell"].format_map(row).replace("%", " %") for row in rows}
    head = [spec["corner"], *(spec["heading"].format(place) for place in places)]
    return [head, *([str(name), *(known[name, place] for place in places)] for name in names)]


def number(text: str) -> float | str | Several:
    """A number, or several, where a format may want them; whole ones stay as they are written."""
    if text == "-":
        return NONE
    if re.fullmatch(r"\d\.\d+( \d\.\d+)+", text):
        return Several(map(float, text.split()))
    try:
        return text if re.fullmatch(r"-?\d+", text) else float(text)
    except ValueError:
        return text


def render(spec: Mapping[str, Any]) -> str:
    lines = straight(spec) if "csv" in spec else pivot(spec)
    rows = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


def sentence(text: str) -> str:
    """With its numbers."""

    def found(match: re.Match[str]) -> str:
        expression, _, form = match[1].partition(" | ")
        value, shown = calculated(expression)
        if form.endswith("%"):
            return f"{100 * value:{form[:-1]}f}"
        return f"{value:{form}}" if form else shown

    return re.sub(r"\{([^}]*)\}", found, text)


def calculated(expression: str) -> tuple[float, str]:
    """What references come to, those in brackets first, and how documents show it if there is only one."""
    plain = re.sub(r"\(([^()]+ [-+*/] [^()]+)\)", lambda inside: repr(calculated(inside[1])[0]), expression)
    first, *rest = re.split(r" ([-+*/]) ", plain)
    value, shown = reference(first)
    for operation, other in zip(rest[::2], rest[1::2], strict=True):
        value = OPERATIONS[operation](value, reference(other)[0])
    return value, shown


def reference(text: str) -> tuple[float, str]:
    """A number of a file, and how documents show it."""
    begin, _, end = text.partition("; ")
    name, *parts = f"{content()['short'].get(begin, begin)}; {end}".removesuffix("; ").split("; ")
    if not parts:
        return float(name), name
    if "." in name:
        value = of_file(name, parts)
        return value, f"{value:,.0f}" if value == int(value) else str(value)
    *at, key = parts
    if (RESULTS / f"{name}.csv").exists():
        own: dict[str, str] = {"results": name, **dict(zip(("row", "epsilon"), at, strict=False))}
        row = next(each for each in stored(name).rows if (each.row, each.epsilon) == _place(own))
        exact = row.numbers[key].ours if key in FIGURES else float(row.noise)
    else:
        own = {"printed": name, **dict(zip(("data", "shift", "row", "epsilon"), at, strict=True))}
        printed = publication_of(name).printed(
            own["data"], own["shift"], own["row"], key, float(own["epsilon"])
        )
        exact = printed.mean if printed and printed.mean is not None else math.nan
    return exact, (figures(own) or {})[key]


def _place(own: Mapping[str, str]) -> tuple[str, float | None]:
    return own["row"], float(own["epsilon"]) if "epsilon" in own else None


def of_file(name: str, parts: Sequence[str]) -> float:
    """A figure of the row that fits, or of all that do."""
    how, _, file = name.rpartition(" of ")
    *conditions, figure = parts if how != "count" else [*parts, ""]
    rows = rows_of(file, dict(each.split("=", 1) for each in conditions))
    if not rows or not (how or len(rows) == 1):
        raise ValueError(f"{name}; {'; '.join(parts)}: {len(rows)} rows fit")
    numbers = [inner(row, figure) if figure else 1.0 for row in rows]
    return float(MANY[how](numbers)) if how else numbers[0]


def inner(row: Mapping[str, Any], figure: str) -> float:
    """A value, or of several in one: the one at a place, or the sum of what lines of that name begin with."""
    name, _, place = figure.partition("[")
    value, place = row[name], place.removesuffix("]")
    if isinstance(value, Several):
        return value[int(place)]
    if isinstance(value, list):
        return sum(float(line.split()[0]) for line in value if place in line)
    return float(value.split()[0] if isinstance(value, str) else value)


def unheld(text: str, passage: Mapping[str, Any], sentences: Sequence[str]) -> list[str]:
    """Numbers of a passage that stand in no table and no sentence, and that it does not name."""
    _, start, rest = text.partition(passage["from"])
    inside, end, _ = rest.partition(passage["to"])
    if not start or not end:
        return [f"no passage from '{passage['from']}' to '{passage['to']}'"]
    written_by_commands = rf"<!-- (?:table|coterie reproduce)\b[^>]*-->.*?{END}"
    inside = re.sub(written_by_commands, "", start + inside, flags=re.DOTALL)
    inside = " ".join(inside.split())
    for each in sentences:
        inside = inside.replace(each, " ")
    inside = re.sub(r"`[^`]*`|\]\([^)]*\)|<!--.*?-->", " ", inside)
    found = [number for number in NUMBER.findall(inside) if "." in number or "," in number]
    return [number for number in found if number not in map(str, passage.get("others", ()))]


def documents() -> list[Path]:
    return [
        ROOT / "README.md",
        ROOT / "CHANGELOG.md",
        *sorted(ROOT.glob("docs/*.md")),
        ROOT / "benchmarks" / "README.md",
    ]


def written(text: str, specs: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The text with every table as its file has it, and the names of its tables."""
    names = re.findall(r"<!-- table: ([\w-]+) -->", text)
    for name in names:
        before, start, rest = text.partition(f"<!-- table: {name} -->")
        _, end, after = rest.partition(END)
        if name not in specs or not end:
            raise ValueError(f"{name}: is not in docs/tables.yaml, or has no '{END}'")
        text = f"{before}{start}\n{render(specs[name])}\n{end}{after}"
    return text, names


def differing(texts: Mapping[Path, str]) -> Iterator[tuple[Path, str, str]]:
    """Documents that show other numbers than the files: what they should be, and why."""
    specified = content()
    used: set[str] = set()
    for path, text in texts.items():
        right, names = written(text, specified["tables"])
        used |= set(names)
        if right != text:
            yield path, right, "a table differs from its file"
        name = path.relative_to(ROOT).as_posix()
        sentences = [" ".join(sentence(each).split()) for each in specified["sentences"].get(name, ())]
        for wanted in sentences:
            if wanted not in " ".join(text.split()):
                yield path, "", f"does not say: {wanted}"
        for passage in specified["passages"].get(name, ()):
            for unknown in unheld(text, passage, sentences):
                yield path, "", f"'{passage['from']}': no file is named for {unknown}"
    for name in sorted(set(specified["tables"]) - used):
        yield SPECIFIED, "", f"{name}: is in no document"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    found = list(differing({path: path.read_text(encoding="utf-8") for path in documents()}))
    for path, right, why in found:
        print(f"{path.relative_to(ROOT)}: {why}")
        if right and not check:
            write_text(path, right)
    raise SystemExit(1 if found and check else 0)


if __name__ == "__main__":
    main()
