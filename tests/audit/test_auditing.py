"""A whole audit: what it reads, what it writes, how it ends, and runs that are attacked as a whole."""

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from planted import audited as small

from coterie.audit.auditing import attack, attacked_releases, audit, between_workers, game_of
from coterie.audit.declared import audited_run
from coterie.audit.games import Game
from coterie.audit.playing import Effort, play
from coterie.audit.result import AUDIT_FILE, read_audit
from coterie.audit.verdicts import AuditVerdict
from coterie.audit.whole_run import attack_whole_run
from coterie.cli.main import main
from coterie.engines import cohorts
from coterie.errors import InputError
from coterie.experiment.experiment_file import experiment_of
from coterie.experiment.local import run
from coterie.experiment.verify import HOLDS, verify
from coterie.privacy import Adjacency, FullBatchSteps, LowestLoss, SecretKey
from coterie.training import dpsgd

SMALL = {
    "federation": {"sizes": [2], "records_per_client": 40},
    "algorithm": {"name": "global"},
    "schedule": {"rounds": 2, "batch": 20},
    "evaluation": {"references": False},
}
DECLARATION = "task: classification\nlabel: {classes: 3}\nfeatures: {shape: [4], range: [0, 1]}\n"


@pytest.fixture(autouse=True)
def _repeatable_keys() -> Iterator[None]:
    """Keys and coins from seeds, so that a verdict does not depend on the day."""
    seeds, drawn = count(1), np.random.default_rng
    with (
        mock.patch.object(SecretKey, "from_os", side_effect=lambda: SecretKey.from_seed(next(seeds))),
        mock.patch("numpy.random.default_rng", lambda seed=7: drawn(seed)),
    ):
        yield


def _without_noise() -> "mock._patch[object]":
    return mock.patch.object(dpsgd, "gaussian", lambda stream, shape, std, **rest: np.zeros(shape))


def folder_of(path: Path, values: float) -> Path:
    path.mkdir()
    (path / "federation.yaml").write_text(DECLARATION)
    for name in ("a", "b"):
        np.savez(path / f"{name}.npz", x=np.full((30, 4), values), y=np.full(30, -7.0))
    return path


def test_records_of_a_folder_are_counted_and_never_read(tmp_path: Path) -> None:
    """They could not even be read: neither the values nor the labels are what the folder declares."""
    experiment = {
        "data": {"name": "folder", "path": str(folder_of(tmp_path / "data", np.nan))},
        "federation": {"kind": "natural"},
        "algorithm": {"name": "global"},
        "model": {"name": "softmax"},
        "schedule": {"rounds": 1, "batch": 8},
    }
    found, called = audited_run(experiment_of(experiment))
    assert found.facts is not None
    assert called == "global on folder"
    assert set(found.facts.records.values()) == {24}  # of 30, a fifth is held out


def test_an_audit_is_written_read_again_and_leaves_a_run_as_it_was(tmp_path: Path) -> None:
    done = run(SMALL, tmp_path / "run")
    found = audit(SMALL, done.folder, trials=400, release="training")
    assert (done.folder / "audit.html").read_text().count("<svg") == 1
    assert verify(done.folder).verdict == HOLDS
    again = read_audit(done.folder)
    assert again.to_json() == found.to_json() == json.loads((done.folder / AUDIT_FILE).read_text())
    assert [release.name for release in again.releases] == ["training"]
    (done.folder / AUDIT_FILE).write_text(json.dumps({**found.to_json(), "version": 2}))
    with pytest.raises(InputError, match="not an audit of version 1"):
        read_audit(done.folder)


def test_a_violation_ends_with_exit_code_four(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [
        f"--set={section}.{key}={json.dumps(value)}"
        for section, own in SMALL.items()
        for key, value in own.items()
    ]
    words = ["coterie", "audit", *settings, "--release", "training", "--trials", "400", "--json"]
    monkeypatch.setattr("sys.argv", [*words, "--out", str(tmp_path / "out")])
    with _without_noise(), pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 4
    printed = json.loads(capsys.readouterr().out)
    [release] = printed["releases"]
    assert (printed["verdict"], release["verdict"]) == ("violated", "violated")
    assert release["lower_bound"] > release["claimed_epsilon"]


def test_a_whole_run_without_noise_is_found_in_one_run_and_an_honest_one_is_not() -> None:
    many = {**SMALL, "federation": {"sizes": [1], "records_per_client": 300}}
    found, _ = audited_run(experiment_of(many))
    honest = attack_whole_run(found, 0.05)
    assert honest.verdict is not AuditVerdict.VIOLATED
    assert 0 <= honest.lower_bound <= honest.claimed_epsilon
    with _without_noise():
        broken = attack_whole_run(found, 0.05)
    assert broken.lower_bound > max(2.0, honest.lower_bound)


def test_what_one_worker_tells_another_is_attacked_through_the_algorithm() -> None:
    groups = {"kind": "groups", "structure": "ring", "workers": 3, "groups": 3, "records_per_client": 20}
    experiment = {
        "privacy": {"unit": "worker", "epsilon": 1},
        "algorithm": {"name": "dp-ogl"},
        "federation": groups,
        "schedule": {"rounds": 2},
    }
    found, _ = audited_run(experiment_of(experiment))
    game = between_workers(found)
    assert isinstance(game, Game)
    honest = play(game, Effort(160, explore=4), 0.05)
    assert honest.found.verdict is not AuditVerdict.VIOLATED
    with mock.patch("coterie.engines.cohorts.gaussian", lambda stream, shape, std, **rest: np.zeros(shape)):
        broken = play(game, Effort(160, explore=4), 0.05)
    assert broken.found.verdict is AuditVerdict.VIOLATED


def test_what_claims_nothing_is_not_attacked() -> None:
    [attacked] = attacked_releases(small(LowestLoss(Adjacency.ZERO_OUT)))
    assert game_of(small(LowestLoss(Adjacency.ZERO_OUT)), attacked) == "no privacy is claimed of it"


def test_a_release_that_is_not_planned_is_refused() -> None:
    own = replace(small(FullBatchSteps(1.0, 1.0, 8, 1, Adjacency.ZERO_OUT)), algorithm=None)
    with pytest.raises(InputError, match="--release: 'sums' is not in the plan; allowed: evaluation"):
        attack(own, "small", release="sums", trials=400)


@pytest.mark.parametrize("share", [1.0, 0.1])
def test_sums_of_sketches_are_attacked_as_they_are_asked_for(share: float) -> None:
    """With the planned noise nothing is found; with a tenth of it, what a client adds to the moments is."""
    experiment = {
        "federation": {"sizes": [20, 10], "shift": "label", "records_per_client": 40},
        "privacy": {"unit": "client", "epsilon": 4, "delta": 1e-2},
        "algorithm": {"name": "dp-sketch-cluster", "rate": 0.5, "sketch_noise": 2.0, "sketch_dimensions": 8},
        "schedule": {"rounds": 3, "batch": 20},
        "evaluation": {"references": False},
    }
    audited, _ = audited_run(experiment_of(experiment))
    names = [each.release.name for each in attacked_releases(audited)]
    assert names == ["moments", "features", "sizes", "sums"]

    def quieter(stream, shape, std, **rest):  # type: ignore[no-untyped-def]
        return share * stream.normal(shape, std=std)

    with mock.patch.object(cohorts, "gaussian", quieter):
        result = attack(audited, "sketches", release="moments", trials=800)
    assert (result.verdict is AuditVerdict.VIOLATED) == (share < 1)
