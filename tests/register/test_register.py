"""The register: what is charged to whom, what is refused, and what a crash or a lost file leaves of it."""

import json
import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import dp_accounting as dp
import numpy as np
import pytest
from dp_accounting import DpEvent, rdp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coterie.errors import BudgetError, CoterieError, LedgerError
from coterie.privacy import Adjacency, Budget, Unit
from coterie.privacy.divergences import INTEGER_ORDERS
from coterie.privacy.events import gaussian, poisson_gaussian, repeated
from coterie.privacy.filters import RdpFilter, composed_epsilon
from coterie.privacy.rdp import divergences_of
from coterie.register import DataSet, Register, RegisterView, Reservation, Use, place
from coterie.register import register as module
from coterie.register.accounts import Basis

RECORD = Basis(Unit.RECORD, Adjacency.ZERO_OUT)
TRAINING = repeated(poisson_gaussian(0.05, 1.1), 60)
LIFETIME = Budget(4.0, 1e-5)


def records(*numbers: int) -> np.ndarray:
    """Digests of made-up records, one for each number."""
    found = np.zeros((len(numbers), 16), dtype=np.uint8)
    found[:, :8] = np.array(numbers, dtype=np.int64)[:, None].view(np.uint8)
    return found


def wanted(data: DataSet, *numbers: int, event: DpEvent = TRAINING, **changed: object) -> Reservation:
    plain = Reservation(
        Reservation.new_id(),
        "run",
        "a run",
        data,
        Unit.RECORD,
        Adjacency.ZERO_OUT,
        1e-5,
        (Use("site", records(*numbers), event),),
    )
    return replace(plain, **changed)  # type: ignore[arg-type]


def spent(data: DataSet) -> float:
    register = RegisterView.read()
    assert register is not None
    found = register.spent(data)
    return 0.0 if found is None else found.epsilon


def theirs(*events: DpEvent, delta: float = 1e-5) -> float:
    account = rdp.RdpAccountant(list(map(int, INTEGER_ORDERS)), dp.NeighboringRelation.REPLACE_SPECIAL)
    for event in events:
        account.compose(event)
    return float(account.get_epsilon(delta))


@pytest.fixture
def data(register: Path, tmp_path: Path) -> DataSet:
    (tmp_path / "mine").mkdir()
    return DataSet.of_folder(tmp_path / "mine")


@pytest.fixture
def other(tmp_path: Path) -> DataSet:
    (tmp_path / "theirs").mkdir()
    return DataSet.of_folder(tmp_path / "theirs")


def reserve(reservation: Reservation) -> None:
    with Register.open() as register:
        register.reserve(reservation)


def limit(data: DataSet, budget: Budget = LIFETIME, **options: object) -> None:
    with Register.open() as register:
        register.limit(data, budget, RECORD, **options)  # type: ignore[arg-type]


# --- what is composed -------------------------------------------------------------------------------------


def test_several_runs_compose_as_dp_accounting_does_and_cost_less_than_their_sum(data: DataSet) -> None:
    for _ in range(3):
        reserve(wanted(data, *range(50)))
    assert spent(data) == pytest.approx(theirs(*[TRAINING] * 3), abs=1e-6)
    assert spent(data) < 3 * theirs(TRAINING)


def test_the_third_of_three_is_refused_with_the_composed_epsilon(data: DataSet) -> None:
    total = theirs(*[TRAINING] * 3)
    limit(data, Budget(total - 0.2, 1e-5))
    reserve(wanted(data, *range(50)))
    reserve(wanted(data, *range(50)))
    before = (place() / "register.jsonl").read_bytes()
    with pytest.raises(
        BudgetError, match=rf"spent epsilon {np.ceil(total * 100) / 100:.2f}.*composed"
    ) as refusal:
        reserve(wanted(data, *range(50)))
    assert refusal.value.exit_code == 3
    assert (place() / "register.jsonl").read_bytes() == before


