"""A run folder as the report reads it: finished, unfinished, with or without clusters to show."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from coterie.algorithms import find_algorithm
from coterie.algorithms.protocol import Findings
from coterie.algorithms.record.oracle import TOLD
from coterie.errors import InputError
from coterie.experiment.experiment_file import read_recorded
from coterie.experiment.folder import RunFolder
from coterie.experiment.result import RunResult, Spread
from coterie.experiment.schema import Experiment
from coterie.experiment.scores import PooledScores
from coterie.files import read_json, read_lines, regular
from coterie.privacy import Guarantee, PrivacyPlan
from coterie.privacy.plain import from_plain
from coterie.report.numbers import fixed
from coterie.table import NONE


@dataclass(frozen=True)
class Measure:
    """What a model is judged by: the share of records it gets right, or the bounded score of a regression."""

    name: str
    is_share: bool

    def text(self, value: float | None) -> str:
        if value is None or not math.isfinite(value) or not self.is_share:
            return fixed(value)
        return f"{100 * value:.1f}%"

    def bare(self, value: float | None) -> str:
        """A difference: in points, where shares are compared."""
        if value is None or math.isnan(value):
            return NONE
        return f"{100 * value:.1f}" if self.is_share else fixed(value)

    def tick(self, value: float) -> str:
        return f"{100 * value:.4g}%" if self.is_share else f"{value:.4g}"


ACCURACY = Measure("accuracy", is_share=True)
SCORE = Measure("bounded score", is_share=False)


@dataclass(frozen=True)
class ClientLine:
    """Of a client; held-out records are None where they are a site's own affair."""

    name: str
    records: int
    test_records: int | None
    true_cluster: int | None


@dataclass(frozen=True)
class RoundLine:
    """One round as `metrics.jsonl` has it; figures are missing in rounds that were not evaluated."""

    round: int
    accuracy: Spread | None
    loss: Spread | None
    clusters: Mapping[str, int]
    epsilon: float


@dataclass(frozen=True)
class Moment:
    """The epsilons of all workers after so many epochs, each against the one that learns most about it."""

    epoch: int
    mean: float
    deviation: float
    largest: float


@dataclass(frozen=True)
class LeakageRecord:
    """`leakage.json` of a run folder; epsilon by target (row) and observer, None outside the threat model."""

    workers: tuple[str, ...]
    structure: str
    threat_model: int
    delta: float
    epsilon: tuple[tuple[float | None, ...], ...]
    per_worker: Mapping[str, float | None]
    history: tuple[Moment, ...]

    @property
    def largest(self) -> float:
        return max((cell for row in self.epsilon for cell in row if cell is not None), default=0.0)


@dataclass(frozen=True)
class RunRecord:
    """Everything a report shows, read once.

    Args:
        leakage: who learns how much about whom, where workers watch each other.
        served: whether its clients were sites, with records of their own.
        public: whether what is outside the guarantee was left out.
    """

    name: str
    experiment: Experiment
    experiment_text: str
    version: str
    parameters: int
    measure: Measure
    classes: int
    clients: tuple[ClientLine, ...]
    plan: PrivacyPlan
    guarantee: Guarantee
    rounds: tuple[RoundLine, ...]
    findings: Findings | None
    result: RunResult | None
    leakage: LeakageRecord | None = None
    served: bool = False
    public: bool = False

    @property
    def finished(self) -> bool:
        return self.result is not None

    @property
    def outcome(self) -> RunResult:
        """The result of a run that has one."""
        assert self.result is not None, self.name
        return self.result

    @property
    def has_privacy(self) -> bool:
        """Whether anything is promised to everybody: one client without a bound is one too many."""
        return math.isfinite(self.guarantee.epsilon)

    @property
    def planned_rounds(self) -> int:
        return self.experiment.schedule.rounds

    @property
    def _last(self) -> RunResult | RoundLine | None:
        """What was measured last."""
        measured = [line for line in self.rounds if line.accuracy is not None]
        return self.result or (measured[-1] if measured else None)

    @property
    def accuracy(self) -> Spread | None:
        """Or the bounded score of a regression, as `measure` says."""
        last = self._last
        return last.reached if isinstance(last, RunResult) else last.accuracy if last else None

    @property
    def scores(self) -> PooledScores:
        """Of all held-out records together, once the run has finished."""
        return self.result.scores if self.result else {}

    @property
    def loss(self) -> Spread | None:
        return self._last.loss if self._last else None

    @property
    def is_exact(self) -> bool:
        """Whether scores were computed as they are, outside the guarantee."""
        return any(
            reached is not None and not reached.is_private
            for reached in (self.accuracy, *(line.accuracy for line in self.rounds))
        )

    @property
    def clusters(self) -> Mapping[str, int]:
        """The cluster each client is in now; empty before the first round."""
        last = self.result or (self.rounds[-1] if self.rounds else None)
        return last.clusters if last else {}

    @property
    def truth(self) -> Mapping[str, int] | None:
        """The true cluster of each client, where there is more than one to tell apart."""
        known = {
            client.name: client.true_cluster for client in self.clients if client.true_cluster is not None
        }
        return known if len(known) == len(self.clients) and len(set(known.values())) > 1 else None

    @property
    def knows_truth(self) -> bool:
        """Whether the algorithm was handed the true clusters."""
        chosen = self.experiment
        if chosen.own_algorithm:  # whose code is not asked
            return TOLD in self.guarantee.caveats
        return find_algorithm(self.plan.unit, chosen.algorithm.name).needs_truth

    @property
    def warnings(self) -> tuple[str, ...]:
        told = self.result or self.findings
        return told.warnings if told else ()


