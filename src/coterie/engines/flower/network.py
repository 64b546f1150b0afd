"""The server's end of the network: its link on loopback, and the proxy before it."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
from flwr.serverapp import Grid

from coterie.engines.flower import runtime
from coterie.engines.flower.keys import KeyFolder, SiteKeys, is_loopback
from coterie.engines.flower.messages import site_log
from coterie.engines.flower.processes import Child, Upstream, free_port, new_secret, wait_until_healthy
from coterie.engines.flower.proxy import AllowlistProxy, ServerStatus, listening
from coterie.errors import CoterieError, InputError

log = site_log(__name__)

WATCH_SECONDS = 0.5
"""Between two looks for keys that were added."""


@dataclass(frozen=True)
class OpenLink:
    """A link that sites can reach."""

    proxy: AllowlistProxy
    port: int
    nodes: dict[str, int]
    """Registered sites by name; empty where nodes have no keys."""
    grid: Callable[[], contextlib.AbstractContextManager[Grid]]
    """Starts a run and is its server."""


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
        patience = runtime.Patience(lambda: child.ended, child.log)
        caller = runtime.Caller(upstream.address, keys.authority.read_bytes() if keys else None, patience)
        nodes: dict[str, int] = {}
        ring = None if keys is None else SiteKeys(keys)
        status = ServerStatus()
        proxy = AllowlistProxy(upstream, ring, status=status, node_of=nodes.get)

        def admit() -> None:
            """Let the link know the keys that are there now."""
            known = {} if ring is None else {name: key for key, name in ring.names().items()}
            with caller.control() as control:
                nodes.update(runtime.register(control, known))

        admit()
        proof = (keys.certificate, keys.key) if keys else (None, None)

        def grid() -> contextlib.AbstractContextManager[Grid]:
            return runtime.server_grid(caller, secret, app)

        with listening(proxy, host, port, *proof) as found:
            log.info("listening on %s:%d for %s", host, found, ", ".join(nodes) or "anybody")
            with _watching(ring, admit):
                yield OpenLink(proxy, found, nodes, grid)


def _watching(ring: SiteKeys | None, admit: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
    """Register keys that are added while we serve; keys that leave are refused by the proxy at once."""
    if ring is None:
        return contextlib.nullcontext()
    known = ring.names()

    def watch() -> None:
        nonlocal known
        if (now := ring.names()) != known:
            with contextlib.suppress(httpx.HTTPError, CoterieError):
                admit()
                known = now

    return runtime.repeating(watch, WATCH_SECONDS, "keys")


def _arguments(folder: Path, keys: KeyFolder | None, address: str) -> list[str]:
    host, _, port = address.rpartition(":")
    arguments = [
        *("--host", host, "--port", port),
        *("--database", ":flwr-in-memory:"),
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
