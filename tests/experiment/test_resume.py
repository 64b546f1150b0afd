"""Killed anywhere, a run resumes to the same parameters, metrics and ledger, bit for bit."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from coterie.algorithms.client.dp_fedper import FedPerState
from coterie.algorithms.protocol import State
from coterie.engines.local import FAST_RANDOMNESS
from coterie.engines.secret import RunSecret
from coterie.errors import InputError, LedgerError
from coterie.experiment import checkpoint, local
from coterie.experiment.callbacks import Callbacks, RoundReport
from coterie.experiment.checkpoint import Checkpoint
from coterie.experiment.folder import RunFolder, check_times, keep_rounds, seconds_in
from coterie.experiment.recorded import recount
from coterie.experiment.result import RunResult
from coterie.experiment.seal import Seal
from coterie.experiment.verify import verify
from coterie.files import digest_file, hashed_text
from coterie.privacy import ChainHead, SecretKey
from coterie.privacy.wording import sentence

ROUNDS = 7
EXPERIMENT = f"""
federation: {{kind: clusters, sizes: [2, 3], shift: rotation, records_per_client: 60}}
algorithm: {{name: r-dpcfl}}
schedule: {{rounds: {ROUNDS}, batch: 20}}
seeds: {{simulation: 3, noise: 5}}
"""

# Runs the experiment and kills itself, without a chance to clean up, when a round reaches a stage.
KILLER = """
import os, signal, sys
from pathlib import Path
from coterie.engines.clients import Clients
from coterie.experiment import checkpoint, evaluator, local

stage, kill_round, experiment, out = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
def die(*_): os.kill(os.getpid(), signal.SIGKILL)

train_one = Clients.train
calls = []
def charged(self, job, mechanism, charge):
    calls.append(charge.round)
    if charge.round == kill_round and calls.count(charge.round) == 2: die()
    return train_one(self, job, mechanism, charge)

evaluate = evaluator.Evaluator.after
def released(self, state):
    if state.round == kill_round: die()
    return evaluate(self, state)

save, replace = checkpoint.save, Path.replace
def logged(folder, saved):
    if saved.state.round == kill_round: die()
    save(folder, saved)
def half_saved(self, target):
    if Path(target).name == f"round-{kill_round:06d}": die()
    return replace(self, target)
def saved(folder, saved_):
    save(folder, saved_)
    if saved_.state.round == kill_round: die()

