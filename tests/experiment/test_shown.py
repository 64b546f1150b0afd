"""Runs, comparisons, experiments and plans as a notebook shows them: tidy tables and escaped HTML."""

import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import coterie as ct
from coterie.experiment import local
from coterie.experiment.cells import SweepResult, table_csv
from coterie.experiment.comparison import CSV
from coterie.experiment.folder import RunFolder
from coterie.experiment.result import RunResult
from coterie.experiment.sweep import Sweep
from coterie.files import write_text
from coterie.table import Table

TINY: dict[str, Any] = {
    "federation": {"kind": "clusters", "sizes": [1, 1], "shift": "rotation", "records_per_client": 30},
    "algorithm": {"name": "global"},
    "schedule": {"rounds": 2, "batch": 10},
    "evaluation": {"references": False},
}
HOSTILE = '<script>alert("1")</script>'


class _Tags(HTMLParser):
    """Every tag with what it is told, and the text around them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def shown(thing: Any) -> _Tags:
    page = _Tags(thing._repr_html_())
    assert not page.open
    assert not {"script", "style", "iframe", "img"} & set(page.tags)
    return page


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    return local.run(TINY, tmp_path_factory.mktemp("shown") / "run")


def test_metrics_have_a_row_for_each_round_and_clients_one_for_each_client(run: RunResult) -> None:
    pd = pytest.importorskip("pandas")
    metrics, clients = run.metrics, run.clients
    assert isinstance(metrics, pd.DataFrame)
    assert metrics["round"].tolist() == [1, 2]
    assert metrics["epsilon"].is_monotonic_increasing
    assert run.accuracy is not None
    assert metrics["accuracy"].iloc[-1] == run.accuracy.mean
    assert clients["client"].tolist() == list(run.accuracy.per_client)
    assert clients["records"].tolist() == [30, 30]
    assert clients["true_cluster"].tolist() == [0, 1]
    np.testing.assert_allclose(clients["accuracy"], list(run.accuracy.per_client.values()))
    assert (clients["epsilon"] <= 8).all()


def test_without_pandas_frames_are_lists_of_dicts(run: RunResult, monkeypatch: pytest.MonkeyPatch) -> None:
    with_pandas = run.clients
    monkeypatch.setitem(sys.modules, "pandas", None)
    rows: Any = run.clients
    assert [row["client"] for row in rows] == list(with_pandas["client"])
    assert list(rows[0]) == list(with_pandas.columns)


def test_a_comparison_has_a_table_with_a_row_for_each_setting(run: RunResult, tmp_path: Path) -> None:
    grid = {"base": TINY, "grid": {"algorithm.name": ("global", "local"), "seeds.simulation": range(1)}}
    sweep = Sweep.read(grid)
    assert [cell.experiment.algorithm.name for cell in sweep.cells()] == ["global", "local"]
    for cell in sweep.cells():
        local.run(cell.experiment, cell.files(tmp_path).path)
    write_text(tmp_path / "sweep.yaml", sweep.to_yaml())
    found = SweepResult.load(tmp_path)
    table: Any = found.table
    assert table["algorithm.name"].tolist() == ["global", "local"]
    assert table["accuracy"].tolist() == [row.accuracy for row in found.rows]
    assert "guarantee_text" not in table.columns
    assert "| global |" in repr(found)
    page = shown(found)
    assert page.tags.count("tr") == 3
    assert "2 of 2 runs finished" in page.text
    assert CSV not in page.text
    assert table_csv(found.rows).count("\n") == 3


def test_a_run_a_plan_and_an_experiment_show_themselves(run: RunResult) -> None:
    page = shown(run)
    assert run.guarantee in page.text
    assert "outside the guarantee" in page.text
    assert str(run.report) in page.text
    assert page.tags.count("tr") == 3
    experiment = ct.Experiment.model_validate(TINY)
    plan = experiment.plan()
    assert plan.guarantee.line in repr(plan)
    assert plan.guarantee.releases[0].what in shown(plan).text
    assert repr(experiment) == "Experiment(global on digits: softmax, 2 rounds, epsilon 8 for one record)"
    assert "records_per_client 30" in shown(experiment).text
    assert not RunFolder(Path("runs")).exists


def test_every_text_of_a_table_is_escaped() -> None:
    table = Table([HOSTILE, "b"], [[HOSTILE, HOSTILE]], HOSTILE, total=["together", HOSTILE])
    page = _Tags(str(table.html()))
    assert "script" not in page.tags
    assert page.text.count(HOSTILE) == 5
    assert "onload" not in str(Table(["a"], [["b"]], '" onload="x').html()).replace("&#34; onload=", "")
