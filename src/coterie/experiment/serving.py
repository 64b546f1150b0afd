"""One run over Flower, from the server's side: its sites agree to a plan, then the run loop asks them.

The server keeps a run folder like any other: what it asked for is in its ledger, what it concluded in its
checkpoint. Sites keep ledgers of their own.

Where a unit is a client or a worker, the server is trusted with clipped updates: it keeps the noise key of
the run and the ledger of the whole population. Who was sampled is a secret that the noise counts on, so
nothing that stays in the folder tells who answered.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from coterie.algorithms.protocol import Assignment, OwnChoice
from coterie.engines.clients import TrainingFacts
from coterie.engines.cohorts import Cohorts
from coterie.engines.driver import answer_all
from coterie.engines.evaluation import PrivateScores
from coterie.engines.flower import server
from coterie.engines.flower.members import RemoteMembers
from coterie.engines.flower.server import FlowerEngine, Participation
from coterie.engines.flower.transport import Journal, NobodyAnswered, Transport
from coterie.engines.local import coin_key
from coterie.errors import InputError
from coterie.experiment import folder
from coterie.experiment.evaluator import Evaluator, Served, rows_of
from coterie.experiment.folder import RunFolder
from coterie.experiment.loop import Run
from coterie.experiment.opened import OpenRunFolder, open_folder
from coterie.experiment.recorded import check_folder
from coterie.experiment.result import Callbacks, RoundReport, RunResult
from coterie.experiment.schema import Experiment
from coterie.experiment.sites import Sites, calibrate_sites, check_servable, contracts_of, trusts_server
from coterie.files import append_line, forget_rounds, read_lines
from coterie.privacy import Ledger, Released

EVERYONE = "everyone"
"""In place of a client's name, where what was spent is the same for all."""


class ServedRun:
    """A run whose clients are sites: gathers their facts, has them agree, and keeps who answered."""

    def __init__(
        self,
        experiment: Experiment,
        files: RunFolder,
        transport: Transport,
        *,
        truth: Mapping[str, int] | None = None,
        callbacks: Callbacks | None = None,
    ) -> None:
        check_servable(experiment)
        self.files = files
        self.transport = transport
        self.callbacks = callbacks or Callbacks()
        if files.exists:
            check_folder(files)
            self.sites = Sites.load(files.sites)
        else:
            self.sites = Sites.gather(transport)
            self.callbacks.joined(self.sites.records)
        self.calibrated = calibrate_sites(experiment, self.sites, truth)
        self.contracts = contracts_of(self.calibrated, self.sites)
        self._trusted = trusts_server(experiment)
        self._journal = Journal(files.path / "journal")

    def finish(self) -> RunResult:
        """Begin the run, or go on with it, to its end; then tell the sites."""
        key_is_for = self.sites.experiment if self._trusted else None
        with open_folder(self.files, self.calibrated, key_is_for, self.sites.to_json()) as opened:
            # Nothing is charged before all have agreed.
            self._agree(resumed=opened.ledger.head.count > 1)
            participation = Participants(self.files.participation, opened.state.round)
            engine, scores = self._engine(opened, participation.note)
            evaluator = Evaluator(self.calibrated, scores, metrics=opened.metrics.bodies)
            run = Run(self.calibrated, opened, engine, evaluator)

            def tell(report: RoundReport) -> None:
                forget_rounds(self._journal.folder, before=report.round + 1)
                answered, missing = participation.of_round(report.round)
                spent, budget = self._spent(opened.ledger)
                self.callbacks.round(
                    replace(report, answered=answered, missing=missing, spent=spent, budget=budget)
                )

            result = run.result(answer_all(run.rounds(tell)))
            spent, _ = self._spent(opened.ledger)
            asked = dict.fromkeys(self.contracts, spent[EVERYONE]) if self._trusted else spent
            result = replace(result, participation=participation.tally, asked=asked)
            server.finish(self.transport, self.contracts)
            opened.finish(result.to_json())
        return result

    def _agree(self, resumed: bool) -> None:
        """Propose the contracts; before the first release everybody must have agreed."""
        there = set(self.transport.present(list(self.contracts))) if resumed else set(self.contracts)
        wanted = {name: contract for name, contract in self.contracts.items() if name in there}
        answers, promised = server.offer(self.transport, wanted), self.calibrated.guarantee.line
        if answers.missing and not resumed:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in answers.missing.items())
            raise InputError(
                f"not all clients agree to the plan ({promised}): {reasons}. Nothing was released; "
                "once they do, --resume goes on"
            )
        self.callbacks.agreed(promised)

    def _engine(
        self, opened: OpenRunFolder, note: Callable[[Participation], None]
    ) -> "tuple[FlowerEngine, SiteScores]":
        calibrated, lr = self.calibrated, self.calibrated.experiment.schedule.lr
        plan, context, parameters = calibrated.plan, calibrated.context(), calibrated.facts.parameters
        cohorts = members = private = None
        if self._trusted:  # then coins, sums and noise are the server's
            seed, records = calibrated.experiment.seeds.simulation, calibrated.facts.records
            coins = coin_key(opened.key, seed)
            facts = TrainingFacts(tuple(records), tuple(records.values()), lr, opened.key, coins, seed)
            members = RemoteMembers(self.transport, self.contracts, parameters, self._journal)
            private = PrivateScores(facts, plan, opened.ledger, context)
            cohorts = Cohorts(facts, members, parameters, plan, opened.ledger, context)
        engine = FlowerEngine(
            self.transport,
            self.contracts,
            plan,
            opened.ledger,
            lr,
            parameters,
            context,
            self._journal,
            note,
            cohorts,
        )
        return engine, SiteScores(engine, tuple(self.contracts), private, members)

    def _spent(self, ledger: Ledger) -> tuple[dict[str, float], dict[str, float]]:
        """Epsilon and its budget by client; one for all of a population, or of workers in groups."""
        plan, budgets = self.calibrated.plan, self.calibrated.budgets
        if self._trusted:
            most = min(budget.epsilon for budget in budgets.values())
            return {EVERYONE: self.calibrated.spent(ledger)}, {EVERYONE: most}
        return {
            client: max(ledger.spent(unit.subject) for unit in plan.units if unit.owner == client)
            for client in self.contracts
        }, {client: budgets[client].epsilon for client in self.contracts}


