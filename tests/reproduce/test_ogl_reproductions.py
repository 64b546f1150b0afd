"""The reproductions of DP-OGL: every row is the configuration that its name says."""

import math

import pytest

from coterie.algorithms import find_algorithm
from coterie.data import GroupsFederation
from coterie.experiment.sweep import LABEL
from coterie.privacy import Unit
from coterie.reproduce.declared import EVERYTHING, ScaleName, find, sweep_of

SHAPES = {"GL": "global", "CL": "clustered", "LB": "label", "RI": "ring"}


@pytest.mark.parametrize("name", ["ogl-mnist", "ogl-fmnist"])
@pytest.mark.parametrize("scale", ScaleName)
def test_a_row_runs_what_it_is_called(name: str, scale: ScaleName) -> None:
    sweep = sweep_of(find(name), scale, EVERYTHING)
    assert sweep is not None
    for cell in sweep.cells():
        experiment, row = cell.experiment, str(cell.values[LABEL])
        row, _, epsilon = row.partition(" at epsilon ")
        shape, numbers, *big = row.split()
        workers, groups, period, *noise = (float(number) for number in numbers.split("/"))
        assert bool(epsilon) != bool(noise)
        federation, algorithm = experiment.federation, experiment.algorithm.model_dump()
        assert isinstance(federation, GroupsFederation)
        assert federation.structure == SHAPES[shape.rstrip("+")]
        assert (federation.workers, federation.groups or 1) == (workers, groups)
        assert algorithm["name"] == (
            "dp-fedavg" if shape == "GL" else "dp-ogl-plus" if "+" in shape else "dp-ogl"
        )
        assert (algorithm.get("period", 1), algorithm["rate"]) == (period, 0.7)
        assert algorithm["noise"] == (noise[0] if noise else None)
        assert algorithm["iterations"] == (10 if scale is ScaleName.PAPER else 5)
        assert (experiment.privacy.unit, experiment.privacy.clip) == (Unit.WORKER, 0.05)
        assert experiment.privacy.delta == 1e-5
        assert experiment.privacy.epsilon == (float(epsilon) if epsilon else math.inf)
        assert experiment.model.name == ("mcmahan-cnn" if big else "softmax")
        assert (experiment.schedule.lr == 0.001) == (big == ["CNN"])
        epochs = (100 if big else 200) if scale is ScaleName.PAPER else 20
        assert experiment.schedule.rounds == epochs


def test_the_five_configurations_of_figure_3_are_there_with_both_models() -> None:
    paper = find("ogl-mnist").scales[ScaleName.PAPER]
    rows = {contender.row for contender in paper.algorithms}
    for row in ("GL 100/1/1/2", "CL 100/4/2/2", "LB 100/5/10/3", "RI 100/4/10/2", "RI+ 100/4/2/2"):
        assert {row, f"{row} CNN"} <= rows
    assert all(find_algorithm(Unit.WORKER, contender.name) for contender in paper.algorithms)


@pytest.mark.parametrize("name", ["ogl-mnist", "ogl-fmnist"])
@pytest.mark.parametrize("scale", ScaleName)
def test_every_row_of_a_panel_is_run_and_every_row_is_in_a_panel(name: str, scale: ScaleName) -> None:
    chosen = find(name).scales[scale]
    drawn = {row for rows in chosen.panels.values() for row in rows}
    assert drawn == {contender.row for contender in chosen.algorithms}
    assert set(chosen.matrices) <= drawn
