"""Lines that follow from each other: each carries the hash of itself and of the line before.

A changed, dropped, moved, doubled or inserted line is found. Whoever rewrites a whole chain, or cuts whole
lines off its end, is found by a head that was kept apart.
"""

import hashlib
import io
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from coterie.privacy.errors import LedgerError
from coterie.privacy.locked_file import append, contents, cut_torn_line, explained
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


class HashChain:
    """A file of JSON lines, as far as it was read or written; keys are sorted where `sort` says so."""

    def __init__(self, path: Path, what: str = "ledger", *, sort: bool = True) -> None:
        self.path, self._what, self._sort = path, what, sort
        self.hashes: list[str] = []
        self.ends = [0]

    @property
    def head(self) -> ChainHead:
        """Where it stands, for somebody to keep apart."""
        return ChainHead(len(self.hashes), self.hashes[-1] if self.hashes else START)

    def check_seen(self, head: ChainHead, seen_by: str) -> None:
        """Refuse a chain that does not contain a head that was kept apart."""
        if head.count > len(self.hashes):
            missing = f"line {len(self.hashes) + 1} is missing"
            raise LedgerError(f"{self.path}: {missing}: {seen_by} has seen {head.count} lines")
        if head.count < 1 or self.hashes[head.count - 1] != head.hash:
            raise LedgerError(f"{self.path}: line {head.count} is not the one that {seen_by} has seen")

    def follow(self, content: bytes) -> Iterator[Json]:
        """The bodies of all lines, without one torn by a crash, if each follows from the one before."""
        *lines, torn = content.split(b"\n")
        for line in lines:
            body, digest = self._next(line)
            self.add(len(line) + 1, digest)
            yield body
        if torn:  # by a crash it stops before its end
            try:
                self._next(torn[:-1])
            except LedgerError:
                return
            whole = f"line {len(lines) + 1} does not end as a line does"
            raise LedgerError(f"{self.path}: {whole}: its last byte was changed")

    def link(self, body: Json) -> tuple[bytes, str]:
        """The line of a body, and the hash that binds it to all lines before."""
        digest = hashlib.sha256(f"{self.head.hash}{self._text(body)}".encode()).hexdigest()
        return f"{self._text({**body, 'hash': digest})}\n".encode(), digest

    def add(self, size: int, digest: str) -> None:
        """Go on from a line of this size that is in the file."""
        self.hashes.append(digest)
        self.ends.append(self.ends[-1] + size)

    def _next(self, line: bytes) -> tuple[Json, str]:
        """The body of the next line, byte for byte as `link` writes it."""
        number = len(self.hashes) + 1
        try:
            body = json.loads(line)
            del body["hash"]
            expected, digest = self.link(body)
        # Deep brackets exhaust the parser's stack; a list or a number has no "hash".
        except (ValueError, TypeError, KeyError, RecursionError):
            raise LedgerError(f"{self.path}: line {number} is not a line of a {self._what}") from None
        if line + b"\n" != expected:
            place = f"the start of a {self._what}" if number == 1 else f"line {number - 1}"
            happened = "a line was changed, dropped, moved or inserted"
            raise LedgerError(f"{self.path}: line {number} does not follow from {place}: {happened}")
        return body, digest

    def _text(self, body: Json) -> str:
        return json.dumps(
            body, sort_keys=self._sort, separators=(",", ":"), ensure_ascii=True, allow_nan=False
        )


class WritableChain(HashChain):
    """A chain whose file this process holds open and locked, to write lines that survive any crash."""

    _file: io.FileIO

    @classmethod
    def _held(
        cls,
        file: io.FileIO,
        read: Callable[[bytes], Self],
        *,
        seen: tuple[ChainHead | None, str] = (None, ""),
        mode: int | None = None,
    ) -> Self:
        """The chain of an open, locked file once all of it is checked: a torn line is cut off then.

        Args:
            read: makes the chain from the content, or refuses it.
            seen: a head that was kept apart, if there is one, and by whom.
            mode: of the file from now on.
        """
        try:
            chain = read(contents(file))
            head, seen_by = seen
            if head is not None:
                chain.check_seen(head, seen_by)
            cut_torn_line(file, chain.ends[-1])
            if mode is not None:
                os.fchmod(file.fileno(), mode)
        except BaseException:
            file.close()
            raise
        chain._file = file
        return chain

    def write(self, body: Json) -> None:
        """Append a line, unless the file is not as this process left it; where that fails, it is done."""
        self._check_untouched()
        line, digest = self.link(body)
        try:
            with explained(self.path):
                append(self._file, line)
        except BaseException:
            # What reached the disk is cut as torn or counted at the next opening; this process is done.
            self.close()
            raise
        self.add(len(line), digest)

    def close(self) -> None:
        """Let go of the file; another process may open it now."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def _check_untouched(self) -> None:
        """Refuse to go on when the file was removed, replaced, cut or extended under this process."""
        if self._file.closed:
            raise LedgerError(f"{self.path}: the ledger is closed")
        with explained(self.path):
            held = os.fstat(self._file.fileno())
            same = self.path.exists() and os.path.samestat(held, self.path.stat())
        if not same or held.st_size != self.ends[-1]:
            what = "changed" if same else "removed or replaced"
            raise LedgerError(f"{self.path}: the ledger was {what} by somebody else during the run")
