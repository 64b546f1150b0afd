"""The ledger: nothing is released that was not written, and nothing written can be quietly undone."""

import errno
import json
import math
import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coterie.privacy import FullBatchSteps, NoiseRule, PoissonSteps, PrivateSelection
from coterie.privacy import ledger as ledger_module
from coterie.privacy.accounting import ACCOUNTANTS, epsilon_of
from coterie.privacy.chain import ChainHead, HashChain
from coterie.privacy.errors import BudgetError, CoterieError, LedgerError, PlanError, PrivacyInputError
from coterie.privacy.ledger import Charge, Ledger, LedgerView
from coterie.privacy.plan import PlannedRelease, PrivacyPlan, UnitPlan
from coterie.privacy.units import Adjacency, Budget, ThreatModel, Unit

ZERO_OUT = Adjacency.ZERO_OUT
BUDGET = Budget(8.0, 1e-3)
ROUNDS = 4


def make_plan(subjects=("a", "b", "c"), noise=1.2, rounds=ROUNDS) -> PrivacyPlan:
    releases = (
        PlannedRelease("first", FullBatchSteps(1.0, noise, 200, 1, ZERO_OUT), 1),
        PlannedRelease("training", PoissonSteps(1.0, noise, 200, 20, 1, ZERO_OUT), rounds),
        PlannedRelease("selection", PrivateSelection(0.1, ZERO_OUT), 2),
    )
    units = tuple(UnitPlan(subject, releases) for subject in subjects)
    return PrivacyPlan(Unit.RECORD, ZERO_OUT, ThreatModel("server", "updates"), units)


PLAN = make_plan()


def open_ledger(path: Path, plan: PrivacyPlan = PLAN, **options) -> Ledger:
    return Ledger.open(path, plan, **{"budget": BUDGET, "accountant": "rdp", **options})


def training(subject: str, number: int, digest: str = "00") -> Charge:
    return Charge(subject, number, "training", digest)


def play(path: Path, rounds: int = ROUNDS, **options) -> ChainHead:
    """A run: each round charges every subject at once."""
    with open_ledger(path, **options) as ledger:
        for number in range(1, rounds + 1):
            ledger.charge([training(subject, number, f"{number:02x}") for subject in "abc"])
        return ledger.head


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("run") / "ledger.jsonl"
    play(path)
    return path.read_bytes()


def lines_of(data: bytes) -> list[bytes]:
    return data.splitlines(keepends=True)


def refused(path: Path, data: bytes, **options) -> str:
    """The message with which these bytes are refused; the bytes must stay as they are."""
    path.write_bytes(data)
    with pytest.raises(LedgerError) as caught:
        open_ledger(path, **options)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    assert path.read_bytes() == data
    return message


# --- charging --------------------------------------------------------------------------------------


def test_a_ledger_knows_each_charge_and_the_latest_round_also_after_a_restart(path):
    with open_ledger(path) as ledger:
        assert ledger.latest_round("a") == 0
        ledger.charge([training("a", 3), training("b", 1)])
        ledger.charge([training("a", 2)])
    with open_ledger(path) as ledger:
        assert (ledger.latest_round("a"), ledger.latest_round("b"), ledger.latest_round("c")) == (3, 1, 0)
        assert ledger.knows(training("a", 3))
        assert not ledger.knows(training("a", 3, "01"))
        assert not ledger.knows(training("b", 3))
        with pytest.raises(PlanError):
            ledger.latest_round("nobody")


def test_a_charge_is_on_disk_when_it_returns(path):
    with open_ledger(path) as ledger:
        before = path.read_bytes()
        ledger.charge([training("a", 1)])
        added = path.read_bytes().removeprefix(before)
    assert json.loads(added)["charges"] == [
        {"subject": "a", "round": 1, "release": "training", "input_hash": "00"}
    ]


