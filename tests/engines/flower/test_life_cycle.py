"""Keys that come and go while a server runs, and a site that is told what is wrong."""

from __future__ import annotations

import shutil
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from site_folders import write_sites
from typer.testing import CliRunner

from coterie import __version__
from coterie.cli.keys import keys as keys_command
from coterie.cli.main import app
from coterie.engines.flower.attending import Connection
from coterie.engines.flower.guard import GRACE
from coterie.engines.flower.keys import (
    KeyFolder,
    SiteKeys,
    add_site_key,
    make_keys,
    make_site_key,
    public_key_bytes,
    revoke_site_key,
    rotate_site_key,
)
from coterie.engines.flower.node import Endpoint, SiteKey, Trouble, _unreachable, greet
from coterie.engines.flower.processes import Upstream, free_port
from coterie.engines.flower.proof import Greeting, public_bytes
from coterie.engines.flower.proxy import AllowlistProxy, listening
from coterie.errors import InputError


@pytest.fixture
def files(tmp_path: Path) -> KeyFolder:
    return make_keys(tmp_path / "keys", [], ["a", "b"])


def key_of(path: Path) -> bytes:
    return public_key_bytes(path)


# --- the folder -------------------------------------------------------------------------------------


def test_what_is_done_to_the_folder_acts_at_once(files: KeyFolder, tmp_path: Path) -> None:
    ring = SiteKeys(files)
    first = key_of(files.sites / "a.pub")
    assert ring.status(first) == ("a", None)
    new = make_site_key(tmp_path, "c").with_suffix(".pub")
    assert ring.status(key_of(new)) == (None, "key unknown")
    add_site_key(files, "c", new)
    assert ring.status(key_of(new)) == ("c", None)
    revoke_site_key(files, "a")
    assert ring.status(first) == (None, "key revoked")
    assert SiteKeys(files).status(first) == (None, "key revoked")  # also after a restart
    other = make_site_key(tmp_path / "other", "b").with_suffix(".pub")
    before = key_of(files.sites / "b.pub")
    rotate_site_key(files, "b", other)
    assert ring.status(before) == (None, "key revoked")
    assert ring.status(key_of(other)) == ("b", None)


def test_a_file_that_is_removed_is_revoked_until_it_is_put_back(files: KeyFolder, tmp_path: Path) -> None:
    ring, path = SiteKeys(files), files.sites / "a.pub"
    key = key_of(path)
    shutil.move(path, tmp_path / "a.pub")
    assert ring.status(key) == (None, "key revoked")
    shutil.move(tmp_path / "a.pub", path)
    assert ring.status(key) == ("a", None)


def test_a_key_belongs_to_one_site_and_never_comes_back(files: KeyFolder, tmp_path: Path) -> None:
    kept = tmp_path / "old.pub"
    shutil.copy(files.sites / "a.pub", kept)
    with pytest.raises(InputError, match="a key belongs to one site"):
        add_site_key(files, "c", kept)
    revoke_site_key(files, "a")
    with pytest.raises(InputError, match="never comes back"):
        add_site_key(files, "a", kept)
    with pytest.raises(InputError, match="no such key"):
        revoke_site_key(files, "a")
    with pytest.raises(InputError, match="no such key; --add"):
        rotate_site_key(files, "a", kept)
    with pytest.raises(InputError, match="--rotate puts another"):
        add_site_key(files, "b", kept)


def test_the_command_takes_one_change_at_a_time(files: KeyFolder, tmp_path: Path) -> None:
    def command(**options: Any) -> None:
        plain = {"host": None, "sites": "", "site": None, "add": None, "revoke": None, "rotate": None}
        keys_command(**{"folder": files.path, "public": None, **plain, **options})

    public = make_site_key(tmp_path, "c").with_suffix(".pub")
    for options, line in (
        ({"add": "c"}, "--public: needed with --add"),
        ({"add": "c", "revoke": "a", "public": public}, "one of them at a time"),
        ({"revoke": "a", "public": public}, "--revoke needs none"),
        ({"add": "c", "public": public, "sites": "x"}, "beside none of the others"),
        ({"public": public}, "one of them"),
        ({"add": "c", "public": public, "folder": tmp_path / "nowhere"}, "no folder of a server's keys"),
        ({"add": "../c", "public": public}, "site"),
    ):
        with pytest.raises(InputError, match=line):
            command(**options)
    command(add="c", public=public)
    assert (files.sites / "c.pub").read_bytes() == public.read_bytes()


# --- what a site is told ------------------------------------------------------------------------------


@contextmanager
def door(files: KeyFolder) -> Iterator[Endpoint]:
    proxy = AllowlistProxy(Upstream("127.0.0.1:1"), SiteKeys(files))
    with listening(proxy, "127.0.0.1", 0, files.certificate, files.key) as port:
        yield Endpoint(f"127.0.0.1:{port}", files.authority)


def site_key(files: KeyFolder, name: str) -> SiteKey:
    return SiteKey.load(files.sites / f"{name}.key")


