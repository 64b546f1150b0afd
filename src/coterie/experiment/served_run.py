"""A run whose clients are sites: their facts, their consent, the rounds, and what they take home.

The server keeps a run folder like any other: what it asked for is in its ledger, what it concluded in its
checkpoint. Sites keep ledgers of their own.

Where a unit is a client or a worker, the server is trusted with clipped updates: it keeps the noise key of
the run and the ledger of the whole population. Who was sampled is a secret that the noise counts on, so
nothing that stays in the folder tells who answered.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from coterie.algorithms.protocol import Assignment, OwnChoice
from coterie.algorithms.state import State
from coterie.engines.clients import TrainingFacts
from coterie.engines.cohorts import Cohorts
from coterie.engines.driver import answer_all
from coterie.engines.evaluation import PrivateScores
from coterie.engines.flower import agreement
from coterie.engines.flower.contract import Contract
from coterie.engines.flower.members import RemoteMembers
from coterie.engines.flower.messages import REFUSALS
from coterie.engines.flower.server import FlowerEngine, Participation
from coterie.engines.flower.transport import (
    Answers,
    Journal,
    NobodyAnswered,
    Transport,
)
from coterie.engines.local import coin_key
from coterie.errors import InputError
from coterie.experiment import checkpoint, folder
from coterie.experiment.callbacks import Callbacks, RoundReport
from coterie.experiment.evaluator import Evaluator, Served, rows_of
from coterie.experiment.folder import RunFolder
from coterie.experiment.loop import OpenRunFolder, Run, open_folder
from coterie.experiment.private_scores import Floats
from coterie.experiment.proposing import calibrate_sites, contracts_of
from coterie.experiment.recorded import check_folder
from coterie.experiment.result import RunResult
from coterie.experiment.schema import Experiment
from coterie.experiment.sites import Sites, check_servable, trusts_server
from coterie.files import append_line, forget_rounds, read_lines
from coterie.privacy import Ledger, Released

log = logging.getLogger(__name__)
AGAIN_SECONDS = 2.0
"""Between two questions whether an operator has decided."""
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
        most_records: int | None = None,
    ) -> None:
        check_servable(experiment)
        self.files = files
        self.transport = transport
        self.callbacks = callbacks or Callbacks()
        if files.exists:
            check_folder(files)
            self.sites = Sites.load(files.sites)
        else:
            self.sites = Sites.gather(transport, most_records)
            self.callbacks.tell("on_joined", self.sites.records)
        self.calibrated = calibrate_sites(experiment, self.sites, truth)
        self.contracts = contracts_of(self.calibrated, self.sites)
        self._trusted = trusts_server(experiment)
        self._journal = Journal(files.path / "journal")

    def finish(self) -> RunResult:
        """Begin the run, or go on with it, to its end; then tell the sites."""
        key_is_for = self.sites.experiment if self._trusted else None
        folder = open_folder(self.files, self.calibrated, key_is_for, self.sites.to_json())
        with self.callbacks.ending() as end, folder as opened:
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
                told = replace(report, answered=answered, missing=missing, spent=spent, budget=budget)
                self.callbacks.tell("on_round", told)

            state = answer_all(run.rounds(replace(self.callbacks, on_round=tell)))
            result = run.result(state)
            spent, _ = self._spent(opened.ledger)
            asked = dict.fromkeys(self.contracts, spent[EVERYONE]) if self._trusted else spent
            result = replace(result, participation=participation.tally, asked=asked)
            opened.finish(result.to_json())
            self._hand_out(state)
            end(result)
        return result

    def hand_out_rest(self) -> list[str]:
        """Hand the models of a finished run to sites that have not got theirs; who still has not."""
        saved = checkpoint.load(self.files.checkpoint, self.calibrated.algorithm.state_type)
        if saved is None:
            raise InputError(f"{self.files.checkpoint}: the models were dropped on purpose")
        return self._hand_out(saved.state)

    def _hand_out(self, state: State) -> list[str]:
        """Tell sites that it is over, with the model that each uses; who could not be told.

        The run is finished by then: a site that is away now takes its model home when it comes again.
        """
        waiting = without_models(self.files, self.contracts)
        contracts = {name: self.contracts[name] for name in waiting}
        told = agreement.finish(self.transport, contracts, self.calibrated.algorithm.models(state))
        for name in told.by_client:
            append_line(self.files.handed, {"site": name})
        left = [name for name in waiting if name not in told.by_client]
        for name in left:
            log.warning(
                "%s has not got its model (%s); serve --resume hands it out",
                name,
                told.missing.get(name, "away"),
            )
        return left

    def _agree(self, resumed: bool) -> None:
        """Propose the contracts; before the first release everybody must have agreed."""
        there = set(self.transport.present(list(self.contracts))) if resumed else set(self.contracts)
        wanted = {name: contract for name, contract in self.contracts.items() if name in there}
        answers, promised = self._offer(wanted, resumed), self.calibrated.guarantee.line
        if answers.missing and not resumed:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in answers.missing.items())
            raise InputError(
                f"not all clients agree to the plan ({promised}): {reasons}. Nothing was released; "
                "once they do, --resume goes on"
            )

    def _offer(self, contracts: Mapping[str, Contract], resumed: bool) -> Answers[str]:
        """Propose contracts; an operator who reads one is asked again until there is an answer.

        At first everybody has the time for consent: sites make ready for the model before they agree, so that
        later the time for an answer is that of the answer alone. Who was ready before does not need it.
        """
        timeouts = self.transport.timeouts
        until = time.monotonic() + timeouts.consent
        seconds = None if resumed else max(timeouts.answer, timeouts.consent)
        told = False
        while True:
            answers = agreement.offer(self.transport, contracts, seconds)
            reading = [name for name, why in answers.missing.items() if REFUSALS["review"] in why]
            if not reading or time.monotonic() > until:
                return answers
            if not told:
                log.info("waiting for the operators of %s, who read the plan", ", ".join(reading))
            told = True
            time.sleep(AGAIN_SECONDS)

    def _engine(
        self, opened: OpenRunFolder, note: Callable[[Participation], None]
    ) -> "tuple[FlowerEngine, SiteScores]":
        calibrated, ledger, lr = self.calibrated, opened.ledger, self.calibrated.experiment.schedule.lr
        plan, context, size = calibrated.plan, calibrated.context(), calibrated.facts.parameters
        cohorts = trusted = None
        if self._trusted:  # then coins, sums and noise are the server's
            seed, records = calibrated.experiment.seeds.simulation, calibrated.facts.records
            coins = coin_key(opened.key, seed)
            facts = TrainingFacts(tuple(records), tuple(records.values()), lr, opened.key, coins, seed)
            members = RemoteMembers(self.transport, self.contracts, size, self._journal)
            cohorts = Cohorts(facts, members, size, plan, ledger, context)
            trusted = PrivateScores(facts, plan, ledger, context), members
        engine = FlowerEngine(
            self.transport, self.contracts, plan, ledger, lr, size, context, self._journal, note, cohorts
        )
        return engine, SiteScores(engine, tuple(self.contracts), trusted)

    def _spent(self, ledger: Ledger) -> tuple[dict[str, float], dict[str, float]]:
        """Epsilon and its budget by client; one for all of a population, or of workers in groups."""
        plan, budgets = self.calibrated.plan, self.calibrated.budgets
        if self._trusted:
            least = min(budget.epsilon for budget in budgets.values())
            return {EVERYONE: self.calibrated.spent(ledger)}, {EVERYONE: least}
        return {
            client: max(ledger.spent(unit.subject) for unit in plan.units if unit.owner == client)
            for client in self.contracts
        }, {client: budgets[client].epsilon for client in self.contracts}


def without_models(files: RunFolder, sites: Iterable[str]) -> list[str]:
    """Those of the sites that have not taken their models home."""
    handed = {str(line.get("site")) for line in read_lines(files.handed)} if files.handed.exists() else set()
    return [name for name in sites if name not in handed]


@dataclass(frozen=True)
class SiteScores:
    """Scores on held-out records that lie at sites.

    Args:
        trusted: who adds the noise and who asks the sites, of a server that they trust.
    """

    engine: FlowerEngine
    names: tuple[str, ...]
    trusted: tuple[PrivateScores, RemoteMembers] | None

    def of_records(
        self, served: Assignment, clients: Collection[str], round: int
    ) -> Mapping[str, Released[float]]:
        models = {client: served.model_of(client) for client in self.names if client in clients}
        try:
            return self.engine.evaluate(models, round)
        except NobodyAnswered:
            return {}

    def of_clients(self, served: Served, round: int) -> Released[float]:
        assert self.trusted is not None
        private, members = self.trusted
        rows = {
            client: served.models if isinstance(served, OwnChoice) else served.model_of(client)[None]
            for client in self.names
        }
        return private.of_clients(rows_of(served), round, lambda: members.shares(rows, round))

    def jointly_of_records(
        self, served: Assignment, clients: Collection[str], round: int
    ) -> Mapping[str, Released[Floats]]:
        raise AssertionError("check_servable refuses several scores between sites")

    def jointly_of_clients(self, served: Served, round: int) -> Released[Floats]:
        raise AssertionError("check_servable refuses several scores between sites")


class Participants:
    """Who answered which request, in a file of its own; empty where that is a secret."""

    def __init__(self, path: Path, rounds: int) -> None:
        """Go on with what is known of so many rounds."""
        folder.keep_rounds(path, rounds)
        self._path = path
        self._known = [Participation(**line) for line in read_lines(path)]

    def note(self, participation: Participation) -> None:
        """Keep who answered a request, and why the others did not."""
        append_line(self._path, asdict(participation))
        self._known.append(participation)

    def of_round(self, round: int) -> tuple[tuple[str, ...], dict[str, str]]:
        """Who answered everything in a round, and why the others did not."""
        requests = [one for one in self._known if one.round == round]
        missing = {name: why for request in requests for name, why in request.missing.items()}
        answered = {name for request in requests for name in request.answered} - set(missing)
        return tuple(sorted(answered)), missing

    @property
    def tally(self) -> dict[str, dict[str, int]]:
        """How many requests each site answered, and how many it missed."""
        answered = Counter(name for request in self._known for name in request.answered)
        missed = Counter(name for request in self._known for name in request.missing)
        asked = dict.fromkeys(name for one in self._known for name in (*one.answered, *one.missing))
        return {name: {"answered": answered[name], "missed": missed[name]} for name in asked}
