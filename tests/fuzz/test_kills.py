"""A few kills of the campaign in kills.py, in every test run."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for processes in /proc")
def test_killed_runs_resume_to_the_same_bits_and_leave_nothing() -> None:
    script = Path(__file__).with_name("kills.py")
    done = subprocess.run(
        [sys.executable, str(script), "--kills", "5", "--only", "run"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| all |  | 5 |" in done.stdout
