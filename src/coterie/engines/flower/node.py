"""A site's side of the network: Flower's node as a child process, our own code in place of Flower's app."""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from flwr.app import Message, RecordDict

from coterie.engines.flower import runtime
from coterie.engines.flower.link import is_loopback
from coterie.engines.flower.processes import (
    Child,
    ChildEnded,
    Upstream,
    free_port,
    new_secret,
    wait_until_healthy,
)
from coterie.engines.flower.words import site_log
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
        if not host or not port.isdigit():
            raise InputError(f"--server: {self.server!r}; allowed: HOST:PORT")
        if self.authority is None and not is_loopback(host.strip("[]")):
            raise InputError(f"--plaintext: only on loopback, and --server is {self.server}")
        if (self.authority is None) != (self.key is None):
            raise InputError("--ca and --key belong together: the server proves who it is, and so do you")
        for option, path in (("--ca", self.authority), ("--key", self.key)):
            if path is not None and not path.is_file():
                raise InputError(f"{option}: {path} is no file")

    def arguments(self) -> list[str]:
        if self.authority is None:
            return ["--superlink", self.server, "--insecure"]
        return [
            *("--superlink", self.server),
            *("--root-certificates", str(self.authority)),
            *("--auth-supernode-private-key", str(self.key)),
        ]


def attend(
    connection: Connection,
    folder: Path,
    handle: Callable[[Message], RecordDict],
    done: Callable[[], bool],
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
            if node.ended:
                raise ChildEnded(f"the node ended; see {node.log}")
            if not worker.take_next():
                time.sleep(POLL_SECONDS)
        worker.settle(SETTLE_SECONDS)
        time.sleep(LAST_WORDS_SECONDS)