def test_half_overlapping_data_sets_compose_for_the_shared_records_only(
    data: DataSet, other: DataSet
) -> None:
    small = repeated(gaussian(6.0), 1)
    reserve(wanted(data, *range(100)))
    reserve(wanted(other, *range(50, 150), event=small))
    assert spent(data) == spent(other) == pytest.approx(theirs(TRAINING, small), abs=1e-6)
    register = RegisterView.read()
    assert register is not None
    alone = {
        "first only": (range(50), theirs(TRAINING)),
        "both": (range(50, 100), theirs(TRAINING, small)),
        "second only": (range(100, 150), theirs(small)),
    }
    for numbers, expected in alone.values():
        prints = np.unique(module.fingerprints_of(records(*numbers), register.key))
        found = register.accounts.spent(prints, None)
        assert found is not None
        assert found.epsilon == pytest.approx(expected, abs=1e-6)


def test_the_budget_of_one_data_set_binds_its_records_in_another(data: DataSet, other: DataSet) -> None:
    limit(data, Budget(theirs(TRAINING) + 0.3, 1e-5))
    reserve(wanted(data, *range(100)))
    reserve(wanted(other, *range(200, 300)))
    with pytest.raises(BudgetError, match="of another data set with some of them"):
        reserve(wanted(other, *range(99, 300)))


def test_larger_units_and_other_neighbours_are_converted_and_smaller_units_are_not_bounded(
    data: DataSet,
) -> None:
    reserve(wanted(data, *range(10)))
    reserve(wanted(data, *range(10), unit=Unit.CLIENT, adjacency=Adjacency.ADD_REMOVE))
    limit(data, Budget(50.0, 1e-5))
    curve = divergences_of(TRAINING, Adjacency.ZERO_OUT) + divergences_of(TRAINING, Adjacency.REPLACE_ONE)
    assert spent(data) == pytest.approx(composed_epsilon(curve, 1e-5))
    reserve(wanted(data, *range(10), adjacency=Adjacency.REPLACE_ONE))
    curve = curve + divergences_of(TRAINING, Adjacency.ZERO_OUT)
    assert spent(data) == pytest.approx(composed_epsilon(curve, 1e-5))


def test_a_budget_for_clients_has_no_bound_for_a_plan_that_protects_records(data: DataSet) -> None:
    with Register.open() as register:
        register.limit(data, Budget(50.0, 1e-5), Basis(Unit.CLIENT, Adjacency.ADD_REMOVE))
    reserve(wanted(data, 1, unit=Unit.CLIENT, adjacency=Adjacency.ADD_REMOVE))
    with pytest.raises(BudgetError, match="no bound for one client, add-remove"):
        reserve(wanted(data, 1))


def test_without_a_budget_the_smallest_unit_counts_and_mixed_neighbours_are_replaced(data: DataSet) -> None:
    reserve(wanted(data, 1))
    reserve(wanted(data, 1, adjacency=Adjacency.REPLACE_ONE))
    twice = 2 * divergences_of(TRAINING, Adjacency.REPLACE_ONE)
    assert spent(data) == pytest.approx(composed_epsilon(twice, 1e-5))


def test_a_record_that_several_hold_pays_for_all_where_it_is_the_same_one(data: DataSet) -> None:
    uses = tuple(Use(holder, records(1, 2), TRAINING) for holder in "ab")
    reserve(wanted(data, uses=uses))
    assert spent(data) == pytest.approx(theirs(TRAINING), abs=1e-6)
    reserve(wanted(data, uses=uses, shared=True))
    assert spent(data) == pytest.approx(theirs(*[TRAINING] * 3), abs=1e-6)


def test_equal_rows_that_train_and_are_held_out_pay_the_larger_of_both(data: DataSet) -> None:
    both = (Use("a", records(1, 2), TRAINING), Use("a", records(2, 3), gaussian(9.0)))
    reserve(wanted(data, uses=both, shared=True))
    assert spent(data) == pytest.approx(theirs(TRAINING), abs=1e-6)


# --- which records are known ------------------------------------------------------------------------------


def test_rows_that_are_new_in_a_known_folder_count_as_known_unless_somebody_says_so(data: DataSet) -> None:
    limit(data, Budget(theirs(TRAINING) + 0.3, 1e-5))
    reserve(wanted(data, *range(50)))
    edited = wanted(data, *range(1000, 1050))
    with pytest.raises(BudgetError):
        reserve(edited)
    with Register.open() as register:
        assert register.enter(data, edited.uses) == 50
        assert register.enter(data, edited.uses) == 0
    reserve(edited)
    with pytest.raises(BudgetError):
        reserve(wanted(data, 7))


