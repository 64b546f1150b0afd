"""The time for an answer is the sites' own: neither sending a request nor making ready for it counts."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from flwr.app import Message
from memory_federation import QUICK, MemoryFederation, experiment

from coterie.engines.flower import messages, site, transport
from coterie.engines.flower.transport import Transport
from coterie.errors import InputError
from coterie.experiment import served_run
from coterie.experiment.folder import RunFolder
from coterie.experiment.served_run import ServedRun


class Clock:
    """Goes on as it does, and leaps when it is told to: for the server's loop and for the sites."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.leapt = 0.0
        shown = SimpleNamespace(
            monotonic=lambda: time.monotonic() + self.leapt,
            time=lambda: time.time() + self.leapt,
            sleep=time.sleep,
        )
        for module in (transport, site, served_run):
            monkeypatch.setattr(module, "time", shown)

    def leap(self, seconds: float) -> None:
        self.leapt += seconds


class SlowFederation(MemoryFederation):
    """A federation whose link, or whose sites, take long for messages of one type."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._push, self._pull = self.grid.push_messages, self.grid.pull_messages
        self._looks = 0

    def tarry(self, clock: Clock, who: str, kind: str, seconds: float) -> None:
        """Let the link, when it is sent messages of this type, or the sites that have them, take so long."""

        def push(sent: Iterable[Message]) -> list[str]:
            sent = list(sent)
            for message in sent:
                message.metadata.__dict__["_created_at"] += clock.leapt
            # Not where a single one is asked once more.
            slow = len(sent) == len(self.nodes) and sent[0].metadata.message_type == kind
            self._looks = 2 if slow else 0
            clock.leap(seconds if slow and who == "link" else 0.0)
            return self._push(sent)

        def pull(identities: Iterable[str]) -> list[Message]:
            if not self._looks:
                return self._pull(identities)
            clock.leap(seconds if who == "sites" and self._looks == 2 else 0.0)
            self._looks -= 1
            return []  # nothing is there yet

        self.grid.push_messages, self.grid.pull_messages = push, pull  # type: ignore[method-assign]

    def serve_within(self, out: Path, **times: float) -> dict[str, dict[str, int]]:
        """Who answered how often, and missed how much."""
        wire = Transport(self.grid, self.nodes, replace(QUICK, **times))
        tally = ServedRun(self.experiment, RunFolder(out), wire).finish().participation
        return {name: dict(each) for name, each in tally.items()}


@pytest.fixture
def federation(tmp_path: Path) -> Iterable[SlowFederation]:
    made = SlowFederation(experiment(algorithm={"name": "global"}), tmp_path / "sites")
    yield made
    made.close()


def test_what_sending_takes_is_not_the_sites_time(
    federation: SlowFederation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link on a busy machine took longer for a request than its answers had: no client ever answered."""
    federation.tarry(Clock(monkeypatch), "link", messages.TRAIN, 150.0)
    tally = federation.serve_within(tmp_path / "run", answer=100.0)
    assert all(each == {"answered": 5, "missed": 0} for each in tally.values())


def test_what_a_site_takes_is_its_own_time(
    federation: SlowFederation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation.tarry(Clock(monkeypatch), "sites", messages.TRAIN, 150.0)
    with pytest.raises(transport.NobodyAnswered, match="round 1: no client answered"):
        federation.serve_within(tmp_path / "run", answer=100.0)


def test_sites_have_the_time_for_consent_to_make_ready(
    federation: SlowFederation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight sites that load torch at once, on two cores, took longer than the time for an answer."""
    federation.tarry(Clock(monkeypatch), "sites", messages.OFFER, 150.0)
    tally = federation.serve_within(tmp_path / "run", answer=100.0, consent=400.0)
    assert all(each == {"answered": 5, "missed": 0} for each in tally.values())


def test_consent_has_an_end(
    federation: SlowFederation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation.tarry(Clock(monkeypatch), "sites", messages.OFFER, 500.0)
    with pytest.raises(InputError, match=r"not all clients agree to the plan .*no answer in time"):
        federation.serve_within(tmp_path / "run", answer=100.0, consent=400.0)


def test_a_site_that_comes_back_is_ready_before_it_is_asked(
    federation: SlowFederation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Model and learner are made when a site starts, before it connects: no request waits for them."""
    wire = Transport(federation.grid, federation.nodes, QUICK)
    ServedRun(federation.experiment, RunFolder(tmp_path / "run"), wire)._agree(resumed=False)
    again = federation.start(next(iter(federation.nodes)))
    assert again.session is not None

    def late(*arguments: object) -> None:
        raise AssertionError("made when a message came")

    monkeypatch.setattr(site, "learner_of", late)
    monkeypatch.setattr(site.Site, "_open", late)
    contract = again.session.contract
    assert messages.is_refusal(again._consider(contract)) is None