def test_a_charge_is_synced_after_it_is_written_and_once_for_the_whole_list(path, monkeypatch):
    calls: list[tuple[str, int]] = []
    write, fsync = os.write, os.fsync
    with open_ledger(path) as ledger:
        monkeypatch.setattr(os, "write", lambda fd, data: calls.append(("write", fd)) or write(fd, data))
        monkeypatch.setattr(os, "fsync", lambda fd: calls.append(("fsync", fd)) or fsync(fd))
        ledger.charge([training(subject, 1) for subject in "abc"])
    assert [name for name, _ in calls] == ["write", "fsync"]
    assert calls[0][1] == calls[1][1]


def test_creation_syncs_the_file_before_it_gets_its_name_and_the_directory_after(path, monkeypatch):
    calls: list[int | str] = []
    fsync, link = os.fsync, os.link
    monkeypatch.setattr(os, "fsync", lambda fd: calls.append(os.fstat(fd).st_ino) or fsync(fd))
    monkeypatch.setattr(os, "link", lambda old, new: calls.append("link") or link(old, new))
    open_ledger(path).close()
    assert calls == [path.stat().st_ino, "link", path.parent.stat().st_ino]
    assert os.listdir(path.parent) == [path.name]


def test_the_same_charge_again_writes_and_counts_nothing(path):
    with open_ledger(path) as ledger:
        ledger.charge([training("a", 1), training("a", 1)])
        size, head = path.stat().st_size, ledger.head
        ledger.charge([training("a", 1)])
        ledger.charge([])
        assert (path.stat().st_size, ledger.head) == (size, head)
        assert ledger.executed("a") == {"first": 0, "training": 1, "selection": 0}


def test_a_list_of_old_and_new_charges_writes_the_new_ones(path):
    with open_ledger(path) as ledger:
        ledger.charge([training("a", 1)])
        ledger.charge([training("a", 1), training("b", 1)])
        assert ledger.executed("a")["training"] == ledger.executed("b")["training"] == 1
    assert [len(json.loads(line)["charges"]) for line in lines_of(path.read_bytes())[1:]] == [1, 1]


def test_the_same_release_on_another_input_is_another_charge(path):
    with open_ledger(path) as ledger:
        for digest in ("00", "01", "02", "03"):
            ledger.charge([training("a", 1, digest)])
        assert ledger.executed("a")["training"] == ROUNDS
        with pytest.raises(BudgetError, match="allows 4"):
            ledger.charge([training("a", 1, "04")])


@pytest.mark.parametrize("reopened", [False, True])
def test_one_release_more_than_planned_is_refused_and_nothing_is_written(path, reopened):
    ledger = open_ledger(path)
    for number in range(ROUNDS):
        ledger.charge([training("a", number)])
    if reopened:
        ledger.close()
        ledger = open_ledger(path)
    before, head = path.read_bytes(), ledger.head
    with pytest.raises(BudgetError) as caught:
        ledger.charge([training("a", ROUNDS)])
    assert str(caught.value) == "a: release 'training' in round 4 would be number 5, the plan allows 4"
    assert path.read_bytes() == before
    assert ledger.head == head
    assert ledger.executed("a")["training"] == ROUNDS
    ledger.charge([training("a", 0), training("b", 0)])
    ledger.close()


def test_two_charges_that_together_exceed_the_plan_are_refused_whole(path):
    with open_ledger(path) as ledger:
        before = path.read_bytes()
        with pytest.raises(BudgetError):
            ledger.charge([training("b", 1), Charge("a", 1, "first", "00"), Charge("a", 1, "first", "01")])
        assert path.read_bytes() == before
        assert ledger.executed("b")["training"] == ledger.executed("a")["first"] == 0
        assert ledger.spent() == 0.0


@pytest.mark.parametrize("charge", [training("stranger", 1), Charge("a", 1, "validation", "00")])
def test_what_the_plan_does_not_declare_is_refused_and_nothing_is_written(path, charge):
    with open_ledger(path) as ledger:
        before = path.read_bytes()
        with pytest.raises(PlanError):
            ledger.charge([training("a", 1), charge])
        assert path.read_bytes() == before
        assert ledger.executed("a")["training"] == 0


