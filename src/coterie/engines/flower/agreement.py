"""What a server and its sites say outside of rounds: who is there, what they sign, what sites take home."""

from collections.abc import Callable, Mapping, Sequence

from flwr.app import RecordDict
from flwr.serverapp import Grid

from coterie.algorithms.protocol import Assignment, OwnChoice
from coterie.engines.flower import messages
from coterie.engines.flower.contract import Contract
from coterie.engines.flower.messages import FinalModels, GarbageError, SiteFacts
from coterie.engines.flower.transport import Answers, Timeouts, Transport
from coterie.errors import CoterieError


def gather_facts(transport: Transport, *, named: bool = True) -> Answers[SiteFacts]:
    """Ask every site for its public facts, which it must give under the name by which it is known."""

    def read(name: str, content: RecordDict) -> SiteFacts:
        facts = SiteFacts.from_content(content)
        GarbageError.when(named and facts.name != name, "a site under another's name")
        return facts

    return transport.ask(messages.FACTS, dict.fromkeys(sorted(transport.nodes), messages.pack({})), read)


def names_of(grid: Grid, nodes: Sequence[int], timeouts: Timeouts) -> dict[str, int]:
    """The names that nodes give themselves, where no keys say who they are."""
    transport = Transport(grid, {str(node): node for node in nodes}, timeouts)
    found = gather_facts(transport, named=False)
    for node, reason in found.missing.items():
        raise CoterieError(f"node {node}: no facts ({reason})")
    names = {facts.name: transport.nodes[node] for node, facts in found.by_client.items()}
    CoterieError.when(len(names) < len(nodes), "two nodes give themselves the same name")
    return names


def offer(
    transport: Transport, contracts: Mapping[str, Contract], seconds: float | None = None
) -> Answers[str]:
    """Propose its contract to every site.

    Args:
        seconds: that a site has to consider it: it loads what it needs for the model, and checks all of it.
    """
    contents = {name: contract.to_content() for name, contract in contracts.items()}
    return transport.ask(messages.OFFER, contents, _confirming("accepted", contracts), seconds=seconds)


def finish(
    transport: Transport, contracts: Mapping[str, Contract], served: Assignment | OwnChoice
) -> Answers[str]:
    """Tell sites that nothing more will be asked, and hand each the model that it uses.

    A site gets no model but its own, where the server knows which that is: workers must not see those of
    groups that they are not in. Where sites choose for themselves, each gets those that it chooses from.
    """
    there = transport.present(list(contracts))

    def final(name: str) -> FinalModels:
        if isinstance(served, OwnChoice):
            return FinalModels(contracts[name].digest, served.models, None)
        return FinalModels(contracts[name].digest, served.model_of(name)[None], served.cluster_of[name])

    told = {name: final(name).to_content() for name in there}
    return transport.ask(messages.FINISHED, told, _confirming("closed", contracts))


def _confirming(word: str, contracts: Mapping[str, Contract]) -> Callable[[str, RecordDict], str]:
    """How an answer is read that says that the site did this with its contract."""

    def read(name: str, content: RecordDict) -> str:
        found: str = messages.plain_of(content, {word: str})[word]
        GarbageError.when(found != contracts[name].digest, "another contract")
        return found

    return read