@dataclass(frozen=True)
class SiteScores:
    """Scores on held-out records that lie at sites.

    Args:
        private, members: of a server that the sites trust.
    """

    engine: FlowerEngine
    names: tuple[str, ...]
    private: PrivateScores | None
    members: RemoteMembers | None

    def of_records(
        self, served: Assignment, clients: Collection[str], round: int
    ) -> Mapping[str, Released[float]]:
        models = {client: served.model_of(client) for client in self.names if client in clients}
        try:
            return self.engine.evaluate(models, round)
        except NobodyAnswered:
            return {}

    def of_clients(self, served: Served, round: int) -> Released[float]:
        private, members = self.private, self.members
        assert private is not None
        assert members is not None
        rows = {
            client: served.models if isinstance(served, OwnChoice) else served.model_of(client)[None]
            for client in self.names
        }
        return private.of_clients(rows_of(served), round, lambda: members.shares(rows, round))


class Participants:
    """Who answered which request, in a file of its own; empty where that is a secret."""

    def __init__(self, path: Path, rounds: int) -> None:
        """Go on with what is known of so many rounds."""
        self._path = path
        self._latest: list[Participation] = []
        self.tally: dict[str, dict[str, int]] = {}
        folder.keep_rounds(path, rounds)
        for line in read_lines(path):
            self._count(line["answered"], line["missing"])

    def note(self, participation: Participation) -> None:
        """Keep who answered a request, and why the others did not."""
        append_line(self._path, asdict(participation))
        self._latest.append(participation)
        self._count(participation.answered, participation.missing)

    def of_round(self, round: int) -> tuple[tuple[str, ...], dict[str, str]]:
        """Who answered everything in a round, and why the others did not."""
        self._latest = [one for one in self._latest if one.round == round]
        missing = {name: why for request in self._latest for name, why in request.missing.items()}
        answered = {name for request in self._latest for name in request.answered} - set(missing)
        return tuple(sorted(answered)), missing

    def _count(self, answered: Iterable[str], missing: Iterable[str]) -> None:
        for what, names in (("answered", answered), ("missed", missing)):
            for name in names:
                self.tally.setdefault(name, {"answered": 0, "missed": 0})[what] += 1