def test_a_copied_folder_is_known_by_its_mark_and_its_records(data: DataSet, tmp_path: Path) -> None:
    limit(data, Budget(theirs(TRAINING) + 0.3, 1e-5))
    reserve(wanted(data, *range(50)))
    copy = DataSet.of_folder(shutil.copytree(tmp_path / "mine", tmp_path / "copy"))
    with pytest.raises(BudgetError):  # whatever its rows are by now
        reserve(wanted(copy, *range(500, 550)))
    for mark in (tmp_path / "copy").iterdir():
        mark.unlink()
    with pytest.raises(BudgetError, match="another data set"):
        reserve(wanted(copy, *range(25, 75)))


# --- who may change a budget ------------------------------------------------------------------------------


def test_a_budget_may_shrink_and_grows_only_for_a_reason_that_is_kept(data: DataSet) -> None:
    limit(data, Budget(4.0, 1e-5))
    limit(data, Budget(3.0, 1e-5))
    for more in (Budget(3.5, 1e-5), Budget(3.0, 1e-4)):
        with pytest.raises(BudgetError, match="coterie budget set --reason raises it"):
            limit(data, more)
    lines = (place() / "register.jsonl").read_text().count("\n")
    limit(data, Budget(3.0, 1e-5))  # the same again is no line
    assert (place() / "register.jsonl").read_text().count("\n") == lines
    limit(data, Budget(5.0, 1e-5), reason="the ethics board agreed")
    assert "the ethics board agreed" in (place() / "register.jsonl").read_text()


def test_noise_that_can_be_repeated_is_not_counted_against_a_budget(data: DataSet) -> None:
    reserve(wanted(data, 1, seeded=True))
    limit(data)
    with pytest.raises(BudgetError, match="noise from a seed"):
        reserve(wanted(data, 1, seeded=True))


def test_no_privacy_leaves_no_budget(data: DataSet) -> None:
    limit(data, Budget(1e5, 1e-5))
    with pytest.raises(BudgetError, match="no bound"):
        reserve(wanted(data, 1, event=dp.NonPrivateDpEvent()))


# --- reserved, settled, gone on with ----------------------------------------------------------------------


def test_what_was_not_executed_is_returned_and_a_run_counts_once(data: DataSet) -> None:
    run = wanted(data, *range(10))
    reserve(run)
    reserve(run)  # it was killed, and goes on
    assert spent(data) == pytest.approx(theirs(TRAINING), abs=1e-6)
    half = repeated(poisson_gaussian(0.05, 1.1), 30)
    ended = replace(run, uses=(Use("site", records(*range(10)), half),))
    with Register.open() as register:
        register.settle(ended)
        assert register.settle(ended) == register.head
    assert spent(data) == pytest.approx(theirs(half), abs=1e-6)
    reserve(run)  # it goes on after all: its whole plan counts again
    assert spent(data) == pytest.approx(theirs(TRAINING), abs=1e-6)


def test_an_abandoned_run_stays_reserved(data: DataSet) -> None:
    limit(data, Budget(theirs(TRAINING) + 0.3, 1e-5))
    reserve(wanted(data, 1))
    with pytest.raises(BudgetError):
        reserve(wanted(data, 1))


