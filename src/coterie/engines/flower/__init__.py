"""The same requests between processes that do not trust each other, over Flower.

The server keeps the algorithm and its state; every site runs its own installed code on its own records, with
its own ledger and its own secret noise, and answers only what the plan it approved allows. Flower carries the
messages. `messages` says what travels, `contract` what a site agrees to, `site` how it answers, `server` how
answers become an algorithm's replies; `runtime` is the one place that touches Flower's internals.
"""

import importlib.util

from coterie.errors import InputError

FLOWER = "1.41.0"
"""The release that `runtime` was written against, as pinned by the extra."""


def require_flower() -> None:
    """One clear line where the extra is not installed."""
    if importlib.util.find_spec("flwr") is None:
        raise InputError("Flower is not installed; pip install 'coterie[flower]' brings it")