def read_run(path: Path) -> RunRecord:
    """Read a run folder; a file that is missing or broken is one clear line."""
    files = RunFolder(path)
    if not files.exists:
        raise InputError(f"{path}: not a run folder, experiment.yaml is missing")
    federation = read_json(files.federation)
    with _written_by_this_version(files.federation):
        told: dict[str, Any] = {
            "clients": from_plain(tuple[ClientLine, ...], federation["clients"]),
            "measure": SCORE if federation["task"] == "regression" else ACCURACY,
            "version": str(federation["coterie"]),
            "parameters": int(federation["parameters"]),
            "classes": int(federation["classes"]),
        }
    return RunRecord(
        **told,
        name=path.resolve().name,
        experiment=read_recorded(files.experiment),
        experiment_text=regular(files.experiment).read_text(encoding="utf-8"),
        plan=PrivacyPlan.from_json(read_json(files.plan)),
        guarantee=Guarantee.from_json(read_json(files.guarantee)),
        rounds=read_rounds(files.metrics),
        findings=read_findings(files.findings),
        result=RunResult.load(path) if files.finished else None,
        leakage=read_leakage(files.leakage),
        served=files.sites.exists(),
    )


def read_rounds(path: Path) -> tuple[RoundLine, ...]:
    with _written_by_this_version(path):
        return tuple(
            RoundLine(
                round=line["round"],
                accuracy=Spread.from_json(reached) if (reached := _reached(line)) else None,
                loss=line["loss"] and Spread.from_json(line["loss"]),
                clusters=line["clusters"],
                epsilon=float(line["epsilon"]),
            )
            for line in read_lines(path)
        )


def _reached(line: Mapping[str, Any]) -> Any:
    """Accuracy, or the bounded score of a regression."""
    return line["accuracy"] or line.get("bounded_score")


def read_findings(path: Path) -> Findings | None:
    if not path.exists():
        return None
    content = read_json(path)
    with _written_by_this_version(path):
        rows = ("points", "centres", "responsibilities")
        plain = {key: tuple(content[key]) for key in ("clients", "warnings")}
        return Findings(**{**content, **plain, **{key: tuple(map(tuple, content[key])) for key in rows}})


def read_leakage(path: Path) -> LeakageRecord | None:
    """The record in a file, or None where workers do not watch each other."""
    if not path.exists():
        return None
    content = read_json(path)
    with _written_by_this_version(path):
        return from_plain(LeakageRecord, {field.name: content[field.name] for field in fields(LeakageRecord)})


@contextmanager
def _written_by_this_version(path: Path) -> Iterator[None]:
    """One clear line for a file of another shape."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as mistake:
        raise InputError(f"{path}: not written by this version ({mistake!r})") from None


def mean_over(values: Mapping[str, float], clients: Sequence[str]) -> float | None:
    """The mean of those clients that have a value; sites need not report any."""
    known = [values[client] for client in clients if client in values]
    return math.fsum(known) / len(known) if known else None
