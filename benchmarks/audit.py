"""Does an audit find what is wrong, and nothing else? Planted mistakes, honest code, power, other libraries.

    python benchmarks/audit.py planted [--repeat 20] [--jobs 2]     # how often each mistake is found
    python benchmarks/audit.py honest [--audits 200] [--jobs 2]     # how often honest code is accused
    python benchmarks/audit.py power [--seconds 300] [--jobs 2]     # bounds against claims at epsilon 3 and 8
    python benchmarks/audit.py one-run [--canaries 2000]            # a whole run that claims 8, delta 1e-5
    python benchmarks/audit.py jax-privacy auditing.py              # the same bounds from the same scores
    python benchmarks/audit.py riskcal PYTHON                       # advantage and true positives from a PLD

`--effort` of `planted` multiplies the trials that the suite takes, `--only` names mistakes. Keys are drawn
from the operating system, so figures differ from run to run. What is planted is in `tests/audit/planted.py`.
`auditing.py` is a file of the wheel jax_privacy 2.0.0, which needs no jax when it is loaded by path; PYTHON
is an interpreter of an environment with riskcal 1.5.1 and dp-accounting.
"""

import argparse
import importlib.util
import json
import math
import multiprocessing.pool
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import dp_accounting as dp
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "audit"))

import planted

from coterie.audit.auditing import WHOLE_RUN, audit
from coterie.audit.bounds import Guesses, Scores
from coterie.audit.games import Game
from coterie.audit.playing import Effort, play
from coterie.audit.verdicts import AuditVerdict, Judgement
from coterie.privacy import FullBatchSketch, FullBatchSteps, PrivateSelection
from coterie.privacy.accounting import accountant_named
from coterie.privacy.units import Adjacency

ZERO = Adjacency.ZERO_OUT
DELTA = planted.DELTA


def find_planted(options: argparse.Namespace) -> None:
    """Every mistake, again and again."""
    chosen = [number for number, each in enumerate(planted.GALLERY) if options.only in each.name]
    tasks = [(number, options.effort) for number in chosen] * options.repeat
    hits = defaultdict[int, list[bool]](list)
    seconds = defaultdict[int, float](float)
    with _processes(options.jobs) as pool:
        for number, hit, took in pool.imap_unordered(_find, tasks):
            hits[number].append(hit)
            seconds[number] = max(seconds[number], took)
            said = "found" if hit else "missed"
            print(f"{planted.GALLERY[number].name}: {said} in {took:.1f} s", file=sys.stderr, flush=True)
    print("| mistake | trials | found | longest, seconds of one core |\n| --- | --- | --- | --- |")
    for number in chosen:
        each = planted.GALLERY[number]
        found = f"{sum(hits[number])} of {len(hits[number])}"
        print(f"| {each.name} | {options.effort * each.trials:,} | {found} | {seconds[number]:.1f} |")


def _find(task: tuple[int, int]) -> tuple[int, bool, float]:
    """Whether one audit finds this mistake, and the processor time it took."""
    number, effort = task
    each, began = planted.GALLERY[number], time.process_time()
    with each.patch():
        outcome = play(each.game(), Effort(effort * each.trials), 0.05)
    return number, outcome.found.verdict is AuditVerdict.VIOLATED, time.process_time() - began


HONEST = (
    planted.full_batch,
    planted.poisson,
    planted.sketch,
    planted.selection,
    planted.sums,
    planted.routed,
    planted.tracked,
    planted.scores,
)


def accuse_honest(options: argparse.Namespace) -> None:
    """Honest releases of every kind in turn; each audit is one release at 95 %."""
    alarms, trials = 0, list[int]()
    with _processes(options.jobs) as pool:
        tasks = [(number, options.seconds) for number in range(options.audits)]
        for name, found in pool.imap(_accuse, tasks):
            alarms += found.verdict is AuditVerdict.VIOLATED
            trials.append(found.trials)
            print(f"{name}: at least {found.lower:.3f} of {found.claimed:.3f}", flush=True)
    print(f"{len(trials)} honest audits of {options.seconds:g} s at 95 %: {alarms} alarms;", end=" ")
    print(f"{min(trials):,} to {max(trials):,} trials")


def _accuse(task: tuple[int, float]) -> tuple[str, Judgement]:
    number, seconds = task
    make = HONEST[number % len(HONEST)]
    return make.__name__, play(make(), Effort(None, seconds), 0.05).found


