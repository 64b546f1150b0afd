"""Readers and federations of the client-level experiments, on small files in the published formats."""

from __future__ import annotations

import gzip
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from coterie.data import (
    ClustersFederation,
    Dataset,
    DataSettings,
    DirichletFederation,
    NaturalFederation,
    build_federation,
    load_dataset,
    whole_test,
)
from coterie.data.lines import LINES, NOISE, SIZES
from coterie.errors import DataError
from coterie.experiment.local import load_federation, run
from coterie.experiment.schema import Experiment

RNG = np.random.default_rng(1)


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path))
    return tmp_path


def load(name: str, seed: int = 0, **options: object) -> Dataset:
    return load_dataset(DataSettings.model_validate({"name": name, **options}), seed=seed)


def refused(line: str, name: str, **options: object) -> None:
    with pytest.raises(DataError, match=line) as error:
        load(name, **options)
    assert "\n" not in str(error.value)


# --- EMNIST -----------------------------------------------------------------------------------------------


def write_emnist(root: Path, split: str, labels: np.ndarray) -> np.ndarray:
    pictures = RNG.integers(0, 256, size=(len(labels), 28, 28), dtype=np.uint8)
    (root / "emnist").mkdir(exist_ok=True)
    for part in ("train", "test"):
        for kind, array in (("images-idx3", pictures), ("labels-idx1", labels.astype(np.uint8))):
            header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, dtype=">u4").tobytes()
            path = root / "emnist" / f"emnist-{split}-{part}-{kind}-ubyte.gz"
            path.write_bytes(gzip.compress(header + array.tobytes()))
    return pictures


def test_emnist_is_turned_upright_and_counts_classes_from_zero(root: Path) -> None:
    pictures = write_emnist(root, "balanced", np.arange(94) % 47)
    data = load("emnist")
    assert data.task.classes == 47
    np.testing.assert_array_equal(np.rint(data.train.features[:, 0] * 255), pictures.swapaxes(1, 2))
    write_emnist(root, "letters", 1 + np.arange(52) % 26)
    letters = load("emnist", split="letters")
    assert (letters.task.classes, letters.train.targets.min(), letters.train.targets.max()) == (26, 0, 25)


def test_emnist_labels_outside_their_split_are_refused(root: Path) -> None:
    write_emnist(root, "letters", np.arange(26))
    refused("row 0 has label 0; allowed: 1 to 26", "emnist", split="letters")
    refused("emnist-digits-train-images", "emnist", split="digits")


def test_emnist_is_dealt_by_a_dirichlet_distribution(root: Path) -> None:
    write_emnist(root, "balanced", np.repeat(np.arange(47), 20))
    skewed, even = (
        build_federation(load("emnist"), DirichletFederation(clients=20, alpha=alpha), 0)
        for alpha in (0.1, 100.0)
    )
    kinds = [
        np.mean([len(set(client.train.targets.tolist())) for client in federation.clients])
        for federation in (skewed, even)
    ]
    assert len(skewed.clients) == 20
    assert kinds[0] < kinds[1] / 2


# --- CIFAR-100 --------------------------------------------------------------------------------------------


