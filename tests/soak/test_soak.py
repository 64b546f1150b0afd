"""Three minutes of the soak in soak.py, and that it leaves nothing behind when it is stopped."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "engines" / "flower"))

from real_federation import processes_about, wait_until

SCRIPT = Path(__file__).with_name("soak.py")
pytestmark = [
    pytest.mark.deployment,
    pytest.mark.soak,
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for processes in /proc"),
]


def test_three_minutes_of_faults_leave_everything_in_agreement() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--minutes", "3", "--rounds", "15"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    found = re.search(r"(\d+) of them while (\d+) faults struck", done.stdout)
    assert found is not None
    assert int(found[2]) >= 10
    assert "reach the same bits" in done.stdout


def test_a_soak_that_is_stopped_leaves_nobody_behind(tmp_path: Path) -> None:
    """SIGTERM ended it and left its server and sites running."""
    kept = tmp_path / "kept"
    with subprocess.Popen(
        [sys.executable, str(SCRIPT), "--minutes", "1", "--keep", str(kept)], stderr=subprocess.DEVNULL
    ) as soak:
        wait_until("sites and server have started", lambda: len(processes_about(kept / "run-0")) >= 9)
        soak.send_signal(signal.SIGTERM)
        assert soak.wait(timeout=120) == 128 + signal.SIGTERM
    assert processes_about(kept) == []