if stage == "charged": Clients.train = charged
if stage == "released": evaluator.Evaluator.after = released
if stage == "logged": checkpoint.save = logged
if stage == "half-saved": Path.replace = half_saved
if stage == "saved": checkpoint.save = saved
local.run(experiment, out, resume=True)
"""


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("experiment") / "experiment.yaml"
    path.write_text(EXPERIMENT)
    return path


@pytest.fixture(scope="module")
def uninterrupted(experiment: Path) -> RunResult:
    return local.run(experiment, experiment.parent / "whole")


def killed_at(stage: str, round: int, experiment: Path, out: Path) -> None:
    command = [sys.executable, "-c", KILLER, stage, str(round), str(experiment), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr


def final_state(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "checkpoint" / f"round-{ROUNDS:06d}" / "state.safetensors")


def figures(folder: Path) -> dict[str, object]:
    content = json.loads(RunFolder(folder).result.read_text())
    changing = ("folder", "report", "seconds", "sample_gradients_per_second")
    return {key: value for key, value in content.items() if key not in changing}


def assert_same_run(one: Path, other: Path) -> None:
    assert RunFolder(one).ledger.read_bytes() == RunFolder(other).ledger.read_bytes()
    assert RunFolder(one).metrics.read_bytes() == RunFolder(other).metrics.read_bytes()
    assert figures(one) == figures(other)
    first, second = final_state(one), final_state(other)
    assert first.keys() == second.keys()
    for name, array in first.items():
        assert array.tobytes() == second[name].tobytes(), name


@pytest.mark.parametrize(
    ("stage", "round"),
    [
        ("charged", 1),
        ("half-saved", 5),
        *(
            pytest.param(*moment, marks=pytest.mark.deployment)
            for moment in (("released", 1), ("charged", 4), ("logged", 3), ("saved", ROUNDS))
        ),
    ],
)
def test_a_killed_run_resumes_to_the_same_result(
    stage: str, round: int, experiment: Path, uninterrupted: RunResult, tmp_path: Path
) -> None:
    killed_at(stage, round, experiment, tmp_path / "run")
    assert not RunFolder(tmp_path / "run").finished
    local.run(experiment, tmp_path / "run", resume=True)
    assert_same_run(uninterrupted.folder, tmp_path / "run")


@pytest.mark.deployment
def test_killed_again_and_again_from_the_command_line(
    experiment: Path, uninterrupted: RunResult, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    command = [sys.executable, "-m", "coterie", "run", str(experiment), "--out", str(out), "--resume"]
    for wanted in (2, 5):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        metrics = RunFolder(out).metrics
        while process.poll() is None:
            if metrics.exists() and metrics.read_text().count("\n") >= wanted:
                process.kill()
                process.wait()
                break
            time.sleep(0.005)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert_same_run(uninterrupted.folder, out)
    assert RunFolder(out).report.exists()


def test_the_same_seeds_give_the_same_run_twice(
    experiment: Path, uninterrupted: RunResult, tmp_path: Path
) -> None:
    local.run(experiment, tmp_path / "again")
    assert_same_run(uninterrupted.folder, tmp_path / "again")


def test_without_a_noise_seed_two_runs_differ_and_the_key_is_secret_until_deleted(tmp_path: Path) -> None:
    path = tmp_path / "experiment.yaml"
    path.write_text(EXPERIMENT.replace("noise: 5", "noise: null").replace(f"rounds: {ROUNDS}", "rounds: 2"))
    keys = []

    def look(report: object) -> None:
        secret = RunFolder(tmp_path / "one").secret
        keys.append(oct(secret.stat().st_mode & 0o777))

    one = local.run(path, tmp_path / "one", callbacks=Callbacks(on_round=look))
    two = local.run(path, tmp_path / "two")
    assert keys == ["0o600", "0o600"]
    assert not RunFolder(tmp_path / "one").secret.exists()
    assert one.accuracy.per_client != two.accuracy.per_client
    assert "simulation" not in one.guarantee


def test_a_seeded_run_says_that_it_is_a_simulation(uninterrupted: RunResult) -> None:
    assert "simulation" in uninterrupted.guarantee


def test_resuming_a_finished_run_returns_its_result(experiment: Path, uninterrupted: RunResult) -> None:
    again = local.run(experiment, uninterrupted.folder, resume=True)
    assert again.to_json() == uninterrupted.to_json()


def test_a_run_folder_is_never_overwritten(
    experiment: Path, uninterrupted: RunResult, tmp_path: Path
) -> None:
    before = RunFolder(uninterrupted.folder).ledger.read_bytes()
    with pytest.raises(InputError, match="holds a run"):
        local.run(experiment, uninterrupted.folder)
    assert RunFolder(uninterrupted.folder).ledger.read_bytes() == before
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("mine")
    with pytest.raises(InputError, match="not a run folder"):
        local.run(experiment, tmp_path / "other")
    assert os.listdir(tmp_path / "other") == ["thesis.tex"]


def test_resuming_with_another_experiment_is_refused(
    experiment: Path, uninterrupted: RunResult, tmp_path: Path
) -> None:
    changed = tmp_path / "changed.yaml"
    changed.write_text(EXPERIMENT + "\nprivacy: {epsilon: 9}\n")
    with pytest.raises(InputError, match=r"privacy.epsilon: 9.0 is not 8.0"):
        local.run(changed, uninterrupted.folder, resume=True)


def tampered(lines: list[str], how: str) -> list[str]:
    middle = len(lines) // 2
    if how == "changed":
        return [*lines[:middle], lines[middle].replace('"round":', '"round": '), *lines[middle + 1 :]]
    if how == "dropped":
        return lines[:middle] + lines[middle + 1 :]
    if how == "reordered":
        return [*lines[:middle], lines[middle + 1], lines[middle], *lines[middle + 2 :]]
    return lines[:-1]  # the end cut off


@pytest.mark.parametrize("how", ["changed", "dropped", "reordered", "cut"])
def test_a_tampered_ledger_is_found_on_resume(how: str, experiment: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"

    def stop(report: RoundReport) -> None:
        if report.round == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        local.run(experiment, out, callbacks=Callbacks(on_round=stop))
    ledger = RunFolder(out).ledger
    lines = tampered(ledger.read_text().splitlines(keepends=True), how)
    ledger.write_text("".join(lines))
    with pytest.raises(LedgerError):
        local.run(experiment, out, resume=True)


def test_resuming_on_changed_data_or_with_another_key_is_refused(experiment: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"

    def stop(report: RoundReport) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        local.run(experiment, out, callbacks=Callbacks(on_round=stop))
    secret = RunFolder(out).secret
    kept = RunSecret.load(secret, Seal(out).key)
    for change, complaint in (({"data": "0" * 64}, "data changed"), ({"plan": "0" * 64}, "plan changed")):
        secret.unlink()
        replace(kept, **change).save(secret)
        with pytest.raises(InputError, match=complaint):
            local.run(experiment, out, resume=True)
    secret.unlink()
    replace(kept, key=SecretKey.from_seed(6)).save(secret)
    with pytest.raises(InputError, match=r"noise\.key: not the noise key that the books"):
        local.run(experiment, out, resume=True)
    secret.unlink()
    with pytest.raises(InputError, match="noise key is gone"):
        local.run(experiment, out, resume=True)


@pytest.mark.parametrize("damage", ["truncated arrays", "broken json"])
def test_a_damaged_checkpoint_is_one_clear_line(damage: str, experiment: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"

    def stop(report: RoundReport) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        local.run(experiment, out, callbacks=Callbacks(on_round=stop))
    folder = RunFolder(out).checkpoint / "round-000001"
    if damage == "truncated arrays":
        arrays = folder / "state.safetensors"
        arrays.write_bytes(arrays.read_bytes()[:100])
    else:
        (folder / "state.json").write_text('{"format": 1')
    with pytest.raises(InputError, match="damaged checkpoint"):
        local.run(experiment, out, resume=True)


@pytest.mark.parametrize("seconds", ["NaN", "Infinity", "1e400", "1e308", "-1", "true", '"1"', "null"])
def test_seconds_that_are_no_seconds_are_named(seconds: str, tmp_path: Path) -> None:
    line = f'{{"round": 1, "train": 1.0, "evaluate": {seconds}}}\n'
    (tmp_path / "timing.jsonl").write_text(2 * line)
    with pytest.raises(InputError, match=r"timing\.jsonl: .*line"):
        check_times(tmp_path / "timing.jsonl")


@pytest.mark.parametrize("line", ['{"train": 1}', '{"round": "x"}', "[]", '{"round": null}'])
def test_a_damaged_file_of_times_is_named(line: str, tmp_path: Path) -> None:
    (tmp_path / "timing.jsonl").write_text(f'{{"round": 1, "train": 1.0, "evaluate": 1.0}}\n{line}\n')
    with pytest.raises(InputError, match=r"timing\.jsonl: .*line"):
        keep_rounds(tmp_path / "timing.jsonl", 3)
    with pytest.raises(InputError, match=r"timing\.jsonl: .*line"):
        seconds_in(tmp_path / "timing.jsonl", "evaluate")


@pytest.mark.parametrize("content", ['{"format": 2, "heads": [], "arrays": []}', '{"format": 2, "state": 3}'])
def test_a_checkpoint_of_another_shape_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "round-000001").mkdir()
    state = tmp_path / "round-000001" / "state.json"
    state.write_text(hashed_text(json.loads(content)))
    for read in (lambda: checkpoint.load(tmp_path, State), lambda: checkpoint.stored(tmp_path)):
        with pytest.raises(InputError, match=r"round-000001.*: damaged checkpoint"):
            read()


@pytest.fixture(scope="module")
def stopped(experiment: Path) -> Path:
    """A run that was stopped after two rounds."""
    out = experiment.parent / "stopped"

    def stop(report: RoundReport) -> None:
        if report.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        local.run(experiment, out, callbacks=Callbacks(on_round=stop))
    return out


def test_a_checkpoint_that_a_kill_kept_from_going_goes_on_resume(experiment: Path, tmp_path: Path) -> None:
    """The last round is saved, the one before it is still there: nothing is left to be saved."""
    out = tmp_path / "out"

    def stop(report: RoundReport) -> None:
        if report.round == report.rounds:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        local.run(experiment, out, callbacks=Callbacks(on_round=stop))
    [last] = RunFolder(out).checkpoint.iterdir()
    for leftover in ("round-000001", ".round-000002.0"):
        shutil.copytree(last, last.with_name(leftover))
    local.run(experiment, out, resume=True)
    assert list(RunFolder(out).checkpoint.iterdir()) == [last]


def test_damaged_times_are_refused_before_anything_is_spent(
    stopped: Path, experiment: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(stopped, out)
    times = RunFolder(out).timing
    times.write_text(times.read_text().replace('"evaluate": ', '"evaluated": ', 1))
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with pytest.raises(InputError, match=r"timing\.jsonl: a line without the seconds of 'evaluate'"):
        local.run(experiment, out, resume=True)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


Change = Callable[[dict[str, Any], dict[str, Any]], object]
FORGED: dict[str, Change] = {
    "models of another size": lambda arrays, _: arrays.update(models=arrays["models"][:, :-1]),
    "one model, and not several": lambda arrays, _: arrays.update(models=arrays["models"][0]),
    "more models than odds": lambda arrays, _: arrays.update(models=np.repeat(arrays["models"], 2, 0)),
    "models in double precision": lambda arrays, _: arrays.update(models=arrays["models"].astype(float)),
    "odds of other clients": lambda arrays, _: arrays.update(responsibilities=arrays["responsibilities"][1:]),
    "an array less": lambda arrays, _: arrays.pop("initial"),
    "an array more": lambda arrays, _: arrays.update(more=np.zeros(3)),
    "a list for an array": lambda arrays, state: state.update(initial=arrays.pop("initial").tolist()),
    "an array for a number": lambda arrays, state: arrays.update(spread=np.array([state.pop("spread")])),
    "a model that is not there": lambda _, state: state["cluster_of"].update({"client-0": 99}),
    "a model before the first": lambda _, state: state["cluster_of"].update({"client-0": -1}),
    "choices of one client more": lambda _, state: state["cluster_of"].update(nobody=0),
    "votes for nothing": lambda _, state: state["votes"].update({"client-0": [7]}),
    "other clients": lambda _, state: state.update(clients=state["clients"][:-1]),
    "another seed": lambda _, state: state.update(seed=state["seed"] + 1),
    "a round that is a text": lambda _, state: state.update(round="two"),
    "a round that is true": lambda _, state: state.update(round=True),
    "a spread that is none": lambda _, state: state.update(spread=None),
    "no field at all": lambda _, state: state.clear(),
}


def forge(folder: Path, change: Change) -> None:
    """Change a checkpoint, and write all its hashes anew."""
    arrays = dict(load_file(folder / checkpoint.ARRAYS))
    content = json.loads((folder / checkpoint.STATE).read_text())
    assert set(content["state"]["cluster_of"]) >= {"client-0"}
    change(arrays, content["state"])
    save_file(
        {name: np.ascontiguousarray(value) for name, value in arrays.items()}, folder / checkpoint.ARRAYS
    )
    content["arrays"] = {checkpoint.ARRAYS: digest_file(folder / checkpoint.ARRAYS)}
    del content["hash"]
    (folder / checkpoint.STATE).write_text(hashed_text(content))


@pytest.mark.parametrize("change", FORGED.values(), ids=FORGED)
def test_a_checkpoint_that_no_round_could_have_left_is_refused_though_its_hashes_fit(
    change: Change, experiment: Path, stopped: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    shutil.copytree(stopped, out)
    forge(RunFolder(out).checkpoint / "round-000002", change)
    with pytest.raises(InputError, match=r"round-000002: damaged checkpoint \(") as refused:
        local.run(experiment, out, resume=True)
    assert "\n" not in str(refused.value)
    problems = verify(out).problems
    if change is FORGED["models of another size"]:
        assert any("round-000002: damaged checkpoint" in problem for problem in problems)


def test_what_a_client_could_not_have_kept_is_refused(tmp_path: Path) -> None:
    """The parts of a model that are a client's own, of other names or another size."""
    heads = dict.fromkeys(("ledger", "metrics", "seal"), ChainHead(1, "0" * 64))
    head = np.array([False, True, True])
    state = FedPerState(1, ("a", "b"), 0, np.zeros((1, 3), np.float32), head=head)
    for kept in ({"c": np.zeros(2)}, {"a": np.zeros(3)}, {"a": np.zeros((2, 1))}):
        kept = {name: own.astype(np.float32) for name, own in kept.items()}
        checkpoint.save(tmp_path, Checkpoint(state, heads, kept))
        with pytest.raises(InputError, match=r"damaged checkpoint .*personal\.safetensors"):
            checkpoint.load(tmp_path, FedPerState, state)
    checkpoint.save(tmp_path, Checkpoint(state, heads, {"a": np.ones(2, np.float32)}))
    found = checkpoint.load(tmp_path, FedPerState, state)
    assert found is not None
    assert found.personal.keys() == {"a"}


@pytest.mark.parametrize("before", [True, False])
def test_noise_of_a_gpu_stays_said_wherever_the_run_goes_on(
    before: bool, experiment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds on a machine with a GPU and rounds on one without, in any order: the guarantee says so."""
    monkeypatch.setattr("coterie.engines.local.stacks", lambda learner: before)
    with pytest.raises(KeyboardInterrupt):
        local.run(experiment, tmp_path / "run", callbacks=Callbacks(on_round=interrupt))
    monkeypatch.setattr("coterie.engines.local.stacks", lambda learner: not before)
    result = local.run(experiment, tmp_path / "run", resume=True)
    assert "; simulation; " in result.guarantee
    said = sentence(FAST_RANDOMNESS)
    assert said in result.guarantee_text
    assert said in json.loads(RunFolder(result.folder).guarantee.read_text())["text"]
    assert recount(result.folder) is not None


def test_without_a_gpu_nothing_is_said_of_one(uninterrupted: RunResult) -> None:
    assert sentence(FAST_RANDOMNESS) not in uninterrupted.guarantee_text


def interrupt(report: RoundReport) -> None:
    raise KeyboardInterrupt