def test_each_cause_has_its_own_words(files: KeyFolder, tmp_path: Path) -> None:
    stranger = SiteKey.load(make_site_key(tmp_path, "stranger"))
    elsewhere = make_keys(tmp_path / "elsewhere", [], ["a"])
    with door(files) as endpoint:
        found = greet(endpoint, site_key(files, "a"))
        assert (found.site, found.coterie) == ("a", __version__)
        with pytest.raises(Trouble, match="does not know this key; send its"):
            greet(endpoint, stranger)
        with pytest.raises(Trouble, match="not signed by the authority in --ca"):
            greet(replace(endpoint, authority=elsewhere.authority), site_key(files, "a"))
        with pytest.raises(Trouble, match=r"does not speak TLS|no connection|no answer"):
            greet(replace(endpoint, authority=None), SiteKey(None))
        revoke_site_key(files, "a")
        with pytest.raises(Trouble, match="has revoked this key"):
            greet(endpoint, site_key(files, "a"))
    with pytest.raises(Trouble, match="no connection; is the server running"):
        greet(Endpoint(f"127.0.0.1:{free_port()}", files.authority), site_key(files, "b"))
    mismatch = httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] IP address mismatch, certificate is not")
    assert "other names than this address" in _unreachable(Endpoint("hub:1", files.authority), mismatch)
    slow = httpx.ReadTimeout("timed out")
    assert "firewall" in _unreachable(Endpoint("hub:1", files.authority), slow)


@pytest.mark.parametrize("off", [60.0, -3600.0])
def test_a_clock_that_is_off_is_corrected_and_told(
    files: KeyFolder, monkeypatch: pytest.MonkeyPatch, off: float
) -> None:
    now = time.time
    key = site_key(files, "a")
    with door(files) as endpoint:
        # Only the site's clock is off: the server's is asked in another thread, by its own module's name.
        monkeypatch.setattr("coterie.engines.flower.node.time", _Clock(off))
        found = greet(endpoint, key)
    assert found.site == "a"
    assert key.offset == pytest.approx(-off, abs=5)
    assert key.now() == pytest.approx(now(), abs=5)


class _Clock:
    """The module `time`, with a wall clock that is off."""

    def __init__(self, off: float) -> None:
        self._off = off

    def time(self) -> float:
        return time.time() + self._off

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


def test_other_versions_are_named(monkeypatch: pytest.MonkeyPatch, files: KeyFolder) -> None:
    with door(files) as endpoint:
        monkeypatch.setattr("coterie.engines.flower.node.PROTOCOL", 99)
        with pytest.raises(Trouble, match=r"has coterie .*install the same version on both sides"):
            greet(endpoint, site_key(files, "a"))
        monkeypatch.undo()
        monkeypatch.setattr("coterie.engines.flower.node.flower_version", lambda: "1.99")
        with pytest.raises(Trouble, match=r"has Flower .*this site 1\.99"):
            greet(endpoint, site_key(files, "a"))


def test_what_a_server_says_of_itself_is_read_strictly() -> None:
    fine = Greeting(2, "1", "1.41", 1.0, None, None, "serving")
    assert Greeting.from_json(fine.to_json()) == fine
    for odd in (b"", b"[]", b"{}", b'{"protocol": "2"}', fine.to_json().replace(b"1.0", b'"now"')):
        assert Greeting.from_json(odd) is None


def test_a_server_may_have_several_addresses(tmp_path: Path, files: KeyFolder) -> None:
    found = Connection("hub:9443,spare.example.org:9444", files.authority, files.sites / "a.key")
    assert found.addresses == ["hub:9443", "spare.example.org:9444"]
    with pytest.raises(InputError, match="HOST:PORT"):
        Connection("hub:9443,spare", files.authority, files.sites / "a.key")
    with pytest.raises(InputError, match="not a private key"):
        SiteKey.load(files.authority)
    assert public_bytes(site_key(files, "a").key) == key_of(files.sites / "a.pub")  # type: ignore[arg-type]


# --- a siege ------------------------------------------------------------------------------------------


def test_a_registered_site_goes_on_while_strangers_hold_the_door(files: KeyFolder) -> None:
    """Half-open connections by the hundred, from the same address as the site's own."""
    with door(files) as endpoint:
        host, port = endpoint.address.split(":")
        held = [socket.create_connection((host, int(port))) for _ in range(300)]
        try:
            time.sleep(GRACE)  # in which they could have proven who they are
            context = ssl.create_default_context(cafile=str(files.authority))
            with httpx.Client(verify=context, timeout=10, trust_env=False) as strangers:
                assert (
                    strangers.post(f"{endpoint.url}/v1/fleet/push-object", content=bytes(10**6)).status_code
                    == 401
                )
            for _ in range(3):
                assert greet(endpoint, site_key(files, "a")).site == "a"
        finally:
            for each in held:
                each.close()


def test_going_on_needs_something_to_go_on_with(tmp_path: Path) -> None:
    data = write_sites(tmp_path, records=20)["amber"]
    arguments = ["join", "--data", str(data), "--server", "127.0.0.1:1", "--plaintext", "--epsilon", "8"]
    with pytest.raises(InputError, match=r"--resume: .*contract\.json does not exist"):
        CliRunner().invoke(app, [*arguments, "--resume"], catch_exceptions=False)
