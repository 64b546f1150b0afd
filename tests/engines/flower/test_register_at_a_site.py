"""A site enters every contract in its register before it signs, and tells the server nothing of it."""

from __future__ import annotations

import logging
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from site_folders import write_sites
from tiny_site import LIMITS, START, contract, deliver, records, site, training

from coterie.engines.flower import messages
from coterie.engines.flower.booking import SiteBooking, basis_of
from coterie.engines.flower.contract import cost
from coterie.engines.flower.joining import Joining, open_site
from coterie.engines.flower.messages import FinalModels
from coterie.engines.flower.site import Site
from coterie.errors import InputError, LedgerError
from coterie.privacy import Adjacency, Budget, Unit
from coterie.register import DataSet, RegisterView


@pytest.fixture
def booking(register: Path, tmp_path: Path) -> SiteBooking:
    (tmp_path / "data").mkdir()
    return SiteBooking(DataSet.of_folder(tmp_path / "data"), records())


def offered(folder: Path, booking: SiteBooking, experiment: str) -> tuple[Site, str | None]:
    """A site in a folder of its own, and how it answers an offer."""
    made = site(folder, booking=booking)
    answer = deliver(made, messages.OFFER, contract(experiment=experiment).to_content())
    return made, messages.is_refusal(answer)


def spent(booking: SiteBooking) -> float:
    register = RegisterView.read()
    found = None if register is None else register.spent(booking.data)
    return 0.0 if found is None else found.epsilon


def test_another_state_folder_does_not_reset_what_records_have_paid(
    booking: SiteBooking, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    once = cost(contract(), 1e-3)
    basis = basis_of(Unit.RECORD)
    booking.prepare(Budget(1.3 * once, 1e-3), basis, new_records=False)
    first, refusal = offered(tmp_path / "one", booking, "first")
    assert refusal is None
    first.close()
    shutil.rmtree(tmp_path / "one")
    with caplog.at_level(logging.WARNING):
        second, refusal = offered(tmp_path / "two", booking, "second")
    assert refusal == "over budget"  # and no figure, no name, no number of records
    assert "would have spent epsilon" in caplog.text  # for its operator
    assert second.session is None
    assert not second.files.contract.exists()


def test_a_site_whose_folder_moved_goes_on_and_counts_once(booking: SiteBooking, tmp_path: Path) -> None:
    """The register looked for the folder under its new name, and ended with a KeyError."""
    made, _ = offered(tmp_path / "data" / "state", booking, "first")
    made.close()
    before = spent(booking)
    shutil.move(tmp_path / "data", tmp_path / "elsewhere")
    moved = SiteBooking(DataSet.of_folder(tmp_path / "elsewhere"), records())
    again = site(tmp_path / "elsewhere" / "state", booking=moved)
    assert again.session is not None
    assert spent(moved) == before
    again.close()


def test_what_was_not_asked_for_comes_back_at_the_end(booking: SiteBooking, tmp_path: Path) -> None:
    made, _ = offered(tmp_path / "one", booking, "first")
    whole = spent(booking)
    agreed = contract(experiment="first")
    assert messages.is_refusal(deliver(made, messages.TRAIN, training(agreed=agreed))) is None
    used = made.session.spent if made.session else 0.0
    final = FinalModels(agreed.digest, START[None], 0)
    ended = deliver(made, messages.FINISHED, final.to_content())
    assert messages.is_refusal(ended) is None
    assert spent(booking) == pytest.approx(used, rel=0.05)
    assert spent(booking) < whole


def test_a_site_that_starts_again_counts_once_and_needs_its_register(
    booking: SiteBooking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = offered(tmp_path / "one", booking, "first")
    before = spent(booking)
    made.close()
    site(tmp_path / "one", booking=booking).close()
    assert spent(booking) == before
    monkeypatch.setenv("COTERIE_REGISTER", str(tmp_path / "another"))
    with pytest.raises(LedgerError, match="the contract was entered in register"):
        site(tmp_path / "one", booking=booking)


def test_a_repeatable_site_is_no_part_of_a_lifetime_budget(booking: SiteBooking, tmp_path: Path) -> None:
    booking.prepare(Budget(50.0, 1e-3), basis_of(Unit.RECORD), new_records=False)
    made = site(tmp_path / "one", booking=booking, noise_seed=1)
    answer = deliver(made, messages.OFFER, contract().to_content())
    assert messages.is_refusal(answer) == "over budget"


def test_an_operator_sets_the_budget_when_joining(register: Path, tmp_path: Path) -> None:
    folder = write_sites(tmp_path, records=50)["amber"]
    open_site(Joining(folder, 8.0, lifetime_epsilon=3.0, lifetime_delta=1e-5))
    found = RegisterView.read()
    assert found is not None
    [limit] = found.limits.values()
    assert (limit.epsilon, limit.delta, limit.unit) == (3.0, 1e-5, Unit.RECORD)
    with pytest.raises(InputError, match="--lifetime-epsilon and --lifetime-delta: needed together"):
        Joining(folder, 8.0, lifetime_epsilon=3.0)
    config = {"data": str(folder), "epsilon": 8.0, "lifetime-epsilon": 2.0, "lifetime-delta": 1e-5}
    open_site(Joining.from_config({**config, "new-records": True}))
    with pytest.raises(InputError, match="new-records: 1 is not allowed, true or false is"):
        Joining.from_config({**config, "new-records": 1})
    whole = basis_of(Unit.CLIENT)
    assert (whole.unit, whole.adjacency) == (Unit.CLIENT, Adjacency.ADD_REMOVE)


def test_a_site_without_a_register_is_as_before(register: Path, tmp_path: Path) -> None:
    made = site(tmp_path / "one", replace(LIMITS))
    assert messages.is_refusal(deliver(made, messages.OFFER, contract().to_content())) is None
    assert not register.exists()
