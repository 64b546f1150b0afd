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
        told: {text: {epsilon 2: words}}   # cells that are words

A table straight from a file of `benchmarks/results` has `csv`, `by` (the column that names rows), `columns`
(heading: format with names of the file's columns) and, where rows of the file are spread over columns,
`across`. `sentences` are texts that a document must contain, with numbers such as
{rdpcfl-mnist-paper:r-dpcfl:3:mean}.
"""

import argparse
import csv
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from coterie.files import parse_yaml, write_text
from coterie.reproduce.printed import read_publication
from coterie.reproduce.runs import QUANTITIES
from coterie.reproduce.stored import RESULTS, StoredTable
from coterie.table import NONE

ROOT = Path(__file__).resolve().parents[1]
SPECIFIED = ROOT / "docs" / "tables.yaml"
END = "<!-- end -->"
FIGURES = {quantity.key: quantity for quantity in QUANTITIES}


@cache
def stored(name: str) -> StoredTable:
    reproduction, _, kind = name.rpartition("-")
    return StoredTable.read(RESULTS / f"{name}.csv", reproduction, kind)


publication_of = cache(read_publication)


def figures(spec: Mapping[str, Any]) -> dict[str, str] | None:
    """The numbers of one cell by their keys, as documents show them; None where there are none."""
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
            cells.append(text if told is None else told)
        lines.append([label, *map(str, cells)])
    return lines


def straight(spec: Mapping[str, Any]) -> list[list[str]]:
    """Columns of a file, or its rows spread over columns."""
    with open(ROOT / spec["csv"], encoding="utf-8", newline="") as file:
        rows = [{key: number(value) for key, value in line.items()} for line in csv.DictReader(file)]
    by, across = spec["by"], spec.get("across")
    if across is None:
        head = [spec["corner"], *spec["columns"]]
        forms = list(spec["columns"].values())
        return [head, *([str(row[by]), *(form.format_map(row) for form in forms)] for row in rows)]
    places = list(dict.fromkeys(row[across] for row in rows))
    names = list(dict.fromkeys(row[by] for row in rows))
    known = {(row[by], row[across]): spec["cell"].format_map(row).replace("%", " %") for row in rows}
    head = [spec["corner"], *(spec["heading"].format(place) for place in places)]
    return [head, *([str(name), *(known[name, place] for place in places)] for name in names)]


def number(text: str) -> float | str:
    """A number where a format may want one; whole ones stay as they are written."""
    if text == "-":
        return NONE
    try:
        return text if re.fullmatch(r"-?\d+", text) else float(text)
    except ValueError:
        return text


def render(spec: Mapping[str, Any]) -> str:
    lines = straight(spec) if "csv" in spec else pivot(spec)
    rows = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


def sentence(text: str) -> str:
    """With its numbers, which are called file:row:epsilon:figure, or file:row:figure."""

    def found(match: re.Match[str]) -> str:
        name, row, *epsilon, figure = match[1].split(":")
        own = {"results": name, "row": row, **({"epsilon": epsilon[0]} if epsilon else {})}
        return (figures(own) or {})[figure]

    return re.sub(r"\{([^}]*)\}", found, text)


def documents() -> list[Path]:
    return [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), ROOT / "benchmarks" / "README.md"]


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
    content = parse_yaml(SPECIFIED.read_text(encoding="utf-8"))
    used: set[str] = set()
    for path, text in texts.items():
        right, names = written(text, content["tables"])
        used |= set(names)
        if right != text:
            yield path, right, "a table differs from its file"
        for wanted in content.get("sentences", {}).get(path.relative_to(ROOT).as_posix(), ()):
            if " ".join(sentence(wanted).split()) not in " ".join(text.split()):
                yield path, "", f"does not say: {sentence(wanted)}"
    for name in sorted(set(content["tables"]) - used):
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
