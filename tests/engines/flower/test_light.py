"""What a server and a site load while they wait: not torch, which comes with the first model."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np

HEAVY = {"torch", "sklearn", "pandas", "pyarrow", "matplotlib", "sqlalchemy"}
OF_A_SITE = """
import sys
from pathlib import Path
from flwr.app import Message
from flwr.supercore.task_identity import TaskIdentity
from coterie.cli import join
from coterie.engines.flower import attending, messages
from coterie.engines.flower.joining import Joining, open_site

TaskIdentity.node_id, TaskIdentity.run_id, TaskIdentity.task_id = 1, 1, 1
site = open_site(Joining(Path(sys.argv[1]), epsilon=8.0))
asked = Message(messages.pack({}), dst_node_id=1, message_type=messages.FACTS)
answer = site.handle(asked)
assert messages.is_refusal(answer) is None, answer
print(*sorted(sys.modules))
"""


def packages(names: list[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


def test_a_site_that_waits_for_a_contract_has_loaded_no_torch(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    (tmp_path / "federation.yaml").write_text(
        "task: classification\nlabel: {classes: 2}\nfeatures: {shape: [3], range: [0, 1]}\n"
    )
    np.savez(tmp_path / "amber.npz", x=rng.random((20, 3)), y=rng.integers(2, size=20))
    ran = subprocess.run(
        [sys.executable, "-c", OF_A_SITE, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert packages(ran.stdout.split()) & HEAVY == set()
    assert {"flwr", "coterie"} <= packages(ran.stdout.split())


def test_a_server_that_waits_for_sites_has_loaded_no_torch(tmp_path: Path) -> None:
    (tmp_path / "experiment.yaml").write_text("algorithm: {name: global}\n")
    arguments = ["serve", "experiment.yaml", "--plaintext", "--sites", "2", "--port", "0", "--wait", "0.1"]
    ran = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "coterie", *arguments, "--out", "run"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert ran.returncode == 2
    assert "0 of 2 sites have joined" in ran.stderr
    loaded = re.findall(r"^import time: +\d+ \| +\d+ \| +([\w.]+)$", ran.stderr, re.MULTILINE)
    assert packages(loaded) & (HEAVY - {"sqlalchemy"}) == set()  # its grid brings that
    assert {"flwr", "coterie"} <= packages(loaded)
