"""Several runs on the same records: what they spend together is never less than the truth, and is said."""

import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from coterie.experiment.composition import FOLDERS, Total, total_of
from coterie.experiment.experiment_file import to_yaml
from coterie.experiment.folder import RunFolder
from coterie.experiment.schema import Experiment
from coterie.files import write_json, write_text
from coterie.privacy import (
    POPULATION,
    Adjacency,
    Budget,
    CohortSums,
    Custody,
    FullBatchSteps,
    Ledger,
    PlannedRelease,
    PoissonSample,
    PrivacyPlan,
    ThreatModel,
    Unit,
    UnitPlan,
    epsilon_of,
    guarantee,
)
from coterie.privacy.events import composed, gaussian, poisson_gaussian, repeated

DELTA = 1e-4
ZERO_OUT, REPLACE_ONE = Adjacency.ZERO_OUT, Adjacency.REPLACE_ONE


def begun(
    path: Path,
    noises: Sequence[float],
    *,
    unit: Unit = Unit.RECORD,
    adjacency: Adjacency = ZERO_OUT,
    opened: bool = True,
    **experiment: object,
) -> Path:
    """A run folder whose clients a, b, ... each release one sum with this noise; nothing else is in it."""
    files = RunFolder(path)
    path.mkdir()
    units = tuple(
        UnitPlan(name, (PlannedRelease("sum", FullBatchSteps(1.0, noise, 10, 1, adjacency), 1),))
        for name, noise in zip("abcdef", noises, strict=False)
    )
    if unit is Unit.CLIENT:
        release = PlannedRelease("sums", CohortSums(1.0, noises[0], PoissonSample(0.5), adjacency), 3)
        units = (UnitPlan(POPULATION, (release,)),)
    plan = PrivacyPlan(unit, adjacency, ThreatModel("the server", "all of it"), units)
    algorithm = {"name": "dp-fedavg" if unit is Unit.CLIENT else "global"}
    settings = {"algorithm": algorithm, "privacy": {"unit": unit.value, "epsilon": 99}, **experiment}
    write_text(files.experiment, to_yaml(Experiment.model_validate(settings)))
    write_json(files.plan, plan.to_json())
    promise = guarantee(plan, delta=DELTA, held_by=Custody.ONE_PROCESS)
    write_json(files.guarantee, promise.to_json())
    if opened:
        with Ledger.open(files.ledger, plan, budget=Budget(1e6, DELTA), accountant="rdp"):
            pass
    return path


def total(*paths: Path) -> Total:
    found = total_of(paths)
    assert found is not None
    return found


def test_clients_of_one_federation_add_up_run_by_run(tmp_path: Path) -> None:
    """Whoever spends most in one run spends least in the other: the worst sum counts, no sum of worsts."""
    first, second = begun(tmp_path / "1", [1.0, 9.0]), begun(tmp_path / "2", [9.0, 2.0])
    found = total(first, second)
    both = composed([gaussian(1.0), gaussian(9.0)])
    assert found.epsilon == pytest.approx(epsilon_of(both, DELTA, "rdp", ZERO_OUT), rel=1e-12)
    assert (found.runs, found.delta, found.unit, found.adjacency) == (2, DELTA, Unit.RECORD, ZERO_OUT)


def test_records_that_are_dealt_anew_may_be_with_the_worst_client_each_time(tmp_path: Path) -> None:
    first = begun(tmp_path / "1", [1.0, 9.0])
    second = begun(tmp_path / "2", [9.0, 2.0], seeds={"simulation": 7})
    both = composed([gaussian(1.0), gaussian(2.0)])
    assert total(first, second).epsilon == pytest.approx(epsilon_of(both, DELTA, "rdp", ZERO_OUT), rel=1e-12)


def test_other_data_are_other_records(tmp_path: Path) -> None:
    first = begun(tmp_path / "1", [1.0])
    second = begun(tmp_path / "2", [2.0], data={"name": "glyphs"})
    assert total(first, second).epsilon == pytest.approx(epsilon_of(gaussian(1.0), DELTA, "rdp", ZERO_OUT))


