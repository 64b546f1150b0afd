"""A few strange inputs of every kind, and that the fuzzers find what is planted; `make fuzz` has the rest."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from case import Case, Outcome
from everything import told
from experiments import TINY, Tree, as_yaml
from fuzzing import fuzz, put_to
from watcher import Watcher

MODEL = """
import os, sys, time
from torch import nn
import coterie.cli.main as cli

def make(task):
    {}
    return nn.Sequential(nn.Flatten(), nn.Linear(64, task.outputs))
"""
PLANTED = {
    "": Outcome.ACCEPTED,
    "raise ValueError('no such luck')": Outcome.REFUSED,
    "raise MemoryError": Outcome.REFUSED,
    "os._exit(1)": Outcome.NOT_ONE_LINE,
    "time.sleep(60)": Outcome.HANG,
    "cli._explain = None; os.remove('e.yaml'); raise ValueError": Outcome.TRACEBACK,
    "cli._explain = lambda _: ('KeyError: 3', 2); raise ValueError": Outcome.BARE_NAME,
    "cli._explain = lambda _: ('data.name: function-before[f]', 2); raise ValueError": Outcome.BARE_NAME,
    "cli._explain = lambda _: ('x (COTERIE_DEBUG=1 shows where)', 1); raise ValueError": Outcome.BARE_NAME,
    "import warnings; warnings.warn('overflow', RuntimeWarning)": Outcome.BARE_NAME,
    "cli._explain = lambda _: ('a.csv: cannot be read (DecodeError)', 2); raise ValueError": Outcome.REFUSED,
    "os.mkdir('out'); raise ValueError": Outcome.HALF_WRITTEN,
    "open('e.yaml', 'a').write(' '); raise ValueError": Outcome.HALF_WRITTEN,
    "os.mkdir('.out.1a2b3c4d')": Outcome.HALF_WRITTEN,
    "open('.report.html.4711', 'w').close()": Outcome.HALF_WRITTEN,
    "print('a word of advice', file=sys.stderr); raise ValueError": Outcome.NOT_ONE_LINE,
    "print('working')": Outcome.NOT_JSON,
    "os.abort()": Outcome.OTHER_CODE,
    "os._exit(77)": Outcome.OTHER_CODE,
}
"""What a model may do while it is made, and what the fuzzers must call it."""


@pytest.fixture(scope="module")
def watcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watcher]:
    found = Watcher(tmp_path_factory.mktemp("fuzz"))
    yield found
    found.close()


def test_whatever_a_command_is_given_it_ends_as_it_promises(tmp_path: Path) -> None:
    tally = fuzz(tmp_path, cases=100)
    assert not tally.faults, "\n".join(told(*fault) for fault in tally.faults)


def planted(code: str) -> Case:
    tree = {**TINY, "model": {"name": "planted:make"}}
    files = {"e.yaml": as_yaml(tree), "planted.py": MODEL.format(code).encode()}
    return Case("planted", ("plan", "e.yaml", "--json"), files)


@pytest.mark.parametrize("code", list(PLANTED))
def test_each_fault_is_seen(watcher: Watcher, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    if PLANTED[code] is Outcome.HANG:
        monkeypatch.setattr("watcher.SECONDS", 2.0)
    outcome, seen = put_to(watcher, planted(code), frozenset())
    assert outcome is PLANTED[code], seen


def changed(tree: Tree, comment: str) -> Case:
    plan = ("plan", "e.yaml", "--json")
    before = Case("option", plan, {"e.yaml": as_yaml(TINY)})
    files = {"e.yaml": as_yaml(tree) + comment.encode()}
    return Case("option", plan, files, option="seeds.simulation", without=before)


@pytest.mark.parametrize(
    ("tree", "comment", "silent", "expected"),
    [
        (TINY, "# not read by anybody", frozenset(), Outcome.IGNORED),
        (TINY, "# not read by anybody", frozenset({"seeds.simulation"}), Outcome.ACCEPTED),
        ({**TINY, "schedule": {"rounds": 3}}, "", frozenset(), Outcome.ACCEPTED),  # changes the plan
        (
            {**TINY, "seeds": {"noise": 0, "simulation": 1}},
            "",
            frozenset(),
            Outcome.ACCEPTED,
        ),  # what is learnt
    ],
)
def test_an_option_that_does_nothing_is_seen(
    watcher: Watcher, tree: Tree, comment: str, silent: frozenset[str], expected: Outcome
) -> None:
    outcome, seen = put_to(watcher, changed(tree, comment), silent)
    assert outcome is expected, seen


def test_a_change_that_nobody_sees_is_seen(watcher: Watcher) -> None:
    case = Case("flip", ("plan", "e.yaml"), {"e.yaml": as_yaml(TINY)}, broken=True)
    assert put_to(watcher, case, frozenset())[0] is Outcome.UNSEEN


def test_a_disk_can_be_full(watcher: Watcher) -> None:
    case = Case("full disk", ("run", "e.yaml", "--out", "out"), {"e.yaml": as_yaml(TINY)}, room=4000)
    _, seen = put_to(watcher, case, frozenset())
    assert (seen.code, "File too large" in seen.err) == (1, True), seen


def test_a_run_without_its_result_is_half_written(watcher: Watcher) -> None:
    case = Case("run", ("run", "e.yaml", "--out", "out"), {"e.yaml": as_yaml(TINY)})
    assert put_to(watcher, case, frozenset())[0] is Outcome.ACCEPTED
    code = "import coterie.cli.run as run; run.show = lambda found: os.remove('out/result.json')"
    tree = {**TINY, "model": {"name": "planted:make"}}
    files = {"e.yaml": as_yaml(tree), "planted.py": MODEL.format(code).encode()}
    assert put_to(watcher, Case("run", case.arguments, files), frozenset())[0] is Outcome.HALF_WRITTEN


def test_nothing_of_a_case_stays(watcher: Watcher, tmp_path: Path) -> None:
    watcher.run(planted("os.mkdir('out', 0o500)"))
    assert os.listdir(watcher._root) == []