@pytest.mark.parametrize(
    "values",
    [
        ("", 1, "training", "00"),
        ("a", -1, "training", "00"),
        ("a", 1.0, "training", "00"),
        ("a", True, "training", "00"),
        ("a", 1, "", "00"),
        ("a", 1, "training", ""),
        ("a", 1, "training", b"00"),
    ],
)
def test_a_charge_without_meaning_is_refused(values):
    with pytest.raises(PrivacyInputError, match="charge: "):
        Charge(*values)


def test_a_closed_ledger_charges_nothing(path):
    with open_ledger(path) as ledger:
        pass
    with pytest.raises(LedgerError, match="closed"):
        ledger.charge([training("a", 1)])


# --- opening again ---------------------------------------------------------------------------------


def test_a_resumed_run_leaves_the_same_bytes_as_an_uninterrupted_one(path, finished):
    for rounds in (0, 1, 1, 3, ROUNDS):
        play(path, rounds)
    assert path.read_bytes() == finished


def test_a_restart_cannot_reset_what_was_spent(path):
    with open_ledger(path) as ledger:
        ledger.charge([training("a", 1)])
        spent, head, executed = ledger.spent("a"), ledger.head, ledger.executed("a")
    with open_ledger(path, anchor=head) as ledger:
        assert (ledger.spent("a"), ledger.head, ledger.executed("a")) == (spent, head, executed)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"plan": make_plan(noise=1.3)}, "another plan"),
        ({"plan": make_plan(rounds=5)}, "another plan"),
        ({"plan": make_plan(subjects=("a", "b"))}, "another plan"),
        ({"budget": Budget(9.0, 1e-3)}, "other budgets"),
        ({"budget": {"a": BUDGET, "b": BUDGET, "c": Budget(8.0, 1e-4)}}, "other budgets"),
        ({"accountant": "other"}, "accountant 'rdp', not 'other'"),
    ],
)
def test_a_ledger_of_another_plan_budget_or_accountant_is_refused(path, finished, options, word, monkeypatch):
    monkeypatch.setitem(ACCOUNTANTS, "other", ACCOUNTANTS["rdp"])
    message = refused(path, finished, **options)
    assert "line 1" in message
    assert word in message


def test_one_budget_for_all_is_the_same_as_the_same_budget_for_each(path, finished):
    path.write_bytes(finished)
    open_ledger(path, budget=dict.fromkeys("abc", BUDGET)).close()


@pytest.mark.parametrize("subjects", ["ab", "abcd"])
def test_budgets_for_other_subjects_than_the_plans_are_refused(path, subjects):
    with pytest.raises(PlanError, match="budget"):
        open_ledger(path, budget=dict.fromkeys(subjects, BUDGET))
    assert not path.exists()


def test_a_plan_that_is_not_calibrated_opens_no_ledger(path):
    with pytest.raises(PlanError):
        open_ledger(path, make_plan(noise=NoiseRule.SHARED))
    assert not path.exists()


def test_an_unknown_accountant_opens_no_ledger(path):
    with pytest.raises(CoterieError):
        open_ledger(path, accountant="guess")
    assert not path.exists()