@pytest.mark.parametrize("spelling", ["hospitals", "/data/../data/hospitals", "/data/link", "/data/copy"])
def test_a_folder_under_another_path_may_hold_the_same_records(tmp_path: Path, spelling: str) -> None:
    """A client may have another name there, so the worst of each counts."""
    natural = {"federation": {"kind": "natural"}}
    first = begun(tmp_path / "1", [1.0, 9.0], data={"name": "folder", "path": "/data/hospitals"}, **natural)
    second = begun(tmp_path / "2", [9.0, 2.0], data={"name": "folder", "path": spelling}, **natural)
    found = total(first, second)
    both = composed([gaussian(1.0), gaussian(2.0)])
    assert found.epsilon == pytest.approx(epsilon_of(both, DELTA, "rdp", ZERO_OUT), rel=1e-12)
    assert FOLDERS in found.text


def test_a_folder_whose_clients_changed_deals_its_records_anew(tmp_path: Path) -> None:
    own = {"data": {"name": "folder", "path": "/data/hospitals"}, "federation": {"kind": "natural"}}
    runs = [begun(tmp_path / "1", [1.0, 9.0], **own), begun(tmp_path / "2", [9.0, 2.0], **own)]
    for records, run in zip((10, 11), runs, strict=True):
        write_json(RunFolder(run).federation, {"clients": [{"name": "a", "records": records}]})
    both = composed([gaussian(1.0), gaussian(2.0)])
    assert total(*runs).epsilon == pytest.approx(epsilon_of(both, DELTA, "rdp", ZERO_OUT), rel=1e-12)
    assert FOLDERS not in total(*runs).text


def test_one_published_data_set_is_the_same_wherever_it_lies_and_however_it_is_cut(tmp_path: Path) -> None:
    first = begun(tmp_path / "1", [1.0], data={"name": "glyphs", "size": 500})
    second = begun(tmp_path / "2", [2.0], data={"name": "glyphs", "size": 600})
    both = composed([gaussian(1.0), gaussian(2.0)])
    assert total(first, second).epsilon == pytest.approx(epsilon_of(both, DELTA, "rdp", ZERO_OUT), rel=1e-12)


def test_many_runs_spend_more_than_any_and_less_than_their_sum(tmp_path: Path) -> None:
    runs = [begun(tmp_path / str(number), [3.0]) for number in range(6)]
    alone, together = total(runs[0]).epsilon, total(*runs).epsilon
    assert alone < together < 6 * alone
    assert together == pytest.approx(epsilon_of(repeated(gaussian(3.0), 6), DELTA, "rdp", ZERO_OUT))


def test_a_client_level_run_costs_its_records_what_replacing_a_client_costs(tmp_path: Path) -> None:
    records = begun(tmp_path / "1", [3.0, 4.0])
    clients = begun(tmp_path / "2", [1.5], unit=Unit.CLIENT, adjacency=Adjacency.ADD_REMOVE)
    found = total(records, clients)
    both = composed([gaussian(3.0), repeated(poisson_gaussian(0.5, 1.5), 3)])
    assert (found.unit, found.adjacency) == (Unit.RECORD, REPLACE_ONE)
    assert found.epsilon == pytest.approx(epsilon_of(both, DELTA, "rdp", REPLACE_ONE), rel=1e-12)


def test_a_run_that_was_stopped_counts_and_one_that_never_began_does_not(tmp_path: Path) -> None:
    stopped = begun(tmp_path / "1", [3.0])
    assert not RunFolder(stopped).finished
    idle = begun(tmp_path / "2", [3.0], opened=False)
    assert total(stopped, idle, tmp_path / "nothing").runs == 1
    assert total_of([idle]) is None


def test_one_run_without_noise_leaves_nothing(tmp_path: Path) -> None:
    found = total(begun(tmp_path / "1", [3.0]), begun(tmp_path / "2", [0.0]))
    assert math.isinf(found.epsilon)
    assert "no privacy (eps=inf)" in found.text
    assert found.to_json()["epsilon"] == "inf"


def test_the_total_is_rounded_up_and_says_that_runs_add_up() -> None:
    found = Total(4, 16.0004, 4e-4, Unit.RECORD, ZERO_OUT, ("simulation",))
    assert found.line == (
        "all 4 runs together: (eps=16.01, delta=4e-4)-DP for one record, zero-out; simulation"
    )
    assert found.text.startswith("Runs on the same data add up")
    assert found.to_json() == {
        "runs": 4,
        "epsilon": 16.0004,
        "delta": 4e-4,
        "unit": "record",
        "adjacency": "zero-out",
        "text": found.text,
    }
