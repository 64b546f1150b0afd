"""What would not fit this machine is refused with an estimate, before any of it is taken."""

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest

from coterie.data.folder import read_folder
from coterie.data.records import Task
from coterie.errors import InputError, check_memory
from coterie.experiment.local import calibrate
from coterie.experiment.schema import Experiment
from coterie.models import ModelSettings, build_model

TWO_CLUSTERS = {"sizes": [2, 3], "records_per_client": 60}


def planned(**sections: object) -> None:
    calibrate(Experiment.model_validate({"federation": TWO_CLUSTERS, **sections}))


@pytest.fixture
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 64 KiB."""
    monkeypatch.setattr("os.sysconf", lambda name: 2**8)


def test_the_line_names_the_key_and_the_estimate() -> None:
    check_memory("data.size: 10", 2**20)
    with pytest.raises(InputError, match=r"data.size: 10 would take 1,048,576.0 GiB of memory, this machine"):
        check_memory("data.size: 10", 2**50)


def test_processes_that_train(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coterie.experiment.local.WORKER_BYTES", 2**50)
    with pytest.raises(InputError, match=r"engine.workers: \d+ processes would take .* GiB of memory"):
        planned(engine={"workers": 1000})


def test_drawn_records(small_machine: None) -> None:
    with pytest.raises(InputError, match=r"data.size: 900 would take"):
        planned(data={"name": "glyphs", "size": 900})


def test_dealt_records(small_machine: None) -> None:
    with pytest.raises(InputError, match=r"federation.sizes: 5 clients would take"):
        planned()


def test_the_models_of_all_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    federation, algorithm = {**TWO_CLUSTERS, "shift": "none"}, {"name": "km-cdpfl", "clusters": 3}
    refused: list[str] = []
    monkeypatch.setattr(
        "coterie.experiment.calibrated.check_memory", lambda what, needed: refused.append(f"{what} {needed}")
    )
    planned(federation=federation, algorithm=algorithm)
    assert refused == ["algorithm.clusters: 3 7800"]


@pytest.mark.parametrize(
    ("settings", "task", "named"),
    [
        ({"name": "mcmahan-cnn", "hidden": 2**16}, Task("classification", (1, 2**14, 2**14), 10), "hidden"),
        (
            {"name": "lstm", "hidden": 2**16, "layers": 64},
            Task("classification", (80,), 90, vocabulary=90),
            "hidden",
        ),
        ({"name": "softmax"}, Task("classification", (2**20, 2**20), 10), "name"),
    ],
)
def test_a_model(settings: dict[str, object], task: Task, named: str) -> None:
    with pytest.raises(InputError, match=rf"^model\.{named}: .* would take .* GiB of memory"):
        build_model(ModelSettings.model_validate(settings), task, 0)


def claiming(path: Path, shape: tuple[int, ...]) -> None:
    """A file whose array says that it is larger than it is."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": shape})
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("x.npy", "y.npy"):
            archive.writestr(name, header.getvalue() + bytes(64))


def declared(folder: Path) -> Path:
    text = "task: classification\nlabel: {classes: 2}\nfeatures: {shape: [3], range: [0, 1]}\n"
    (folder / "federation.yaml").write_text(text)
    return folder


def test_a_file_that_claims_more_than_it_has(tmp_path: Path) -> None:
    claiming(declared(tmp_path) / "a.npz", (10**14, 3))
    with pytest.raises(InputError, match=r"a.npz: array x claims shape"):
        read_folder(tmp_path)


def test_a_file_that_unfolds_to_more_than_fits(tmp_path: Path, small_machine: None) -> None:
    np.savez_compressed(declared(tmp_path) / "a.npz", x=np.zeros((10**4, 3)), y=np.zeros(10**4))
    with pytest.raises(InputError, match=r"a.npz would take .* GiB of memory, this machine has"):
        read_folder(tmp_path)


def test_a_table_that_unfolds_to_more_than_fits(tmp_path: Path, small_machine: None) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    text = "task: classification\nlabel: {column: y, classes: 2}\nfeatures: [{column: x, range: [0, 1]}]\n"
    (tmp_path / "federation.yaml").write_text(text)
    pq.write_table(pa.table({"x": np.zeros(10**5), "y": np.zeros(10**5)}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"a.parquet would take .* GiB of memory, this machine has"):
        read_folder(tmp_path)
