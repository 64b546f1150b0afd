"""A disk that is full while a charge is written: one line, and later the same run with the same budget."""

import os
import resource
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "fuzz"))
from kills import UNITS, contents

from coterie.experiment import local
from coterie.experiment.folder import RunFolder
from coterie.experiment.schema import Experiment
from coterie.experiment.verify import verify
from coterie.privacy import chain
from coterie.privacy.locked_file import LedgerDiskError

ROUNDS = 3


def experiment(unit: str) -> Experiment:
    sections: dict[str, Any] = {**UNITS[unit], "schedule": {"rounds": ROUNDS, "batch": 10}}
    return Experiment.model_validate(sections)


CASES: dict[str, tuple[str, float | None]] = {
    "half of a line": ("record", 0.5),
    "all but its end": ("record", -1),
    "nothing": ("client", 0),
    "all, but not for sure": ("worker", None),
}


@pytest.mark.parametrize(("unit", "written"), CASES.values(), ids=CASES)
def test_a_charge_that_the_disk_has_no_room_for_is_made_once_there_is(
    unit: str, written: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever part of the line got onto the disk."""
    whole = tmp_path / "whole"
    local.run(experiment(unit), whole)
    lines, out = RunFolder(whole).ledger.read_bytes().count(b"\n"), tmp_path / "run"
    append, charge = chain.append, lines // 2
    calls: list[int] = []

    def full(file: Any, data: bytes) -> None:
        calls.append(len(data))
        if len(calls) != charge:
            append(file, data)
            return
        room = (
            len(data)
            if written is None
            else int(written * len(data) if 0 < written < 1 else written % len(data))
        )
        before, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        size = os.fstat(file.fileno()).st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + room, hard))
        try:
            append(file, data)
            raise OSError(28, "No space left on device")  # as the disk says when it is asked to be sure
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (before, hard))

    with monkeypatch.context() as patch:
        patch.setattr(chain, "append", full)
        with pytest.raises(LedgerDiskError, match=r"run/ledger\.jsonl: the ledger cannot be used: "):
            local.run(experiment(unit), out)
    assert len(calls) == charge
    local.run(experiment(unit), out, resume=True)
    assert contents(out) == contents(whole)
    assert verify(out).problems == ()
