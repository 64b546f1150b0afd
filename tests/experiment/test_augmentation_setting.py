"""`schedule.augmentation` costs nothing, resumes to the last bit, and is the only way to augment."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from coterie.data import Task
from coterie.errors import InputError
from coterie.experiment import calibrated, local
from coterie.experiment.callbacks import Callbacks, RoundReport
from coterie.experiment.experiment_file import read_experiment
from coterie.experiment.folder import RunFolder
from coterie.experiment.local import calibrate

SMALL = [
    "federation.sizes=[2,3]",
    "federation.records_per_client=60",
    "schedule.rounds=4",
    "schedule.batch=20",
    "seeds.noise=5",
    "evaluation.references=false",
]
VIEWS = "schedule.augmentation={copies: 3, kinds: [shift, flip], pixels: 1}"


def test_the_plan_and_its_events_are_those_of_training_without_views() -> None:
    plain, augmented = (calibrate(read_experiment(None, [*SMALL, *more])) for more in ([], [VIEWS]))
    assert augmented.plan == plain.plan
    assert [unit.event for unit in augmented.plan.units] == [unit.event for unit in plain.plan.units]
    assert augmented.guarantee.epsilon == plain.guarantee.epsilon
    assert augmented.augmentation is not None


def final_models(out: Path) -> dict[str, np.ndarray]:
    newest = max(RunFolder(out).checkpoint.rglob("*.safetensors"))
    return load_file(newest)


def test_an_interrupted_run_repeats_its_views(tmp_path: Path) -> None:
    experiment = read_experiment(None, [*SMALL, VIEWS])
    whole = local.run(experiment, tmp_path / "whole")

    def stop(report: RoundReport) -> None:
        if report.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        local.run(experiment, tmp_path / "parts", callbacks=Callbacks(on_round=stop))
    resumed = local.run(experiment, tmp_path / "parts", resume=True)
    assert resumed.loss == whole.loss
    both = final_models(tmp_path / "whole"), final_models(tmp_path / "parts")
    assert both[0].keys() == both[1].keys()
    for name in both[0]:
        np.testing.assert_array_equal(both[0][name], both[1][name])
    plain = local.run(read_experiment(None, SMALL), tmp_path / "plain")
    assert plain.loss != whole.loss
    assert plain.epsilon == whole.epsilon


@pytest.mark.parametrize("key", ["augment", "augmentation", "copies", "oversample"])
def test_copies_in_the_data_are_refused_and_the_way_to_go_is_named(key: str) -> None:
    with pytest.raises(InputError, match=rf"{key}: .* as many clips .* schedule\.augmentation averages"):
        read_experiment(None, [f"data.{key}=4"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["schedule.augmentation={copies: 0}"], r"schedule\.augmentation\.copies: 0 is not allowed"),
        (["schedule.augmentation={kinds: [crop]}"], r"schedule\.augmentation\.kinds.*'crop'"),
        (
            ["schedule.augmentation={pixels: 8}"],
            r"pixels: 8 moves all of an image of 8 x 8 away; .* 1 to 7",
        ),
    ],
)
def test_views_that_cannot_be_made_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        calibrate(read_experiment(None, [*SMALL, *overrides]))


def test_views_of_records_that_are_no_images_are_refused() -> None:
    task = Task(kind="classification", shape=(80,), classes=10, vocabulary=9)
    with pytest.raises(InputError, match=r"schedule\.augmentation: .* \[80\]; views are made of images"):
        calibrated.augmentation_of(read_experiment(None, [*SMALL, VIEWS]), task)
