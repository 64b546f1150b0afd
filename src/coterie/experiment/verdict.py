"""What a comparison can tell apart: differences between settings over seeds, and for whom they paid.

Two settings are compared seed by seed, on the same federation and with the same draws of a simulation, by
the mean difference and its 95 % t-interval. A private score has noise of a known size besides: the error of a
mean is never taken for less than what that noise alone gives it. Of several pairs that are tested together,
p-values are corrected by Holm's method, so that one false claim among all of them is as rare as for one.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from scipy import stats

from coterie.experiment.result import RunResult, Spread
from coterie.experiment.sweep import LABEL, Cell, Sweep

LEVEL = 0.05
ALGORITHM = "algorithm.name"
LOCAL, GLOBAL = ("local",), ("global", "dp-fedavg")
"""Algorithms in which nobody learns from others, and in which all share one model."""
NORMAL_95 = float(stats.norm.ppf(0.975))
AHEAD, BEHIND, UNCLEAR, SAME, UNTESTED = "ahead", "behind", "not distinguishable", "the same", "not tested"


@dataclass(frozen=True)
class Reading:
    """What a run or one of its clients reached, larger is better, and the standard deviation of its noise."""

    value: float
    noise: float = 0.0


@dataclass(frozen=True)
class Difference:
    """How much better one is than the other, over the seeds that both have.

    Args:
        half_width: of the 95 % t-interval; None where there is nothing to test.
        p: of a paired t-test; `p_holm` corrected for all that are tested with it.
    """

    one: str
    other: str
    seeds: int
    mean: float
    half_width: float | None = None
    p: float | None = None
    p_holm: float | None = None

    @property
    def status(self) -> str:
        if self.p_holm is None:
            return SAME if self.seeds > 1 and self.mean == 0 else UNTESTED
        if self.p_holm >= LEVEL:
            return UNCLEAR
        return AHEAD if self.mean > 0 else BEHIND

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "status": self.status}


@dataclass(frozen=True)
class ByClient:
    """For whom one setting was better than another."""

    what: str
    one: str
    other: str
    clients: Mapping[str, Difference]

    def count(self, status: str) -> int:
        return sum(own.status == status for own in self.clients.values())

    @property
    def seeds(self) -> int:
        return max((own.seeds for own in self.clients.values()), default=0)

    @property
    def text(self) -> str:
        """In one sentence."""
        everyone, against = len(self.clients), f"{self.what} ({self.one} against {self.other})"
        if self.seeds < 2:
            more = sum(own.mean > 0 for own in self.clients.values())
            return (
                f"{against}: one run of each, better for {more} of {everyone} clients, which is not tested."
            )
        unclear = everyone - self.count(AHEAD) - self.count(BEHIND)
        return (
            f"{against}: paid for {self.count(AHEAD)} of {everyone} clients, cost {self.count(BEHIND)}, "
            f"cannot be told for {unclear}."
        )

    def to_json(self) -> dict[str, Any]:
        told = {client: own.to_json() for client, own in self.clients.items()}
        counts = {status: self.count(status) for status in (AHEAD, BEHIND)}
        named = {"what": self.what.lower(), "one": self.one, "other": self.other, "seeds": self.seeds}
        return {**named, "paid": counts[AHEAD], "cost": counts[BEHIND], "clients": told, "text": self.text}


@dataclass(frozen=True)
class Contest:
    """Settings that differ in one thing, all else being equal.

    Args:
        setting: what else was set, where the sweep varies it.
        best: the one with the highest mean.
        pairs: of every two of them.
        missing: settings with fewer runs than planned, and why they are compared less.
    """

    setting: str
    measure: str
    best: str
    means: Mapping[str, float]
    pairs: tuple[Difference, ...]
    by_client: tuple[ByClient, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict)

    def against_best(self) -> list[Difference]:
        """The best one with each of the others, turned so that it comes first."""
        found = []
        for pair in self.pairs:
            if pair.one == self.best:
                found.append(pair)
            elif pair.other == self.best:
                turned = Difference(
                    pair.other, pair.one, pair.seeds, -pair.mean, pair.half_width, pair.p, pair.p_holm
                )
                found.append(turned)
        return sorted(found, key=lambda pair: -pair.mean)

    def amount(self, pair: Difference) -> str:
        digits = "{:.1f}" if self.measure == "points" else "{:.3g}"
        width = "" if pair.half_width is None else f" ± {digits.format(pair.half_width)}"
        return digits.format(pair.mean) + width

    @property
    def lines(self) -> list[str]:
        """In sentences."""
        where, pairs = f"{self.setting}: " if self.setting else "", self.against_best()
        tested = [pair for pair in pairs if pair.seeds > 1]
        single = [pair for pair in pairs if pair.seeds == 1]
        said = []
        ahead = [pair for pair in tested if pair.status == AHEAD]
        if ahead:
            told = [f"of {pair.other} by {self.amount(pair)} {self.measure}" for pair in ahead]
            said.append(f"{self.best} is ahead {_listed(told)} over {_seeds(ahead)}")
        unclear = [f"{pair.other} ({self.amount(pair)})" for pair in tested if pair.status == UNCLEAR]
        if unclear:
            named = "it" if ahead else f"{self.best}, the highest,"
            said.append(f"not distinguishable from {named} {_are(unclear)} {_listed(unclear)}")
        behind = [f"{pair.other} by {self.amount(pair)}" for pair in tested if pair.status == BEHIND]
        if behind:  # over the seeds that both have, where some are missing
            said.append(f"{self.best} is behind {_listed(behind)}")
        for status, words in (
            (SAME, "the same in every seed"),
            (UNTESTED, "by the same in every seed, so not tested"),
        ):
            alike = [
                pair.other if status == SAME else f"{pair.other} {self.amount(pair)}"
                for pair in tested
                if pair.status == status
            ]
            if alike:
                said.append(f"from {self.best} {_are(alike)} {_listed(alike)} {words}")
        if single:
            told = [f"{pair.other} {self.amount(pair)} less" for pair in single]
            said.append(
                f"one run of each, so differences are not tested: {self.best} is highest, {_listed(told)}"
            )
        lines = [f"{where}{'; '.join(said)}."] if said else []
        lines += [f"{where}{name}: {reason}." for name, reason in self.missing.items()]
        return lines + [f"{where}{own.text}" for own in self.by_client]

    def to_json(self) -> dict[str, Any]:
        return {
            "setting": self.setting,
            "best": self.best,
            "means": dict(self.means),
            "pairs": [pair.to_json() for pair in self.pairs],
            "by_client": [own.to_json() for own in self.by_client],
            "missing": dict(self.missing),
        }


@dataclass(frozen=True)
class ComparisonVerdict:
    """What can be told apart, in words and as data."""

    measure: str
    contests: tuple[Contest, ...]

    @property
    def lines(self) -> list[str]:
        said = [line for contest in self.contests for line in contest.lines]
        if not said:
            return ["One setting, or one finished: there is nothing to compare."]
        tests = max((len([p for p in each.pairs if p.p is not None]) for each in self.contests), default=0)
        if not tests:
            return said
        corrected = f", corrected by Holm's method over {tests} pairs" if tests > 1 else ""
        return [*said, f"After ± half a 95 % t-interval over seeds, paired; tested at 5 %{corrected}."]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def __str__(self) -> str:
        return self.text

    def to_json(self) -> dict[str, Any]:
        contests = [contest.to_json() for contest in self.contests]
        return {"text": self.text, "measure": self.measure, "correction": "holm", "contests": contests}


# --- statistics ------------------------------------------------------------------------------------------


def paired(one: str, other: str, pairs: Sequence[tuple[Reading, Reading]]) -> Difference:
    """The mean difference over seeds with its t-interval and p-value, as far as seeds give any."""
    gaps = np.array([mine.value - theirs.value for mine, theirs in pairs])
    number, mean = len(gaps), float(gaps.mean())
    if number < 2:
        return Difference(one, other, number, mean)
    known = math.hypot(*(reading.noise for pair in pairs for reading in pair)) / number
    # Rounding makes equal differences differ in the last bits.
    spread = 0.0 if np.ptp(gaps) <= 1e-12 * np.abs(gaps).max(initial=0.0) else float(stats.sem(gaps))
    error = max(spread, known)
    if error == 0.0:
        return Difference(one, other, number, mean)
    half = float(stats.t.ppf(1 - LEVEL / 2, number - 1)) * error
    return Difference(one, other, number, mean, half, float(2 * stats.t.sf(abs(mean) / error, number - 1)))


def holm(differences: Sequence[Difference]) -> list[Difference]:
    """The same with p-values corrected for all of them (Holm 1979)."""
    tested = sorted((own.p, place) for place, own in enumerate(differences) if own.p is not None)
    found, largest = list(differences), 0.0
    for rank, (p, place) in enumerate(tested):
        largest = max(largest, min(1.0, (len(tested) - rank) * p))
        found[place] = Difference(**{**asdict(found[place]), "p_holm": largest})
    return found


# --- from the cells of a sweep ---------------------------------------------------------------------------


def verdict_of(sweep: Sweep, results: Mapping[str, RunResult]) -> ComparisonVerdict:
    """What the finished cells can tell apart.

    Args:
        results: of the finished cells, by name.
    """
    measure, of_run, of_clients = _measure(list(results.values()))
    groups: dict[str, list[Cell]] = {}
    every = sweep.cells()
    names = {cell.name: _name(sweep, cell, every) for cell in every}
    for cell in every:
        groups.setdefault(_beside(sweep, cell), []).append(cell)
    contests = []
    for setting, cells in groups.items():
        runs: dict[str, dict[str, RunResult]] = {}
        planned: dict[str, int] = {}
        algorithms: dict[str, str] = {}
        for cell in cells:
            name = names[cell.name]
            planned[name] = planned.get(name, 0) + 1
            algorithms[name] = cell.experiment.algorithm.name
            if cell.name in results and of_run(results[cell.name]) is not None:
                runs.setdefault(name, {})[_seed(cell)] = results[cell.name]
        contest = _contest(setting, measure, runs, planned, algorithms, of_run, of_clients)
        if contest is not None:
            contests.append(contest)
    return ComparisonVerdict(measure, tuple(contests))


def _contest(
    setting: str,
    measure: str,
    runs: Mapping[str, Mapping[str, RunResult]],
    planned: Mapping[str, int],
    algorithms: Mapping[str, str],
    of_run: "OfRun",
    of_clients: "OfClients",
) -> Contest | None:
    if len(planned) < 2 or not runs:
        return None
    read = {name: {seed: of_run(run) for seed, run in own.items()} for name, own in runs.items()}
    means = {
        name: float(np.mean([reading.value for reading in own.values() if reading is not None]))
        for name, own in read.items()
    }
    pairs = []
    for place, one in enumerate(read):
        for other in list(read)[place + 1 :]:
            both = [(read[one][seed], read[other][seed]) for seed in read[one] if seed in read[other]]
            known = [(mine, theirs) for mine, theirs in both if mine is not None and theirs is not None]
            if known:
                pairs.append(paired(one, other, known))
    missing = {}
    for name, count in planned.items():
        finished = len(runs.get(name, {}))
        if finished < count:
            missing[name] = f"{finished} of {count} runs have a score, the others are not compared"
    by_client = tuple(_by_client(runs, algorithms, of_clients))
    shown = {name: abs(mean) for name, mean in means.items()}
    best = max(means, key=lambda name: means[name])
    return Contest(setting, measure, best, shown, tuple(holm(pairs)), by_client, missing)


def _by_client(
    runs: Mapping[str, Mapping[str, RunResult]], algorithms: Mapping[str, str], of_clients: "OfClients"
) -> Iterator[ByClient]:
    """Whether federating and clustering paid, client by client."""
    alone = [name for name in runs if algorithms[name] in LOCAL]
    shared = [name for name in runs if algorithms[name] in GLOBAL]
    rest = [name for name in runs if name not in (*alone, *shared)]
    wanted = [("Federating", one, other) for one in (*shared, *rest) for other in alone]
    wanted += [("Clustering", one, other) for one in rest for other in shared]
    for what, one, other in wanted:
        gathered: dict[str, list[tuple[Reading, Reading]]] = {}
        for seed in (seed for seed in runs[one] if seed in runs[other]):
            mine, theirs = of_clients(runs[one][seed]), of_clients(runs[other][seed])
            for client in (client for client in mine if client in theirs):
                gathered.setdefault(client, []).append((mine[client], theirs[client]))
        if gathered:
            found = holm([paired(one, other, own) for own in gathered.values()])
            yield ByClient(what, one, other, dict(zip(gathered, found, strict=True)))


OfRun = Callable[[RunResult], Reading | None]
OfClients = Callable[[RunResult], Mapping[str, Reading]]


def _measure(results: Sequence[RunResult]) -> tuple[str, OfRun, OfClients]:
    """What runs are compared by: accuracy in points, RMSE in the label's units, else the bounded score."""
    judged = [result for result in results if result.reached is not None]
    if all(result.accuracy is not None for result in judged):
        return "points", lambda run: _reached(run.accuracy, 100.0), lambda run: _each(run.accuracy, 100.0)
    if all("rmse" in result.scores and result.scores["rmse"].value is not None for result in judged):
        return "of RMSE", _rmse, _rmse_of_clients
    return "of bounded score", lambda run: _reached(run.reached), lambda run: _each(run.reached)


