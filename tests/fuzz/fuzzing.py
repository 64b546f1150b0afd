"""Every fuzzer, run for so many cases: what became of them, and those that should not have."""

from __future__ import annotations

import ast
import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from case import Case, Outcome
from commands import FILES, command_lines
from experiments import TINY, as_yaml, overrides, planned, single_options, trained, yaml_texts
from folders import data_folders, flips, full_disks, sweeps, written_folders
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from watcher import Seen, Watcher, judge


@dataclass
class Tally:
    """How many cases of each kind came to what, and those to look at: faults, and what ended with 1."""

    counts: Counter[tuple[str, Outcome]] = field(default_factory=Counter)
    kept: list[tuple[Case, Outcome, Seen]] = field(default_factory=list)
    slowest: float = 0.0

    def add(self, case: Case, outcome: Outcome, seen: Seen) -> None:
        self.counts[case.kind, outcome] += 1
        self.slowest = max(self.slowest, seen.seconds)
        if outcome.is_fault or outcome is Outcome.FAILED:
            self.kept.append((case, outcome, seen))

    @property
    def faults(self) -> list[tuple[Case, Outcome, Seen]]:
        return [kept for kept in self.kept if kept[1].is_fault]


def put_to(watcher: Watcher, case: Case, silent: frozenset[str]) -> tuple[Outcome, Seen]:
    """What became of a case.

    Args:
        silent: keys that may be changed without any difference.
    """
    seen = watcher.run(case)
    outcome = judge(case, seen)
    if outcome is Outcome.ACCEPTED and case.without is not None and case.option not in silent:
        outcome = _of_option(watcher, case, seen)
    return outcome, seen


def _of_option(watcher: Watcher, case: Case, seen: Seen) -> Outcome:
    """Whether the one option that was changed makes a difference, to the plan or to what is learnt."""
    assert case.without is not None
    if case.files == case.without.files or watcher.known(case.without).out != seen.out:
        return Outcome.ACCEPTED
    learnt = []
    for each, see in ((case, watcher.run), (case.without, watcher.known)):
        run = Case(case.kind, ("run", "e.yaml", "--out", "out", "--json"), each.files)
        ran = see(run)
        outcome = judge(run, ran)
        if outcome is not Outcome.ACCEPTED:
            return outcome
        learnt.append(ran.learnt)
    return Outcome.IGNORED if learnt[0] == learnt[1] else Outcome.ACCEPTED


def silent_options() -> frozenset[str]:
    """Keys that change nothing that can be seen, with a reason for each in the test of all options."""
    test = Path(__file__).parents[1] / "experiment" / "test_every_option_acts.py"
    if not test.exists():
        return frozenset({"engine.workers", "engine.device", "engine.max_memory"})
    assigned = (node for node in ast.parse(test.read_text()).body if isinstance(node, ast.AnnAssign))
    [listed] = [node.value for node in assigned if ast.unparse(node.target) == "LISTED" and node.value]
    return frozenset(ast.literal_eval(listed))


def fuzzers(written: Path) -> dict[str, tuple[st.SearchStrategy[Case], int]]:
    """The fuzzers by name, and how often each is asked in a hundred cases."""
    run = written / "finished" / "run"
    return {
        "plan": (planned(), 18),
        "run": (trained(), 9),
        "option": (single_options(), 4),
        "--set": (overrides(), 10),
        "YAML": (yaml_texts(), 11),
        "command": (command_lines(run), 18),
        "data": (data_folders(), 12),
        "finished run": (written_folders(run), 6),
        "unfinished run": (written_folders(written / "unfinished" / "run"), 2),
        "comparison": (written_folders(written / "compared" / "out"), 2),
        "sweep": (sweeps(), 1),
        "flip of a run": (flips(run), 3),
        "flip of a comparison": (flips(written / "compared" / "out"), 1),
        "full disk": (full_disks(written), 3),
    }


def write_folders(watcher: Watcher, root: Path) -> Path:
    """A finished run, one that was interrupted after its first round, and a comparison, by name."""
    from coterie import api
    from coterie.experiment.callbacks import Callbacks
    from coterie.experiment.schema import Experiment

    class Interrupted(Exception):
        """Somebody pulled the plug."""

    def stop(report: object) -> None:
        raise Interrupted

    written = root / "written"
    tree = {**TINY, "schedule": {"rounds": 3, "batch": 20}}
    watcher.write(
        Case("", ("run", "e.yaml", "--out", "run"), {"e.yaml": as_yaml(tree)}), written / "finished"
    )
    watcher.write(Case("", ("compare", "s.yaml", "--out", "out"), FILES), written / "compared")
    with suppress(Interrupted):
        path = written / "unfinished" / "run"
        api.run(Experiment.model_validate(tree), path, callbacks=Callbacks(on_round=stop))
    return written


def fuzz(
    root: Path,
    cases: int,
    number: int = 0,
    seconds: float = float("inf"),
    told: Callable[[Tally, int], None] = lambda tally, done: None,
) -> Tally:
    """Put so many cases to the command, drawn from one number, and stop when the time is up."""
    tally, ends = Tally(), time.monotonic() + seconds
    watcher, silent = Watcher(root), silent_options()

    try:
        made = fuzzers(write_folders(watcher, root))
        turns = [name for name, (_, share) in made.items() for _ in range(share)]
        random.Random(number).shuffle(turns)
        for place in range(cases):
            if time.monotonic() > ends:
                break
            name = turns[place % len(turns)]
            case = drawn(made[name][0], f"{name} {number} {place}")
            tally.add(case, *put_to(watcher, case, silent))
            told(tally, place + 1)
    finally:
        watcher.close()
    return tally


def drawn(strategy: st.SearchStrategy[Case], label: str) -> Case:
    """One case of a strategy; which, a label decides."""
    found: list[Case] = []

    @seed(label)
    @settings(
        max_examples=2,  # the simplest comes first, and what comes after a second is much like it
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.integers(0, 2**32), strategy)  # the first draw after the simplest is never the simplest again
    def draw(other: int, case: Case) -> None:
        found.append(case)

    draw()
    return found[-1]