def test_a_path_that_cannot_be_written_is_one_line(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere" / "ledger.jsonl"):
        with pytest.raises(LedgerError, match=str(path)):
            open_ledger(path)


# --- crashes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [1, 20, -2, -1])
def test_a_torn_last_line_is_cut_and_the_run_goes_on_to_the_same_bytes(path, finished, kept):
    *whole, last = lines_of(finished)
    path.write_bytes(b"".join(whole) + last[:kept])
    with open_ledger(path) as ledger:
        assert ledger.head.count == len(whole)
        assert path.read_bytes() == b"".join(whole)
    play(path)
    assert path.read_bytes() == finished


def test_a_torn_line_is_not_cut_from_a_file_that_is_refused(path, finished):
    lines = lines_of(finished)
    refused(path, b"".join([lines[0], lines[2], lines[3][:10]]))


CRASHES = {
    "before the write": "chain.os.write = lambda fd, data: die()",
    "inside the write": "chain.os.write = lambda fd, data: (write(fd, data[:50]), die())",
    "before the sync": "chain.os.fsync = lambda fd: die()",
    "after the sync": "chain.os.fsync = lambda fd: (fsync(fd), die())",
}

CHILD = """
import json, os, signal, sys
from pathlib import Path
from coterie.privacy import chain, ledger
from coterie.privacy.plan import PrivacyPlan
from coterie.privacy.units import Budget

def die():
    os.kill(os.getpid(), signal.SIGKILL)

job = json.load(sys.stdin)
write, fsync = os.write, os.fsync
plan, budget = PrivacyPlan.from_json(job["plan"]), Budget(**job["budget"])
book = ledger.Ledger.open(Path(job["path"]), plan, budget=budget, accountant="rdp")
released = os.open(job["released"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
for number in range(1, job["rounds"] + 1):
    if number == job["deadly"]:
        exec(job["patch"])
    book.charge([ledger.Charge(subject, number, "training", f"{number:02x}") for subject in "abc"])
    write(released, f"{number}\\n".encode())
"""


def start_child(path: Path, rounds: int, deadly: int = 0, patch: str = "", plan=PLAN) -> subprocess.Popen:
    """A process that charges round by round and notes each release, and dies in one round if asked to."""
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, text=True)
    job = {
        "path": str(path),
        "released": str(path.with_name("released")),
        "rounds": rounds,
        "deadly": deadly,
        "patch": patch,
        "plan": plan.to_json(),
        "budget": asdict(BUDGET),
    }
    assert child.stdin is not None
    json.dump(job, child.stdin)
    child.stdin.close()
    return child


def released_by(path: Path) -> int:
    log = path.with_name("released")
    return len(log.read_text().splitlines()) if log.exists() else 0


@pytest.mark.parametrize("moment", CRASHES)
def test_a_process_killed_inside_a_charge_has_released_nothing_uncharged(path, finished, moment):
    child = start_child(path, ROUNDS, deadly=3, patch=CRASHES[moment])
    assert child.wait(60) == -signal.SIGKILL
    assert released_by(path) == 2
    with open_ledger(path) as ledger:
        charged = ledger.executed("a")["training"]
        assert charged == ledger.executed("c")["training"]
        assert charged == (3 if "sync" in moment else 2)
    play(path)
    assert path.read_bytes() == finished


@pytest.mark.parametrize("delay", [0.0, 0.003, 0.01])
def test_a_process_killed_at_any_moment_has_charged_whatever_it_released(path, delay):
    plan = make_plan(rounds=100_000)
    child = start_child(path, 100_000, plan=plan)
    while released_by(path) < 5 and child.poll() is None:
        pass
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(delay)
    child.kill()
    assert child.wait(60) == -signal.SIGKILL
    with open_ledger(path, plan) as ledger:
        assert 5 <= released_by(path) <= ledger.executed("a")["training"] <= released_by(path) + 1


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_full_disk_is_one_line_and_ends_all_charging(path, finished, monkeypatch, call):
    ledger = open_ledger(path)
    ledger.charge([training(subject, 1, "01") for subject in "abc"])
    real = os.write

    def fail(fd, *data):
        if data:
            real(fd, data[0][:30])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(LedgerError, match="No space left"):
        ledger.charge([training(subject, 2, "02") for subject in "abc"])
    monkeypatch.undo()
    with pytest.raises(LedgerError, match="closed"):
        ledger.charge([training("a", 2)])
    play(path)
    assert path.read_bytes() == finished


def test_a_short_write_is_continued(path, finished, monkeypatch):
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:7]))
    play(path)
    assert path.read_bytes() == finished


# --- one run at a time -----------------------------------------------------------------------------


