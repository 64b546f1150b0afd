"""The walk-through of docs/deployment.md works as it stands there, between five addresses."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
DATA = Path(os.environ.get("COTERIE_DATA", ROOT / "data"))


def may_make_networks() -> bool:
    """Whether network namespaces can be made here."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    made = subprocess.run(["ip", "netns", "add", "coterie-try"], capture_output=True, check=False)
    subprocess.run(["ip", "netns", "del", "coterie-try"], capture_output=True, check=False)
    return made.returncode == 0


@pytest.mark.deployment
@pytest.mark.skipif(not (DATA / "heart-disease").is_dir(), reason="needs UCI Heart Disease in $COTERIE_DATA")
def test_the_walk_through_can_be_followed_literally() -> None:
    if not may_make_networks():
        pytest.skip("network namespaces need root and iproute2")
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "walkthrough.py", "--data", DATA],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for words in (
        "round 12 of 12",
        "verdict: holds",
        "predictions: ",
        "Privacy card of va",
        "serving on 0.0.0.0",
    ):
        assert words in done.stdout
