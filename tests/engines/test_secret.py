"""The noise key of a run lies in a file of its own, which nobody else reads."""

import os
from pathlib import Path
from typing import Any

import pytest

from coterie.engines.secret import RunSecret
from coterie.errors import CoterieError
from coterie.privacy import SecretKey


def test_a_key_is_written_to_the_file_that_was_made_for_it_and_to_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may write to the folder puts a file of their own there as soon as the key's is made."""
    path, theirs, made = tmp_path / "noise.key", tmp_path / "theirs", os.open

    def watched(file: Any, flags: int, *rest: Any, **more: Any) -> int:
        handle = made(file, flags, *rest, **more)
        if flags & os.O_CREAT and Path(file) == path:
            theirs.write_bytes(b"")
            theirs.replace(path)
        return handle

    secret = RunSecret(SecretKey.from_os(), "data", "plan")
    monkeypatch.setattr(os, "open", watched)
    secret.save(path)
    assert path.read_bytes() == b""


def test_a_key_is_never_overwritten_and_its_owner_alone_reads_it(tmp_path: Path) -> None:
    path, secret = tmp_path / "noise.key", RunSecret(SecretKey.from_os(), "data", "plan")
    secret.save(path)
    assert path.stat().st_mode & 0o777 == 0o600
    before = path.read_bytes()
    with pytest.raises(CoterieError, match="File exists"):
        RunSecret(SecretKey.from_os(), "data", "plan").save(path)
    assert path.read_bytes() == before
    assert RunSecret.load(path, secret.key.fingerprint).key.to_hex() == secret.key.to_hex()