KINDS: dict[str, Callable[[float], Game]] = {
    "training step": lambda z: planted.of_records(FullBatchSteps(1.0, z, 8, 1, ZERO), times=1),
    "sketch": lambda z: planted.of_records(FullBatchSketch(1.0, z, 8, 5, ZERO), times=1),
    "routed sums": lambda z: planted.of_clients(histogram_ratio=4.0, noise=z),
    "selection": lambda epsilon: planted.of_records(PrivateSelection(epsilon, ZERO), times=1),
}


def show_power(options: argparse.Namespace) -> None:
    """A training step, a sketch, a selection and routed sums that claim 3 and 8: what is shown of it.

    For each claim the four releases share `--seconds` of `--jobs` cores, as in one audit of them."""
    each = options.seconds * options.jobs / len(KINDS)
    tasks = [(name, epsilon, each) for epsilon in (3.0, 8.0) for name in KINDS]
    print("| release | claimed epsilon | at least | share | trials |\n| --- | --- | --- | --- | --- |")
    with _processes(options.jobs) as pool:
        for row in pool.imap(_bound, tasks):
            print(row, flush=True)


def _bound(task: tuple[str, float, float]) -> str:
    name, epsilon, seconds = task
    make = KINDS[name]
    game = make(epsilon if name == "selection" else _root(make, epsilon))
    found = play(game, Effort(None, seconds), 0.05).found
    share = found.lower / found.claimed
    return f"| {name} | {found.claimed:.2f} | {found.lower:.2f} | {share:.2f} | {found.trials:,} |"


def _processes(jobs: int) -> multiprocessing.pool.Pool:
    return multiprocessing.get_context("spawn").Pool(jobs, torch.set_num_threads, (1,))


def _root(make: Callable[[float], Game], epsilon: float) -> float:
    """The noise of a Gaussian release that claims this epsilon, to a thousandth."""
    low, high = 0.05, 20.0
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if make(middle).claim.epsilon(DELTA) > epsilon else (low, middle)
    return high


