"""Characters drawn from fonts."""

from __future__ import annotations

import time

import numpy as np
import pytest
from sklearn.linear_model import SGDClassifier

from coterie.data import Dataset, DataSettings, load_dataset
from coterie.data.glyphs import _FONTS, _templates
from coterie.experiment.experiment_file import experiment_of
from coterie.experiment.local import calibrate


def glyphs(seed: int = 0, **options: int) -> Dataset:
    return load_dataset(DataSettings(name="glyphs", **options), seed)


def test_images_are_28x28_in_the_unit_interval_with_a_sixth_as_many_for_testing() -> None:
    data = glyphs(size=600)
    assert data.train.features.shape == (600, 1, 28, 28)
    assert data.train.features.dtype == np.float32
    assert data.test is not None
    assert len(data.test) == 100
    assert data.train.features.min() == 0.0
    assert 0.95 < data.train.features.max() <= 1.0
    assert set(data.train.targets) == set(range(10))


def test_the_seed_decides_everything() -> None:
    first, again, other = glyphs(1, size=300), glyphs(1, size=300), glyphs(2, size=300)
    assert np.array_equal(first.train.features, again.train.features)
    assert np.array_equal(first.train.targets, again.train.targets)
    assert not np.array_equal(first.train.features, other.train.features)


def test_train_and_test_images_differ() -> None:
    data = glyphs(size=600)
    assert data.test is not None
    assert not np.array_equal(data.train.features[:100], data.test.features)


@pytest.mark.parametrize("classes", [2, 36, 62])
def test_letters_join_the_digits(classes: int) -> None:
    data = glyphs(size=40 * classes, classes=classes)
    assert data.task.classes == classes
    assert set(data.train.targets) == set(range(classes))


def test_every_font_draws_every_character_inside_its_template() -> None:
    drawn = _templates("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz", _FONTS)
    assert len(set(_FONTS)) == 20
    assert drawn.max(axis=(2, 3)).min() > 0.5, "a font without this character"
    border = np.concatenate([drawn[:, :, [0, -1]].ravel(), drawn[:, :, :, [0, -1]].ravel()])
    assert border.max() == 0.0
    flat = drawn.reshape(62, -1)
    assert len(np.unique(flat, axis=0)) == 62


def test_images_are_learnable_by_a_linear_model_but_not_trivial() -> None:
    data = glyphs(size=6_000)
    assert data.test is not None
    model = SGDClassifier(loss="log_loss", max_iter=15, tol=None, random_state=0)
    model.fit(data.train.features.reshape(len(data.train), -1), data.train.targets)
    accuracy = model.score(data.test.features.reshape(len(data.test), -1), data.test.targets)
    assert 0.7 < accuracy < 0.97


def test_sixty_thousand_images_take_seconds() -> None:
    start = time.process_time()
    assert len(glyphs(size=60_000).train) == 60_000
    assert time.process_time() - start < 15.0


def test_a_plan_counts_glyphs_and_draws_none(monkeypatch: pytest.MonkeyPatch) -> None:
    data: dict[str, object] = {"name": "glyphs", "size": 400}
    told = {
        "federation": {"sizes": [2, 2], "records_per_client": 40, "alpha": 0.5},
        "privacy": {"epsilon": 3},
    }
    drawn = calibrate(experiment_of({"data": data, **told}))

    def never(*_: object) -> None:
        raise AssertionError("drew what is only counted")

    monkeypatch.setattr("coterie.data.glyphs._draw", never)
    monkeypatch.setattr("coterie.data.glyphs._templates", never)
    counted = experiment_of({"data": data, **told}).plan()
    assert counted.plan == drawn.plan
    assert str(counted.guarantee) == str(drawn.guarantee)
    blank = load_dataset(DataSettings(name="glyphs", size=400), 3, counted=True)
    monkeypatch.undo()
    whole = load_dataset(DataSettings(name="glyphs", size=400), 3)
    assert np.array_equal(blank.train.targets, whole.train.targets)
    assert not blank.train.features.any()
