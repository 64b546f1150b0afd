"""Counting the books again: what follows from plan and ledger passes, every edited figure does not."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dp_accounting as dp
import pytest

from coterie.engines.secret import SEEDED
from coterie.errors import InputError, LedgerError
from coterie.experiment import local
from coterie.experiment.calibrated import HELD_OUT
from coterie.experiment.folder import RunFolder
from coterie.experiment.loop import create_folder
from coterie.experiment.recorded import recount
from coterie.experiment.schema import Experiment
from coterie.experiment.seal import ChainedLines, Seal
from coterie.files import read_json, write_json
from coterie.privacy import Custody, Guarantee, Ledger, LedgerView, Meaning, PrivacyPlan

RECORDS = {
    "federation": {"sizes": [2, 2], "records_per_client": 40},
    "algorithm": {"name": "global"},
    "privacy": {"epsilon": 4.0, "delta": 1e-3},
    "schedule": {"rounds": 3, "batch": 20},
    "seeds": {"noise": 1},
    "evaluation": {"references": False},
}
WORKERS = {
    "federation": {
        "kind": "groups",
        "structure": "ring",
        "workers": 6,
        "groups": 3,
        "alpha": 1.0,
        "records_per_client": 20,
    },
    "algorithm": {"name": "dp-ogl", "period": 2, "rate": 0.7, "noise": 2.0, "iterations": 1},
    "privacy": {"unit": "worker", "epsilon": 50.0, "delta": 1e-3, "clip": 0.5},
    "schedule": {"rounds": 3, "batch": 10},
    "seeds": {"noise": 2},
}


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("runs")
    found = {"records": RECORDS, "workers": WORKERS}
    for name, content in found.items():
        local.run(Experiment.model_validate(content), base / name)
    return {name: base / name for name in found}


@pytest.fixture
def files(originals: dict[str, Path], tmp_path: Path) -> RunFolder:
    return RunFolder(shutil.copytree(originals["records"], tmp_path / "run"))


@pytest.fixture
def watched(originals: dict[str, Path], tmp_path: Path) -> RunFolder:
    return RunFolder(shutil.copytree(originals["workers"], tmp_path / "run"))


def edit(path: Path, **changes: Any) -> None:
    write_json(path, {**read_json(path), **changes})


def restate(files: RunFolder, **changes: Any) -> None:
    """Another guarantee that agrees with itself, in all the places that repeat it."""
    stored = dataclasses.replace(Guarantee.from_json(read_json(files.guarantee)), **changes)
    write_json(files.guarantee, stored.to_json())
    edit(
        files.result,
        guarantee=stored.line,
        guarantee_text=stored.text,
        epsilon=stored.epsilon,
        delta=stored.delta,
        per_client=stored.per_client_json(),
    )


@pytest.mark.parametrize("name", ["records", "workers"])
def test_the_books_of_a_run_add_up(originals: dict[str, Path], name: str) -> None:
    files = RunFolder(originals[name])
    counted = recount(files.path)
    assert counted is not None
    stored = Guarantee.from_json(read_json(files.guarantee))
    assert counted.promised == stored.epsilon
    assert counted.spent == pytest.approx(stored.epsilon)
    assert counted.releases == {"records": 4 * 3, "workers": 3 * 3 * 3}[name]
    assert "unbroken chain" in str(counted)


def test_a_run_that_was_stopped_adds_up_and_one_never_begun_has_no_books(
    files: RunFolder, tmp_path: Path
) -> None:
    files.result.unlink()
    ChainedLines(files.metrics, "file of metrics").cut(1)  # charged for round 2, but died before its line
    assert recount(files.path) is not None
    files.ledger.unlink()
    with pytest.raises(LedgerError, match=r"ledger\.jsonl: the ledger cannot be used"):
        recount(files.path)
    create_folder(
        RunFolder(tmp_path / "new"), local.calibrate(Experiment.model_validate(RECORDS)), "data", None
    )
    assert recount(tmp_path / "new") is None


def _halve(files: RunFolder) -> None:
    restate(files, epsilon=2.0)


def _fewer_rounds(files: RunFolder) -> None:
    stored = Guarantee.from_json(read_json(files.guarantee))
    assert isinstance(stored.event, dp.SelfComposedDpEvent)
    restate(files, event=dp.SelfComposedDpEvent(stored.event.event, stored.event.count - 1))


def _line(files: RunFolder) -> None:
    line = read_json(files.guarantee)["line"].replace("eps=4", "eps=1")
    edit(files.guarantee, line=line)
    edit(files.result, guarantee=line)


def _text(files: RunFolder) -> None:
    text = read_json(files.guarantee)["text"].replace("One process", "Nobody")
    edit(files.guarantee, text=text)
    edit(files.result, guarantee_text=text)


def _smaller_for_one(files: RunFolder) -> None:
    stored = Guarantee.from_json(read_json(files.guarantee))
    first, *others = stored.per_client
    restate(files, per_client=(dataclasses.replace(first, epsilon=0.1), *others))


def _smaller_in_the_result(files: RunFolder) -> None:
    told = read_json(files.result)["per_client"]
    name = next(iter(told))
    edit(files.result, per_client={**told, name: {**told[name], "epsilon": 0.1}})


def _cheaper_release(files: RunFolder) -> None:
    stored = Guarantee.from_json(read_json(files.guarantee))
    restate(files, releases=tuple(dataclasses.replace(row, epsilon=0.1) for row in stored.releases))


def _louder_plan(files: RunFolder) -> None:
    text = files.plan.read_text()
    noise = next(line for line in text.splitlines() if '"noise_multiplier"' in line)
    files.plan.write_text(text.replace(noise, '     "noise_multiplier": 30.0,'))


def _unsaid_seed(files: RunFolder) -> None:
    stored = Guarantee.from_json(read_json(files.guarantee))
    restate(files, caveats=tuple(caveat for caveat in stored.caveats if caveat != SEEDED))


def _unsaid_scores(files: RunFolder) -> None:
    stored = Guarantee.from_json(read_json(files.guarantee))
    restate(files, caveats=tuple(caveat for caveat in stored.caveats if caveat != HELD_OUT))


def _lost_line(files: RunFolder) -> None:
    files.ledger.write_bytes(b"".join(files.ledger.read_bytes().splitlines(keepends=True)[:-1]))


def _new_chain(files: RunFolder) -> None:
    """A ledger that holds together, with less in it, and nothing that remembers the other."""
    plan = PrivacyPlan.from_json(read_json(files.plan))
    books = LedgerView.read(files.ledger, plan)
    files.ledger.unlink()
    shutil.rmtree(files.checkpoint)
    (files.path / "seal.jsonl").unlink()
    Seal.create(files.path)
    Ledger.open(files.ledger, plan, budget=books.budgets, accountant=books.accountant).close()


def _cheap_round(files: RunFolder) -> None:
    lines = ChainedLines(files.metrics, "file of metrics")
    last = dict(lines.bodies[-1])
    lines.cut(len(lines.bodies) - 1)
    lines.append({**last, "epsilon": 0.1})


FORGERIES: dict[str, tuple[Callable[[RunFolder], None], str]] = {
    "a smaller epsilon": (_halve, "guarantee.json: epsilon is 2.0; counted again .* it is 3.9|4.0"),
    "a smaller delta": (lambda files: restate(files, delta=1e-6), "guarantee.json: delta is 1e-06"),
    "a smaller replace-one": (lambda files: restate(files, epsilon_replace_one=4.5), "epsilon_replace_one"),
    "another accountant": (lambda files: restate(files, accountant="PLD"), "accountant is PLD"),
    "fewer rounds in the event": (_fewer_rounds, "event is"),
    "another line": (_line, "guarantee.json: its line"),
    "another text": (_text, "guarantee.json: its text"),
    "a smaller epsilon for one": (_smaller_for_one, "guarantee.json: per_client is"),
    "a smaller epsilon for one in the result": (_smaller_in_the_result, "result.json: per_client"),
    "a cheaper release": (_cheaper_release, "guarantee.json: releases is"),
    "less for an attacker": (
        lambda files: restate(files, meaning=Meaning(0.51, 0.02)),
        "guarantee.json: meaning is",
    ),
    "records that sites held": (
        lambda files: restate(files, held_by=Custody.EACH_SITE),
        "guarantee.json: held_by is each-site; .* one-process",
    ),
    "a seed that is not said": (_unsaid_seed, "guarantee.json: the caveat 'simulation: noise"),
    "exact scores that are not said": (_unsaid_scores, "guarantee.json: the caveat 'test scores"),
    "a noisier plan": (_louder_plan, "belongs to another plan"),
    "a line less": (_lost_line, "the checkpoint has seen"),
    "a ledger of its own": (_new_chain, "metrics.jsonl: round 1 states epsilon"),
    "no ledger": (lambda files: files.ledger.unlink(), "ledger.jsonl: the ledger cannot be used"),
    "a cheap round": (_cheap_round, "metrics.jsonl: round 3 states epsilon 0.1"),
    "another result": (lambda files: edit(files.result, epsilon=1.0), "result.json: epsilon is 1.0"),
    "another promise": (
        lambda files: edit(files.result, guarantee="(eps=1)-DP"),
        "result.json: its guarantee",
    ),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_every_forgery_is_found(files: RunFolder, forgery: str) -> None:
    forge, complaint = FORGERIES[forgery]
    forge(files)
    with pytest.raises(LedgerError, match=complaint):
        recount(files.path)


def test_workers_are_counted_pair_by_pair(watched: RunFolder) -> None:
    content = read_json(watched.leakage)
    first = next(iter(content["per_worker"]))
    edit(watched.leakage, per_worker={**content["per_worker"], first: 0.5})
    with pytest.raises(LedgerError, match=f"leakage.json: epsilon of {first} is 0.5"):
        recount(watched.path)


def test_a_structure_that_shows_less_is_not_that_of_the_plan(watched: RunFolder) -> None:
    groups = read_json(watched.leakage)["groups"]
    edit(watched.leakage, groups={**groups, "0": groups["0"][:-1]})
    with pytest.raises(LedgerError, match=r"leakage.json: its groups are not those of plan.json"):
        recount(watched.path)


def test_a_run_of_another_version_is_refused_by_name_and_not_called_broken(
    files: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Words change between versions; what was touched is found by the version that wrote it."""
    monkeypatch.setattr("coterie.experiment.recorded.__version__", "9.9.9")
    with pytest.raises(InputError, match=r"written by coterie .*, this is 9\.9\.9"):
        recount(files.path)
