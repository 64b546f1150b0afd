"""The folder of a run between sites is verified and resumed like any other, down to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from memory_federation import MemoryFederation, experiment
from trusting import TRUSTING, sites_of, trusting

from coterie.engines.flower.contract import Limits
from coterie.engines.flower.transport import Journal
from coterie.errors import CoterieError
from coterie.experiment import checkpoint
from coterie.experiment.folder import RunFolder
from coterie.experiment.verify import verify
from coterie.files import read_arrays
from coterie.privacy import Budget, HeldOut
from coterie.report.run import write_run_report

OUTSIDE = {"timing.jsonl", "participation.jsonl", "handed.jsonl"}


class Killed(BaseException):
    """Nothing in the code under test may catch this."""


def records(folder: Path) -> MemoryFederation:
    chosen = experiment(
        algorithm={"name": "global"},
        schedule={"rounds": 2, "batch": 20},
        evaluation={"kind": "private"},
    )
    return MemoryFederation(chosen, folder, limits=Limits(Budget(8.0, 1e-3), reported=HeldOut(0, 1.0, 1)))


def workers(folder: Path) -> MemoryFederation:
    quick: dict[str, Any] = {"schedule": {"rounds": 2, "batch": 15, "lr": 0.1}}
    return sites_of(trusting("worker", {"name": "dp-ogl", "period": 2}, **quick), folder, TRUSTING)


def kill_at(federation: MemoryFederation, out: Path, request: int) -> None:
    """Serve until so many requests were sent, and die before their answers are read."""
    pushed: list[int] = []
    push, pull = federation.grid.push_messages, federation.grid.pull_messages

    def counting(sent: Any) -> list[str]:
        pushed.append(1)
        return push(sent)

    def killing(identities: Any) -> Any:
        if len(pushed) == request:
            raise Killed
        return pull(identities)

    federation.grid.push_messages = counting  # type: ignore[method-assign]
    federation.grid.pull_messages = killing  # type: ignore[method-assign]
    with pytest.raises(Killed):
        federation.serve(out)
    federation.grid.push_messages = push  # type: ignore[method-assign]
    federation.grid.pull_messages = pull  # type: ignore[method-assign]


@pytest.mark.parametrize("made", [records, workers])
def test_a_served_run_is_whole_at_its_end_and_no_bit_of_it_can_change(
    made: Callable[[Path], MemoryFederation], tmp_path: Path
) -> None:
    federation = made(tmp_path / "sites")
    federation.serve(tmp_path / "run")
    federation.close()
    write_run_report(tmp_path / "run")
    found = verify(tmp_path / "run")
    assert (found.problems, found.finished) == ((), True)
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file() and path.name not in OUTSIDE]
    assert "sites.json" in {path.name for path in files}
    for path in files:
        original = path.read_bytes()
        for number, position in enumerate((0, len(original) // 3, len(original) - 1)):
            content = bytearray(original)
            content[position] ^= 1 << number
            path.write_bytes(content)
            assert any(str(path) in problem for problem in verify(tmp_path / "run").problems), path.name
        path.write_bytes(original)


@pytest.mark.parametrize("made", [records, workers])
def test_a_served_run_that_was_stopped_is_whole_and_not_resumed_over_an_edit(
    made: Callable[[Path], MemoryFederation], tmp_path: Path
) -> None:
    federation, files = made(tmp_path / "sites"), RunFolder(tmp_path / "run")
    kill_at(federation, files.path, 4)
    found = verify(files.path)
    assert (found.problems, found.finished) == ((), False)
    for path in (files.guarantee, files.plan, files.sites, files.experiment):
        original = path.read_bytes()
        path.write_bytes(original.replace(b"1", b"2", 1))
        with pytest.raises(CoterieError, match=path.name):
            federation.serve(files.path)
        path.write_bytes(original)
    federation.serve(files.path)
    federation.close()
    assert verify(files.path).problems == ()


def test_a_damaged_answer_in_the_journal_is_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bits of a clipped update that change on the server's disk could be worth any number of clips."""
    whole = workers(tmp_path / "whole-sites")
    whole.serve(tmp_path / "whole")
    whole.close()
    federation = workers(tmp_path / "sites")

    def killed(*arguments: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", killed)
        with pytest.raises(Killed):
            federation.serve(tmp_path / "run")
    kept = sorted(Journal(tmp_path / "run" / "journal").folder.glob("*.safetensors"))
    assert kept
    for path in kept:
        content = bytearray(path.read_bytes())
        content[-1] ^= 0x40
        path.write_bytes(content)
        assert read_arrays(path) is None
    federation.serve(tmp_path / "run")
    federation.close()
    assert verify(tmp_path / "run").problems == ()
    ledgers = [RunFolder(tmp_path / name).ledger.read_bytes() for name in ("run", "whole")]
    assert ledgers[0] == ledgers[1]
