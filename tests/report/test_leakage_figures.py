"""The matrix of who learns what about whom: every pair is drawn once, darker where more leaks."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.patches import PathPatch

from coterie.errors import InputError
from coterie.experiment.sweep import LABEL
from coterie.groups import GroupSchedule, Structure, Threat, clustered, leakage, ring
from coterie.privacy.units import round_up
from coterie.report.drawing import Figure
from coterie.report.leakage import LEVELS, growth, growths, matrix
from coterie.report.record import LeakageRecord, read_leakage
from coterie.reproduce.figures import FIGURES
from painting import painted


def written(path: Path, structure: Structure, threat: Threat = Threat.ANYONE, *, noise: float = 2.0) -> Path:
    """`leakage.json` as a run writes it."""
    schedule = GroupSchedule.of(len(structure.groups), period=3, rate=0.7, noise=noise)
    tables = [leakage(structure, schedule, epoch=t, delta=1e-5, threat=threat) for t in (1, 7, 13)]
    found = tables[-1]
    names = [f"worker-{number}" for number in range(structure.workers)]
    rows = [table.per_worker for table in tables]
    content = {
        "workers": names,
        "structure": structure.summary,
        "groups": [list(members) for members in structure.groups],
        "threat_model": int(threat),
        "delta": 1e-5,
        "epsilon": [[None if np.isnan(cell) else cell for cell in row] for row in found.epsilon.tolist()],
        "per_worker": dict(zip(names, found.per_worker.tolist(), strict=True)),
        "history": [
            {"epoch": epoch, "mean": row.mean(), "deviation": row.std(), "largest": row.max()}
            for epoch, row in zip((0, 6, 12), rows, strict=True)
        ],
    }
    path.write_text(json.dumps(content))
    return path


def read(path: Path) -> LeakageRecord:
    record = read_leakage(path)
    assert record is not None
    return record


def drawn(figure: Figure, workers: int) -> np.ndarray:
    """Opacity of every cell; nan where none is drawn."""
    table = np.full((workers, workers), np.nan)
    for patch in painted(figure).axes.patches:
        for square in patch.get_path().to_polygons(closed_only=True) if isinstance(patch, PathPatch) else ():
            (left, top), (right, bottom) = square.min(axis=0), square.max(axis=0)
            if right > workers:
                continue  # the scale beside the matrix
            cells = table[round(top) : round(bottom), round(left) : round(right)]
            if (patch.get_gid() or "").startswith("shade"):
                cells[:] = patch.get_alpha()
            else:
                assert np.isnan(cells).all(), "a pair is drawn twice"
                cells[:] = 0.0
    return table


@pytest.mark.parametrize("threat", Threat)
@pytest.mark.parametrize("structure", [ring(12, 4), clustered(6, 2)], ids=["ring", "clustered"])
def test_every_pair_is_drawn_once_and_darker_where_more_leaks(
    tmp_path: Path, structure: Structure, threat: Threat
) -> None:
    record = read(written(tmp_path / "leakage.json", structure, threat))
    table = drawn(*matrix(record), structure.workers)
    epsilon = np.array(record.epsilon, dtype=float)
    assert np.array_equal(np.isnan(table), np.isnan(epsilon))
    known = ~np.isnan(epsilon)
    assert np.array_equal(table[known] == 0, epsilon[known] == 0)
    assert np.abs(table[known] - epsilon[known] / max(record.largest, 1e-9)).max() <= 0.51 / LEVELS + 0.01


def test_matrices_of_several_runs_share_a_scale(tmp_path: Path) -> None:
    record = read(written(tmp_path / "leakage.json", ring(12, 4)))
    alone = np.nanmax(drawn(*matrix(record), 12))
    beside = np.nanmax(drawn(*matrix(record, name="one", top=4 * record.largest), 12))
    assert alone == 1.0
    assert beside == pytest.approx(0.25)


def test_growth_ends_where_the_run_ends(tmp_path: Path) -> None:
    record = read(written(tmp_path / "leakage.json", ring(12, 4)))
    last = record.history[-1]
    (figure,) = growth(record)
    assert f"After epoch 12: {round_up(last.mean)} on average" in figure.caption
    assert painted(figure)["most exposed worker"].get_ydata()[-1] == last.largest
    both = painted(growths([("first", record), ("second", record)]))
    for name in ("first", "second"):
        assert both[name].get_xdata()[-1] == 12
        assert both[name].get_ydata()[-1] == last.mean


def test_no_file_is_no_record_and_a_broken_one_is_one_line(tmp_path: Path) -> None:
    assert read_leakage(tmp_path / "leakage.json") is None
    (tmp_path / "leakage.json").write_text('{"workers": []}')
    with pytest.raises(InputError, match="not written by this version"):
        read_leakage(tmp_path / "leakage.json")


# --- several runs on the page of a reproduction -----------------------------------------------------


@pytest.fixture
def runs(tmp_path: Path) -> SimpleNamespace:
    """Four rows: two that differ by a plus, one with hardly any noise, one that stopped early."""
    settings = []
    for row, noise, rounds, accuracy in (
        ("RI 12/4/3/2", 2.0, 12, 0.5),
        ("RI+ 12/4/3/2", 2.5, 12, 0.25),
        ("RI 12/4/3/0.01", 0.01, 12, 0.9),
        ("GL 12/1/1/2", 2.0, 3, 0.1),
    ):
        folder = tmp_path / row.replace("/", "-")
        folder.mkdir()
        written(folder / "leakage.json", ring(12, 4), noise=noise)
        reached = SimpleNamespace(mean=accuracy)
        run = SimpleNamespace(planned_rounds=rounds, accuracy=reached, leakage=read(folder / "leakage.json"))
        settings.append(SimpleNamespace(values={LABEL: row}, runs=[run]))
    return SimpleNamespace(settings=settings)


def figures(name: str, runs: SimpleNamespace, matrices: tuple[str, ...] = ()) -> list[Figure]:
    result = SimpleNamespace(scale=SimpleNamespace(matrices=matrices), settings=runs.settings)
    return list(FIGURES[name](result))  # type: ignore[arg-type]


def test_a_mark_for_every_row_that_ran_to_the_end_and_promises_something(
    runs: SimpleNamespace, tmp_path: Path
) -> None:
    worst, mean = figures("exchange", runs)
    record = read(tmp_path / "RI 12-4-3-2" / "leakage.json")
    values = [value for line in record.epsilon for value in line if value is not None]
    assert f"RI: {record.largest:.4g}, 50.0%" in worst.svg
    assert f"RI: {sum(values) / len(values):.4g}, 50.0%" in mean.svg
    for figure in (worst, mean):
        assert figure.svg.count("RI+: ") == 1
        assert "90.0%" not in figure.svg, "epsilon beyond all promises"
        assert "GL" not in figure.svg, "fewer rounds than the others"


def test_only_the_wanted_matrices_are_drawn_and_each_has_a_file_of_its_own(
    runs: SimpleNamespace,
) -> None:
    growing, *matrices = figures("leakage", runs, ("RI 12/4/3/2", "RI+ 12/4/3/2"))
    assert [figure.heading.partition(": ")[2] for figure in matrices] == ["RI 12/4/3/2", "RI+ 12/4/3/2"]
    assert len({figure.slug for figure in (growing, *matrices)}) == 3
    assert len(figures("leakage", runs)) == 4, "rows that leak alike are one"
