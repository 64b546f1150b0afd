"""Keys: private ones are for their owner alone, none is overwritten, and the server proves its name."""

from __future__ import annotations

import os
import socket
import ssl
import stat
import threading
from pathlib import Path

import pytest

from coterie.engines.flower.attending import Connection
from coterie.engines.flower.keys import KeyFolder, is_loopback, make_keys, make_site_key, public_key_bytes
from coterie.engines.flower.network import open_link
from coterie.errors import CoterieError, InputError


def handshake(keys: KeyFolder, name: str, authority: Path) -> None:
    """A TLS client that expects this name and trusts this authority."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(keys.certificate, keys.key)
    ours, theirs = socket.socketpair()

    def answer() -> None:
        try:
            server.wrap_socket(theirs, server_side=True).close()
        except (ssl.SSLError, OSError):
            theirs.close()

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        with ours:
            ssl.create_default_context(cafile=authority).wrap_socket(ours, server_hostname=name).close()
    finally:
        thread.join()


def test_the_server_proves_its_names_and_no_other(tmp_path: Path) -> None:
    keys = make_keys(tmp_path / "keys", ["fed.example.org", "192.0.2.7"], [])
    for name in ("fed.example.org", "192.0.2.7", "localhost", "127.0.0.1"):
        handshake(keys, name, keys.authority)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(keys, "other.example.org", keys.authority)
    stranger = make_keys(tmp_path / "stranger", [], [])
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(stranger, "localhost", keys.authority)


def test_private_keys_are_for_their_owner_alone_and_are_kept(tmp_path: Path) -> None:
    keys = make_keys(tmp_path / "keys", [], ["a", "b"])
    private = [keys.key, keys.authority_key, keys.sites / "a.key", keys.sites / "b.key"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in private} == {0o600}
    assert keys.site_names() == ["a", "b"]
    assert public_key_bytes(keys.sites / "a.pub") != public_key_bytes(keys.sites / "b.pub")
    before = {path: path.read_bytes() for path in private}
    with pytest.raises(InputError, match="never overwritten"):
        make_keys(tmp_path / "keys", [], ["a"])
    with pytest.raises(InputError, match="never overwritten"):
        make_site_key(keys.sites, "a")
    assert {path: path.read_bytes() for path in private} == before


@pytest.mark.parametrize("name", ["", "../a", "a/b", ".hidden", "a b", "x" * 101])
def test_a_site_is_called_what_a_file_can_be(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="site"):
        make_site_key(tmp_path, name)
    assert list(tmp_path.iterdir()) == []


def test_a_key_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.pub"
    path.write_text("ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ0sC6Xk0m4iKp6gQyqvJt1bQp1W0wq1b8n0u0mWnGdK x\n")
    with pytest.raises(InputError, match=r"a\.pub"):
        public_key_bytes(path)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("10.0.0.1", False)],
)
def test_plaintext_is_for_loopback_only(tmp_path: Path, host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback
    if not loopback:
        with (
            pytest.raises(InputError, match="only on loopback"),
            open_link(tmp_path / "link", None, host, 0, tmp_path),
        ):
            pass
        with pytest.raises(InputError, match="only on loopback"):
            Connection(f"{host}:9443", None, None)


def test_half_a_proof_is_none(tmp_path: Path) -> None:
    path = tmp_path / "a.key"
    path.write_text("x")
    with pytest.raises(InputError, match="belong together"):
        Connection("127.0.0.1:9443", None, path)
    with pytest.raises(InputError, match="no file"):
        Connection("127.0.0.1:9443", tmp_path / "ca.crt", path)
    with pytest.raises(InputError, match="HOST:PORT"):
        Connection("127.0.0.1", None, None)


def test_what_a_refused_command_made_is_removed(tmp_path: Path) -> None:
    (tmp_path / "keys" / "sites").mkdir(parents=True)
    (tmp_path / "keys" / "sites" / "b.pub").write_text("kept")
    with pytest.raises(InputError, match=r"b\.pub: exists; keys are never overwritten"):
        make_keys(tmp_path / "keys", [], ["a", "b"])
    assert [path.name for path in (tmp_path / "keys").rglob("*")] == ["sites", "b.pub"]
    for folder in ("/proc/keys", tmp_path / "keys" / "sites" / "b.pub" / "keys", tmp_path / ("x" * 250)):
        with pytest.raises(InputError, match=r"FOLDER: .* cannot be written"):
            make_keys(Path(folder), [], [])


def test_a_full_disk_leaves_no_half_of_a_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = os.open

    def full(path: Path, flags: int, mode: int = 0o777) -> int:
        if str(path).endswith("server.key"):
            raise OSError(28, "No space left on device")
        return opened(path, flags, mode)

    monkeypatch.setattr("coterie.engines.flower.keys.os.open", full)
    with pytest.raises(CoterieError, match=r"server\.key: cannot be written \(No space left on device\)"):
        make_keys(tmp_path / "a" / "keys", [], ["a"])
    assert list(tmp_path.iterdir()) == []
