"""The loop that stands above a kernel of the processor, as its slow twin."""

import inspect
import itertools
import textwrap
from collections.abc import Callable

import numpy as np


def loop_of(kernel: Callable[..., object], **arrays: object) -> None:
    """Run the loop that stands above a kernel, on these arrays and numbers."""
    text = inspect.getdoc(kernel)
    assert text is not None
    _, _, after = text.partition("::\n\n")
    lines = [*itertools.takewhile(lambda line: not line or line.startswith(" "), after.splitlines())]
    assert lines[0].startswith("    for record")
    exec(textwrap.dedent("\n".join(lines)), {"np": np, **arrays})
