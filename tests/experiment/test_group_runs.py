"""Runs of workers in groups: what they promise, store, resume and show."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from coterie.errors import BudgetError, InputError
from coterie.experiment import local
from coterie.experiment.calibrated import CalibratedRun
from coterie.experiment.callbacks import Callbacks, RoundReport
from coterie.experiment.folder import RunFolder
from coterie.experiment.loop import training_noise
from coterie.experiment.result import RunResult
from coterie.experiment.schema import Experiment
from coterie.files import read_lines
from coterie.groups import GroupSchedule, leakage, ring
from coterie.privacy import Guarantee
from coterie.report.run import write_run_report

ROUNDS = 6
BASE = {
    "federation": {
        "kind": "groups",
        "structure": "ring",
        "workers": 8,
        "groups": 4,
        "alpha": 1.0,
        "records_per_client": 20,
    },
    "model": {"name": "softmax"},
    "algorithm": {"name": "dp-ogl", "period": 2, "rate": 0.7, "noise": 2.0, "iterations": 2},
    "privacy": {"unit": "worker", "epsilon": 50.0, "delta": 1e-3, "clip": 0.5},
    "schedule": {"rounds": ROUNDS, "batch": 10},
    "seeds": {"simulation": 1, "noise": 2},
}


def experiment(**sections: dict[str, object]) -> Experiment:
    return Experiment.model_validate(
        {name: {**BASE.get(name, {}), **sections.get(name, {})} for name in {**BASE, **sections}}
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    return local.run(experiment(), tmp_path_factory.mktemp("groups") / "whole")


def test_a_run_promises_what_the_leakage_of_its_structure_says(whole: RunResult) -> None:
    schedule = GroupSchedule.of(4, period=2, rate=0.7, noise=2.0)
    found = leakage(ring(8, 4), schedule, epoch=ROUNDS + 1, delta=1e-3)
    assert whole.per_worker is not None
    assert list(whole.per_worker.values()) == pytest.approx(found.per_worker.tolist())
    assert whole.epsilon == pytest.approx(max(found.per_worker))
    content = json.loads(RunFolder(whole.folder).leakage.read_text())
    assert np.array(content["epsilon"], dtype=float) == pytest.approx(found.epsilon, nan_ok=True)
    assert content["workers"] == [f"worker-{number}" for number in range(8)]
    stored = Guarantee.from_json(json.loads(RunFolder(whole.folder).guarantee.read_text()))
    assert (stored.line, stored.text) == (whole.guarantee, whole.guarantee_text)
    assert stored.epsilon == whole.epsilon


def test_what_is_spent_grows_with_the_epochs_to_what_was_promised(whole: RunResult) -> None:
    spent = [line["epsilon"] for line in read_lines(RunFolder(whole.folder).metrics)]
    assert len(spent) == ROUNDS
    assert spent == sorted(spent)
    assert spent[-1] == pytest.approx(whole.epsilon)
    expected = leakage(ring(8, 4), GroupSchedule.of(4, period=2, rate=0.7, noise=2.0), epoch=2, delta=1e-3)
    assert spent[0] == pytest.approx(np.nanmax(expected.epsilon))


def test_every_worker_is_evaluated_with_its_own_model(whole: RunResult) -> None:
    assert len(whole.accuracy.per_client) == 8
    assert len(set(whole.clusters.values())) == 8
    assert whole.clusters_found is None


def test_results_survive_their_file(whole: RunResult) -> None:
    assert RunResult.load(whole.folder) == whole


def test_an_interrupted_run_resumes_to_the_same_bytes(whole: RunResult, tmp_path: Path) -> None:
    """With masters that keep moments, in a block that is half done."""

    class Interrupt(Exception):
        pass

    def stop(report: RoundReport) -> None:
        if report.round == 3:
            raise Interrupt

    adam = experiment(algorithm={"master": {"optimiser": "adam", "lr": 0.05}})
    local.run(adam, tmp_path / "whole")
    with pytest.raises(Interrupt):
        local.run(adam, tmp_path / "halves", callbacks=Callbacks(on_round=stop))
    local.run(adam, tmp_path / "halves", resume=True)
    one, other = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "halves")
    assert one.ledger.read_bytes() == other.ledger.read_bytes()
    assert one.metrics.read_bytes() == other.metrics.read_bytes()
    states = [
        load_file(files.checkpoint / f"round-{ROUNDS:06d}" / "state.safetensors") for files in (one, other)
    ]
    for name, array in states[0].items():
        assert array.tobytes() == states[1][name].tobytes(), name
    assert not np.array_equal(
        states[0]["models"],
        load_file(RunFolder(whole.folder).checkpoint / f"round-{ROUNDS:06d}" / "state.safetensors")["models"],
    )


@pytest.mark.parametrize(
    "options",
    [{"name": "dp-ogl", "period": 2}, {"name": "dp-ogl-plus", "period": 2}, {"name": "dp-fedavg"}],
    ids=lambda options: str(options["name"]),
)
def test_noise_is_the_least_that_keeps_every_worker_within_its_budget(options: dict[str, object]) -> None:
    def prepared_with(noise: float | None) -> CalibratedRun:
        privacy = {**BASE["privacy"], "epsilon": 3.0}
        return local.calibrate(
            Experiment.model_validate({**BASE, "privacy": privacy, "algorithm": {**options, "noise": noise}})
        )

    found = prepared_with(None)
    assert 0.998 * 3.0 < found.guarantee.epsilon <= 3.0
    with pytest.raises(BudgetError, match=r"privacy\.epsilon: 3 at delta 1e-3 is not kept") as refused:
        prepared_with(0.99 * training_noise(found.plan))
    assert refused.value.exit_code == 3


def test_a_strict_worker_makes_everybody_louder() -> None:
    plain = local.calibrate(experiment(algorithm={"noise": None}, privacy={"epsilon": 5.0}))
    budgets = {"worker-1": {"epsilon": 2.0}}
    strict = local.calibrate(
        experiment(algorithm={"noise": None}, privacy={"epsilon": 5.0, "budgets": budgets})
    )
    assert training_noise(strict.plan) > 1.2 * training_noise(plain.plan)
    per_worker = strict.per_worker()
    assert per_worker is not None
    own = per_worker["worker-1"]
    assert own is not None
    assert 1.99 < own <= 2.0


def test_no_privacy_says_so() -> None:
    prepared = local.calibrate(experiment(algorithm={"noise": None}, privacy={"epsilon": float("inf")}))
    assert prepared.guarantee.line.startswith("no privacy (eps=inf)")
    assert training_noise(prepared.plan) == 0.0
    assert prepared.per_worker() is None


def test_groups_formed_from_labels_are_a_caveat() -> None:
    federation = {"structure": "label", "groups": 2}
    prepared = local.calibrate(experiment(federation=federation))
    assert "The groups were formed from labels" in prepared.guarantee.text


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"privacy": {"budgets": {"worker-1": {"epsilon": 2.0, "delta": 1e-6}}}}, "not in delta"),
        ({"privacy": {"accountant": "pld"}}, "privacy.accountant: 'pld'"),
        ({"algorithm": {"rate": [0.5, 0.6]}}, "algorithm.rate: 2 numbers"),
        ({"federation": {"structure": "global", "groups": None}, "algorithm": {"threat_model": 2}}, "threat"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(sections: dict[str, dict[str, object]], words: str) -> None:
    with pytest.raises(InputError, match=words):
        local.calibrate(experiment(**sections))


def test_the_report_shows_who_learns_what_about_whom(whole: RunResult) -> None:
    html = write_run_report(whole.folder).read_text()
    assert "Who learns how much about whom" in html
    assert "Epsilon of workers against epoch" in html
    assert "Epsilon and delta of 8 workers" in html
    assert "for any of 8 workers, zero-out" in html
    assert "8 workers in groups (ring of 4 groups)" in html
