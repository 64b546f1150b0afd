"""`coterie join`: a site takes part with its own records, ledger and noise, over Flower."""

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.console import log_to_stderr, say
from coterie.cli.options import RecordAdjacency
from coterie.engines.flower import require_flower
from coterie.errors import InputError
from coterie.privacy import Adjacency


def join(
    data: Annotated[Path, typer.Option("--data", help="Folder with federation.yaml and one data file.")],
    server: Annotated[str, typer.Option("--server", metavar="HOST:PORT", help="Where the server listens.")],
    epsilon: Annotated[float, typer.Option("--epsilon", help="The most that may be spent of these records.")],
    delta: Annotated[
        float | None, typer.Option("--delta", help="By default a fifth of one over the number of records.")
    ] = None,
    ca: Annotated[
        Path | None, typer.Option("--ca", help="Certificate of the authority that signed the server's.")
    ] = None,
    key: Annotated[Path | None, typer.Option("--key", help="This site's private key.")] = None,
    name: Annotated[str | None, typer.Option("--name", help="By default that of the file.")] = None,
    state: Annotated[
        Path | None, typer.Option("--state", help="Ledger, noise key, contract; by default with the data.")
    ] = None,
    allow_model: Annotated[
        list[str] | None,
        typer.Option("--allow-model", metavar="MODULE:FUNCTION", help="A model whose code may run here."),
    ] = None,
    held_out: Annotated[
        float | None,
        typer.Option("--held-out", help="Share of the records that is never trained on; by default none."),
    ] = None,
    split: Annotated[
        str, typer.Option("--split", metavar="SEED[:PLACE]", help="Which those are, by position alone.")
    ] = "0",
    evaluation_epsilon: Annotated[
        float | None,
        typer.Option("--evaluation-epsilon", help="Let held-out records score models, noisily, for this."),
    ] = None,
    evaluation_reports: Annotated[
        int, typer.Option("--evaluation-reports", help="How often they may, for all of it.")
    ] = 1,
    trust_server: Annotated[
        bool,
        typer.Option("--trust-server", help="Units client, worker: let it see clipped updates in the clear."),
    ] = False,
    adjacency: Annotated[
        RecordAdjacency | None,
        typer.Option("--adjacency", help="Neighbours for whom --epsilon must hold; by default the plan's."),
    ] = None,
    noise_seed: Annotated[
        int | None, typer.Option("--noise-seed", help="For tests: repeatable noise, private against nobody.")
    ] = None,
    plaintext: Annotated[
        bool, typer.Option("--plaintext", help="No TLS and no key: for a trial, on loopback only.")
    ] = False,
) -> None:
    require_flower()
    from coterie.engines.flower.joining import Joining, open_site, parse_split
    from coterie.engines.flower.network import Connection, attend

    proofs = "--ca and --key: needed, unless --plaintext asks for a trial without any"
    InputError.when(plaintext != (ca is None and key is None), proofs)
    joining = Joining(
        data,
        epsilon,
        delta,
        name,
        state,
        tuple(allow_model or ()),
        held_out,
        parse_split(split),
        evaluation_epsilon,
        evaluation_reports,
        noise_seed,
        trust_server,
        None if adjacency is None else Adjacency(adjacency),
    )
    connection = Connection(server, ca, key)
    site = open_site(joining)
    InputError.when(
        site.finished,
        f"{site.files.path}: its experiment is finished; another needs another --state, and what "
        "it spends adds to what was spent",
    )
    with contextlib.closing(site), log_to_stderr():
        attend(connection, site.files.path / "node", site.handle, lambda: site.finished)
    say(f"finished: {site.files.path}")
