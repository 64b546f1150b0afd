"""`coterie bench` does the same work for everyone and says how many times as fast ours is."""

import json

import pytest
import torch

from coterie.bench import records as measuring
from coterie.bench import timing
from coterie.bench.peers import installed_peers, installed_round_peers
from coterie.bench.records import BenchResult, Scaling, compare_rounds
from coterie.bench.timing import Timing
from coterie.bench.work import RoundWork, Work
from coterie.cli.bench import bench

TINY = Work(model="softmax", clients=2, records=8, batch=4, shape=(1, 4, 4))
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "PAUSE", 0.0)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command with a table that was measured before."""
    rows = (
        Timing("cnn", "ours", 4000.0, None),
        Timing("cnn", "opacus", 1000.0, 4.0),
        Timing("softmax", "opacus", 1000.0, 5.0),
        Timing("cnn, client-level", "plain_round", 2000.0, 2.0),
    )
    result = BenchResult("a machine", "2.x", "cpu", rows, (Scaling("clients", (2, 20), (1.0, 10.0)),))
    monkeypatch.setattr("coterie.bench.records.run_bench", lambda quick, watch: result)


def test_every_installed_peer_is_compared() -> None:
    rows = measuring.compare_records(TINY, CPU, repeats=1, watch=lambda text: None)
    assert [row.way for row in rows] == ["ours", *installed_peers()]
    assert all(row.samples_per_second > 0 for row in rows)
    ours = rows[0].samples_per_second
    for row in rows[1:]:
        assert row.ratio == pytest.approx(ours / row.samples_per_second)


def test_a_client_level_round_is_compared_by_the_records_that_went_through() -> None:
    work = RoundWork(clients=8, sampled=4, records=6, epochs=2, batch=3, model="softmax", shape=(1, 4, 4))
    rows = compare_rounds(work, CPU, repeats=3, warm_up=0, watch=lambda text: None)
    assert [row.way for row in rows] == ["ours", *installed_round_peers()]
    assert rows[1].samples_per_second > 0
    assert rows[1].ratio == pytest.approx(rows[0].samples_per_second / rows[1].samples_per_second)


def test_growth_is_measured_along_an_axis() -> None:
    def work_of(size: int) -> Work:
        return Work(model="softmax", clients=size, records=4, batch=4, shape=(1, 4, 4))

    found = measuring.grow("clients", (1, 2), work_of, CPU, lambda text: None)
    assert found.sizes == (1, 2)
    assert min(found.seconds) > 0


def test_the_exponent_of_linear_growth_is_one() -> None:
    assert Scaling("records", (2, 20), (0.1, 1.0)).exponent == pytest.approx(1.0)


def test_json_is_one_object_with_ratios(tiny: None, capsys: pytest.CaptureFixture[str]) -> None:
    bench(quick=True, json=True)
    content = json.loads(capsys.readouterr().out)
    assert content["ratios"] == {"opacus": 4.0, "plain_round": 2.0}
    assert content["machine"] == "a machine"
    assert content["scaling"][0]["exponent"] == pytest.approx(1.0)


def test_the_table_names_every_way(tiny: None, capsys: pytest.CaptureFixture[str]) -> None:
    bench(quick=True, json=False)
    printed = capsys.readouterr().out
    assert "Opacus" in printed
    assert "4.00x" in printed
    assert "a machine" in printed
