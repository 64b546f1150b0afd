"""`coterie keys`: what server and sites know each other by."""

from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.console import say
from coterie.engines.flower import require_flower
from coterie.errors import InputError


def keys(
    folder: Annotated[Path, typer.Argument(help="Folder to write.")],
    host: Annotated[
        list[str] | None, typer.Option("--host", help="Name or address of the server, for its certificate.")
    ] = None,
    sites: Annotated[
        str, typer.Option("--sites", help="Names of sites to make keys for, with commas; for trials.")
    ] = "",
    site: Annotated[
        str | None, typer.Option("--site", help="Make this site's own key pair and nothing else.")
    ] = None,
    add: Annotated[
        str | None, typer.Option("--add", metavar="NAME", help="Let a site in, with the key in --public.")
    ] = None,
    revoke: Annotated[
        str | None, typer.Option("--revoke", metavar="NAME", help="Let a site's key in no more.")
    ] = None,
    rotate: Annotated[
        str | None,
        typer.Option("--rotate", metavar="NAME", help="Put the key in --public in the place of a site's."),
    ] = None,
    public: Annotated[
        Path | None, typer.Option("--public", help="With --add, --rotate: the site's .pub file.")
    ] = None,
) -> None:
    require_flower()
    from coterie.engines.flower.keys import make_keys, make_site_key

    changes = {"--add": add, "--revoke": revoke, "--rotate": rotate}
    asked = {option: name for option, name in changes.items() if name is not None}
    if asked or public is not None:
        InputError.when(bool(host or sites or site), "--add, --revoke, --rotate: beside none of the others")
        InputError.when(len(asked) != 1, "--add, --revoke, --rotate: one of them at a time")
        [(option, name)] = asked.items()
        say(_change(folder, option, name, public))
        return

    names = [name.strip() for name in sites.split(",") if name.strip()]
    if site is not None:
        if host or names:
            raise InputError("--site: makes one site's own pair; --host and --sites are for the server's set")
        path = make_site_key(folder, site)
        say(f"{path} stays here; {path.with_suffix('.pub')} goes to the server's operator")
        return
    files = make_keys(folder, host or [], names)
    made = ", ".join(files.site_names()) or "none"
    say(f"authority {files.authority}, server {files.certificate}, sites: {made}")


def _change(folder: Path, option: str, name: str, public: Path | None) -> str:
    """Change who may join a server, also one that runs; what was done, in words."""
    from coterie.engines.flower.keys import KeyFolder, add_site_key, revoke_site_key, rotate_site_key

    files = KeyFolder(folder)
    InputError.when(not files.sites.is_dir(), f"FOLDER: {folder} is no folder of a server's keys")
    if option == "--revoke":
        InputError.when(public is not None, "--public: --revoke needs none; it acts with --add, --rotate")
        kept = revoke_site_key(files, name)
        return f"{name}: nobody joins with this key any more, from now on; it is kept in {kept}"
    if public is None:
        raise InputError(f"--public: needed with {option}: the .pub file of {name}")
    change = add_site_key if option == "--add" else rotate_site_key
    return f"{name}: may join with the key in {change(files, name, public)}, from now on"
