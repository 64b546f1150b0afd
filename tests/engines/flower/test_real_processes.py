"""R-DPCFL between five real processes with TLS and keys, and a stranger at the door."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from flwr.proto.control_pb2 import ListNodesRequest, RegisterNodeRequest, StartRunRequest
from flwr.proto.fleet_pb2 import ActivateNodeRequest, RegisterNodeFleetRequest
from flwr.supercore.control.control_http_client import ControlHttpClient
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor
from real_federation import PATIENCE, RealFederation, processes_about
from site_folders import NAMES, TRUTH, write_sites

from coterie.algorithms import find_algorithm
from coterie.engines.flower import internals, runtime
from coterie.engines.flower.keys import make_site_key
from coterie.engines.flower.processes import environment, free_port
from coterie.experiment import checkpoint, local
from coterie.experiment.experiment_file import read_experiment
from coterie.experiment.folder import RunFolder

ROUNDS = 5


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealFederation]:
    """A server that waits for its sites; the tests below run in their order."""
    folder = tmp_path_factory.mktemp("real")
    sites = write_sites(folder / "data")
    experiment = {
        "data": {"name": "folder", "path": str(folder / "data" / "together")},
        "federation": {"kind": "natural"},
        "algorithm": {"name": "r-dpcfl", "clusters": 2},
        "privacy": {"epsilon": 8},
        "schedule": {"rounds": ROUNDS, "batch": 40},
    }
    with RealFederation(folder, sites, experiment) as made:
        (folder / "truth.json").write_text(json.dumps(TRUTH))
        made.serve("--truth", str(folder / "truth.json"))
        assert not made.server_ended, made.log("server")
        yield made


# --- a stranger who holds only the authority's certificate, at the public port -----------------------


@pytest.fixture
def public(federation: RealFederation) -> dict[str, Any]:
    return {
        "server_address": f"127.0.0.1:{federation.port}",
        "insecure": False,
        "root_certificates": federation.keys.authority.read_bytes(),
    }


def refused(call: Any, *arguments: Any) -> int:
    with pytest.raises(httpx.HTTPStatusError) as mistake:
        call(*arguments)
    status: int = mistake.value.response.status_code
    return status


def test_a_stranger_can_neither_register_a_key_nor_submit_a_run(public: dict[str, Any]) -> None:
    version = [RuntimeVersionHttpInterceptor(component_name="flwr CLI")]
    control = ControlHttpClient.from_server_address(**public, interceptors=version)
    key = public_key_to_bytes(generate_key_pairs()[1])
    assert refused(control.RegisterNode, RegisterNodeRequest(public_key=key)) == 404
    assert refused(control.StartRun, StartRunRequest()) == 404
    assert refused(control.ListNodes, ListNodesRequest()) == 404
    control.close()


def test_a_stranger_cannot_join(federation: RealFederation, public: dict[str, Any]) -> None:
    private, key = generate_key_pairs()
    interceptors = [
        RuntimeVersionHttpInterceptor(component_name="SuperNode"),
        NodeAuthHttpInterceptor(private, key),
    ]
    encoded = public_key_to_bytes(key)
    with FleetHttpClient.from_server_address(**public, interceptors=interceptors) as fleet:
        assert refused(fleet.RegisterNode, RegisterNodeFleetRequest(public_key=encoded)) == 404
        status = refused(fleet.ActivateNode, ActivateNodeRequest(public_key=encoded, heartbeat_interval=30))
        assert status == 401
    # The same with Flower's own program, as somebody with a key of their own would start it.
    stranger = make_site_key(federation.folder / "stranger", "stranger")
    arguments = ["--superlink", public["server_address"], "--root-certificates", federation.keys.authority]
    ended = subprocess.run(
        [
            *(Path(sys.executable).parent / "flower-supernode", *arguments),
            *("--auth-supernode-private-key", stranger, "--max-retries", "1", "--port", str(free_port())),
            *("--isolation", "process"),
        ],
        env=environment(federation.folder / "stranger" / "flwr"),
        capture_output=True,
        timeout=PATIENCE,
        check=False,
    )
    assert b"SuperNode ID" not in ended.stdout + ended.stderr  # which it is told once it is let in


def test_a_stranger_cannot_take_the_servers_task(federation: RealFederation, public: dict[str, Any]) -> None:
    authority = public["root_certificates"]
    tasks = runtime.TaskClient(runtime.Caller(public["server_address"], authority), b"guessed")
    with pytest.raises(runtime.Unreachable):
        tasks.acquire()
    tasks.close()
    # Not even from inside, on the link's own port, without the secret.
    inside = inner_address(federation)
    tasks = runtime.TaskClient(runtime.Caller(inside, authority), b"guessed")
    assert (
        400 <= refused(tasks._client.AcquireTask, internals.AcquireTaskRequest(supported_task_types=[])) < 500
    )
    tasks.close()
    secret = federation.run.with_name("run.link") / "task.secret"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600


def inner_address(federation: RealFederation) -> str:
    """Where the link itself listens: on loopback, on a port that only its command line tells."""
    for number in processes_about(federation.folder):
        words = Path(f"/proc/{number}/cmdline").read_bytes().decode().split("\0")
        if any(word.endswith("flower-superlink") for word in words) and "--database" in words:
            host, port = words[words.index("--host") + 1], words[words.index("--port") + 1]
            assert host == "127.0.0.1"
            return f"{host}:{port}"
    raise AssertionError("no link is running")


# --- the sites come ---------------------------------------------------------------------------------


@pytest.mark.deployment
def test_four_sites_find_their_clusters_and_reach_the_simulations_state(federation: RealFederation) -> None:
    for place, name in enumerate(NAMES):
        held_out = ["--held-out", "0.2", "--split", f"0:{place}"]
        federation.join(name, *held_out, "--evaluation-epsilon", "1")
    federation.wait_for_end()
    assert federation.server is not None
    assert federation.server.returncode == 0, federation.log("server")
    result = json.loads(federation.out("server"))
    assert result["clusters_found"] is True
    assert result["rounds"] == ROUNDS
    assert all(tally == {"answered": ROUNDS + 2, "missed": 0} for tally in result["participation"].values())
    chosen = read_experiment(federation.experiment, ["seeds.noise=5"])
    alone = local.run(chosen, federation.folder / "alone")
    kind = find_algorithm(chosen.privacy.unit, chosen.algorithm.name).state_type
    states = [
        vars(saved.state)
        for out in (federation.run, federation.folder / "alone")
        if (saved := checkpoint.load(RunFolder(out).checkpoint, kind)) is not None
    ]
    for name, value in states[1].items():
        if isinstance(value, np.ndarray):
            np.testing.assert_array_equal(states[0][name], value, err_msg=name)
        else:
            assert states[0][name] == value, name
    assert result["epsilon"] == alone.epsilon
    assert alone.accuracy is not None
    assert result["accuracy"]["per_client"] == alone.accuracy.per_client
    for name in NAMES:
        state = federation.sites[name] / ".coterie"
        assert federation.joined[name].returncode == 0, federation.log(name)
        assert json.loads((state / "finished.json").read_text())["epsilon"] == pytest.approx(
            result["asked"][name]
        )
        assert not (state / "noise.key").exists()


def test_nothing_is_left_running(federation: RealFederation) -> None:
    federation.stop()
    assert processes_about(federation.folder) == []
    assert not any(os.path.exists(f"/proc/{process.pid}") for process in federation.joined.values())