def test_a_second_process_is_refused_in_one_line_until_the_first_lets_go(path):
    script = f"""
        import sys, fcntl
        try:
            fcntl.flock(open({str(path)!r}, "rb+"), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit(7)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    with open_ledger(path):
        assert subprocess.run(command, check=False).returncode == 7
        with pytest.raises(LedgerError) as caught:
            open_ledger(path)
        assert str(caught.value) == f"{path}: another run has this ledger open; only one may spend at a time"
        # Somebody reading the file in this process does not unlock it.
        path.read_bytes()
        assert subprocess.run(command, check=False).returncode == 7
    assert subprocess.run(command, check=False).returncode == 0
    with open_ledger(path):
        assert subprocess.run(command, check=False).returncode == 7
        with pytest.raises(LedgerError, match="another run"):
            open_ledger(path)


def test_the_loser_of_a_race_to_create_the_file_is_refused(path, monkeypatch):
    rival = []
    link = os.link

    def slow(old, new):
        monkeypatch.undo()
        rival.append(open_ledger(path))
        link(old, new)

    monkeypatch.setattr(os, "link", slow)
    with pytest.raises(LedgerError, match="another run"):
        open_ledger(path)
    rival[0].charge([training("a", 1)])
    LedgerView.read(path, PLAN).check_seen(rival[0].head, "this process")
    rival[0].close()
    assert os.listdir(path.parent) == [path.name]


def test_a_ledger_removed_replaced_or_changed_during_the_run_stops_it(path, finished):
    for disturb in (
        path.unlink,
        lambda: (path.unlink(), path.write_bytes(finished)),
        lambda: os.truncate(path, path.stat().st_size - 1),
        lambda: path.open("ab").write(b"x"),
    ):
        path.unlink(missing_ok=True)
        with open_ledger(path) as ledger:
            ledger.charge([training("a", 1)])
            disturb()
            with pytest.raises(LedgerError, match="somebody else"):
                ledger.charge([training("a", 2)])


def test_a_byte_changed_under_a_running_process_is_found(path):
    with open_ledger(path) as ledger:
        ledger.charge([training("a", 1)])
        ledger.charge([training("a", 2)])
        LedgerView.read(path, PLAN).check_seen(ledger.head, "this process")
        path.write_bytes(path.read_bytes().replace(b'"round":1', b'"round":3'))
        with pytest.raises(LedgerError, match="line 2"):
            LedgerView.read(path, PLAN)


# --- tampering -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tamper", "line"),
    [
        (lambda x: [x[0], x[1].replace(b'"round":1', b'"round":2'), *x[2:]], 2),
        (lambda x: [x[0].replace(b'"times":4', b'"times":9'), *x[1:]], 1),
        (lambda x: [x[0], *x[2:]], 2),
        (lambda x: [*x[:3], *x[4:]], 4),
        (lambda x: [*x[:2], x[3], x[2], x[4]], 3),
        (lambda x: [*x[:3], *x[2:]], 4),
        (lambda x: [*x, x[-1]], 6),
        (lambda x: [*x[:2], x[1], *x[2:]], 3),
        (lambda x: [x[0], x[0], *x[1:]], 2),
        (lambda x: x[1:], 1),
        (lambda x: [*x[:2], b"\n", *x[2:]], 3),
        (lambda x: [*x, b"\n"], 6),
        (lambda x: [*x[:2], x[2].replace(b'"round"', b' "round"', 1), *x[3:]], 3),
        (lambda x: [*x[:2], x[2].replace(b"{", b'{"extra":1,', 1), *x[3:]], 3),
        (lambda x: [*x[:2], x[2].replace(b"\n", b"\r\n"), *x[3:]], 3),
        (lambda x: [x[0].replace(b"\n", b""), *x[1:]], 1),
    ],
)
def test_a_changed_dropped_moved_doubled_or_inserted_line_is_found_with_its_number(
    path, finished, tamper, line
):
    assert f"line {line} " in refused(path, b"".join(tamper(lines_of(finished))))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\n",
        b"x",
        b"{}",
        b"{}\n",
        b"[]\n",
        b"null\n",
        b"3\n",
        b'"hash"\n',
        b'{"hash":3}\n',
        b"NaN\n",
        b'{"hash":NaN}\n',
        b'{"a":NaN,"hash":""}\n',
        b"\x00" * 100,
        b"\x00" * 100 + b"\n",
        b"\xff\xfe\n",
        b"\xef\xbb\xbf{}\n",
        bytes(range(256)),
        b"[" * 100_000 + b"\n",
        b'{"hash":' + b"[" * 100_000 + b"\n",
        b"9" * 10_000 + b"\n",
        b'{"\\ud800":1,"hash":""}\n',
    ],
    ids=range(22),
)
def test_a_file_that_is_no_ledger_is_refused_with_its_name_and_line(path, data):
    assert "line 1 " in refused(path, data)


def chained(*bodies: dict) -> bytes:
    """A file whose hash chain is in order, whatever it says."""
    data, chain = b"", HashChain(Path("a ledger"))
    for body in bodies:
        line, digest = chain.link(body)
        chain.add(len(line), digest)
        data += line
    return data


def header_of(data: bytes) -> dict:
    header = json.loads(lines_of(data)[0])
    del header["hash"]
    return header


ENTRY = training("a", 1).to_json()


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"other": 1},
        {"charges": None},
        {"charges": {}},
        {"charges": []},
        {"charges": ["a"]},
        {"charges": [{}]},
        {"charges": [ENTRY], "more": 1},
        {"charges": [{**ENTRY, "more": 1}]},
        {"charges": [{**ENTRY, "round": "1"}]},
        {"charges": [{**ENTRY, "round": 1.5}]},
        {"charges": [{**ENTRY, "subject": None}]},
    ],
)
def test_a_chained_line_that_is_no_list_of_charges_is_refused(path, finished, body):
    assert "line 2 is not a list of charges" in refused(path, chained(header_of(finished), body))


@pytest.mark.parametrize(
    "entries",
    [
        [{**ENTRY, "subject": "stranger"}],
        [{**ENTRY, "release": "validation"}],
        [{**ENTRY, "round": number} for number in range(ROUNDS + 1)],
        [ENTRY, ENTRY],
    ],
)
def test_a_chained_line_that_the_plan_does_not_allow_is_refused(path, finished, entries):
    message = refused(path, chained(header_of(finished), {"charges": entries}))
    assert "line 2 " in message


def test_a_chained_header_of_another_format_is_refused(path, finished):
    header = header_of(finished)
    for changed in ({**header, "ledger": 2}, {**header, "more": 1}, {}, {"charges": [ENTRY]}):
        assert "line 1 is not the header" in refused(path, chained(changed))


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_change_of_bytes_before_the_last_newline_goes_unnoticed(path, finished, data):
    position = data.draw(st.integers(0, len(finished) - 1), label="position")
    removed = data.draw(st.integers(0, 3), label="removed")
    added = data.draw(st.binary(max_size=3), label="added")
    changed = finished[:position] + added + finished[position + removed :]
    head = ChainHead(len(lines_of(finished)), json.loads(lines_of(finished)[-1])["hash"])
    if not changed.startswith(finished):
        refused(path, changed, anchor=head)


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(order=st.lists(st.integers(0, ROUNDS), max_size=8))
def test_only_a_prefix_of_the_lines_is_accepted(path, finished, order):
    lines = lines_of(finished)
    changed = b"".join(lines[index] for index in order)
    if order and order == list(range(len(order))):
        path.write_bytes(changed)
        open_ledger(path).close()
    else:
        refused(path, changed)


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(garbage=st.binary(max_size=200))
def test_garbage_is_refused_and_never_a_crash_of_another_kind(path, garbage):
    refused(path, garbage)
    assert "line 1 " in refused(path, garbage + b"\n")


# --- the anchor ------------------------------------------------------------------------------------


def test_every_head_on_the_way_is_an_anchor_of_the_finished_file(path):
    heads = []
    with open_ledger(path) as ledger:
        heads.append(ledger.head)
        for number in range(ROUNDS):
            ledger.charge([training("a", number)])
            heads.append(ledger.head)
    assert [head.count for head in heads] == list(range(1, ROUNDS + 2))
    for head in heads:
        open_ledger(path, anchor=ChainHead.from_json(json.loads(json.dumps(head.to_json())))).close()


def test_lines_dropped_from_the_end_are_found_by_the_anchor(path, finished):
    path.write_bytes(finished)
    with open_ledger(path) as ledger:
        head = ledger.head
    lines = lines_of(finished)
    assert "line 5 is missing" in refused(path, b"".join(lines[:4]), anchor=head)
    assert "line 5 is missing" in refused(path, finished[:-1], anchor=head)
    assert "line 2 is missing" in refused(path, lines[0], anchor=head)


def test_a_chain_rewritten_from_some_line_on_is_found_by_the_anchor(path, finished):
    path.write_bytes(finished)
    with open_ledger(path) as ledger:
        head = ledger.head
    bodies = [json.loads(line) for line in lines_of(finished)]
    for body in bodies:
        del body["hash"]
    bodies[2]["charges"] = bodies[2]["charges"][:1]
    assert "line 5 is not the one" in refused(path, chained(*bodies), anchor=head)


def test_a_ledger_that_is_gone_is_not_started_again_when_a_checkpoint_has_seen_one(path):
    with pytest.raises(LedgerError, match="missing"):
        open_ledger(path, anchor=ChainHead(3, "00" * 32))
    assert not path.exists()


@pytest.mark.parametrize("count", [0, -1, 1, ROUNDS + 1])
def test_an_anchor_that_never_was_is_refused(path, finished, count):
    refused(path, finished, anchor=ChainHead(count, "00" * 32))
    if count < 1:
        refused(path, finished, anchor=ChainHead(count, json.loads(lines_of(finished)[count - 1])["hash"]))


@pytest.mark.parametrize("data", [{}, {"count": 1}, {"count": "x", "hash": "00"}])
def test_a_head_that_cannot_be_read_is_a_ledger_error(data):
    with pytest.raises(LedgerError):
        ChainHead.from_json(data)


# --- what was spent --------------------------------------------------------------------------------


def test_nothing_is_spent_before_anything_is_charged_whatever_the_accountant_thinks_of_nothing(
    path, monkeypatch
):
    monkeypatch.setattr(ledger_module, "epsilon_of", lambda *_: 0.1)
    with open_ledger(path) as ledger:
        assert ledger.spent() == ledger.spent("a") == 0.0


def test_spending_grows_with_every_charge_of_the_subject_and_of_nobody_else(path):
    with open_ledger(path) as ledger:
        series = [ledger.spent("a")]
        for number in range(ROUNDS):
            ledger.charge([training("a", number)])
            series.append(ledger.spent("a"))
        assert all(later > earlier for earlier, later in pairwise(series))
        assert ledger.spent("b") == 0.0
        assert ledger.spent() == ledger.spent("a")


def test_strangers_have_no_spending(path):
    with open_ledger(path) as ledger:
        with pytest.raises(PlanError):
            ledger.spent("stranger")
        with pytest.raises(PlanError):
            ledger.executed("stranger")


def test_without_noise_anything_released_costs_everything(path):
    with open_ledger(path, make_plan(noise=0.0), budget=Budget(math.inf, 1e-3)) as ledger:
        assert ledger.spent() == 0.0
        ledger.charge([training("a", 1)])
        assert ledger.spent("a") == ledger.spent() == math.inf
        assert ledger.spent("b") == 0.0
    with open_ledger(path, make_plan(noise=0.0), budget=Budget(math.inf, 1e-3)) as ledger:
        assert ledger.spent() == math.inf


def test_a_thousand_alike_subjects_are_accounted_once_a_round(path, monkeypatch):
    calls = []
    real = ledger_module.epsilon_of

    def counted(*args, **kwargs):
        calls.append(args)
        return real(*args, **kwargs)

    subjects = [f"client {number}" for number in range(1000)]
    with open_ledger(path, make_plan(subjects)) as ledger:
        monkeypatch.setattr(ledger_module, "epsilon_of", counted)
        for number in range(ROUNDS):
            ledger.charge([training(subject, number) for subject in subjects])
            assert ledger.spent() == ledger.spent(subjects[-1]) == ledger.spent()
    assert len(calls) == ROUNDS


def test_subjects_with_another_delta_are_accounted_by_their_own(path):
    budgets = {"a": Budget(8.0, 1e-3), "b": Budget(8.0, 1e-6), "c": Budget(8.0, 1e-3)}
    with open_ledger(path, budget=budgets) as ledger:
        ledger.charge([training(subject, 1) for subject in "abc"])
        assert ledger.spent("a") == ledger.spent("c") < ledger.spent("b") == ledger.spent()


def test_a_plan_carried_out_in_full_has_spent_what_the_plan_costs(path):
    with open_ledger(path) as ledger:
        for release, times in (("selection", 2), ("training", ROUNDS), ("first", 1)):
            for number in range(times):
                ledger.charge([Charge("a", number, release, "00")])
        planned = epsilon_of(PLAN.for_subject("a").event, BUDGET.delta, "rdp", ZERO_OUT)
        assert ledger.spent() == pytest.approx(planned, rel=1e-12)


# --- what the file shows ---------------------------------------------------------------------------


def test_the_header_names_the_plan_its_releases_the_budgets_and_the_accountant(finished):
    header = header_of(finished)
    assert header["plan"] == PLAN.digest()
    assert header["accountant"] == "rdp"
    (units,) = header["units"]
    assert units["subjects"] == ["a", "b", "c"]
    assert units["releases"] == [
        {"name": "first", "times": 1},
        {"name": "training", "times": 4},
        {"name": "selection", "times": 2},
    ]
    assert (units["epsilon"], units["delta"]) == (8.0, 1e-3)


def test_the_content_depends_on_nothing_but_plan_and_charges(path, finished):
    play(path)
    assert path.read_bytes() == finished


def test_the_file_mode_follows_the_umask(path):
    old = os.umask(0o027)
    try:
        open_ledger(path).close()
    finally:
        os.umask(old)
    assert path.stat().st_mode & 0o777 == 0o640


def test_the_ledger_shows_its_file_and_length_to_a_person(path):
    with open_ledger(path) as ledger:
        assert repr(ledger) == f"Ledger({str(path)!r}, 1 lines)"


# --- reading without opening ------------------------------------------------------------------------


def test_what_was_executed_is_read_without_a_lock_or_a_write(path: Path) -> None:
    with open_ledger(path) as ledger:
        ledger.charge([training("a", 1), training("b", 1), Charge("a", 1, "first", "00")])
        path.chmod(0o444)
        counts = LedgerView.read(path, PLAN).counts
        assert counts == {subject: ledger.executed(subject) for subject in "abc"}
    assert counts["a"] == {"first": 1, "training": 1, "selection": 0}


def test_reading_checks_the_chain_and_the_plan(path: Path, finished: bytes) -> None:
    path.write_bytes(finished)
    with pytest.raises(LedgerError, match="belongs to another plan"):
        LedgerView.read(path, make_plan(noise=1.3))
    lines = lines_of(finished)
    path.write_bytes(b"".join([*lines[:2], *lines[3:]]))
    with pytest.raises(LedgerError, match="does not follow"):
        LedgerView.read(path, PLAN)
    path.write_bytes(b"")
    with pytest.raises(LedgerError, match="line 1"):
        LedgerView.read(path, PLAN)
    path.unlink()
    with pytest.raises(LedgerError, match="cannot be used"):
        LedgerView.read(path, PLAN)
