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
) -> None:
    require_flower()
    from coterie.engines.flower.keys import make_keys, make_site_key

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
