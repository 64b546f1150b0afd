"""What benchmarks printed into documents is what the files that they keep hold, digit by digit."""

from __future__ import annotations

import csv
import itertools
import math
import re
import statistics
from collections import Counter
from pathlib import Path

import pytest

from benchmark_modules import load

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
SCORES = ("MSS, M given (* wrong)", "MSS, M unknown (* wrong)")


def rows(name: str) -> list[dict[str, str]]:
    with open(RESULTS / name, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def lines(document: str) -> list[str]:
    return (ROOT / document).read_text(encoding="utf-8").splitlines()


def cells(line: str) -> tuple[str, ...]:
    return tuple(cell.strip() for cell in line.strip("|").split("|"))


def test_natural_federations_are_those_of_their_file() -> None:
    natural = load("natural_results")
    printed = "\n".join(natural.render(natural.read_rows([RESULTS / "natural.csv"])))
    told = [line.replace("- not within: ", "- ") for line in printed.splitlines() if re.search(r"\d", line)]
    wanted = [cells(line) for line in told if not line.startswith("The recipe / the best of nine")]
    shown = {cells(line) for line in lines("docs/natural.md")}
    assert len(wanted) > 100
    assert [line for line in wanted if line not in shown] == []


def test_clusters_that_were_found_are_those_of_their_file() -> None:
    found = rows("clustering.csv")
    shown: Counter[tuple[str, ...]] = Counter(map(cells, lines("docs/clustering-table.md")))
    assert len(found) == 82
    for which in ("M given", "M unknown"):
        names = [name for name in found[0] if name.startswith(f"{which}: ")]
        for row in found:
            rates = [round(100 * (int(row[name]) / int(row["draws"]))) for name in names]
            marked = [f"**{rate}**" if rate == max(rates) and rate > 0 else str(rate) for rate in rates]
            shown[row["data"], row["shift"], row["release"], row["sizes"], row["z"], *marked] -= 1
    assert [told for told, more in shown.items() if more < 0] == []


@pytest.mark.parametrize("which", ["M given", "M unknown"])
def test_means_over_federations_are_those_of_their_file(which: str) -> None:
    """The tables by data, shift and release, which both documents have."""
    names = [name for name in rows("clustering.csv")[0] if name.startswith(f"{which}: ")]
    groups: dict[tuple[str, str, str], list[list[float]]] = {}
    for row in rows("clustering.csv"):
        rates = [int(row[name]) / int(row["draws"]) for name in names]
        for place in ((row["data"], row["shift"], row["release"]), ("all", "", "")):
            groups.setdefault(place, []).append(rates)
    one, other = (
        {cells(line) for line in lines(name)} for name in ("docs/clustering.md", "docs/clustering-table.md")
    )
    assert len(groups) == 13
    for place, found in groups.items():
        means = [statistics.mean(rates) for rates in zip(*found, strict=True)]
        marked = [f"**{100 * mean:.0f}**" if mean == max(means) else f"{100 * mean:.0f}" for mean in means]
        assert (*place, str(len(found)), *marked) in one & other


def test_how_sure_a_score_is_follows_from_its_file() -> None:
    """The table of docs/clustering.md by separation score, of scores that are kept with two decimals."""
    edges = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, math.inf)
    shown = [
        told
        for first, *told in map(cells, lines("docs/clustering.md"))
        if re.match(r"[\d.]+ (to|and) ", first)
    ]
    assert len(shown) == len(edges) - 1
    for (low, high), told in zip(itertools.pairwise(edges), shown, strict=True):
        for which, share, count in zip(SCORES, told[1::2], told[2::2], strict=True):
            scores = [score for row in rows("clustering.csv") for score in row[which].split()]
            inside = [score for score in scores if low <= float(score.rstrip("*")) < high]
            right = sum(not score.endswith("*") for score in inside)
            assert float(share.removesuffix(" %")) == pytest.approx(100 * right / len(inside), abs=2)
            assert int(count) == pytest.approx(len(inside), abs=10)


def test_clusters_found_on_features_are_those_of_their_file() -> None:
    kept = rows("clustering-features.csv")

    def success(data: str, shift: str, rule: str) -> int:
        own = [row for row in kept if (row["data"], row["shift"]) == (data, shift)]
        return round(100 * statistics.mean(int(row[f"{rule}: ours"]) / int(row["draws"]) for row in own))

    shown = {
        first.split(",")[0]: told for first, *told in map(cells, lines("docs/features.md")) if len(told) == 4
    }
    for shift in ("rotation", "label"):
        expected = [
            success(data, shift, rule)
            for rule in ("M given", "M unknown")
            for data in ("fashion-mnist", "fashion-mnist, scattering")
        ]
        assert shown[shift] == list(map(str, expected))


