"""Under siege by strangers, sites finish all their rounds, and the server needs little more memory."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from real_federation import RealFederation, processes_about
from siege import Siege
from site_folders import NAMES, write_sites

pytestmark = pytest.mark.deployment

ROUNDS = 8
MORE_MEMORY = 96.0
"""MiB that a siege may cost: buffers of connections, and nothing of 30 bodies of 15 MiB."""


def memory(federation: RealFederation, what: str = "VmRSS") -> float:
    """MiB of the server and of whatever it started."""
    assert federation.server is not None
    found = 0.0
    for number in {federation.server.pid, *processes_about(federation.run)}:
        status = Path(f"/proc/{number}/status").read_text()
        if " join" not in Path(f"/proc/{number}/cmdline").read_bytes().decode().replace("\0", " "):
            size = re.search(rf"{what}:\s+(\d+) kB", status)
            found += int(size[1]) / 1024 if size else 0.0
    return found


def test_under_siege_registered_sites_finish_their_rounds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment = {
        "algorithm": {"name": "global"},
        "privacy": {"epsilon": 8},
        "schedule": {"rounds": ROUNDS, "batch": 40},
    }
    with RealFederation(tmp_path, write_sites(tmp_path / "data"), experiment) as made:
        made.serve()
        for name in NAMES:
            made.join(name)
        made.wait_for_round(2)
        before = memory(made)
        with Siege(made.port, made.keys.authority) as siege:
            made.wait_for_round(ROUNDS - 1)
            during, highest = memory(made), memory(made, "VmHWM")
            made.wait_for_end()
        assert made.server is not None
        assert made.server.returncode == 0, made.log("server")
        result = json.loads(made.out("server"))
        assert result["participation"] == {name: {"answered": ROUNDS, "missed": 0} for name in NAMES}
        assert during - before < MORE_MEMORY, (before, during)
        assert highest - before < MORE_MEMORY, (before, highest)
        assert all(siege.tried[kind] > 30 for kind in ("half_open", "slow", "oversized")), siege.tried
        assert not siege.statuses.keys() & {"200"}, siege.statuses
        with capsys.disabled():
            print(
                f"\nserver's memory: {before:.0f} MiB before the siege, {during:.0f} at its end, at most "
                f"{highest:.0f}; connections tried: {dict(siege.tried)}; answers: {dict(siege.statuses)}"
            )
