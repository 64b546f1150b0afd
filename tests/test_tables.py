"""Tables of the documents hold the numbers of the files that they come from, digit by digit."""

from pathlib import Path
from types import ModuleType

import pytest

from benchmark_modules import load

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    return load("tables")


def read(tables: ModuleType) -> dict[Path, str]:
    return {path: path.read_text(encoding="utf-8") for path in tables.documents()}


def test_every_table_of_a_document_is_what_its_file_holds(tables: ModuleType) -> None:
    wrong = [f"{path.relative_to(ROOT)}: {why}" for path, _, why in tables.differing(read(tables))]
    assert not wrong, f"{'; '.join(wrong)}; write them again by: python benchmarks/tables.py"


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("README.md", "| oracle | 94.5 / 93.4", "| oracle | 94.5 / 93.5"),
        ("docs/r-dpcfl.md", "93.7 / 91.8 / 91.2", "93.7 / 91.8 / 91.3"),
        ("docs/r-dpcfl.md", "98 % (z 2.46", "98 % (z 2.45"),
        ("docs/r-dpcfl.md", "of mr-mtl 2.9", "of mr-mtl 2.8"),
        ("docs/rr-cluster.md", "| `dp-fedavg` | 67.0 |", "| `dp-fedavg` | 67.1 |"),
        ("docs/groups.md", "| 83.7 | 0.726 |", "| 83.7 | 0.727 |"),
        ("docs/recipe.md", "| 0.794 | lr 2, clip 1 | 0.792 |", "| 0.794 | lr 2, clip 1 | 0.793 |"),
        ("docs/features.md", "| 4.5 | 13.4 | 17.5 |", "| 4.6 | 13.4 | 17.5 |"),
    ],
)
def test_one_changed_digit_is_found(tables: ModuleType, name: str, before: str, after: str) -> None:
    texts = read(tables)
    assert before in texts[ROOT / name]
    texts[ROOT / name] = texts[ROOT / name].replace(before, after, 1)
    assert [path for path, *_ in tables.differing(texts)] == [ROOT / name]


def test_a_table_that_nobody_shows_is_named(tables: ModuleType) -> None:
    texts = read(tables)
    place = "<!-- table: few-records -->"
    texts[ROOT / "docs/r-dpcfl.md"] = texts[ROOT / "docs/r-dpcfl.md"].replace(place, "")
    assert [why for *_, why in tables.differing(texts)] == ["few-records: is in no document"]