def _noise(value: float, interval: tuple[float, float] | None) -> float:
    """Standard deviation from a 95 % interval, of which one side may be cut off at the end of a range."""
    return 0.0 if interval is None else max(value - interval[0], interval[1] - value) / NORMAL_95


def _reached(spread: Spread | None, scale: float = 1.0) -> Reading | None:
    if spread is None:
        return None
    return Reading(scale * spread.mean, scale * _noise(spread.mean, spread.interval))


def _each(spread: Spread | None, scale: float = 1.0) -> dict[str, Reading]:
    if spread is None:
        return {}
    return {
        client: Reading(scale * value, scale * _noise(value, spread.intervals.get(client)))
        for client, value in spread.per_client.items()
    }


def _rmse(run: RunResult) -> Reading | None:
    score = run.scores.get("rmse")
    if score is None or score.value is None:
        return None
    return Reading(-score.value, _noise(score.value, score.interval))


def _rmse_of_clients(run: RunResult) -> dict[str, Reading]:
    score = run.scores.get("rmse")
    found = score.per_client if score else {}
    return {client: Reading(-value) for client, value in found.items() if value is not None}


def _inside(sweep: Sweep) -> tuple[str, ...]:
    """The keys whose values are compared with one another; all others are set beside."""
    leading = sweep.leading
    return (LABEL, ALGORITHM) if leading in (LABEL, ALGORITHM) else (leading,) if leading else ()


