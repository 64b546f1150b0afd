"""One flipped bit in any file that a claim rests on is found; honest folders, killed or not, are whole."""

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from coterie import api
from coterie.cli.report import report
from coterie.cli.verify import verify as verify_command
from coterie.errors import CoterieError, InputError, LedgerError
from coterie.experiment import cells, checkpoint, local
from coterie.experiment.calibrated import CalibratedRun
from coterie.experiment.callbacks import Callbacks, RoundReport
from coterie.experiment.cells import Progress, compare
from coterie.experiment.comparison import SweepResult
from coterie.experiment.experiment_file import read_experiment
from coterie.experiment.folder import RunFolder
from coterie.experiment.loop import create_folder, drop_models
from coterie.experiment.recorded import check_folder
from coterie.experiment.schema import Experiment
from coterie.experiment.seal import NAME, ChainedLines, Seal
from coterie.experiment.sweep import Cell, Sweep
from coterie.experiment.verify import Verification, read_claim, verify, with_claim
from coterie.files import json_text, read_json, write_json, write_text
from coterie.report.comparison import write_comparison_report
from coterie.report.run import write_run_report

RECORDS: dict[str, Any] = {
    "federation": {"sizes": [2, 2], "records_per_client": 40},
    "algorithm": {"name": "r-dpcfl"},
    "privacy": {"epsilon": 4.0, "delta": 1e-3},
    "schedule": {"rounds": 3, "batch": 20},
    "seeds": {"noise": 1},
    "evaluation": {"references": False},
}
CLIENTS: dict[str, Any] = {
    "federation": {"sizes": [2, 2], "records_per_client": 20},
    "model": {"name": "cnn"},
    "algorithm": {"name": "dp-fedper", "rate": 0.5},
    "privacy": {"unit": "client", "epsilon": 8.0, "delta": 1e-2},
    "schedule": {"rounds": 2, "batch": 10},
    "seeds": {"noise": 1},
    "evaluation": {"references": False},
}
WORKERS: dict[str, Any] = {
    "federation": {
        "kind": "groups",
        "structure": "ring",
        "workers": 4,
        "groups": 2,
        "alpha": 1.0,
        "records_per_client": 20,
    },
    "algorithm": {"name": "dp-ogl", "period": 2, "rate": 0.7, "noise": 2.0, "iterations": 1},
    "privacy": {"unit": "worker", "epsilon": 50.0, "delta": 1e-3, "clip": 0.5},
    "schedule": {"rounds": 2, "batch": 10},
    "seeds": {"noise": 2},
}
OUTSIDE = {"timing.jsonl"}
"""Wall-clock times, on which no claim rests."""


def stopped_after(rounds: int) -> Callable[[RoundReport], None]:
    def stop(report: RoundReport) -> None:
        if report.round == rounds:
            raise KeyboardInterrupt

    return stop


def stop(content: dict[str, Any], out: Path, rounds: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        local.run(
            Experiment.model_validate(content), out, callbacks=Callbacks(on_round=stopped_after(rounds))
        )


def in_this_process(wanted: Sequence[Cell], out: Path, *others: object) -> None:
    for cell in wanted:
        local.run(cell.experiment, out / "cells" / cell.name)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("runs")
    for name, content in {"records": RECORDS, "clients": CLIENTS, "workers": WORKERS}.items():
        api.run(Experiment.model_validate(content), base / name)
    stop(RECORDS, base / "stopped", 2)
    write_run_report(base / "stopped")
    grid = Sweep(base={**RECORDS, "algorithm": {"name": "global"}}, grid={"privacy.epsilon": [2.0, 4.0]})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cells, "run_cells", in_this_process)
        compare(grid, base / "comparison")
    write_comparison_report(base / "comparison")
    names = ("records", "clients", "workers", "stopped", "comparison")
    return {name: base / name for name in names}


