"""The run loop, the same on every engine: rounds, evaluation, metrics, checkpoint, result."""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

from coterie.algorithms.protocol import Assignment, State
from coterie.engines.driver import Engine, Work, addressed
from coterie.experiment.calibrated import CalibratedRun
from coterie.experiment.evaluator import Evaluation, Evaluator, exact_figures
from coterie.experiment.metrics import (
    clustering_accuracy,
    live_clusters,
    minority_found,
    round_line,
    same_partition,
)
from coterie.experiment.opened import OpenRunFolder
from coterie.experiment.result import RoundReport, RunResult
from coterie.files import append_line, read_lines
from coterie.privacy import POPULATION, Ledger, PrivacyPlan


@dataclass(frozen=True)
class Run:
    """A calibrated run in its folder, with those who answer its requests and judge its models."""

    calibrated: CalibratedRun
    opened: OpenRunFolder
    engine: Engine
    evaluator: Evaluator

    def rounds(self, tell: Callable[[RoundReport], None]) -> Work[State]:
        """Do the rounds that are still to be done; whoever drives this has the engine answer."""
        opened, engine, algorithm = self.opened, self.engine, self.calibrated.algorithm
        state, rounds = opened.state, self.calibrated.experiment.schedule.rounds
        while state.round < rounds:
            began, waited = time.perf_counter(), engine.waited
            state = yield from addressed(algorithm.round(state), engine, state.round + 1)
            trained = time.perf_counter()
            began += engine.waited - waited
            judged = self.evaluator.after(state)
            self._log(state, judged)
            seconds = {"train": trained - began, "evaluate": time.perf_counter() - trained}
            append_line(opened.files.timing, {"round": state.round, **seconds})
            opened.save(state, engine.personal)
            tell(
                RoundReport(
                    round=state.round,
                    rounds=rounds,
                    accuracy=judged.accuracy.mean if judged else None,
                    epsilon=self.calibrated.spent(opened.ledger),
                    seconds=sum(seconds.values()),
                )
            )
        return state

    def _log(self, state: State, judged: Evaluation | None) -> None:
        opened, spent = self.opened, self.calibrated.spent(self.opened.ledger)
        scores = (judged.accuracy, judged.loss) if judged else None
        opened.metrics.append(round_line(state.round, scores, self._clusters(state, judged), spent))
        findings = self.calibrated.algorithm.findings(state)
        if findings is not None:
            opened.seal.write_json(opened.files.findings, asdict(findings))

    def _clusters(self, state: State, judged: Evaluation | None) -> Mapping[str, int]:
        """Who uses which model; nothing where that is known to the clients alone."""
        known = judged.assignment if judged else None
        served = self.calibrated.algorithm.models(state) if known is None else known
        return served.cluster_of if isinstance(served, Assignment) else {}

    def result(self, state: State) -> RunResult:
        """What was found, after the last round."""
        calibrated, opened, judged = self.calibrated, self.opened, self.evaluator.after(state)
        clusters, truth = self._clusters(state, judged), calibrated.population.truth
        findings = calibrated.algorithm.findings(state)
        timing = list(read_lines(opened.files.timing))
        trained = sum(line["train"] for line in timing)
        gradients = sample_gradients(calibrated, opened.ledger)
        known = truth if truth and clusters else None
        return RunResult(
            folder=opened.files.path,
            algorithm=calibrated.algorithm.name,
            accuracy=judged.accuracy if judged else None,
            loss=judged.loss if judged else None,
            clusters=dict(clusters),
            clusters_found=same_partition([clusters[client] for client in known], list(known.values()))
            if known
            else None,
            guarantee=opened.guarantee.line,
            guarantee_text=opened.guarantee.text,
            epsilon=opened.guarantee.epsilon,
            delta=opened.guarantee.delta,
            noise_multiplier=training_noise(calibrated.plan),
            rounds=state.round,
            seconds=trained + sum(line["evaluate"] for line in timing),
            sample_gradients_per_second=gradients / trained if trained > 0 else 0.0,
            warnings=findings.warnings if findings else (),
            minority_found=minority_found(clusters, known) if known else None,
            clustering_accuracy=clustering_accuracy(clusters, known) if known else None,
            live_clusters=live_clusters(clusters),
            per_worker=calibrated.per_worker(),
            per_client=opened.guarantee.per_client_json(),
            **(exact_figures(calibrated, judged, clusters) if judged else {}),
        )


def training_noise(plan: PrivacyPlan) -> float:
    """The largest noise multiplier that any unit trains with."""
    mechanisms = (release.mechanism for unit in plan.units for release in unit.releases)
    noises = (mechanism.multiplier for mechanism in mechanisms if mechanism.sampled)
    return max(noise for noise in noises if noise is not None)


def sample_gradients(calibrated: CalibratedRun, ledger: Ledger) -> int:
    """Per-record gradients computed so far (in expectation, where samples are drawn)."""
    plan, total, records = calibrated.plan, 0, calibrated.facts.records
    for unit in plan.units:
        for name, times in ledger.executed(unit.subject).items():
            members = records.values() if unit.subject == POPULATION else [records[unit.owner]]
            learning = sum(calibrated.algorithm.local_gradients(own) for own in members)
            total += unit.release(name).mechanism.gradients(times, learning)
    return total
