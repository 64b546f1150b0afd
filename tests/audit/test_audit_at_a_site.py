"""At a site: its own code is attacked under a contract, its records are counted, and the two must fit."""

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr")

from coterie.audit.auditing import audit
from coterie.audit.verdicts import AuditVerdict
from coterie.data.records import Task
from coterie.engines.flower.contract import Contract
from coterie.errors import InputError
from coterie.models import ModelSettings
from coterie.privacy import Adjacency, FullBatchSteps, PlannedRelease, PrivateSelection, Unit
from coterie.privacy.plans import plan_of

ZERO = Adjacency.ZERO_OUT
DECLARATION = "task: classification\nlabel: {classes: 3}\nfeatures: {shape: [4], range: [0, 1]}\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Fifty records that nobody could read: none of their labels is a class."""
    data = tmp_path / "data"
    data.mkdir()
    (data / "federation.yaml").write_text(DECLARATION)
    np.savez(data / "me.npz", x=np.zeros((50, 4)), y=np.full(50, 99))
    return data


def contract(path: Path, model: str = "softmax", records: int = 40) -> Path:
    releases = [
        PlannedRelease("training", FullBatchSteps(1.0, 1.0, records, 1, ZERO), 3),
        PlannedRelease("selection", PrivateSelection(1.0, ZERO), 2),
    ]
    made = Contract(
        experiment="test",
        algorithm="global",
        client="me",
        records=records,
        task=Task("classification", (4,), 3),
        held_out=10,
        model=ModelSettings(name=model),
        lr=0.1,
        augmentation=None,
        public_seed=0,
        rounds=3,
        plan=plan_of(Unit.RECORD, ZERO, {"me": releases}),
        accountant="rdp",
        delta=1e-2,
    )
    file = path / "contract.json"
    file.write_text(json.dumps({"contract": made.to_json(), "epsilon": 8.0}))
    return file


def test_a_site_attacks_what_it_would_release(folder: Path, tmp_path: Path) -> None:
    found = audit(data=folder, contract=contract(tmp_path), out=tmp_path / "out", trials=400)
    assert [release.name for release in found.releases] == ["training", "selection"]
    assert found.verdict is not AuditVerdict.VIOLATED
    assert found.not_audited == (("whole run", "at a site only what it releases itself is known"),)
    assert (tmp_path / "out" / "report.html").exists()


def test_a_contract_about_other_records_or_code_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is about 31 records; --data has 50"):
        audit(data=folder, contract=contract(tmp_path, records=21))
    with pytest.raises(InputError, match="names a model whose code would run here, 'theirs:net'"):
        audit(data=folder, contract=contract(tmp_path, model="theirs:net"))
    (tmp_path / "contract.json").write_text("{}")
    with pytest.raises(InputError, match=r"--contract: .*malformed contract"):
        audit(data=folder, contract=tmp_path / "contract.json")
