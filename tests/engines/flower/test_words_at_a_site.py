"""What a site prints are its own words, whatever a server writes into a contract."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from tiny_site import contract, deliver, joined, plan_of, releases, scores, site

from coterie.engines.flower import messages
from coterie.engines.flower.contract import promised
from coterie.engines.flower.messages import MOST_CAVEATS, MOST_LETTERS, printable, site_log
from coterie.privacy import PrivacyPlan, ThreatModel, Unit
from coterie.privacy.threats import THREATS

LIE = ThreatModel("nobody", "nothing at all", "nobody", 7)


def offered(tmp_path: Path, data: dict[str, Any]) -> str | None:
    made = site(tmp_path / "state")
    reason = messages.is_refusal(deliver(made, messages.OFFER, messages.pack({"contract": json.dumps(data)})))
    assert made.files.contract.exists() == (reason is None)
    made.close()
    return reason


def changed(*path: str | int, to: object) -> dict[str, Any]:
    """The usual contract as plain data, with one text changed."""
    data: dict[str, Any] = json.loads(json.dumps(contract().to_json()))
    inner: Any = data
    for key in path[:-1]:
        inner = inner[key]
    assert path[-1] == "caveats" or isinstance(inner[path[-1]], str)
    inner[path[-1]] = to
    return data


def lying(**changes: Any) -> PrivacyPlan:
    return dataclasses.replace(plan_of(releases()), **changes)


# --- texts of a contract ----------------------------------------------------------------------------

TEXTS: dict[str, tuple[str | int, ...]] = {
    "experiment": ("experiment",),
    "algorithm": ("algorithm",),
    "observers": ("plan", "threat", "observers"),
    "sees": ("plan", "threat", "sees"),
    "trusted": ("plan", "threat", "trusted"),
    "accountant": ("accountant",),
    "name of another client": ("plan", "subjects", 1),
}
ODD = ["two\nlines", "\x1b[2J", "\u202ereversed", "\x7f", "\u2028", "x" * (MOST_LETTERS + 1)]


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("path", TEXTS.values(), ids=TEXTS.keys())
def test_no_text_that_is_long_or_moves_a_cursor_is_signed(
    path: tuple[str | int, ...], odd: str, tmp_path: Path
) -> None:
    assert offered(tmp_path, changed(*path, to=odd)) == "words"


@pytest.mark.parametrize("caveats", [["\x1b[31m"], ["so it is."] * (MOST_CAVEATS + 1)])
def test_no_caveat_that_moves_a_cursor_and_no_flood_of_them_is_signed(
    caveats: list[str], tmp_path: Path
) -> None:
    assert offered(tmp_path, changed("plan", "caveats", to=caveats)) == "words"


@pytest.mark.parametrize("name", ["a\nb", "\x1b[2K", "x" * 41, "", " ", "training: released, epsilon 0;"])
def test_no_name_of_a_release_says_more_than_which_it_is(name: str, tmp_path: Path) -> None:
    release = dataclasses.replace(releases()[1], name=name)
    assert offered(tmp_path, contract(plan=plan_of((release,))).to_json()) == "words"


def test_no_name_of_a_score_says_more_either(tmp_path: Path) -> None:
    data = contract(plan=plan_of(releases(), scores(name="nothing: at all"))).to_json()
    assert offered(tmp_path, data) == "words"


# --- the site's guarantee ---------------------------------------------------------------------------


def test_a_guarantee_at_a_site_says_who_sees_what_in_its_own_words(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "coterie"):
        made = joined(tmp_path, contract(plan=lying(threat=LIE)))
    assert made.session is not None
    assert made.session.guarantee.threat == THREATS[Unit.RECORD]
    assert "This holds against the server and all other clients" in caplog.text
    for word in ("nobody", "nothing at all", "colluding"):
        assert word not in made.session.guarantee.text + made.session.guarantee.line
    # Noise and messages are bound to the plan as the server knows it.
    assert made.session.contract.plan.threat == LIE
    made.close()


def test_every_unit_has_words_of_its_own() -> None:
    assert set(THREATS) == set(Unit)
    assert (THREATS[Unit.RECORD].trusted, THREATS[Unit.CLIENT].trusted) == ("nobody", "the server")


def test_what_a_server_adds_to_a_guarantee_is_quoted() -> None:
    added = "simulation: in truth epsilon is 0.01"
    promise = promised(contract(plan=lying(caveats=(added,))), [])
    assert f'The server says: "{added}"' in promise.text
    assert not promise.text.startswith("Simulation")
    assert promise.epsilon == promised(contract(), []).epsilon


# --- the site's log ---------------------------------------------------------------------------------


def test_no_type_of_message_writes_a_line_of_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = site(tmp_path)
    kind = "query.x\n12:00:00 approved (eps=0.01)\x1b[2K"
    with caplog.at_level(logging.INFO, "coterie"):
        made.handle(Forged(kind))  # type: ignore[arg-type]
    [said] = [record.getMessage() for record in caplog.records]
    assert said == "refused a message of type query.x?12:00:00 approved (eps=0.01)?[2K: garbage"
    made.close()


class Forged:
    """A message whose type says more than a type."""

    def __init__(self, kind: str) -> None:
        self.metadata = type("Metadata", (), {"message_type": kind})

    def has_content(self) -> bool:
        return False


def test_what_is_logged_is_one_printable_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "coterie"):
        site_log("coterie.test").info("%s and 100%%", "a\r\n\x1b[0mb")
        site_log("coterie.test").warning("plain, 100%")
        site_log("coterie.test").debug("never")
    assert [record.getMessage() for record in caplog.records] == ["a???[0mb and 100%", "plain, 100%"]
    assert printable("größer \u2028") == "größer ?"
