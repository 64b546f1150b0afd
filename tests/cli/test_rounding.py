"""No printer of the command line or of a page rounds an epsilon down."""

import dataclasses
import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from coterie import api
from coterie.cli import compare as compare_command
from coterie.cli import console
from coterie.cli import run as run_command
from coterie.experiment import local
from coterie.experiment.callbacks import Callbacks, RoundReport
from coterie.experiment.comparison import Row, SweepResult, table_columns, table_csv, table_markdown
from coterie.experiment.composition import Total
from coterie.experiment.result import RunResult
from coterie.experiment.schema import Experiment
from coterie.experiment.sweep import Sweep
from coterie.groups import GroupSchedule, leakage, ring
from coterie.privacy import Adjacency, Budget, BudgetError, Unit, calibrate, guarantee
from coterie.privacy.plan import UnitPlan
from coterie.report import numbers
from coterie.report.comparison import comparison_report
from coterie.report.grid import Comparison, Setting
from coterie.report.record import ACCURACY, ClientLine, RoundLine, RunRecord
from coterie.report.run import run_report

EPSILON = 7777.0004
"""Four digits that stand nowhere else; whatever prints them must print more than 7777.0004."""


def shown(text: str) -> list[float]:
    """Every number of the text that begins with these digits."""
    return [float(found.replace(",", "")) for found in re.findall(r"7,?777(?:\.\d+)?", text)]


def check(text: str) -> None:
    found = shown(text)
    assert found, "the epsilon is not printed at all"
    assert all(value >= EPSILON for value in found), found


ROW = Row(
    values={"algorithm.name": "local"},
    runs=1,
    reached=0.5,
    reached_std=None,
    worst_client=0.4,
    best_client=0.6,
    worst_cluster=None,
    disparity=0.2,
    f_acc=None,
    f_loss=None,
    clusters_found=None,
    kind="exact",
    epsilon=EPSILON,
    noise_multiplier=1.0,
    seconds=1.0,
    guarantee="its line",
    guarantee_text="its text",
)
TOTAL = Total(2, EPSILON, 1e-3, Unit.RECORD, Adjacency.ZERO_OUT)


def test_8_0004_is_no_8() -> None:
    headings, [cells] = table_columns([dataclasses.replace(ROW, epsilon=8.0004)])
    assert cells[headings.index("epsilon")] == "8.01"


def test_tables_of_a_comparison() -> None:
    check(table_markdown([ROW], TOTAL))
    check(table_csv([ROW]))
    check(" ".join(table_columns([ROW])[1][0]))
    check(TOTAL.text)


def test_a_comparison_in_the_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    printed = io.StringIO()
    monkeypatch.setattr(console, "out", Console(file=printed, width=200))
    result = SweepResult(tmp_path, Sweep({}, {"algorithm.name": ["local"]}), (ROW,), {}, {})
    result.__dict__["total"] = TOTAL
    compare_command.show(result)
    check(printed.getvalue())


def test_progress_of_a_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []

    def run(experiment: Experiment, out: Path | None, *, callbacks: Callbacks, **_: object) -> RunResult:
        callbacks.on_round(RoundReport(round=1, rounds=2, accuracy=None, epsilon=EPSILON, seconds=1.0))
        raise KeyboardInterrupt

    monkeypatch.setattr(api, "run", run)
    monkeypatch.setattr(console.ProgressBar, "update", lambda self, done, status: said.append(status))
    with pytest.raises(KeyboardInterrupt):
        run_command.run()
    check(" ".join(said))


