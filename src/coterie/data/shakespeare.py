"""Next-character prediction on Shakespeare's plays; a client is one speaking role in one play."""

import gzip
import json
import zlib
from pathlib import Path

import numpy as np

from coterie.data.dataset_files import dataset_files, reading
from coterie.data.preprocessing import Label, Preprocessing, TokenInputs
from coterie.data.records import Array, Dataset, Records, Task
from coterie.errors import DataError

# Fixed before anyone's text is read; the last token stands for every other character.
_ALPHABET = "\n !$&',-.0123456789:;?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz"
_TEST_SHARE = 0.2
WINDOW = 80
"""Characters in a window, unless the experiment says otherwise."""


def read_shakespeare(length: int = WINDOW, stride: int | None = None) -> Dataset:
    """Windows of characters and the character that follows each, role by role.

    The last fifth of every role's text is its test text, so that no window reaches from one into the other.

    Args:
        length: characters in a window.
        stride: characters from one window to the next. By default windows share no character, so a record
            is all that a record-level guarantee protects; a smaller stride repeats text in many records.
    """
    (path,) = dataset_files("shakespeare", ("speeches.jsonl.gz",))
    stride = stride or length + 1
    vocabulary = len(_ALPHABET) + 1
    inputs = TokenInputs(length=length, vocabulary=vocabulary, alphabet=_ALPHABET)
    train: dict[str, Records] = {}
    test: dict[str, Records] = {}
    for role, text in _texts(path).items():
        tokens = inputs.tokens(text)
        start = len(tokens) - round(_TEST_SHARE * len(tokens))
        train[role] = _windows(tokens[:start], length, stride)
        test[role] = _windows(tokens[start:], length, stride)
    return Dataset.of_owners(
        "shakespeare",
        train,
        Task("classification", (length,), vocabulary, vocabulary=vocabulary),
        f"Moby Shakespeare by play and role; windows of {length} characters, every {stride}",
        test,
        Preprocessing(inputs=inputs, label=Label(classes=(*_ALPHABET, "another"))),
    )


def _texts(path: Path) -> dict[str, str]:
    """The speeches of every role, in the order of the play."""
    speeches: dict[str, list[str]] = {}
    damaged = reading(path, EOFError, zlib.error, UnicodeDecodeError)
    with damaged, gzip.open(path, "rt", encoding="utf-8") as stream:
        for number, line in enumerate(stream, start=1):
            try:
                row = json.loads(line)
                # What is no text is refused where it is joined.
                role, text = "/".join([row["play"], row["role"]]), "".join([row["text"]])
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(
                    f"{path}: line {number}: not JSON with play, role and text ({type(error).__name__})"
                ) from error
            speeches.setdefault(role, []).append(text)
    if not speeches:
        raise DataError(f"{path}: no speeches")
    return {name: "\n".join(parts) for name, parts in speeches.items()}


def _windows(tokens: Array, length: int, stride: int) -> Records:
    """Windows of so many characters, and the character after each."""
    if len(tokens) <= length:
        return Records(np.empty((0, length), dtype=np.int64), np.empty(0, dtype=np.int64))
    windows = np.lib.stride_tricks.sliding_window_view(tokens, length + 1)[::stride]
    return Records(windows[:, :-1], windows[:, -1])
