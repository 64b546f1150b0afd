"""Lines that follow from each other: each carries the hash of itself and of the line before.

A changed, dropped, moved, doubled or inserted line is found. Whoever rewrites a whole chain, or cuts whole
lines off its end, is found by a head that was kept apart.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from coterie.privacy.errors import LedgerError
from coterie.privacy.plain import Json, Plain

START = "0" * 64
"""What the first line follows from."""


@dataclass(frozen=True)
class ChainHead(Plain):
    """How many lines a chain had, and the hash of the last: kept apart, it shows what was dropped later."""

    called = "head of a chain"
    mistake = LedgerError
    count: int
    hash: str


def link(body: Json, previous: str, *, sort: bool = True) -> tuple[bytes, str]:
    """The line of a body, and the hash that binds it to all lines before."""
    digest = hashlib.sha256(f"{previous}{_text(body, sort)}".encode()).hexdigest()
    return f"{_text({**body, 'hash': digest}, sort)}\n".encode(), digest


def follow(
    path: Path, number: int, line: bytes, previous: str, *, what: str = "ledger", sort: bool = True
) -> tuple[Json, str]:
    """The body of a line that follows from the one before, byte for byte as `link` writes it."""
    try:
        body = json.loads(line)
        del body["hash"]
        expected, digest = link(body, previous, sort=sort)
    # Deep brackets exhaust the parser's stack; a list or a number has no "hash".
    except (ValueError, TypeError, KeyError, RecursionError):
        raise LedgerError(f"{path}: line {number} is not a line of a {what}") from None
    if line + b"\n" != expected:
        place = f"the start of a {what}" if number == 1 else f"line {number - 1}"
        happened = "a line was changed, dropped, moved or inserted"
        raise LedgerError(f"{path}: line {number} does not follow from {place}: {happened}")
    return body, digest


def check_tail(
    path: Path, number: int, tail: bytes, previous: str, *, what: str = "ledger", sort: bool = True
) -> None:
    """Refuse a whole line whose end was changed: a line torn by a crash stops before its end."""
    try:
        follow(path, number, tail[:-1], previous, what=what, sort=sort)
    except LedgerError:
        return
    raise LedgerError(f"{path}: line {number} does not end as a line does: its last byte was changed")


def check_seen(path: Path, hashes: Sequence[str], head: ChainHead, seen_by: str) -> None:
    """Refuse a chain that does not contain a head that was kept apart."""
    if head.count > len(hashes):
        raise LedgerError(f"{path}: line {len(hashes) + 1} is missing: {seen_by} has seen {head.count} lines")
    if head.count < 1 or hashes[head.count - 1] != head.hash:
        raise LedgerError(f"{path}: line {head.count} is not the one that {seen_by} has seen")


def _text(body: Json, sort: bool) -> str:
    return json.dumps(body, sort_keys=sort, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