@pytest.fixture(scope="module")
def record() -> RunRecord:
    """A run as its page reads it, with this epsilon wherever one stands."""
    small = {"kind": "clusters", "sizes": [2, 2], "records_per_client": 40}
    prepared = local.calibrate(Experiment.model_validate({"federation": small, "schedule": {"rounds": 2}}))
    promise = prepared.guarantee
    promise = dataclasses.replace(
        promise,
        epsilon=EPSILON,
        epsilon_replace_one=EPSILON,
        releases=tuple(dataclasses.replace(row, epsilon=EPSILON) for row in promise.releases),
        per_client=tuple(dataclasses.replace(cost, epsilon=EPSILON) for cost in promise.per_client),
    )
    return RunRecord(
        name="run",
        experiment=prepared.experiment,
        experiment_text="",
        version="0",
        parameters=1,
        measure=ACCURACY,
        classes=10,
        clients=tuple(ClientLine(name, 40, 10, None) for name in prepared.facts.clients),
        plan=prepared.plan,
        guarantee=promise,
        rounds=tuple(RoundLine(number, None, None, {}, EPSILON) for number in (1, 2)),
        findings=None,
        result=None,
    )


def test_every_form_of_a_guarantee(record: RunRecord) -> None:
    promise = record.guarantee
    for text in (promise.line, promise.text):
        check(text)
        assert shown(text).count(7777.01) >= 2


def test_the_page_of_a_run(record: RunRecord) -> None:
    html = run_report(record)
    check(html)
    assert len(shown(html)) > 8


def test_the_page_of_a_comparison(record: RunRecord, tmp_path: Path) -> None:
    sweep = Sweep({}, {"algorithm.name": ["local"]})
    result = RunResult(
        folder=tmp_path,
        algorithm="local",
        accuracy=None,
        cluster_accuracy=None,
        loss=None,
        fairness=None,
        clusters={},
        clusters_found=None,
        guarantee=record.guarantee.line,
        guarantee_text=record.guarantee.text,
        epsilon=EPSILON,
        delta=1e-3,
        noise_multiplier=1.0,
        rounds=2,
        seconds=1.0,
        sample_gradients_per_second=1.0,
        warnings=(),
    )
    check(repr(result))
    run = dataclasses.replace(record, result=result, name=sweep.cells()[0].name)
    check(comparison_report(Comparison("c", sweep, (Setting(ROW.values, ROW, (run,), 0),), (), TOTAL)))


def test_numbers_of_reports_and_reprs() -> None:
    check(numbers.epsilon(EPSILON))
    found = leakage(ring(8, 2), GroupSchedule.of(2, period=2, rate=0.7, noise=1.0), epoch=20, delta=1e-5)
    largest = max(value for row in found.epsilon.tolist() for value in row if value == value)
    told = re.search(r"largest epsilon ([\d.]+)", repr(found))
    assert told is not None
    assert float(told.group(1)) >= largest


@pytest.mark.parametrize("value", [0.0500001234, 0.1, 0.99999949, 0.0123456789, 9.999999e-5, 4e-4, 1e-5])
def test_a_delta_on_a_page_is_never_below_the_value(value: float) -> None:
    plain = numbers.delta(value).translate(str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789"))
    mantissa, _, power = plain.rpartition("10-") if "10-" in plain else (plain, "", "0")
    printed = float(mantissa.removesuffix(" × ") or "1") * 10.0 ** -int(power)
    assert printed >= value * (1 - 1e-9)
    assert printed <= value * (1 + 1e-4)


def test_an_error_that_names_what_parts_cost() -> None:
    small = {"kind": "clusters", "sizes": [2, 2], "records_per_client": 40}
    plan = local.calibrate(Experiment.model_validate({"federation": small, "schedule": {"rounds": 2}})).plan
    with pytest.raises(BudgetError) as refused:
        calibrate(plan, Budget(0.001, 1e-4))
    told = dict(re.findall(r"[:,] ([\w -]+) alone ([\d.]+)", str(refused.value)))
    assert told
    for release in plan.units[0].releases:
        alone = dataclasses.replace(plan, units=(UnitPlan("x", (release,)),))
        assert float(told[release.name]) >= guarantee(alone, delta=1e-4).epsilon