def audit_one_run(options: argparse.Namespace) -> None:
    """A client whose records are canaries, on a softmax regression that has a feature for each of them."""
    side = math.isqrt(options.canaries - 1) + 1
    with tempfile.TemporaryDirectory() as folder:
        declared = (
            "task: classification\nlabel: {classes: 10}\nfeatures: {shape: [1, %d, %d], range: [0, 1]}\n"
        )
        (Path(folder) / "federation.yaml").write_text(declared % (side, side))
        blank = np.zeros((options.canaries + 1, 1, side, side), np.uint8)
        np.savez_compressed(Path(folder) / "client.npz", x=blank, y=np.zeros(len(blank), np.int64))
        for batch, rounds in ((options.canaries + 1, 1), ((options.canaries + 1) // 4, 3)):
            experiment = {
                "data": {"name": "folder", "path": folder},
                "federation": {"kind": "natural", "test_share": 0},
                "evaluation": {"kind": "none"},
                "model": {"name": "softmax"},
                "algorithm": {"name": "global"},
                "privacy": {"unit": "record", "epsilon": 8, "delta": 1e-5, "accountant": "pld"},
                "schedule": {"rounds": rounds, "batch": batch, "lr": 0.1},
            }
            [found] = audit(experiment, Path(folder) / "audit", release=WHOLE_RUN).releases
            print(f"{rounds} rounds, batches of {batch:,}: at least {found.lower_bound:.2f} of")
            print(f"  {found.claimed_epsilon:.2f} claimed, delta {found.delta:g}; {found.canary};")
            print(f"  {found.statistic}", flush=True)


def agree_with_jax_privacy(options: argparse.Namespace) -> None:
    """Clopper-Pearson and one-run bounds from the same scores, at the same thresholds."""
    theirs, largest = _loaded(options.file), 0.0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        scores = Scores(rng.normal(size=500) + rng.uniform(0.2, 3.0), rng.normal(size=500))
        auditor = theirs.CanaryScoreAuditor(scores.present, scores.absent)
        for threshold in (0.0, 0.7, 1.5, 2.5):
            strategy = theirs.Explicit(threshold)
            made = int((scores.present >= threshold).sum() + (scores.absent >= threshold).sum())
            guesses = Guesses(scores.trials, made, int((scores.present >= threshold).sum()))
            for delta in (1e-5, 1e-3):
                pairs = (
                    (
                        scores.rates(threshold, 0.05).epsilon(delta),
                        auditor.epsilon_clopper_pearson(0.05, delta, False, threshold_strategy=strategy),
                    ),
                    (
                        guesses.epsilon(delta, 0.05),
                        auditor.epsilon_one_run(0.05, delta, threshold_strategy=strategy),
                    ),
                    (
                        guesses.gaussian_epsilon(delta, 0.05),
                        auditor.epsilon_one_run_fdp(0.05, delta, threshold_strategy=strategy),
                    ),
                )
                for place, (ours, other) in enumerate(pairs):
                    apart = abs(ours - other)
                    if apart > 1e-6:
                        print(f"differs: bound {place}, seed {seed}, {threshold}, {delta}: {ours}, {other}")
                    largest = max(largest, apart)
    print(f"480 bounds of jax_privacy.auditing: the largest difference is {largest:.1e}")


def _loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("jax_privacy_auditing", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


_RISKCAL = """
import json, sys
from dp_accounting.pld import privacy_loss_distribution as pld
from riskcal.analysis import get_advantage_from_pld, get_beta_from_pld
out = []
for rate, noise, times in json.load(sys.stdin):
    each = pld.from_gaussian_mechanism(noise, sampling_prob=rate, value_discretization_interval=1e-4)
    whole = each.self_compose(times)
    out.append([float(get_advantage_from_pld(whole)), 1.0 - float(get_beta_from_pld(whole, 0.01))])
print(json.dumps(out))
"""


def agree_with_riskcal(options: argparse.Namespace) -> None:
    """Advantage and true positives at 1 % false positives: from PLDs as riskcal's, from RDP never below."""
    cases = [(1.0, 0.7, 1), (1.0, 2.3, 1), (0.1, 1.2, 290), (0.25, 0.6, 4), (0.01, 0.8, 1000), (0.5, 3.0, 50)]
    command = [options.python, "-c", _RISKCAL]
    run = subprocess.run(command, input=json.dumps(cases), capture_output=True, text=True, check=True)
    worst = [0.0, 0.0]
    print(
        "| rate | noise | times | advantage | riskcal | RDP | TPR at 1 % | riskcal | RDP |\n"
        + "| --- " * 9
        + "|"
    )
    for (rate, noise, times), theirs in zip(cases, json.loads(run.stdout.splitlines()[-1]), strict=True):
        event = dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(noise)), times)
        rows: dict[str, Any] = {
            name: accountant_named(name)(event, ZERO).meaning() for name in ("pld", "rdp")
        }
        ours = [2.0 * rows["pld"].guess - 1.0, rows["pld"].found]
        above = [2.0 * rows["rdp"].guess - 1.0, rows["rdp"].found]
        worst = [max(w, abs(a - b)) for w, a, b in zip(worst, ours, theirs, strict=True)]
        assert all(a >= b - 1e-9 for a, b in zip(above, theirs, strict=True)), "RDP is below the truth"
        cells = (ours[0], theirs[0], above[0], ours[1], theirs[1], above[1])
        print(f"| {rate} | {noise} | {times} | " + " | ".join(f"{cell:.4f}" for cell in cells) + " |")
    print(f"largest differences from riskcal: advantage {worst[0]:.1e}, true positive rate {worst[1]:.1e}")


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = parser.add_subparsers(required=True)
    for name, work, extra in (
        ("planted", find_planted, {"--repeat": 20, "--effort": 3, "--only": "", "--jobs": 2}),
        ("honest", accuse_honest, {"--audits": 200, "--seconds": 20.0, "--jobs": 2}),
        ("power", show_power, {"--seconds": 300.0, "--jobs": 2}),
        ("one-run", audit_one_run, {"--canaries": 2000}),
        ("jax-privacy", agree_with_jax_privacy, {"file": Path}),
        ("riskcal", agree_with_riskcal, {"python": str}),
    ):
        part = parts.add_parser(name)
        part.set_defaults(work=work)
        for option, value in extra.items():
            if option.startswith("--"):
                part.add_argument(option, type=type(value), default=value)
            else:
                part.add_argument(option, type=value)
    options = parser.parse_args()
    options.work(options)


if __name__ == "__main__":
    main()