def test_what_fourier_features_bring_tables_is_what_their_file_says() -> None:
    scores: dict[tuple[str, ...], dict[str, list[float]]] = {}
    for row in rows("fourier.csv"):
        cell = scores.setdefault((row["federation"], row["epsilon"], row["algorithm"]), {})
        cell.setdefault(row["features"], []).append(100 * float(row["score"]))
    gains = []
    for own in scores.values():
        means = {name: statistics.mean(values) for name, values in own.items()}
        gains.append(max(means["narrow"], means["wide"]) - means["none"])
    text = " ".join(lines("docs/features.md"))
    assert f"columns in {sum(gain > 0 for gain in gains)} of {len(gains)} cells" in text
    assert f"by at most {max(gains):.1f} points, and behind by up to {-min(gains):.0f} " in text
    assert len({federation for federation, *_ in scores}) == 6


def test_clusters_of_clients_are_those_of_their_file() -> None:
    """The first table of docs/rr-cluster.md, its runs averaged once more."""
    names = {
        "`dp-sketch-cluster`": "dp-sketch-cluster",
        "`oracle`, told the clusters": "oracle",
        "`dp-ifca` with `route`, B = 8, told that there are 4": "dp-ifca",
    }
    checked = 0
    for line in lines("docs/rr-cluster.md"):
        first, *told = cells(line)
        if not line.startswith("|") or first not in names or len(told) != 8 or told[0] not in ("2", "4"):
            continue
        own = client_clusters("run", "8:4:1:1", f"{names[first]}, epsilon {told[0]}")
        accuracy = zip(*([float(value) for value in row["accuracy"].split()] for row in own), strict=True)
        means = [*map(statistics.mean, accuracy), statistics.mean(float(row["mean"]) for row in own)]
        assert told[1] == str(len(own))
        assert [float(text) for text in told[3:]] == [pytest.approx(100 * mean, abs=0.051) for mean in means]
        assert told[2] in ("", str(sum(map(found_clusters, own))))
        checked += 1
    assert checked == 6


def client_clusters(*wanted: str) -> list[dict[str, str]]:
    """The lines of a part, table and row."""
    return [row for row in rows("client-clusters.csv") if (row["part"], row["table"], row["row"]) == wanted]


def found_clusters(row: dict[str, str]) -> bool:
    """Whether a run found the right number of clusters, and in each at least 90 % of its clients."""
    return row["models"] == row["clusters"] and min(map(float, row["right"].split())) >= 0.9


def test_clusters_of_other_federations_are_those_of_their_file() -> None:
    """The second table of docs/rr-cluster.md."""

    def of(part: str, table: str, name: str) -> list[dict[str, str]]:
        return client_clusters(part, table, f"{name}, epsilon 4")

    def least(own: list[dict[str, str]]) -> float:
        return 100 * min(
            map(statistics.mean, zip(*(map(float, row["accuracy"].split()) for row in own), strict=True))
        )

    tables = {row["table"] for row in rows("client-clusters.csv") if row["part"] == "run"}
    shown = set()
    for line in lines("docs/rr-cluster.md"):
        if not line.startswith("|") or cells(line)[0] not in tables or len(cells(line)) != 8:
            continue
        table, *told = cells(line)
        run, search = (of(part, table, "dp-sketch-cluster") for part in ("run", "search"))
        counts = [len(run), sum(map(found_clusters, run)), len(search), sum(map(found_clusters, search))]
        assert told[:4] == list(map(str, counts))
        assert float(told[4]) == pytest.approx(least(run), abs=0.051)
        assert float(told[5]) == pytest.approx(least(of("run", table, "oracle")), abs=0.051)
        others = of("run", table, "dp-ifca")
        if others:
            number = sum(map(found_clusters, others))
            beside = re.fullmatch(r"([\d.]+) \((\d) of (\d)\)", told[6])
            assert beside is not None
            assert float(beside[1]) == pytest.approx(least(others), abs=0.051)
            assert (int(beside[2]), int(beside[3])) == (number, len(others))
        else:
            assert told[6] == ""
        shown.add(table)
    assert shown == tables - {"8:4:1:1", "equal", "2:1:1"}
