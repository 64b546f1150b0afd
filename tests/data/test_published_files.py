"""Readers of published datasets, on small files of the same format: whole, damaged, and lying."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from scipy.io import savemat

from coterie.data import Dataset, DataSettings, NaturalFederation, build_federation, load_dataset
from coterie.errors import DataError

RNG = np.random.default_rng(0)
PICTURES = RNG.integers(0, 256, size=(30, 28, 28), dtype=np.uint8)


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path))
    return tmp_path


def load(name: str, **options: object) -> Dataset:
    return load_dataset(DataSettings.model_validate({"name": name, **options}), seed=0)


def refused(name: str, line: str) -> None:
    with pytest.raises(DataError, match=line) as error:
        load(name)
    assert "\n" not in str(error.value)


def idx(array: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, dtype=">u4").tobytes()
    return header + array.tobytes()


def write_idx(folder: Path, **replaced: bytes) -> None:
    folder.mkdir(exist_ok=True)
    labels = np.arange(30, dtype=np.uint8) % 10
    content = {
        "train-images-idx3-ubyte.gz": idx(PICTURES),
        "train-labels-idx1-ubyte.gz": idx(labels),
        "t10k-images-idx3-ubyte.gz": idx(PICTURES[:10]),
        "t10k-labels-idx1-ubyte.gz": idx(labels[:10]),
    }
    for name, raw in content.items():
        key = name.split("-idx")[0].replace("-", "_")
        (folder / name).write_bytes(gzip.compress(replaced.get(key, raw)))


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_idx_images_arrive_divided_by_255(root: Path, name: str) -> None:
    write_idx(root / name)
    data = load(name)
    assert data.test is not None
    assert np.array_equal(np.rint(data.train.features[:, 0] * 255), PICTURES)
    assert data.train.targets.tolist() == [k % 10 for k in range(30)]
    assert len(data.test) == 10


def test_published_mean_and_deviation_are_an_option(root: Path) -> None:
    write_idx(root / "mnist")
    features = load("mnist", pixels="standard").train.features
    np.testing.assert_allclose(features[:, 0], (PICTURES / 255 - 0.1307) / 0.3081, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("replaced", "line"),
    [
        (
            {"train_images": idx(PICTURES)[:-5]},
            "train-images.*23515 bytes of data; its header declares 23520",
        ),
        ({"train_images": idx(PICTURES) + b"x"}, "its header declares 23520"),
        ({"train_images": idx(PICTURES[:, 0])}, "train-images.*starts with 00000802"),
        ({"train_images": b"\x00\x00"}, "train-images.*starts with 0000;"),
        ({"train_images": idx(PICTURES)[:9]}, "train-images.*starts with"),
        ({"train_images": idx(PICTURES[:, :20])}, r"images of \(20, 28\); allowed: \(28, 28\)"),
        ({"t10k_labels": idx(np.zeros(9, np.uint8))}, "t10k-labels.*9 labels for the 10 images"),
        (
            {"train_labels": idx(np.full(30, 10, np.uint8))},
            "train-labels.*row 0 has label 10; allowed: 0 to 9",
        ),
    ],
)
def test_idx_files_that_lie_are_refused(root: Path, replaced: dict[str, bytes], line: str) -> None:
    write_idx(root / "mnist", **replaced)
    refused("mnist", line)


def halved(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def scrambled(path: Path) -> None:
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 40] = bytes(255 - byte for byte in content[middle : middle + 40])
    path.write_bytes(bytes(content))


def replaced_by_text(path: Path) -> None:
    path.write_text("<html>404 not found</html>")


def emptied(path: Path) -> None:
    path.write_bytes(b"")


DAMAGES = [halved, replaced_by_text, emptied]


@pytest.mark.parametrize("damage", [*DAMAGES, scrambled])
def test_damaged_idx_files_are_refused(root: Path, damage: Callable[[Path], None]) -> None:
    write_idx(root / "mnist")
    damage(root / "mnist" / "train-images-idx3-ubyte.gz")
    refused("mnist", r"train-images-idx3-ubyte\.gz: ")


def encoded(side: int = 32, colour: int = 0, kind: str = "PNG") -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (side, side), (colour, 100, 200)).save(stream, kind)
    return stream.getvalue()


def write_cifar(folder: Path, images: list[bytes], labels: list[int]) -> None:
    folder.mkdir(exist_ok=True)
    structs = [{"bytes": image, "path": "p"} for image in images]
    table = pa.table({"img": structs, "label": pa.array(labels, pa.int64())})
    for part in ("train", "test"):
        pq.write_table(table, folder / f"{part}.parquet")


def test_encoded_images_arrive_channels_first(root: Path) -> None:
    write_cifar(root / "cifar10", [encoded(colour=51 * k) for k in range(4)], [3, 1, 2, 9])
    data = load("cifar10")
    assert data.train.features.shape == (4, 3, 32, 32)
    assert data.train.features.flags.c_contiguous
    np.testing.assert_allclose(data.train.features[:, 0, 5, 7], [0.0, 0.2, 0.4, 0.6], atol=1e-6)
    np.testing.assert_allclose(data.train.features[:, 2], 200 / 255, atol=1e-6)
    assert data.train.targets.tolist() == [3, 1, 2, 9]
    assert "JPEG" in data.note
    write_cifar(root / "cifar10", [encoded(colour=51, kind="JPEG")], [7])
    np.testing.assert_allclose(load("cifar10").train.features[0, :, 5, 7], [0.2, 0.4, 0.78], atol=0.02)


@pytest.mark.parametrize(
    ("image", "label", "line"),
    [
        (encoded()[:60], 0, r"train\.parquet: row 1: not an image"),
        (b"nothing", 0, r"train\.parquet: row 1: not an image"),
        (encoded(side=16), 0, r"row 1: an image of \(16, 16\) pixels"),
        (encoded(), 10, "row 1 has label 10; allowed: 0 to 9"),
    ],
)
def test_images_that_cannot_be_used_are_named_by_row(root: Path, image: bytes, label: int, line: str) -> None:
    write_cifar(root / "cifar10", [encoded(), image], [0, label])
    refused("cifar10", line)


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_parquet_files_are_refused(root: Path, damage: Callable[[Path], None]) -> None:
    write_cifar(root / "cifar10", [encoded()] * 5, [0] * 5)
    damage(root / "cifar10" / "test.parquet")
    refused("cifar10", r"test\.parquet: cannot be read")


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        ({"pixels": [1]}, r"1 rows of \[\]; allowed: rows of img and label"),
        (
            {"img": pa.array([], pa.struct([("bytes", pa.binary())])), "label": pa.array([], pa.int64())},
            "0 rows",
        ),
        ({"img": [encoded()], "label": [0]}, "column img holds binary; allowed: a struct"),
        ({"img": [{"data": encoded()}], "label": [0]}, "column img holds struct<data: binary>; allowed"),
        (
            {"img": [{"bytes": encoded()}], "label": ["cat"]},
            "column label holds string, 0 missing; allowed: int",
        ),
        ({"img": [{"bytes": encoded()}], "label": [0.5]}, "column label holds double"),
        ({"img": [{"bytes": encoded()}] * 2, "label": [0, None]}, "column label holds int64, 1 missing"),
        ({"img": [{"bytes": encoded()}, None], "label": [0, 1]}, "row 1: not an image"),
    ],
)
def test_parquet_of_another_shape_is_refused(root: Path, columns: dict[str, Any], line: str) -> None:
    write_cifar(root / "cifar10", [encoded()], [0])
    pq.write_table(pa.table(columns), root / "cifar10" / "train.parquet")
    refused("cifar10", rf"train\.parquet: {line}")


def write_speeches(folder: Path, speeches: list[tuple[str, str, str]]) -> Path:
    folder.mkdir(exist_ok=True)
    rows = [json.dumps({"play": play, "role": role, "text": text}) for play, role, text in speeches]
    path = folder / "speeches.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(rows).encode()))
    return path


LINES = [
    ("hamlet", "HAMLET", "To be, or not to be: " * 10),
    ("hamlet", "GHOST", "Mark me."),
    ("hamlet", "HAMLET", "that is the question. " * 10),
    ("macbeth", "HAMLET", "é" * 60),
]


def text_of(tokens: np.ndarray) -> str:
    alphabet = "\n !$&',-.0123456789:;?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz"
    return "".join([*alphabet, "~"][token] for token in tokens)


def test_a_record_is_a_window_of_a_role_and_the_next_character(root: Path) -> None:
    write_speeches(root / "shakespeare", LINES)
    data = load("shakespeare", length=9)
    assert data.owners is not None
    assert data.test is not None
    assert data.owners.names == ("hamlet/HAMLET", "hamlet/GHOST", "macbeth/HAMLET")
    assert text_of(data.train.features[0]) == "To be, or"
    assert text_of(data.train.targets[:1]) == " "
    assert text_of(data.train.features[1]) == "not to be"
    whole = "\n".join(text for play, _, text in LINES if play == "hamlet" and len(text) > 20)
    for part, owner in ((data.train, data.owners.train), (data.test, data.owners.test)):
        for row in np.flatnonzero(np.asarray(owner) == 0):
            assert text_of(np.append(part.features[row], part.targets[row])) in whole
    assert (len(whole) - round(0.2 * len(whole))) // 10 == int((data.owners.train == 0).sum())


def test_test_text_comes_after_training_text_even_when_windows_overlap(root: Path) -> None:
    text = "".join(f"{number:04d} " for number in range(200))
    write_speeches(root / "shakespeare", [("p", "R", text)])
    data = load("shakespeare", length=4, stride=1)
    assert data.test is not None
    trained = {text_of(row) for row in data.train.features}
    assert "0159" in trained
    assert "0160" not in trained
    assert "0160" in {text_of(row) for row in data.test.features}


def test_characters_outside_the_public_alphabet_share_one_token(root: Path) -> None:
    write_speeches(root / "shakespeare", LINES)
    data = load("shakespeare", length=9)
    assert data.owners is not None
    foreign = data.train.features[data.owners.train == 2]
    assert len(foreign)
    assert set(foreign.ravel().tolist()) <= {76, text_of_token("?")}
    assert data.task.vocabulary == data.task.classes == 77


def text_of_token(character: str) -> int:
    return [text_of(np.array([token])) for token in range(77)].index(character)


def test_roles_without_enough_text_can_be_left_out(root: Path) -> None:
    write_speeches(root / "shakespeare", LINES)
    federation = build_federation(
        load("shakespeare", length=9), NaturalFederation(clients="enough", minimum_records=4), seed=0
    )
    assert [client.name for client in federation.clients] == ["hamlet/HAMLET", "macbeth/HAMLET"]


def test_lines_that_are_not_speeches_are_named(root: Path) -> None:
    path = write_speeches(root / "shakespeare", LINES)
    good = b'{"play": "a", "role": "b", "text": "c"}\n'
    for bad, why in ((b'{"play": "a"}', "KeyError"), (good.replace(b'"c"', b"null"), "TypeError")):
        path.write_bytes(gzip.compress(good + bad + b"\n"))
        refused("shakespeare", rf"speeches\.jsonl\.gz: line 2: not JSON with play, role and text \({why}\)")


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_speeches_are_refused(root: Path, damage: Callable[[Path], None]) -> None:
    damage(write_speeches(root / "shakespeare", LINES * 50))
    refused("shakespeare", r"speeches\.jsonl\.gz: ")


def cells(arrays: list[np.ndarray]) -> np.ndarray:
    cell = np.empty((1, len(arrays)), dtype=object)
    for index, array in enumerate(arrays):
        cell[0, index] = array
    return cell


def write_school(folder: Path, features: list[np.ndarray], targets: list[np.ndarray]) -> Path:
    folder.mkdir(exist_ok=True)
    savemat(folder / "school.mat", {"X": cells(features), "Y": cells(targets)})
    return folder / "school.mat"


def pupils(count: int) -> np.ndarray:
    rows = np.ones((count, 28), dtype=np.uint8)
    rows[:, 3:5] = 50
    return rows


def test_school_scales_percentages_and_scores_by_constants(root: Path) -> None:
    write_school(
        root / "school", [pupils(3), pupils(2)], [np.full((3, 1), 35, np.uint8), np.full((2, 1), 70)]
    )
    data = load("school")
    assert data.owners is not None
    assert data.owners.names == ("school-000", "school-001")
    assert data.owners.train.tolist() == [0, 0, 0, 1, 1]
    assert data.train.features[0, :6].tolist() == [1.0, 1.0, 1.0, 0.5, 0.5, 1.0]
    assert data.train.targets.tolist() == [0.5, 0.5, 0.5, 1.0, 1.0]
    assert data.train.targets.dtype == np.float32
    assert data.task.kind == "regression"
    assert data.task.error_cap == 0.1


def test_school_files_of_another_shape_are_refused(root: Path) -> None:
    write_school(root / "school", [pupils(3)[:, :5]], [np.ones((3, 1))])
    refused("school", r"school\.mat: school 0: features of shape \(3, 5\)")
    write_school(root / "school", [pupils(3), pupils(3)], [np.ones((3, 1))])
    refused("school", "2 schools in X, 1 in Y")


@pytest.mark.parametrize("damage", [halved, emptied, replaced_by_text])
def test_damaged_mat_files_are_refused(root: Path, damage: Callable[[Path], None]) -> None:
    damage(write_school(root / "school", [pupils(30)], [np.ones((30, 1))]))
    refused("school", r"school\.mat: cannot be read")


PATIENT = "55,1,4,140,250,0,1,140,1,2,2,?,7,3\n"
OTHER = "20,0,1,0,0,?,?,?,?,?,?,0,?,0\n"


def write_hearts(folder: Path, content: str) -> Path:
    folder.mkdir(exist_ok=True)
    for hospital in ("cleveland", "hungarian", "switzerland", "va"):
        (folder / f"processed.{hospital}.data").write_text(content)
    return folder / "processed.cleveland.data"


def test_clinical_values_are_mapped_by_public_ranges_and_missing_ones_flagged(root: Path) -> None:
    write_hearts(root / "heart-disease", PATIENT + OTHER)
    data = load("heart-disease")
    assert data.owners is not None
    assert data.owners.names == ("cleveland", "hungarian", "switzerland", "va")
    assert data.train.targets.tolist() == [1, 0] * 4
    known, unknown = data.train.features[:2]
    age, sex, chest = known[0], known[1], known[2:6]
    assert (age, sex) == (0.0, 1.0)
    assert chest.tolist() == [0, 0, 0, 1]
    assert known[6:10].tolist() == [0.0, 0.0, 0.0, 0.0]  # 140 mm Hg and 250 mg/dl are mid-range, both present
    assert unknown[6:10].tolist() == [0.0, 1.0, 0.0, 1.0]  # 0 means missing
    assert unknown[0] == -1.0
    assert known[-6:].tolist() == [0.0, 1.0, 0.0, 0.0, 1.0, 0.0]  # ca missing, thal 7
    assert data.task.shape == known.shape


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (PATIENT + "55,1,4\n", "line 2: 3 values for 14 columns"),
        (PATIENT + PATIENT.replace("140", "high", 1), r"line 2, column trestbps: 'high' is no number"),
        (PATIENT.replace("3\n", "9\n"), r"line 1, column num: 9\.0; allowed: 0, 1, 2, 3, 4"),
        (PATIENT.replace("3\n", "?\n"), "line 1, column num: no label"),
        (PATIENT.replace("55,", "?,"), "line 1, column age: no value"),
        (PATIENT.replace("55,", "inf,"), "line 1, column age: inf; allowed: finite numbers"),
        ("", "no records"),
    ],
)
def test_hospital_files_with_mistakes_are_refused_by_line(root: Path, content: str, line: str) -> None:
    write_hearts(root / "heart-disease", content)
    refused("heart-disease", rf"processed\.cleveland\.data: {line}")