def test_a_reservation_is_not_used_for_another_plan(data: DataSet) -> None:
    run = wanted(data, 1)
    reserve(run)
    with pytest.raises(LedgerError, match="of other records or of another plan"):
        reserve(replace(run, uses=(Use("site", records(1), repeated(TRAINING, 5)),)))


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(st.integers(0, 30), st.integers(1, 30), st.floats(0.8, 6.0), st.floats(0.0, 1.0)),
        min_size=2,
        max_size=5,
    )
)
def test_no_record_ever_passes_its_budget_in_whatever_order_runs_come(
    register: Path, tmp_path_factory: pytest.TempPathFactory, plans: list[tuple[int, int, float, float]]
) -> None:
    """Against a slow twin that keeps an account for every single record."""
    shutil.rmtree(register, ignore_errors=True)
    data = DataSet.of_folder(tmp_path_factory.mktemp("data"))
    limit(data, Budget(3.0, 1e-5))
    with Register.open() as opened:
        opened.enter(data, (Use("site", records(*range(60)), dp.NoOpDpEvent()),))
    filtered = RdpFilter(Budget(3.0, 1e-5))
    accounts = {number: np.zeros_like(INTEGER_ORDERS) for number in range(60)}
    for first, count, noise, executed in plans:
        numbers = range(first, first + count)
        run = wanted(data, *numbers, event=repeated(gaussian(noise), 4))
        allowed = all(
            filtered.admits(
                accounts[number] + divergences_of(repeated(gaussian(noise), 4), Adjacency.ZERO_OUT)
            )
            for number in numbers
        )
        try:
            reserve(run)
            assert allowed
        except BudgetError:
            assert not allowed
            continue
        times = round(4 * executed)
        done = repeated(gaussian(noise), times)
        with Register.open() as opened:
            opened.settle(replace(run, uses=(Use("site", records(*numbers), done),)))
        for number in numbers:
            accounts[number] = accounts[number] + divergences_of(done, Adjacency.ZERO_OUT)
    assert all(filtered.admits(account) for account in accounts.values())
    worst = max(composed_epsilon(account, 1e-5) for account in accounts.values())
    assert spent(data) == pytest.approx(worst, abs=1e-9)


# --- crashes, thieves and lost files ----------------------------------------------------------------------


