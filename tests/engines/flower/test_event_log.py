"""The log of a deployment as JSON: one object per event, whatever somebody else wrote into it."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_site import contract, deliver, joined, training

from coterie.cli.events import EventLog
from coterie.engines.flower import messages
from coterie.engines.flower.messages import site_log


def lines(text: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in text.splitlines()]


def test_every_event_is_one_object_with_its_facts(capsys: pytest.CaptureFixture[str]) -> None:
    events = EventLog(as_json=True)
    with events.logging():
        events.tell("round", "round 1 of 2", round=1, epsilon_left={"east": float("inf")})
        site_log("coterie.test").event("released", "round 1", round=1, release="training")
        logging.getLogger("coterie.test").warning("two\nlines")
    told = lines(capsys.readouterr().err)
    assert [line["event"] for line in told] == ["round", "released", "log"]
    assert told[0]["epsilon_left"] == {"east": None}
    assert (told[1]["level"], told[1]["release"]) == ("info", "training")
    assert told[2]["message"] == "two\nlines"
    assert all(str(line["at"]).endswith("+00:00") for line in told)


def test_a_site_tells_what_it_signed_released_and_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with EventLog(as_json=True).logging():
        site = joined(tmp_path)
        deliver(site, messages.TRAIN, training(1))
        deliver(site, messages.TRAIN, training(1))
        deliver(site, "train.anything", training(2))
        site.close()
    told = {str(line["event"]): line for line in lines(capsys.readouterr().err)}
    assert told["approved"]["contract"] == contract().digest
    assert (told["released"]["round"], told["released"]["release"]) == (1, "training")
    assert told["repeated"]["round"] == 1
    assert (told["refused"]["kind"], told["refused"]["reason"]) == ("train.anything", "garbage")
    # Names, numbers and fixed words alone: no value of a record or of an update is among them.
    known = {"at", "level", "event", "message", "contract", "epsilon", "round", "rounds", "release"}
    known |= {"seconds", "epsilon_spent", "kind", "reason"}
    assert {name for line in told.values() for name in line} <= known


def test_a_server_says_where_it_listens_as_json(tmp_path: Path) -> None:
    (tmp_path / "experiment.yaml").write_text("algorithm: {name: global}\n")
    page = tmp_path / "live.html"
    options = ["--plaintext", "--sites", "2", "--port", "0", "--wait", "0.1", "--log-json"]
    done = subprocess.run(
        [sys.executable, "-m", "coterie", "serve", "experiment.yaml", *options, "--page", str(page)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    told = {line["event"]: line for line in map(json.loads, done.stderr.splitlines()[:-1])}
    assert told["serving"]["port"] > 0
    assert "0 of 2 sites have joined" in done.stderr.splitlines()[-1]