def _name(sweep: Sweep, cell: Cell, every: Sequence[Cell]) -> str:
    """Its value of what is compared: of a part its label, with the algorithm where one label has several."""
    if LABEL in cell.values:
        alike = {one.values.get(ALGORITHM) for one in every if one.values.get(LABEL) == cell.values[LABEL]}
        told = [LABEL] if len(alike) == 1 else [LABEL, ALGORITHM]
    else:
        told = [key for key in _inside(sweep) if key in cell.values]
    return ", ".join(str(cell.values[key]) for key in told) or "all runs"


def _beside(sweep: Sweep, cell: Cell) -> str:
    """What else is set, in words."""
    rest = {key: value for key, value in sweep.setting(cell).items() if key not in _inside(sweep)}
    return ", ".join(f"{key.rpartition('.')[2].replace('_', ' ')} {value}" for key, value in rest.items())


def _seed(cell: Cell) -> str:
    return repr({key: value for key, value in cell.values.items() if key.startswith("seeds.")})


def _listed(words: Sequence[str]) -> str:
    return "".join(words) if len(words) < 2 else f"{', '.join(words[:-1])} and {words[-1]}"


def _are(words: Sequence[str]) -> str:
    return "is" if len(words) == 1 else "are"


def _seeds(pairs: Sequence[Difference]) -> str:
    counts = sorted({pair.seeds for pair in pairs})
    return f"{' to '.join(map(str, (counts[0], *counts[1:][-1:])))} seeds"
