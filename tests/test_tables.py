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
        ("README.md", "1,166,907 sample", "1,166,917 sample"),
        ("README.md", "in 30 of 30 runs", "in 29 of 30 runs"),
        ("README.md", "prints 29.9 / 27.9", "prints 29.9 / 27.8"),
        ("CHANGELOG.md", "9.4 million sample", "9.3 million sample"),
        ("CHANGELOG.md", "39.3 % with clusters", "39.4 % with clusters"),
        ("docs/r-dpcfl.md", "0.76 for the minority", "0.67 for the minority"),
        ("docs/r-dpcfl.md", "2.0 and 0.16 at epsilon 10", "2.0 and 0.15 at epsilon 10"),
        ("docs/rr-cluster.md", "needs 3.7 times", "needs 3.8 times"),
        ("docs/rr-cluster.md", "with `gmfsc` 50.0", "with `gmfsc` 51.0"),
        ("docs/rr-cluster.md", "| 81.0 / 78.4 / 64.1 / 64.7 |", "| 81.0 / 78.4 / 64.1 / 64.8 |"),
        ("docs/features.md", "72,358 for Opacus", "72,385 for Opacus"),
        ("benchmarks/README.md", "| 16,752 |", "| 16,725 |"),
        ("benchmarks/README.md", "matrix units: 8) | 56 | 11 % |", "matrix units: 8) | 57 | 11 % |"),
        ("benchmarks/README.md", "490,328 records a second", "490,382 records a second"),
    ],
)
def test_one_changed_digit_is_found(tables: ModuleType, name: str, before: str, after: str) -> None:
    texts = read(tables)
    assert before in texts[ROOT / name]
    texts[ROOT / name] = texts[ROOT / name].replace(before, after, 1)
    assert {path for path, *_ in tables.differing(texts)} == {ROOT / name}


def test_a_number_without_a_file_is_found(tables: ModuleType) -> None:
    texts = read(tables)
    texts[ROOT / "README.md"] = texts[ROOT / "README.md"].replace(
        "Models are means over rounds", "It gains 12.3 points in 1,234 seconds. Models are means over rounds"
    )
    found = [why for *_, why in tables.differing(texts)]
    assert [why.rpartition(" ")[2] for why in found] == ["12.3", "1,234"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("{rdpcfl-mnist-paper; r-dpcfl; 3; mean}", "94.6"),
        ("{rc-dpfl-preprint; mnist; rotation; rc-dpfl; 3; mean}", "89.0"),
        ("{rdpcfl-mnist-paper; r-dpcfl; 3; mean - rdpcfl-mnist-paper; global; 3; mean | .2f}", "12.14"),
        ("{h200.json; variant=cnn peer: Opacus hooks loop; samples_per_second}", "5,777"),
        ("{count of client-clusters.csv; part=run; table=8:4:1:1; row=oracle, epsilon 4}", "5"),
        ("{gpu-cnn; kernels[pool] / 2 | .2f}", "16.25"),
        ("{12 / (2 + 1) | .1f}", "4.0"),
        (
            "{mean of client-clusters.csv; part=run; table=equal; row=dp-sketch-cluster, epsilon 2; "
            "mean | .1%}",
            "78.8",
        ),
    ],
)
def test_a_reference_is_read_from_its_file(tables: ModuleType, text: str, shown: str) -> None:
    assert tables.sentence(text) == shown


def test_a_reference_that_fits_several_rows_is_refused(tables: ModuleType) -> None:
    with pytest.raises(ValueError, match="10 rows fit"):
        tables.sentence(
            "{client-clusters.csv; part=run; table=8:4:1:1; row=dp-sketch-cluster, epsilon 4; mean}"
        )


def test_a_table_that_nobody_shows_is_named(tables: ModuleType) -> None:
    texts = read(tables)
    place = "<!-- table: few-records -->"
    texts[ROOT / "docs/r-dpcfl.md"] = texts[ROOT / "docs/r-dpcfl.md"].replace(place, "")
    assert [why for *_, why in tables.differing(texts)] == ["few-records: is in no document"]
