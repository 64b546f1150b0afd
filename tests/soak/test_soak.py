"""Three minutes of the soak in soak.py, and that what it looks for is seen when it is there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("soak.py")


@pytest.mark.soak
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for processes in /proc")
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