@pytest.fixture
def copy(originals: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: Path(shutil.copytree(originals[name], tmp_path / name))


@pytest.fixture
def finished(copy: Callable[[str], Path]) -> RunFolder:
    return RunFolder(copy("records"))


@pytest.fixture
def stopped(copy: Callable[[str], Path]) -> RunFolder:
    return RunFolder(copy("stopped"))


# --- honest folders ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["records", "clients", "workers", "stopped", "comparison"])
def test_an_honest_folder_holds_and_so_does_its_page(originals: dict[str, Path], name: str) -> None:
    found = verify(originals[name])
    assert found.problems == ()
    assert found.verdict == "holds"
    assert found.finished == (name != "stopped")
    assert found.epsilon_claimed is not None
    assert found.epsilon_recounted is not None
    assert found.epsilon_recounted <= found.epsilon_claimed * (1 + 1e-6)
    page = verify(originals[name] / "report.html")
    assert page.problems == ()
    assert page.epsilon_claimed == found.epsilon_claimed
    assert page.epsilon_recounted == pytest.approx(found.epsilon_claimed)
    if name != "comparison":
        lines = RunFolder(originals[name]).ledger.read_text().splitlines()
        head = {"count": len(lines), "hash": json.loads(lines[-1])["hash"]}
        assert found.to_json()["ledger_head"] == head == page.to_json()["ledger_head"]


def test_the_page_for_everybody_is_checked_like_the_other(copy: Callable[[str], Path]) -> None:
    for name, write in (("records", write_run_report), ("comparison", write_comparison_report)):
        folder = copy(name)
        page = write(folder, public=True)
        assert page.name == "public.html"
        assert verify(page).problems == verify(folder).problems == ()
        page.write_bytes(with_flipped(page, len(page.read_bytes()) // 2, 3))
        assert any(str(page) in problem for problem in verify(folder).problems)
        assert verify(page).verdict == "broken"


def test_a_page_holds_on_its_own_and_in_any_folder(originals: dict[str, Path], tmp_path: Path) -> None:
    for name in ("records", "workers", "comparison"):
        page = Path(shutil.copy(originals[name] / "report.html", tmp_path / f"{name}.html"))
        assert verify(page).verdict == "holds"


def test_a_folder_that_was_only_made_holds(tmp_path: Path) -> None:
    prepared = local.calibrate(Experiment.model_validate(RECORDS))
    create_folder(RunFolder(tmp_path / "new"), prepared, "data", None)
    found = verify(tmp_path / "new")
    assert (found.verdict, found.finished, found.ledger_head) == ("holds", False, None)


class Killed(BaseException):
    """What a crash does: nothing after it happens."""


def killed_everywhere(prepared: CalibratedRun, base: Path) -> Iterator[Path]:
    """One folder for each moment at which a run writes a file, as the crash left it, before and after."""
    for moment in range(10_000):
        out = base / f"killed-{moment}"
        with pytest.MonkeyPatch.context() as patch:
            left = [moment]

            def counted(function: Callable[..., Any], left: list[int] = left) -> Callable[..., Any]:
                def wrapped(*arguments: Any, **named: Any) -> Any:
                    left[0] -= 1
                    if left[0] == -1:
                        raise Killed
                    done = function(*arguments, **named)
                    left[0] -= 1
                    if left[0] == -1:
                        raise Killed
                    return done

                return wrapped

            patch.setattr("coterie.experiment.seal.ChainedLines.append", counted(ChainedLines.append))
            patch.setattr("coterie.experiment.seal.write_text", counted(write_text))
            patch.setattr("coterie.experiment.checkpoint.save", counted(checkpoint.save))
            try:
                local.finish(prepared, RunFolder(out))
            except Killed:
                if RunFolder(out).exists:
                    yield out
                continue
        yield out
        return


def test_killed_between_any_two_writes_a_run_is_whole_resumes_and_is_whole_again(tmp_path: Path) -> None:
    content = {**RECORDS, "schedule": {"rounds": 2, "batch": 20}}
    prepared = local.calibrate(Experiment.model_validate(content))
    folders = list(killed_everywhere(prepared, tmp_path))
    assert len(folders) > 10
    for folder in folders:
        assert verify(folder).problems == (), folder.name
    whole = RunFolder(folders[-1])
    for folder in folders[:-1]:
        files = RunFolder(folder)
        if not files.finished:
            local.finish(prepared, files)
        assert verify(folder).problems == (), folder.name
        assert files.ledger.read_bytes() == whole.ledger.read_bytes()
        assert files.metrics.read_bytes() == whole.metrics.read_bytes()


# --- one flipped bit --------------------------------------------------------------------------------


def positions(content: bytes) -> dict[str, int]:
    """A byte of every class: where a file begins and ends, numbers, lines, and the middle of everything."""
    digits = [at for at, byte in enumerate(content) if chr(byte).isdigit()]
    letters = [at for at, byte in enumerate(content) if chr(byte).isascii() and chr(byte).isalpha()]
    newlines = [at for at, byte in enumerate(content) if byte == ord("\n")]
    found = {
        "header": 0,
        "early": min(9, len(content) - 1),
        "first digit": digits[0] if digits else None,
        "last digit": digits[-1] if digits else None,
        "letter": letters[len(letters) // 2] if letters else None,
        "first newline": newlines[0] if newlines else None,
        "last newline": newlines[-1] if newlines else None,
        "middle": len(content) // 2,
        "last": len(content) - 1,
    }
    return {name: at for name, at in found.items() if at is not None}


def with_flipped(path: Path, position: int, bit: int) -> bytes:
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    return bytes(content)


@pytest.mark.parametrize("name", ["records", "clients", "workers", "stopped"])
def test_one_flipped_bit_is_found_wherever_it_is(copy: Callable[[str], Path], name: str) -> None:
    folder = copy(name)
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in OUTSIDE]
    expected = {"experiment.yaml", "federation.json", "plan.json", "guarantee.json", "ledger.jsonl"}
    expected |= {"metrics.jsonl", "state.json", "state.safetensors", "report.html", NAME}
    more = {
        "records": {"findings.json", "task.json", "result.json"},
        "clients": {"personal.safetensors", "task.json", "result.json"},
        "workers": {"leakage.json", "task.json", "result.json"},
        "stopped": {"findings.json", "noise.key"},
    }
    assert {path.name for path in files} == expected | more[name]
    for path in files:
        original = path.read_bytes()
        for number, (place, position) in enumerate(positions(original).items()):
            path.write_bytes(with_flipped(path, position, number % 8))
            found = verify(folder)
            assert found.verdict == "broken", f"{path.name}: {place}"
            assert any(str(path) in problem for problem in found.problems), (path.name, place, found.problems)
            assert not any("\n" in problem for problem in found.problems)
            path.write_bytes(original)
    assert verify(folder).verdict == "holds"


def test_one_flipped_bit_of_a_comparison_is_found(copy: Callable[[str], Path]) -> None:
    folder = copy("comparison")
    own = ["sweep.yaml", "table.csv", "table.md", "report.html", NAME]
    for path in [*(folder / name for name in own), folder / "cells" / "epsilon=4.0" / "result.json"]:
        original = path.read_bytes()
        for number, (place, position) in enumerate(positions(original).items()):
            path.write_bytes(with_flipped(path, position, number % 8))
            found = verify(folder)
            assert found.verdict == "broken", f"{path.name}: {place}"
            assert any(str(path) in problem for problem in found.problems), (place, found.problems)
            path.write_bytes(original)
    assert verify(folder).verdict == "holds"


def test_any_bit_of_a_page_is_found_without_its_folder(originals: dict[str, Path], tmp_path: Path) -> None:
    page = Path(shutil.copy(originals["records"] / "report.html", tmp_path / "report.html"))
    original = page.read_bytes()
    for number, position in enumerate([*positions(original).values(), *range(37, len(original), 997)]):
        page.write_bytes(with_flipped(page, position, number % 8))
        assert verify(page).verdict == "broken", position
        page.write_bytes(original)


# --- edits ------------------------------------------------------------------------------------------


def _edit(path: Path, **changes: Any) -> Path:
    write_json(path, {**read_json(path), **changes})
    return path


def _text(path: Path, old: str, new: str) -> Path:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    return path


def _guarantee(files: RunFolder) -> Path:
    stored = read_json(files.guarantee)
    return _edit(files.guarantee, epsilon=0.1, line=stored["line"].replace("eps=4", "eps=0.1"))


def _newest(files: RunFolder) -> Path:
    return max(files.checkpoint.glob("round-*"))


def _round(files: RunFolder) -> Path:
    path = _newest(files) / "state.json"
    content = read_json(path)
    return _edit(path, state={**content["state"], "round": 1})


def _weight(files: RunFolder) -> Path:
    path = _newest(files) / "state.safetensors"
    path.write_bytes(with_flipped(path, len(path.read_bytes()) - 3, 4))
    return path


EDITS: dict[str, Callable[[RunFolder], Path]] = {
    "guarantee": _guarantee,
    "plan": lambda files: _text(files.plan, '"times": ', '"times": 1'),
    "round of the state": _round,
    "one bit of a weight": _weight,
    "step size in the experiment": lambda files: _text(files.experiment, "lr: 0.5", "lr: 0.4"),
    "a comment in the experiment": lambda files: _text(files.experiment, "data:", "# mine\ndata:"),
    "a metrics line": lambda files: _text(files.metrics, '"mean":0.', '"mean":0.9'),
    "the facts": lambda files: _text(files.federation, '"records": 40', '"records": 400'),
    "the findings": lambda files: _text(files.findings, "0.", "1."),
    "a result that nobody found": lambda files: Path(
        shutil.copy(files.path.parent / "of-another.json", files.result)
    ),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_while_a_run_is_stopped_is_refused_on_resume_by_the_name_of_the_file(
    edit: str, stopped: RunFolder, originals: dict[str, Path]
) -> None:
    shutil.copy(RunFolder(originals["records"]).result, stopped.path.parent / "of-another.json")
    path = EDITS[edit](stopped)
    before = {file: file.read_bytes() for file in stopped.path.rglob("*") if file.is_file()}
    with pytest.raises(CoterieError) as refused:
        local.run(stopped.experiment, stopped.path, resume=True)
    assert str(path) in str(refused.value)
    assert {file: file.read_bytes() for file in stopped.path.rglob("*") if file.is_file()} == before
    with pytest.raises(CoterieError, match=path.name):
        check_folder(stopped)


@pytest.mark.parametrize(
    "edit",
    {
        "the result": lambda files: _edit(files.result, epsilon=0.1),
        "another accuracy": lambda files: _text(files.result, '"mean": 0.', '"mean": 0.9'),
        **{name: EDITS[name] for name in ("guarantee", "plan", "a metrics line", "one bit of a weight")},
    }.items(),
    ids=lambda edit: edit[0],
)
def test_an_edited_finished_run_is_not_told_again(
    edit: tuple[str, Callable[[RunFolder], Path]], finished: RunFolder
) -> None:
    path = edit[1](finished)
    with pytest.raises(CoterieError) as refused:
        local.run(finished.experiment, finished.path, resume=True)
    assert str(path) in str(refused.value)


@pytest.mark.parametrize("name", ["ledger.jsonl", "guarantee.json", "metrics.jsonl", "checkpoint", NAME])
def test_a_part_that_is_missing_is_named(name: str, stopped: RunFolder) -> None:
    path = stopped.path / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    found = verify(stopped.path)
    assert found.verdict == "broken"
    assert any(name in problem for problem in found.problems)
    with pytest.raises(CoterieError, match=name):
        local.run(stopped.experiment, stopped.path, resume=True)


def test_a_ledger_deleted_in_the_first_round_is_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first checkpoint the seal remembers that there was one."""

    def killed(*arguments: object) -> None:
        raise Killed

    experiment = Experiment.model_validate(RECORDS)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", killed)
        with pytest.raises(Killed):
            local.run(experiment, tmp_path / "run")
    assert verify(tmp_path / "run").verdict == "holds"
    RunFolder(tmp_path / "run").ledger.unlink()
    with pytest.raises(CoterieError, match=r"ledger\.jsonl: the ledger"):
        local.run(experiment, tmp_path / "run", resume=True)
    assert not RunFolder(tmp_path / "run").ledger.exists()


def test_a_result_that_was_deleted_is_missed(finished: RunFolder) -> None:
    finished.result.unlink()
    found = verify(finished.path)
    assert any("result.json: missing" in problem for problem in found.problems)


def test_models_that_were_deleted_are_missed(finished: RunFolder) -> None:
    shutil.rmtree(finished.checkpoint)
    found = verify(finished.path)
    assert found.verdict == "broken"
    assert any("checkpoint: missing" in problem for problem in found.problems)


def test_models_that_were_dropped_on_purpose_are_not_missed(
    finished: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    drop_models(finished)
    drop_models(finished)
    found = verify(finished.path)
    assert not finished.checkpoint.exists()
    assert (found.verdict, found.problems, found.models_dropped) == ("holds", (), 1)
    assert found.to_json()["models_dropped"] == 1
    verify_command(finished.path)
    assert "models: dropped on purpose" in " ".join(capsys.readouterr().out.split())
    seal = Seal(finished.path)
    seal.lines.cut(len(seal.lines.bodies) - 1)  # without the line that says so, they are lost
    assert any("checkpoint: missing" in problem for problem in verify(finished.path).problems)


def test_a_crash_while_models_are_dropped_leaves_them_whole_or_gone(
    finished: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*arguments: object) -> None:
        raise Killed

    for step in ("coterie.experiment.loop.shutil.rmtree", "pathlib.Path.rename"):
        with monkeypatch.context() as patch:
            patch.setattr(step, killed)
            with pytest.raises(Killed):
                drop_models(finished)
        assert verify(finished.path).verdict == "holds"
        for hidden in finished.checkpoint.glob(".round-*"):
            hidden.rename(hidden.with_name(hidden.name[1:]))
    drop_models(finished)
    assert not finished.checkpoint.exists()


def test_every_problem_is_listed(finished: RunFolder) -> None:
    _edit(finished.result, epsilon=0.1)
    _guarantee(finished)
    _weight(finished)
    text = "\n".join(verify(finished.path).problems)
    for name in ("result.json", "guarantee.json", "state.safetensors"):
        assert name in text


def test_a_folder_of_an_earlier_version_is_refused_in_one_line(stopped: RunFolder) -> None:
    (stopped.path / NAME).unlink()
    with pytest.raises(CoterieError, match="written by an earlier version"):
        local.run(stopped.experiment, stopped.path, resume=True)
    state = _newest(stopped) / "state.json"
    write_json(state, {**read_json(state), "format": 1})
    with pytest.raises(InputError, match=r"state\.json: written by an earlier version \(format 1"):
        checkpoint.stored(stopped.checkpoint)


def test_a_guarantee_that_was_replaced_does_not_come_back(stopped: RunFolder) -> None:
    """Caveats may be added while a run is resumed; then the guarantee without them is an edit like any."""
    before = stopped.guarantee.read_text()
    content = read_json(stopped.guarantee)
    more = json_text({**content, "caveats": [*content["caveats"], "more"]})
    Seal(stopped.path).write_text(stopped.guarantee, more)
    Seal(stopped.path).check("guarantee.json")
    stopped.guarantee.write_text(before)
    with pytest.raises(CoterieError, match=r"guarantee\.json: changed since it was written"):
        Seal(stopped.path).check("guarantee.json")


def test_a_damaged_noise_key_is_not_used(stopped: RunFolder) -> None:
    stopped.secret.write_bytes(with_flipped(stopped.secret, 12, 0))
    with pytest.raises(InputError, match=r"noise\.key: changed since it was written"):
        local.run(stopped.experiment, stopped.path, resume=True)


# --- pages and comparisons --------------------------------------------------------------------------


def test_a_page_that_claims_less_than_its_plan_costs_is_broken(
    originals: dict[str, Path], tmp_path: Path
) -> None:
    """With a hash that fits: the figure itself is counted again."""
    original = originals["records"] / "report.html"
    [(name, claim)] = read_claim(original).items()
    text = original.read_text().partition("<!-- coterie-claim ")[0] + "</body></html>\n"
    page = tmp_path / "report.html"
    page.write_text(with_claim(text, {name: claim}))
    assert verify(page).verdict == "holds"
    page.write_text(with_claim(text, {name: dataclasses.replace(claim, epsilon=0.1)}))
    [problem] = verify(page).problems
    assert f"claims epsilon 0.1; counted again it is {claim.epsilon}" in problem


def test_a_page_beside_another_run_is_broken(finished: RunFolder, originals: dict[str, Path]) -> None:
    shutil.copy(originals["workers"] / "report.html", finished.report)
    assert any(str(finished.report) in problem for problem in verify(finished.report).problems)
    assert any(str(finished.report) in problem for problem in verify(finished.path).problems)


def test_an_older_page_of_the_same_run_holds(stopped: RunFolder) -> None:
    local.run(stopped.experiment, stopped.path, resume=True)
    assert verify(stopped.report).verdict == "holds"
    assert not verify(stopped.report).finished
    assert verify(stopped.path).verdict == "holds"


def test_a_table_sealed_anew_over_other_figures_is_found(copy: Callable[[str], Path]) -> None:
    folder = copy("comparison")
    table = folder / "table.csv"
    lines = table.read_text().splitlines()
    edited = "\n".join([lines[0], lines[1].replace("2.0,", "0.1,", 1), *lines[2:]]) + "\n"
    cells = [cell.name for cell in (folder / "cells").iterdir() if cell.is_dir()]
    Seal(folder).write_text(table, edited, cells=cells)
    assert any("table.csv: its rows" in problem for problem in verify(folder).problems)


def test_a_comparison_is_not_resumed_over_an_edited_run(copy: Callable[[str], Path]) -> None:
    folder = copy("comparison")
    result = folder / "cells" / "epsilon=2.0" / "result.json"
    _edit(result, epsilon=0.1)
    with pytest.raises(CoterieError, match=r"result\.json"):
        compare(Sweep.read(folder / "sweep.yaml"), folder, resume=True)


LOST = "epsilon=2.0"


def refusals(folder: Path) -> Iterator[str]:
    """What everything says that would tell of a comparison or go on with it."""
    for refused in (
        lambda: report(folder, show=False),
        lambda: report(folder, show=False, public=True),
        lambda: compare(Sweep.read(folder / "sweep.yaml"), folder, resume=True),
    ):
        with pytest.raises(LedgerError) as told:
            refused()
        yield str(told.value)
    problems = [problem for problem in verify(folder).problems if LOST in problem]
    assert problems
    yield problems[0]


def test_a_run_that_was_deleted_from_a_comparison_is_missed(copy: Callable[[str], Path]) -> None:
    folder = copy("comparison")
    (folder / "report.html").unlink()
    shutil.rmtree(folder / "cells" / LOST)
    for told in refusals(folder):
        assert told.startswith(f"{folder / 'cells' / LOST}: missing; ")
        assert len(told.splitlines()) == 1
    assert not (folder / "cells" / LOST).exists(), "nothing was spent again"
    assert verify(folder).epsilon_total is None, "what is left spent less"


def test_a_run_that_was_deleted_and_run_again_is_not_the_one_that_the_comparison_knew(
    copy: Callable[[str], Path],
) -> None:
    folder = copy("comparison")
    (folder / "report.html").unlink()
    experiment = read_experiment(folder / "cells" / LOST / "experiment.yaml")
    shutil.rmtree(folder / "cells" / LOST)
    local.run(experiment, folder / "cells" / LOST)
    for told in refusals(folder):
        assert told.startswith(str(folder / "cells" / LOST / NAME))


@pytest.mark.parametrize("killed", [False, True])
def test_a_run_that_had_only_begun_is_missed_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    """Also where the comparison had no time to end in order."""

    def begin(
        cells: Sequence[Cell],
        out: Path,
        executor: object,
        forecast: object,
        watch: Callable[[Progress], None],
    ) -> None:
        stop(cells[0].experiment.model_dump(mode="json"), out / "cells" / cells[0].name, 1)
        watch(Progress({}, {}, frozenset()))
        raise KeyboardInterrupt

    grid = Sweep(base={**RECORDS, "algorithm": {"name": "global"}}, grid={"privacy.epsilon": [2.0, 4.0]})
    with monkeypatch.context() as patch:
        patch.setattr(cells, "run_cells", begin)
        if killed:
            note = Seal.remember
            patch.setattr(
                Seal, "remember", lambda *runs, running: note(*runs, running=True) if running else None
            )
        with pytest.raises(KeyboardInterrupt):
            compare(grid, tmp_path / "comparison")
    monkeypatch.setattr(cells, "run_cells", lambda *arguments: None)
    whole = Path(shutil.copytree(tmp_path / "comparison", tmp_path / "whole"))
    assert set(compare(grid, whole, resume=True).failed) == {LOST, "epsilon=4.0"}
    shutil.rmtree(tmp_path / "comparison" / "cells" / LOST)
    for told in refusals(tmp_path / "comparison"):
        assert told.startswith(f"{tmp_path / 'comparison' / 'cells' / LOST}: missing; ")


def test_a_comparison_tells_what_all_its_runs_spend_together(originals: dict[str, Path]) -> None:
    found, total = verify(originals["comparison"]), SweepResult.load(originals["comparison"]).total
    assert total is not None
    assert found.epsilon_claimed is not None
    assert found.epsilon_total == total.epsilon > found.epsilon_claimed
    assert found.to_json()["epsilon_total"] == total.epsilon


def test_what_is_neither_run_nor_comparison_nor_page_is_wrong_input(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text("<!doctype html><title>mine</title>")
    for path in (tmp_path, tmp_path / "page.html", tmp_path / "nowhere"):
        with pytest.raises(InputError, match="not a run folder, the folder of a comparison, or a report"):
            verify(path)


def test_the_answer_has_the_promised_keys(originals: dict[str, Path]) -> None:
    content = verify(originals["records"]).to_json()
    promised = {"verdict", "finished", "epsilon_claimed", "epsilon_recounted", "ledger_head", "problems"}
    assert set(content) == promised
    json.dumps(content, allow_nan=False)
    assert set(verify(originals["comparison"]).to_json()) == promised | {"runs", "epsilon_total"}
    assert isinstance(verify(originals["records"]), Verification)
