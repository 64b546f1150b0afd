"""Exported models say the same in a process that has no coterie, from the same raw values."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from trained_runs import Runs, runs

from coterie.errors import InputError
from coterie.experiment.exporting import export, layers
from coterie.experiment.trained import TrainedRun
from coterie.files import digest_file, read_json
from coterie.report.model_card import model_card

__all__ = ["runs"]
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "use.md"
ALONE = """
import sys
from pathlib import Path
sys.modules["coterie"] = None
import numpy as np, torch, onnxruntime
for place in sys.argv[1:]:
    place = Path(place)
    raw = np.load(place / "raw.npy")
    def save(kind, outputs):
        np.save(place / f"{kind}.npy", outputs)
    name = next((place / "pt2").glob("*.pt2")).stem
    save("pt2", torch.export.load(place / "pt2" / f"{name}.pt2").module()(torch.from_numpy(raw)).numpy())
    session = onnxruntime.InferenceSession(place / "onnx" / f"{name}.onnx")
    save("onnx", session.run(None, {"raw": raw})[0])
    given = {"folder": str(place / "safetensors"), "raw": raw}
    exec(shown, given)
    save("safetensors", given["outputs"].reshape(len(raw), -1).squeeze())
"""


def shown() -> str:
    """The lines of the document by which a model is used without coterie."""
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    [lines] = [block for block in blocks if "load_state_dict" in block]
    return str(lines)


def card_of(run: TrainedRun) -> object:
    return lambda signature: model_card(run, signature, personal=run.personal_parts is not None)


def rows_of(run: TrainedRun) -> np.ndarray:
    """Raw records, some of which lie outside the range or are missing."""
    rng, inputs = np.random.default_rng(5), run.preprocessing.inputs
    if inputs.kind == "array":
        return rng.uniform(0, 16, (20, *inputs.shape)).astype(np.float32)
    columns = []
    for column in inputs.columns:
        values = rng.choice(len(column.categories), 20) if column.categories else rng.uniform(-5, 250, 20)
        gone = rng.choice([np.nan, *column.missing_values], 20)
        columns.append(np.where((rng.random(20) < 0.3) & (column.missing == "indicator"), gone, values))
    return np.column_stack(columns)


def test_the_lines_that_are_shown_are_few() -> None:
    assert len(shown().strip().splitlines()) <= 20


def test_every_format_says_the_same_in_a_process_without_coterie(runs: Runs, tmp_path: Path) -> None:
    chosen = {"table": {"client": "south"}, "regression": {"cluster": 1}, "personal": {"client": "client-0"}}
    expected = {}
    for name, which in chosen.items():
        run, place = TrainedRun.open(runs(name).folder), tmp_path / name
        place.mkdir()
        raw = rows_of(run)
        np.save(place / "raw.npy", raw)
        with torch.no_grad():
            expected[name] = run.model(**which)(torch.from_numpy(raw)).numpy()
        for kind in ("safetensors", "pt2", "onnx"):
            export(run, place / kind, kind, **which, card=card_of(run))
    (tmp_path / "alone.py").write_text(f"shown = {shown()!r}\n{ALONE}")
    places = [str(tmp_path / name) for name in chosen]
    done = subprocess.run([sys.executable, tmp_path / "alone.py", *places], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name, outputs in expected.items():
        for kind in ("safetensors", "pt2", "onnx"):
            found = np.load(tmp_path / name / f"{kind}.npy")
            np.testing.assert_allclose(found, outputs, rtol=1e-5, atol=1e-5, err_msg=f"{name}, {kind}")


def test_a_signature_names_files_columns_classes_and_the_promise(runs: Runs, tmp_path: Path) -> None:
    run = TrainedRun.open(runs("table").folder)
    done = export(run, tmp_path / "models", card=card_of(run))
    told = json.loads((tmp_path / "models" / "signature.json").read_text())
    assert [path.name for path in done.models] == ["cluster-0.safetensors", "cluster-1.safetensors"]
    for model in told["models"]:
        assert digest_file(tmp_path / "models" / model["file"]) == model["sha256"]
    assert [model["clients"] for model in told["models"]] == [["north"], ["south"]]
    assert [column["column"] for column in told["inputs"]["columns"]] == ["age", "smoker", "pressure"]
    assert told["inputs"]["columns"][0]["range"] == [18, 100]
    assert told["outputs"]["classes"] == ["healthy", "ill"]
    assert told["guarantee"]["line"] == runs("table").guarantee
    card = (tmp_path / "models" / "CARD.md").read_text()
    promised = read_json(run.files.guarantee)
    assert promised["text"] in card
    for release in promised["releases"]:
        assert f"| {release['name']} | {release['what']} |" in card
    assert "learnt without noise" not in card
    assert "1 = yes" in card


def test_a_card_warns_of_a_part_that_is_not_covered(runs: Runs, tmp_path: Path) -> None:
    run = TrainedRun.open(runs("personal").folder)
    with pytest.raises(InputError, match="name a client"):
        export(run, tmp_path / "models", card=card_of(run))
    assert not (tmp_path / "models").exists()
    export(run, tmp_path / "models", client="client-1", card=card_of(run))
    assert "must not be given away" in (tmp_path / "models" / "CARD.md").read_text()


def test_nothing_is_overwritten_and_a_format_is_one_of_three(runs: Runs, tmp_path: Path) -> None:
    run = TrainedRun.open(runs("table").folder)
    (tmp_path / "kept").write_text("mine")
    with pytest.raises(InputError, match="not empty"):
        export(run, tmp_path, card=card_of(run))
    with pytest.raises(InputError, match="'pickle'; allowed: safetensors, pt2, onnx"):
        export(run, tmp_path / "models", "pickle", card=card_of(run))
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_a_network_that_cannot_be_put_together_by_names_has_no_layers() -> None:
    assert layers(torch.nn.Sequential(torch.nn.Linear(2, 3))) is not None
    assert layers(torch.nn.Sequential(torch.nn.Tanh())) is None
    assert layers(torch.nn.Linear(2, 3)) is None


def test_what_no_tracer_follows_is_one_line(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = TrainedRun.open(runs("table").folder)

    class Odd(torch.nn.Module):
        def forward(self, features: torch.Tensor) -> torch.Tensor:
            return features[:, :2] * (1.0 if float(features.sum()) > 0 else 2.0)

    monkeypatch.setattr(TrainedRun, "network", lambda self, parameters: Odd())
    with pytest.raises(InputError, match="--format: pt2 cannot hold this network") as refused:
        export(run, tmp_path / "models", "pt2", card=card_of(run))
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "models").exists()
