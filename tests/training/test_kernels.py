"""The GPU's kernels compute what torch's operations compute, as far as an interpreter can tell."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

BROKEN_INTERPRETER = 77
"""Exit code of the script where Triton itself cannot interpret a loop (it says why)."""


def test_kernels_agree_with_torch_in_the_interpreter() -> None:
    """Triton decides on import whether it interprets, so this takes a process of its own."""
    pytest.importorskip("triton", reason="torch for processors comes without Triton")
    script = Path(__file__).with_name("interpreted_kernels.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(script)],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == BROKEN_INTERPRETER:
        _, _, reason = done.stdout.partition("Exit: ")
        pytest.skip(reason.splitlines()[0].rstrip("! "))
    assert done.returncode == 0, done.stdout[-3000:]
