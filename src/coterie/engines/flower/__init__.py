"""The same requests between processes that do not trust each other, over Flower.

The server keeps the algorithm and its state; every site runs its own installed code on its own records, with
its own ledger and its own secret noise, and answers only what the plan it approved allows. Flower carries the
messages. `messages` says what travels, `contract` what a site agrees to, `site` how it answers, `server` how
answers become an algorithm's replies; `node` is a site's end of the wire, `proxy` and `guard` the server's
door; `internals` is the one place that imports what is not public in Flower.
"""

from importlib.metadata import PackageNotFoundError, version

from coterie.errors import InputError

FLOWER = "1.41"
"""The minor release that `internals` was written against; internals move between minors."""


def require_flower() -> None:
    """One clear line where the extra is not installed, or is another Flower than ours was written for."""
    try:
        found = version("flwr")
    except PackageNotFoundError:
        raise InputError("Flower is not installed; pip install 'coterie[flower]' brings it") from None
    wanted = f"allowed: {FLOWER} (pip install 'coterie[flower]')"
    InputError.when(not found.startswith(f"{FLOWER}."), f"Flower {found} is installed; {wanted}")
