"""`coterie join`: a site takes part with its own records, ledger and noise, over Flower."""

import contextlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from coterie.cli.console import complain, say
from coterie.cli.events import EventLog
from coterie.cli.options import LifetimeDelta, LifetimeEpsilon, LogJson, NewRecords, RecordAdjacency
from coterie.engines.flower import require_flower
from coterie.errors import InputError
from coterie.privacy import Adjacency


def join(
    data: Annotated[Path, typer.Option("--data", help="Folder with federation.yaml and one data file.")],
    server: Annotated[
        str, typer.Option("--server", metavar="HOST:PORT", help="Where it listens; several with commas.")
    ],
    epsilon: Annotated[
        float | None, typer.Option("--epsilon", help="The most that may be spent of these records.")
    ] = None,
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
        int | None, typer.Option("--evaluation-reports", help="How often they may, for all of it: 1.")
    ] = None,
    trust_server: Annotated[
        bool,
        typer.Option("--trust-server", help="Units client, worker: let it see clipped updates in the clear."),
    ] = False,
    adjacency: Annotated[
        RecordAdjacency | None,
        typer.Option("--adjacency", help="Neighbours for whom --epsilon must hold; by default the plan's."),
    ] = None,
    records_per_person: Annotated[
        int | None,
        typer.Option(
            "--records-per-person",
            help="Protect persons (federation.yaml: person), of whom so many records count.",
        ),
    ] = None,
    noise_seed: Annotated[
        int | None, typer.Option("--noise-seed", help="For tests: repeatable noise, private against nobody.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on under a contract; refused where there is none yet.")
    ] = False,
    review: Annotated[
        bool, typer.Option("--review", help="Show what the server proposes, and wait for yes.")
    ] = False,
    policy: Annotated[
        Path | None,
        typer.Option("--policy", help="YAML file: sign what it allows, refuse the rest with the rule named."),
    ] = None,
    lifetime_epsilon: LifetimeEpsilon = None,
    lifetime_delta: LifetimeDelta = None,
    new_records: NewRecords = False,
    plaintext: Annotated[
        bool, typer.Option("--plaintext", help="No TLS and no key: for a trial, on loopback only.")
    ] = False,
    log_json: LogJson = False,
) -> None:
    require_flower()
    from coterie.engines.flower.attending import Connection, attend
    from coterie.engines.flower.joining import Joining, open_site, parse_split, spent_before
    from coterie.engines.flower.review import Reviewer

    proofs = "--ca and --key: needed, unless --plaintext asks for a trial without any"
    InputError.when(plaintext != (ca is None and key is None), proofs)
    joining = Joining(
        data,
        name=name,
        state=state,
        held_out=held_out,
        split=parse_split(split),
        noise_seed=noise_seed,
        records_per_person=records_per_person,
        lifetime_epsilon=lifetime_epsilon,
        lifetime_delta=lifetime_delta,
        new_records=new_records,
        **_allowed(
            policy,
            {
                "--epsilon": ("epsilon", epsilon),
                "--delta": ("delta", delta),
                "--allow-model": ("models", tuple(allow_model or ()) or None),
                "--evaluation-epsilon": ("evaluation_epsilon", evaluation_epsilon),
                "--evaluation-reports": ("evaluation_reports", evaluation_reports),
                "--trust-server": ("trust_server", trust_server or None),
                "--adjacency": ("adjacency", None if adjacency is None else Adjacency(adjacency)),
            },
        ),
    )
    reviewer = Reviewer(
        _decide if review else None,
        lambda: [("who asks", server), ("spent before", spent_before(data))],
    )
    connection = Connection(server, ca, key)
    site = open_site(joining, reviewer)
    if resume and site.session is None and not site.finished:
        raise InputError(f"--resume: {site.files.contract} does not exist; without it, join begins anew")
    InputError.when(
        site.finished,
        f"{site.files.path}: its experiment is finished; another needs another --state, and what "
        "it spends adds to what was spent",
    )
    with contextlib.closing(site), EventLog(as_json=log_json).logging():
        attend(connection, site)
    from coterie.experiment.card import write_card
    from coterie.experiment.site_card import card_of
    from coterie.report.site import write_site_report

    say(f"finished: {site.files.path}")
    say(f"report: {write_site_report(site.files.path)}")
    write_card(card_of(site.files.path))
    say(f"what may be claimed of it: coterie card {site.files.path}")
    say(f"the model that this site uses: coterie predict {site.files.path} --data FILE")


def _allowed(policy: Path | None, options: Mapping[str, tuple[str, object]]) -> dict[str, Any]:
    """What the operator allows: by options, or by a policy file, never by both."""
    given = {field: value for field, value in options.values() if value is not None}
    if policy is None:
        InputError.when(
            "epsilon" not in given, "--epsilon: needed, unless --policy names a file that says it"
        )
        return given
    for option, (_, value) in options.items():
        twice = f"{option}: beside --policy, which says what is allowed; put it into {policy}"
        InputError.when(value is not None, twice)
    from coterie.engines.flower.policy import read_policy

    found = read_policy(policy)
    said = {
        "epsilon": found.epsilon,
        "delta": found.delta,
        "models": tuple(found.models or ()),
        "trust_server": found.trust_server,
        "adjacency": None if found.adjacency is None else Adjacency(found.adjacency),
        "rules": found.rules,
    }
    if found.evaluation is not None:
        said |= {
            "evaluation_epsilon": found.evaluation.epsilon,
            "evaluation_reports": found.evaluation.reports,
        }
    return said


def _decide(facts: Sequence[tuple[str, str]]) -> bool:
    """Show what is proposed, and wait for the operator; whoever cannot answer has not agreed."""
    complain("The server proposes:")
    width = max(len(name) for name, _ in facts)
    for name, told in facts:
        complain(f"  {name.ljust(width)}  {told}")
    complain("Agree? yes or no: ")
    answer = sys.stdin.readline().strip().lower()
    complain("agreed" if answer in ("yes", "y") else "not agreed; nothing was released")
    return answer in ("yes", "y")