def write_cifar100(root: Path, rows: int, last_label: int = 99) -> tuple[np.ndarray, np.ndarray]:
    pixels = RNG.integers(0, 256, size=(rows, 3072), dtype=np.uint8)
    fine = np.linspace(0, last_label, rows).astype(np.uint8)
    content = np.concatenate([(fine // 5)[:, None], fine[:, None], pixels], axis=1)
    (root / "cifar100").mkdir(exist_ok=True)
    for name in ("train.bin", "test.bin"):
        (root / "cifar100" / name).write_bytes(content.tobytes())
    return pixels, fine


def test_cifar100_is_read_from_its_binary_version(root: Path) -> None:
    pixels, fine = write_cifar100(root, 12)
    data = load("cifar100")
    np.testing.assert_array_equal(np.rint(data.train.features * 255), pixels.reshape(-1, 3, 32, 32))
    np.testing.assert_array_equal(data.train.targets, fine)
    assert data.task.classes == 100
    assert abs(load("cifar100", pixels="standard").train.features.mean()) < 0.5


def test_damaged_cifar100_files_are_refused(root: Path) -> None:
    write_cifar100(root, 3, last_label=200)
    refused("fine labels: row 1 has label 100; allowed: 0 to 99", "cifar100")
    path = root / "cifar100" / "train.bin"
    path.write_bytes(path.read_bytes()[:-1])
    refused("9221 bytes; allowed: rows of 3074", "cifar100")
    path.unlink()
    refused(r"lacks train\.bin", "cifar100")


# --- TinyImageNet -----------------------------------------------------------------------------------------


def write_tiny_imagenet(root: Path, side: int = 64) -> None:
    folder = root / "tiny-imagenet"

    def picture(path: Path, colour: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = io.BytesIO()
        Image.new("L" if colour == 9 else "RGB", (side, side), colour).save(stream, "JPEG")
        path.write_bytes(stream.getvalue())

    classes = ["n01443537", "n01629819", "n01641577"]
    for name in classes:
        for number in range(2):
            picture(folder / "train" / name / "images" / f"{name}_{number}.JPEG", number)
    picture(folder / "val" / "images" / "val_0.JPEG", 9)
    picture(folder / "val" / "images" / "val_1.JPEG", 3)
    (folder / "wnids.txt").write_text("\n".join(classes) + "\n")
    lines = [f"val_0.JPEG\t{classes[2]}\t0\t0\t62\t63", f"val_1.JPEG\t{classes[0]}\t0\t0\t62\t63"]
    (folder / "val" / "val_annotations.txt").write_text("\n".join(lines) + "\n")


def test_tiny_imagenet_is_read_from_its_folders(root: Path) -> None:
    write_tiny_imagenet(root)
    data = load("tiny-imagenet")
    assert data.test is not None
    assert data.train.features.shape == (6, 3, 64, 64)
    assert data.train.targets.tolist() == [0, 0, 1, 1, 2, 2]
    assert data.test.targets.tolist() == [2, 0]
    assert data.task.classes == 3


def test_tiny_imagenet_that_is_not_whole_is_refused(root: Path) -> None:
    refused(r"lacks wnids\.txt", "tiny-imagenet")
    write_tiny_imagenet(root, side=32)
    refused(r"an image of \(32, 32\) pixels", "tiny-imagenet")
    annotations = root / "tiny-imagenet" / "val" / "val_annotations.txt"
    annotations.write_text("\nval_0.JPEG\tn99\t0\n")
    refused("line 2: class 'n99' is not in wnids", "tiny-imagenet")


def test_damaged_tiny_imagenet_files_are_refused_by_name(root: Path) -> None:
    folder = root / "tiny-imagenet"
    write_tiny_imagenet(root)
    picture = folder / "train" / "n01629819" / "images" / "n01629819_1.JPEG"
    for content in (picture.read_bytes()[:200], b"", b"<html>404 not found</html>"):
        picture.write_bytes(content)
        refused(r"n01629819_1\.JPEG: not an image", "tiny-imagenet")
    picture.unlink()
    (picture.parent / "n01629819_0.JPEG").unlink()
    refused("n01629819/images: no .JPEG files, but wnids.txt names the class", "tiny-imagenet")
    write_tiny_imagenet(root)
    (folder / "val" / "images" / "val_1.JPEG").unlink()
    refused(r"val_1\.JPEG: not an image \(FileNotFoundError\)", "tiny-imagenet")
    names = folder / "wnids.txt"
    for file in (names, folder / "val" / "val_annotations.txt"):
        whole = file.read_bytes()
        file.write_bytes(b"\xff\xfe" + whole)
        refused(rf"{file.name}: cannot be read", "tiny-imagenet")
        file.write_bytes(whole)
    names.write_text(2 * names.read_text())
    refused(r"wnids\.txt: 3 classes stand there twice", "tiny-imagenet")


@pytest.mark.parametrize("name", ["cifar100", "tiny-imagenet"])
def test_colour_images_make_a_federation_of_rotations_and_a_run(
    name: str, root: Path, tmp_path: Path
) -> None:
    write_cifar100(root, 24) if name == "cifar100" else write_tiny_imagenet(root)
    made = Experiment.model_validate(
        {
            "data": {"name": name},
            "federation": {"sizes": [1, 1], "shift": "rotation", "records_per_client": 6},
            "model": {"name": "softmax"},
            "privacy": {"unit": "client", "epsilon": 8, "delta": 0.01},
            "algorithm": {"name": "dp-ifca", "clusters": 2, "rate": 1.0},
            "schedule": {"rounds": 1, "batch": 3},
            "evaluation": {"references": False},
        }
    )
    federation = load_federation(made)
    assert federation.truth == (0, 1)
    assert federation.clients[0].train.features.shape[1:] == load(name).task.shape
    result = run(made, tmp_path / "run")
    assert 0 < result.epsilon <= 8
    assert np.isfinite(result.loss.mean)


# --- lines ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scenario", [f"{one}-{other}" for one in SIZES for other in NOISE])
def test_every_client_has_points_of_its_own_clusters_line(scenario: str) -> None:
    balance, difficulty = scenario.split("-")
    data = load("lines", scenario=scenario)
    federation = build_federation(data, NaturalFederation(), 0)
    assert federation.truth is not None
    assert np.bincount(federation.truth).tolist() == list(SIZES[balance])
    residuals = []
    for client, cluster in zip(federation.clients, federation.truth, strict=True):
        slope, intercept = LINES[cluster]
        residuals.append(client.train.targets - slope * client.train.features[:, 0] - intercept)
    assert np.std(residuals) == pytest.approx(NOISE[difficulty], rel=0.1)


def test_lines_are_drawn_under_the_seed() -> None:
    one, same, other = (load("lines", seed) for seed in (3, 3, 4))
    np.testing.assert_array_equal(one.train.targets, same.train.targets)
    assert not np.array_equal(one.train.targets, other.train.targets)


# --- thousands of clients -----------------------------------------------------------------------------------


def test_a_clusters_whole_test_set_is_every_test_record_under_its_shift() -> None:
    digits = load("digits")
    settings = ClustersFederation(sizes=(6, 3, 3), shift="label", records_per_client=50)
    federation = build_federation(digits, settings, 0)
    pools = [whole_test(digits, settings, cluster, 0) for cluster in range(3)]
    assert len({len(pool) for pool in pools}) == 1
    np.testing.assert_array_equal((pools[0].targets + 2) % 10, pools[2].targets)
    mine = {record.tobytes() for record in pools[1].features}
    assert all(record.tobytes() in mine for record in federation.clients[7].test.features)
