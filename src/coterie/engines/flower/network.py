"""Both ends of the network: the server's link on loopback with the proxy before it, and a site's node."""

import contextlib
import ipaddress
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from coterie.engines.flower import runtime
from coterie.engines.flower.keys import KeyFolder, check_host
from coterie.engines.flower.messages import site_log
from coterie.engines.flower.processes import (
    Child,
    ChildEnded,
    Upstream,
    free_port,
    new_secret,
    wait_until_healthy,
)
from coterie.engines.flower.proxy import AllowlistProxy, listening
from coterie.errors import InputError

log = site_log(__name__)

LOG = "node.log"
POLL_SECONDS = 0.2
AGAIN_SECONDS = 3.0
"""Between two attempts to reach the server. After a crash the link refuses, for up to a minute, a key that it
still takes for online."""
SETTLE_SECONDS = 30.0
LAST_WORDS_SECONDS = 2.0
"""For the node to pass on our last answer before it is stopped; it looks every half second."""


# --- the server's ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OpenLink:
    """A link that sites can reach."""

    proxy: AllowlistProxy
    port: int
    nodes: dict[str, int]
    """Registered sites by name; empty where nodes have no keys."""
    grid: Callable[[], contextlib.AbstractContextManager[Grid]]
    """Starts a run and is its server."""


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@contextlib.contextmanager
def open_link(folder: Path, keys: KeyFolder | None, host: str, port: int, app: Path) -> Iterator[OpenLink]:
    """Start the link where only this machine reaches it, register the sites' keys, then open what sites need.

    Args:
        keys: certificates and the sites' public keys; None is the plaintext mode, on loopback only.
        host, port: where sites come in.
        app: the Flower app under whose name the run goes.
    """
    InputError.when(
        keys is None and not is_loopback(host),
        f"--plaintext: only on loopback, and --host is {host}; allowed: 127.0.0.1, ::1",
    )
    if keys is not None:
        keys.check()
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)  # the link keeps messages there: who was asked, and what was answered
    secret = new_secret(folder / "task.secret")
    upstream = Upstream(f"127.0.0.1:{free_port()}", keys.authority if keys else None)
    arguments = _arguments(folder, keys, upstream.address)
    child = Child("flower-superlink", arguments, folder / "flwr", folder / "link.log")
    with contextlib.closing(child):
        wait_until_healthy(child, upstream)
        pem = keys.authority.read_bytes() if keys else None
        known = keys.public_keys() if keys else {}
        with runtime.control(upstream.address, pem) as control:
            nodes = runtime.register(control, known)
        proxy = AllowlistProxy(upstream, self_registration=keys is None)
        proof = (keys.certificate, keys.key) if keys else (None, None)

        def grid() -> contextlib.AbstractContextManager[Grid]:
            with runtime.control(upstream.address, pem) as control:
                runtime.start_run(control, app)
            return runtime.server_grid(upstream.address, secret, pem)

        with listening(proxy, host, port, *proof) as found:
            log.info("listening on %s:%d for %s", host, found, ", ".join(nodes) or "anybody")
            yield OpenLink(proxy, found, nodes, grid)


def _arguments(folder: Path, keys: KeyFolder | None, address: str) -> list[str]:
    host, _, port = address.rpartition(":")
    arguments = [
        *("--host", host, "--port", port),
        *("--database", str(folder / "link.db")),
        # The server's task is ours alone: nobody else knows the secret, and no process is started for it.
        *("--isolation", "process", "--superexec-auth-secret-file", str(folder / "task.secret")),
        "--disable-runtime-dependency-installation",
    ]
    if keys is None:
        return [*arguments, "--insecure"]
    return [
        *arguments,
        *("--ssl-ca-certfile", str(keys.authority)),
        *("--ssl-certfile", str(keys.certificate), "--ssl-keyfile", str(keys.key)),
        "--enable-supernode-auth",
    ]


# --- a site's ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Connection:
    """How to reach the server, and how to prove who we are.

    Args:
        server: HOST:PORT.
        authority: certificate of the authority that signed the server's; None is the plaintext mode.
        key: the site's private key, in OpenSSH format.
    """

    server: str
    authority: Path | None
    key: Path | None

    def __post_init__(self) -> None:
        host, _, port = self.server.rpartition(":")
        reachable = re.fullmatch("[0-9]{1,5}", port) is not None and 0 < int(port) < 2**16
        allowed = "HOST:PORT, with a port from 1 to 65535"
        InputError.when(not (host and reachable), f"--server: {self.server!r} is not allowed, {allowed} is")
        check_host(host.removeprefix("[").removesuffix("]"), "--server")
        bare = self.authority is None
        apart = bare and not is_loopback(host.strip("[]"))
        InputError.when(apart, f"--plaintext: only on loopback, and --server is {self.server}")
        half = "--ca and --key belong together: the server proves who it is, and so do you"
        InputError.when(bare != (self.key is None), half)
        for option, path in (("--ca", self.authority), ("--key", self.key)):
            InputError.when(path is not None and not path.is_file(), f"{option}: {path} is no file")

    def arguments(self) -> list[str]:
        if self.authority is None:
            return ["--superlink", self.server, "--insecure"]
        return [
            *("--superlink", self.server),
            *("--root-certificates", str(self.authority)),
            *("--auth-supernode-private-key", str(self.key)),
        ]


def attend(
    connection: Connection, folder: Path, handle: Callable[[Message], RecordDict], done: Callable[[], bool]
) -> None:
    """Answer messages until there is nothing more to answer, through restarts of either side."""
    folder.mkdir(parents=True, exist_ok=True)
    told = False
    while not done():
        try:
            _attend_once(connection, folder, handle, done)
        except (ChildEnded, runtime.Unreachable):
            if not told:
                log.warning("no connection to %s, trying on; %s says more", connection.server, folder / LOG)
            told = True
            time.sleep(AGAIN_SECONDS)


def _attend_once(
    connection: Connection, folder: Path, handle: Callable[[Message], RecordDict], done: Callable[[], bool]
) -> None:
    """One life of Flower's node."""
    secret_file, port = folder / "task.secret", str(free_port())
    secret, upstream = new_secret(secret_file), Upstream(f"127.0.0.1:{port}")
    arguments = [
        *connection.arguments(),
        *("--host", "127.0.0.1", "--port", port),
        *("--isolation", "process", "--superexec-auth-secret-file", str(secret_file)),
    ]
    with contextlib.ExitStack() as stack:
        node = Child("flower-supernode", arguments, folder / "flwr", folder / LOG)
        stack.callback(node.close)
        wait_until_healthy(node, upstream)
        tasks = runtime.TaskClient(upstream.address, secret)
        stack.callback(tasks.close)
        worker = runtime.TaskWorker(tasks, handle)
        while not done():
            ChildEnded.when(node.ended, f"the node ended; see {node.log}")
            if not worker.take_next():
                time.sleep(POLL_SECONDS)
        worker.settle(SETTLE_SECONDS)
        time.sleep(LAST_WORDS_SECONDS)