@pytest.mark.parametrize("at", range(12))
def test_a_crash_at_any_write_leaves_at_least_what_was_released_charged(
    data: DataSet, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Whatever write fails: where `reserve` returned, a fresh look counts the plan."""
    calls, real = [0], {"fsync": os.fsync, "replace": os.replace, "write": os.write}

    def failing(name: str) -> Callable[..., object]:
        def call(*arguments: object, **options: object) -> object:
            calls[0] += 1
            if calls[0] > at:
                raise OSError(28, "No space left on device")
            return real[name](*arguments, **options)  # type: ignore[operator]

        return call

    run, released = wanted(data, *range(5)), False
    with monkeypatch.context() as patch:
        for name in real:
            patch.setattr(os, name, failing(name))
        try:
            reserve(run)
            released = True
        except (CoterieError, OSError):
            pass
    if released:
        assert spent(data) >= theirs(TRAINING) - 1e-6
    reserve(run)  # and it can go on, counted once
    assert spent(data) == pytest.approx(theirs(TRAINING), abs=1e-6)


def test_a_torn_line_was_never_promised(data: DataSet) -> None:
    reserve(wanted(data, 1))
    path = place() / "register.jsonl"
    whole = path.read_bytes()
    reserve(wanted(data, 1))
    path.write_bytes(path.read_bytes()[: len(whole) + 40])
    (data.folder / ".coterie-register.json").unlink()  # type: ignore[operator]
    assert spent(data) == pytest.approx(theirs(TRAINING), abs=1e-6)
    reserve(wanted(data, 1))
    assert spent(data) == pytest.approx(theirs(TRAINING, TRAINING), abs=1e-6)


def test_a_register_put_back_from_a_copy_is_found_by_the_data(data: DataSet, tmp_path: Path) -> None:
    reserve(wanted(data, 1))
    shutil.copytree(place(), tmp_path / "backup")
    reserve(wanted(data, 1))
    shutil.rmtree(place())
    shutil.copytree(tmp_path / "backup", place())
    with pytest.raises(LedgerError, match=r"register.jsonl: line 4 is missing: .*mine has seen 4 lines"):
        reserve(wanted(data, 1))


def test_a_deleted_register_is_missed_where_a_budget_counts_on_it(data: DataSet) -> None:
    reserve(wanted(data, 1))
    shutil.rmtree(place())
    limit(data)
    with pytest.raises(BudgetError, match="entered in another register, too"):
        reserve(wanted(data, 1))
    limit(data, unknown_history=True)
    reserve(wanted(data, 1))
    register = RegisterView.read()
    assert register is not None
    assert len(register.elsewhere(data)) == 1  # said wherever the history is shown


@pytest.mark.parametrize("file", ["key", "records"])
def test_lost_parts_are_named(data: DataSet, file: str) -> None:
    reserve(wanted(data, 1))
    path = place() / file
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(LedgerError, match=f"{file}.*put"):
        reserve(wanted(data, 1))


def test_changed_lines_and_keys_are_found(data: DataSet) -> None:
    reserve(wanted(data, 1))
    (place() / "key").write_text("00" * 32)
    with pytest.raises(LedgerError, match="not the key"):
        RegisterView.read()
    shutil.rmtree(place())
    (data.folder / ".coterie-register.json").unlink()  # type: ignore[operator]
    reserve(wanted(data, 1))
    path = place() / "register.jsonl"
    path.write_text(path.read_text().replace("1.1", "9.9"))
    with pytest.raises(LedgerError, match="line 3 does not follow"):
        RegisterView.read()
    [prints] = (place() / "records").iterdir()
    prints.write_bytes(b"\0" * 8)


def test_nobody_else_reads_it_and_nothing_in_it_is_a_row(data: DataSet) -> None:
    reserve(wanted(data, *range(5)))
    assert stat.S_IMODE(place().stat().st_mode) == 0o700
    files = [path for path in place().rglob("*") if path.is_file()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert stat.S_IMODE((place() / "records").stat().st_mode) == 0o700
    digests = [bytes(row) for row in records(*range(5))]
    assert not any(digest[:8] in path.read_bytes() for digest in digests[1:] for path in files)
    mark = json.loads((data.folder / ".coterie-register.json").read_text())  # type: ignore[operator]
    assert set(next(iter(mark.values()))) == {"data", "head"}


def test_two_registers_know_the_same_record_under_different_fingerprints() -> None:
    one, two = (module.fingerprints_of(records(1), key * 32) for key in (b"a", b"b"))
    assert one != two


def test_processes_wait_for_each_other(data: DataSet, register: Path) -> None:
    code = (
        "from coterie.register import Register; import sys, time\n"
        "with Register.open(): print('open', flush=True); time.sleep(0.4)"
    )
    held = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert held.stdout is not None
    assert held.stdout.readline() == "open\n"
    reserve(wanted(data, 1))
    held.communicate()
    assert spent(data) > 0


def test_a_hundred_thousand_records_take_about_a_second(data: DataSet) -> None:
    many = np.random.default_rng(0).integers(0, 256, (100_000, 16), dtype=np.uint8)
    uses = (Use("a", many[:80_000], TRAINING), Use("a", many[80_000:], gaussian(5.0)))
    run = wanted(data, uses=uses)
    reserve(run)
    began = time.process_time()
    reserve(wanted(data, uses=uses))
    assert time.process_time() - began < 2.0
    assert spent(data) == pytest.approx(theirs(TRAINING, TRAINING), abs=1e-6)


def test_rows_that_were_there_and_not_used_have_paid_nothing(data: DataSet) -> None:
    """Held out and never asked, or of a client that was not drawn: known all the same."""
    reserve(wanted(data, *range(50), members=records(*range(100))))
    reserve(wanted(data, *range(50, 100), event=gaussian(9.0)))
    assert spent(data) == pytest.approx(theirs(TRAINING), abs=1e-6)
    reserve(wanted(data, 500, event=gaussian(9.0), members=records(500, 501)))  # new since then
    small = divergences_of(gaussian(9.0), Adjacency.ZERO_OUT)
    both = divergences_of(TRAINING, Adjacency.ZERO_OUT) + 2 * small
    assert spent(data) == pytest.approx(composed_epsilon(both, 1e-5), abs=1e-6)
    reserve(wanted(data, 500, event=gaussian(9.0)))  # and it never forgets what was there before it
    assert spent(data) == pytest.approx(composed_epsilon(both + small, 1e-5), abs=1e-6)


def test_what_a_new_row_is_taken_to_have_paid_follows_it_into_other_data(
    data: DataSet, other: DataSet
) -> None:
    reserve(wanted(data, 1))
    reserve(wanted(data, 2))
    reserve(wanted(other, 2))
    assert spent(other) == pytest.approx(theirs(*[TRAINING] * 3), abs=1e-6)
    with Register.open() as register:
        register.enter(data, wanted(data, 3).uses)
    reserve(wanted(data, 3))
    reserve(wanted(other, 3))
    now = RegisterView.read()
    assert now is not None
    prints = np.unique(module.fingerprints_of(records(3), now.key))
    found = now.accounts.spent(prints, None)
    assert found is not None
    # In `data` it was said to be new; in `other`, which was used before, it was not.
    assert found.epsilon == pytest.approx(theirs(*[TRAINING] * 3), abs=1e-6)
