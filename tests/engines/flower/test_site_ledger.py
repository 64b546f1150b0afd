"""What a site has spent survives deletion, cuts and crashes: no budget begins anew in silence."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tiny_site import FINAL, contract, deliver, joined, selection, site, training

from coterie.engines.flower import kept, messages
from coterie.engines.flower import session as session_module
from coterie.engines.flower.kept import SiteFolder
from coterie.engines.flower.site import Site
from coterie.errors import InputError, LedgerError
from coterie.files import read_json, write_json


def spent_something(folder: Path) -> SiteFolder:
    """A site that was asked for a training vector and a choice, and stopped."""
    made = joined(folder)
    deliver(made, messages.TRAIN, training())
    deliver(made, messages.SELECT, selection())
    made.close()
    return made.files


def executed(found: Site) -> dict[str, int]:
    assert found.session is not None
    return dict(found.session.ledger.executed("a"))


def cut(files: SiteFolder, lines: int) -> None:
    files.ledger.write_bytes(b"".join(files.ledger.read_bytes().splitlines(keepends=True)[:lines]))


def forget_head(files: SiteFolder) -> None:
    """The contract as it was signed, before anything was charged."""
    first = files.ledger.read_bytes().splitlines(keepends=True)[0]
    stored = read_json(files.contract)
    digest = first.decode().partition('"hash":"')[2][:64]
    write_json(files.contract, {**stored, "ledger": {"count": 1, "hash": digest}})


DAMAGE: dict[str, tuple[Callable[[SiteFolder], None], str]] = {
    "the ledger is deleted": (lambda files: files.ledger.unlink(), r"ledger\.jsonl: the ledger is missing"),
    "the last charge is cut off": (
        lambda files: cut(files, 2),
        r"ledger\.jsonl: line 3 is missing: contract\.json has seen 3 lines",
    ),
    "all charges are cut off": (lambda files: cut(files, 1), r"ledger\.jsonl: line 2 is missing"),
    "it is empty": (lambda files: files.ledger.write_bytes(b""), r"ledger\.jsonl: line 1 "),
    "cut, beside a contract that has forgotten": (
        lambda files: (forget_head(files), cut(files, 2))[0],
        r"ledger\.jsonl: line 3 is missing: answers/.*safetensors has seen 3 lines",
    ),
    "the contract is deleted": (
        lambda files: files.contract.unlink(),
        r"contract\.json: missing, though something was spent",
    ),
    "contract and ledger are deleted": (
        lambda files: (files.contract.unlink(), files.ledger.unlink())[0],
        r"contract\.json: missing, though something was spent",
    ),
    "contract and answers are deleted": (
        lambda files: (files.contract.unlink(), shutil.rmtree(files.answers))[0],
        r"contract\.json: missing, though something was spent",
    ),
    "the contract has no head": (
        lambda files: write_json(
            files.contract, {k: v for k, v in read_json(files.contract).items() if k != "ledger"}
        ),
        r"contract\.json: not a contract of this version",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_budget_is_never_begun_anew(damage: str, tmp_path: Path) -> None:
    files = spent_something(tmp_path)
    spoil, complaint = DAMAGE[damage]
    spoil(files)
    there = files.ledger.exists()
    with pytest.raises((InputError, LedgerError), match=complaint) as refused:
        site(tmp_path)
    assert "\n" not in str(refused.value)
    assert files.ledger.exists() == there


def test_another_ledger_of_the_same_plan_is_refused(tmp_path: Path) -> None:
    files = spent_something(tmp_path / "one")
    other = joined(tmp_path / "two")
    for round in (1, 2, 3):
        deliver(other, messages.TRAIN, training(round=round))
    other.close()
    shutil.copy(other.files.ledger, files.ledger)
    with pytest.raises(LedgerError, match=r"line 3 is not the one that contract\.json has seen"):
        site(tmp_path / "one")


class Killed(BaseException):
    """What a crash does: nothing after it happens."""


@pytest.mark.parametrize("moment", ["before the answer", "before the head", "before the contract is written"])
def test_killed_between_charge_answer_and_head_it_goes_on_and_is_charged_once(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = joined(tmp_path / "whole", noise_seed=1)
    expected = deliver(whole, messages.TRAIN, training())
    whole.close()

    def killed(*arguments: object) -> None:
        raise Killed

    made = joined(tmp_path / "site", noise_seed=1)
    with monkeypatch.context() as patch:
        if moment == "before the answer":
            patch.setattr(session_module, "write_arrays", killed)
        elif moment == "before the head":
            patch.setattr(session_module.SiteSession, "_keep_head", killed)
        else:
            patch.setattr(kept, "write_json", killed)
        with pytest.raises(Killed):
            deliver(made, messages.TRAIN, training())
    made.close()
    made = site(tmp_path / "site", noise_seed=1)
    assert executed(made)["training"] == 1
    again = deliver(made, messages.TRAIN, training())
    for answer in (again, expected):
        assert messages.is_refusal(answer) is None
    values = [answer.array_records["arrays"]["value"].numpy() for answer in (again, expected)]
    np.testing.assert_array_equal(*values)
    assert executed(made)["training"] == 1
    made.close()


@pytest.mark.parametrize("moment", ["before the ledger", "before the contract"])
def test_an_approval_cut_short_may_be_given_again(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*arguments: object, **named: object) -> None:
        raise Killed

    made = site(tmp_path)
    with monkeypatch.context() as patch:
        if moment == "before the ledger":
            patch.setattr(kept.Ledger, "open", killed)
        else:
            patch.setattr(kept, "write_json", killed)
        with pytest.raises(Killed):
            deliver(made, messages.OFFER, contract().to_content())
    again = site(tmp_path)
    other = contract(lr=0.2)
    assert messages.is_refusal(deliver(again, messages.OFFER, other.to_content())) is None
    assert again.session is not None
    assert again.session.contract == other
    again.close()


def test_a_contract_under_which_no_session_opens_is_never_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is killed while it finds out, and cannot clean up, leaves a folder that works."""

    def cannot_open(files: SiteFolder, *_: object) -> None:
        assert not files.contract.exists()
        raise InputError("no session of these records")

    made = site(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(session_module, "SiteSession", cannot_open)
        patch.setattr(Site, "_unsign", lambda self: None)
        assert messages.is_refusal(deliver(made, messages.OFFER, contract().to_content())) == "failed"
        assert not made.files.contract.exists()
        assert made.files.secret.exists()  # as a kill leaves it
        site(tmp_path)
    again = joined(tmp_path)
    assert again.session is not None
    again.close()


def closed(folder: Path) -> SiteFolder:
    made = joined(folder)
    deliver(made, messages.TRAIN, training())
    deliver(made, messages.FINISHED, FINAL.to_content())
    assert made.finished
    return made.files


def test_closed_books_stay_closed_when_their_mark_is_deleted(tmp_path: Path) -> None:
    files = closed(tmp_path)
    files.finished.unlink()
    with pytest.raises(InputError, match="noise key is gone"):
        site(tmp_path)
    files.contract.unlink()
    with pytest.raises(InputError, match=r"contract\.json: missing, though something was spent"):
        site(tmp_path)


@pytest.mark.parametrize("name", ["ledger", "contract"])
def test_closed_books_that_lost_a_part_are_refused_by_its_name(name: str, tmp_path: Path) -> None:
    files = closed(tmp_path)
    path: Path = getattr(files, name)
    path.unlink()
    with pytest.raises((InputError, LedgerError), match=path.name):
        site(tmp_path)


def test_a_closed_ledger_that_was_cut_is_refused(tmp_path: Path) -> None:
    files = closed(tmp_path)
    forget_head(files)
    cut(files, 1)
    with pytest.raises(LedgerError, match=r"line 2 is missing: finished\.json has seen 2 lines"):
        site(tmp_path)


def test_a_kept_answer_with_a_flipped_bit_is_not_sent_but_made_again(tmp_path: Path) -> None:
    made = joined(tmp_path)
    first = deliver(made, messages.TRAIN, training()).array_records["arrays"]["value"].numpy()
    [kept] = made.files.answers.glob("*.safetensors")
    content = bytearray(kept.read_bytes())
    content[-2] ^= 0x40
    kept.write_bytes(content)
    again = deliver(made, messages.TRAIN, training()).array_records["arrays"]["value"].numpy()
    np.testing.assert_array_equal(again, first)
    assert executed(made)["training"] == 1
    made.close()


@pytest.mark.parametrize("round", [1, 3])
def test_the_noise_key_of_other_books_is_refused(round: int, tmp_path: Path) -> None:
    """Same records, same contract: the other key would answer a charged round with a second sample."""
    made = joined(tmp_path / "one")
    for number in range(1, round + 1):
        deliver(made, messages.TRAIN, training(number))
    made.close()
    joined(tmp_path / "two").close()
    kept = made.files.secret.read_bytes()
    shutil.copy(tmp_path / "two" / "noise.key", made.files.secret)
    with pytest.raises(InputError, match=r"noise\.key: not the noise key that the books beside it"):
        site(tmp_path / "one")
    made.files.secret.write_bytes(kept)
    again = site(tmp_path / "one")
    assert executed(again)["training"] == round
    again.close()


def test_a_contract_that_does_not_know_its_key_is_refused(tmp_path: Path) -> None:
    files = spent_something(tmp_path)
    stored = read_json(files.contract)
    del stored["key"]
    write_json(files.contract, stored)
    with pytest.raises(InputError, match=r"contract\.json: not a contract of this version"):
        site(tmp_path)
