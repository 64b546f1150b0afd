"""The server's side of the network: Flower's link on loopback, the proxy before it, and the sites' keys."""

import contextlib
import ipaddress
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flwr.serverapp import Grid

from coterie.engines.flower import runtime
from coterie.engines.flower.keys import KeyFolder, public_key_bytes
from coterie.engines.flower.processes import Child, free_port, new_secret, wait_until_healthy
from coterie.engines.flower.proxy import AllowlistProxy, RunningProxy, Upstream
from coterie.errors import InputError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpenLink:
    """A link that sites can reach."""

    proxy: RunningProxy
    address: str
    nodes: dict[str, int]
    """Registered sites by name; empty where nodes have no keys."""
    _secret: bytes
    _authority: bytes | None
    _app: Path

    @contextlib.contextmanager
    def grid(self) -> Iterator[Grid]:
        """Start a run and be its server."""
        with contextlib.closing(runtime.Control(self.address, self._authority)) as control:
            control.start_run(self._app)
        with runtime.server_grid(self.address, self._secret, self._authority) as grid:
            yield grid


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
    if keys is None and not is_loopback(host):
        raise InputError(f"--plaintext: only on loopback, and --host is {host}; allowed: 127.0.0.1, ::1")
    if keys is not None:
        keys.check()
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)  # the link keeps messages there: who was asked, and what was answered
    secret = new_secret(folder / "task.secret")
    authority = keys.authority if keys else None
    address = f"127.0.0.1:{free_port()}"
    child = Child("flower-superlink", _arguments(folder, keys, address), folder / "flwr", folder / "link.log")
    try:
        upstream = Upstream(address, authority)
        wait_until_healthy(child, upstream.url, authority)
        pem = authority.read_bytes() if authority else None
        nodes = _register(address, pem, keys) if keys else {}
        proxy = AllowlistProxy(upstream, self_registration=keys is None)
        certificate, key = (keys.certificate, keys.key) if keys else (None, None)
        with RunningProxy(proxy, host, port, certificate, key) as opened:
            log.info("listening on %s:%d for %s", host, opened.port, ", ".join(nodes) or "anybody")
            yield OpenLink(opened, address, nodes, secret, pem, app)
    finally:
        child.stop()


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


def _register(address: str, authority: bytes | None, keys: KeyFolder) -> dict[str, int]:
    with contextlib.closing(runtime.Control(address, authority)) as control:
        return {
            name: control.register(name, public_key_bytes(keys.sites / f"{name}.pub"))
            for name in keys.site_names()
        }
