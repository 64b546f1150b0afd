"""What tests of every room share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder with the real datasets; tests that need it are skipped where it is absent."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("COTERIE_DATA") or beside)
    if not folder.is_dir():
        pytest.skip(f"no real datasets: {folder} does not exist (set COTERIE_DATA)")
    return folder
