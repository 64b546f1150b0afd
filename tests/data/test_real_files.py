"""The published files themselves, where they are present."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from sklearn.linear_model import LinearRegression, LogisticRegression

from coterie.data import (
    ClustersFederation,
    Dataset,
    DataSettings,
    NaturalFederation,
    build_federation,
    load_dataset,
)
from coterie.data.dataset_files import data_root


@pytest.fixture(autouse=True)
def source(real_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COTERIE_DATA", str(real_data))


def folder(name: str) -> Path:
    found = data_root() / name
    if not found.is_dir():
        pytest.skip(f"no {name}: {found} does not exist")
    return found


def load(name: str) -> Dataset:
    folder(name)
    return load_dataset(DataSettings(name=name), seed=0)


def test_mnist_has_the_published_labels_and_mean() -> None:
    data = load("mnist")
    assert data.test is not None
    assert np.bincount(data.train.targets).tolist()[:3] == [5923, 6742, 5958]
    assert np.bincount(data.test.targets).tolist()[:3] == [980, 1135, 1032]
    assert data.train.features.mean() == pytest.approx(0.1307, abs=1e-4)
    assert data.train.features.std() == pytest.approx(0.3081, abs=1e-4)


def test_fashion_mnist_serves_the_papers_federation() -> None:
    data = load("fashion-mnist")
    settings = ClustersFederation(records_per_client=8000, validation_per_client=2000)
    federation = build_federation(data, settings, seed=0)
    sizes = {(len(c.train), len(c.validation), len(c.test)) for c in federation.clients}
    assert len(federation.clients) == 21
    assert sizes == {(8000, 2000, 1666)}


def test_cifar10_test_images_decode_with_the_known_statistics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cifar10").mkdir()
    for name in ("train", "test"):  # decoding the training images, too, would take as long as all other files
        (tmp_path / "cifar10" / f"{name}.parquet").symlink_to(folder("cifar10") / "test.parquet")
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path))
    records = load_dataset(DataSettings(name="cifar10"), seed=0).test
    assert records is not None
    assert records.features.shape == (10_000, 3, 32, 32)
    assert np.bincount(records.targets).tolist() == [1000] * 10
    np.testing.assert_allclose(records.features.mean(axis=(0, 2, 3)), [0.494, 0.485, 0.450], atol=0.01)


def test_shakespeare_gives_three_hundred_roles() -> None:
    data = load("shakespeare")
    assert data.owners is not None
    assert len(data.owners.names) == 1339
    assert data.train.features.max() < 76, "a character of the plays is missing from the alphabet"
    federation = build_federation(data, NaturalFederation(clients=300), seed=0)
    assert len(federation.clients) == 300
    assert min(len(client.train) for client in federation.clients) >= 10


def test_school_is_139_schools_on_which_a_linear_model_beats_the_mean() -> None:
    data = load("school")
    assert len(data.train) == 15_362
    federation = build_federation(data, NaturalFederation(), seed=0)
    assert len(federation.clients) == 139
    features, targets = data.train.features, data.train.targets
    assert LinearRegression().fit(features, targets).score(features, targets) > 0.25


def test_heart_disease_is_four_hospitals_that_can_be_told_ill_from_healthy() -> None:
    data = load("heart-disease")
    federation = build_federation(data, NaturalFederation(), seed=0)
    assert [client.name for client in federation.clients] == ["cleveland", "hungarian", "switzerland", "va"]
    assert [len(c.train) + len(c.test) for c in federation.clients] == [303, 294, 123, 200]
    assert data.train.targets.sum() == 139 + 106 + 115 + 149
    model = LogisticRegression(max_iter=1000).fit(data.train.features, data.train.targets)
    assert model.score(data.train.features, data.train.targets) > 0.8
