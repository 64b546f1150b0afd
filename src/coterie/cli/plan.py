"""`coterie plan`: what a budget needs in noise, and what noise costs, before anyone trains."""

import dataclasses
import math
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from coterie.cli.console import err, out, print_json, print_table
from coterie.errors import InputError
from coterie.privacy import (
    POPULATION,
    AccuracySelection,
    Adjacency,
    Budget,
    BudgetError,
    FullBatchSteps,
    Guarantee,
    Mode,
    Multiplier,
    NoiseRule,
    PlannedRelease,
    PoissonSteps,
    PrivacyPlan,
    PrivateSelection,
    RebalancedSums,
    RoutedSums,
    SampledSum,
    ShuffledSteps,
    ThreatModel,
    Unit,
    UnitPlan,
    calibrate,
    epsilon_of,
    guarantee,
    paper,
)
from coterie.privacy.calibration import FIRST_ROUND_SHARE
from coterie.privacy.mechanisms import NoisySum
from coterie.privacy.rdp import shares
from coterie.privacy.units import number_to_json, round_up

plan_app = typer.Typer(
    name="plan",
    help="Budget to noise and noise to budget, with what each part costs.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

FIRST_ROUND, TRAINING, SELECTION, SUMS = "first-round", "training", "selection", "sums"
SELECTION_SHARE = 0.03
HISTOGRAM_RATIO = 4.0

SERVER = ThreatModel("the server", "all updates and selections")
MODELS = ThreatModel("whoever sees the models", "every model of every round", trusted="the server")


class FirstRound(StrEnum):
    FULL = "full"
    NONE = "none"


class Sampling(StrEnum):
    POISSON = "poisson"
    SHUFFLE = "shuffle"


class AccountantName(StrEnum):
    RDP = "rdp"
    PLD = "pld"


class RecordAdjacency(StrEnum):
    ZERO_OUT = "zero-out"
    REPLACE_ONE = "replace-one"


class ClientMechanism(StrEnum):
    ROUTE = "route"
    REBALANCE = "rebalance"
    PAPER = "paper"
    FEDAVG = "fedavg"


@dataclasses.dataclass(frozen=True)
class SampleSchedule:
    """A record-level run in numbers that are public."""

    records: int
    batch: int
    rounds: int
    epochs: int
    first_round: Multiplier | None
    selections: int
    selection_epsilon: float
    adjacency: Adjacency
    sampling: Sampling = Sampling.POISSON
    mode: Mode = Mode.SOUND

    def plan(self, noise: Multiplier = NoiseRule.SHARED) -> PrivacyPlan:
        """The releases of one client, with this noise in training."""
        releases = []
        rounds = self.rounds
        if self.first_round is not None:
            full = FullBatchSteps(1.0, self.first_round, self.records, self.epochs, self.adjacency)
            releases.append(PlannedRelease(FIRST_ROUND, full, 1))
            rounds -= 1
        steps = PoissonSteps if self.sampling is Sampling.POISSON else ShuffledSteps
        if rounds:
            training = steps(1.0, noise, self.records, self.batch, self.epochs, self.adjacency)
            releases.append(PlannedRelease(TRAINING, training, rounds))
        if self.selections:
            kind = AccuracySelection if self.mode is Mode.PAPER else PrivateSelection
            choice = kind(self.selection_epsilon, self.adjacency)
            releases.append(PlannedRelease(SELECTION, choice, self.selections))
        unit = UnitPlan("one client", tuple(releases))
        return PrivacyPlan(Unit.RECORD, self.adjacency, SERVER, (unit,))


RoundCount = Annotated[int, typer.Option(min=1, help="Rounds in all.")]
Delta = Annotated[float, typer.Option(help="Delta of the guarantee.")]
Epsilon = Annotated[float | None, typer.Option(help="Budget: find the noise for it (inf: no privacy).")]
Accounting = Annotated[AccountantName, typer.Option(help="Accountant that proves the plan.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


@plan_app.command()
def sample(
    records: Annotated[int, typer.Option(min=1, help="Records of a client.")],
    batch: Annotated[int, typer.Option(min=1, help="Expected batch size.")],
    rounds: RoundCount,
    delta: Delta,
    epochs: Annotated[int, typer.Option(min=1, help="Local epochs a round.")] = 1,
    epsilon: Epsilon = None,
    noise: Annotated[
        float | None, typer.Option(help="Noise multiplier (noise on the clipped sum / clip): find its cost.")
    ] = None,
    first_round: Annotated[
        FirstRound, typer.Option(help="A full-batch first round, or none.")
    ] = FirstRound.FULL,
    first_round_noise: Annotated[
        str, typer.Option(metavar="shared|auto|FLOAT", help="Noise multiplier of the first round.")
    ] = "shared",
    selections: Annotated[int, typer.Option(min=0, help="Private selections by the client.")] = 0,
    selection_epsilon: Annotated[
        float | None, typer.Option(help="Epsilon of each selection; by default 3 % of --epsilon.")
    ] = None,
    accountant: Accounting = AccountantName.RDP,
    adjacency: Annotated[RecordAdjacency, typer.Option()] = RecordAdjacency.ZERO_OUT,
    mode: Annotated[
        Mode, typer.Option(help="sound proves what it prints; paper repeats the publication's arithmetic.")
    ] = Mode.SOUND,
    sampling: Annotated[
        Sampling, typer.Option(help="Poisson batches, or a shuffled order (not amplified).")
    ] = Sampling.POISSON,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw noise against epsilon, batch and first-round noise."),
    ] = None,
    json: Json = False,
) -> None:
    """Record-level privacy against an untrusted server: DP-SGD, a first round, private selections."""
    _check_either(epsilon, noise)
    if mode is Mode.PAPER and sampling is Sampling.SHUFFLE:
        raise InputError("--sampling: shuffle is not allowed with --mode paper, poisson is")
    schedule = SampleSchedule(
        records=records,
        batch=batch,
        rounds=rounds,
        epochs=epochs,
        first_round=_first_round(first_round, first_round_noise, noise),
        selections=selections,
        selection_epsilon=_selection_epsilon(selections, selection_epsilon, epsilon),
        adjacency=Adjacency(adjacency.value),
        sampling=sampling,
        mode=mode,
    )
    if epsilon is not None:
        plan = calibrate(schedule.plan(), Budget(epsilon, delta), accountant=accountant.value, mode=mode)
    else:
        assert noise is not None
        plan = _with_noise_given(schedule, noise, delta, accountant.value)
    caveats = _delta_caveats(delta, records, "records")
    promise = guarantee(plan, delta=delta, accountant=accountant.value, mode=mode, caveats=caveats)
    content = {"noise_multiplier": _noise(plan, TRAINING)}
    if schedule.first_round is not None:
        content["first_round_noise_multiplier"] = _noise(plan, FIRST_ROUND)
    content |= _facts(plan, promise, accountant.value)
    if epsilon is not None and math.isfinite(epsilon):
        content |= _alternatives(schedule, Budget(epsilon, delta))
    elif mode is Mode.SOUND and sampling is Sampling.POISSON:
        content["published_epsilon"] = paper.epsilon(plan.units[0], delta)
    if plot is not None:
        _draw(plot, schedule, promise)
    _print(content, plan, promise, json)


@plan_app.command()
def client(
    clients: Annotated[int, typer.Option(min=1, help="Clients in the population.")],
    rate: Annotated[float, typer.Option(help="Share of the clients that is sampled each round.")],
    rounds: RoundCount,
    delta: Delta,
    epsilon: Epsilon = None,
    noise: Annotated[
        float | None,
        typer.Option(help="Noise: std / clip for route and fedavg, sigma_theta for rebalance and paper."),
    ] = None,
    identifier_noise: Annotated[
        float | None, typer.Option(help="Noise on identifiers (rebalance, paper); by default as --noise.")
    ] = None,
    mechanism: Annotated[
        ClientMechanism, typer.Option(help="How clusters are filled and noised.")
    ] = ClientMechanism.ROUTE,
    histogram_ratio: Annotated[
        float | None,
        typer.Option(help=f"Histogram noise over sum noise (route); by default {HISTOGRAM_RATIO:g}."),
    ] = None,
    accountant: Accounting = AccountantName.RDP,
    json: Json = False,
) -> None:
    """Client-level privacy with a trusted server: noisy cluster sums of sampled clients."""
    _check_either(epsilon, noise)
    rebalances = mechanism in (ClientMechanism.REBALANCE, ClientMechanism.PAPER)
    if identifier_noise is not None and (noise is None or not rebalances):
        raise InputError(
            f"--identifier-noise: {identifier_noise:g} is only allowed with --noise and "
            "--mechanism rebalance or paper"
        )
    if histogram_ratio is not None and mechanism is not ClientMechanism.ROUTE:
        raise InputError(f"--histogram-ratio: {histogram_ratio:g} is only allowed with --mechanism route")
    mode = Mode.PAPER if mechanism is ClientMechanism.PAPER else Mode.SOUND
    # A published rule's noise is twice its sigma_theta times the clip.
    scale = 2.0 if rebalances else 1.0
    start: Multiplier = NoiseRule.SHARED if noise is None else scale * noise
    release: RoutedSums | RebalancedSums | SampledSum
    if rebalances:
        if identifier_noise is not None and noise == 0:
            raise InputError(f"--identifier-noise: {identifier_noise:g} is not allowed with --noise 0")
        ratio = 1.0 if identifier_noise is None or noise is None else identifier_noise / noise
        # A share that is no whole number of clients is rounded up: more are sampled, and charged.
        cohort = math.ceil(rate * clients - 1e-9)
        release = RebalancedSums(1.0, start, ratio, clients, cohort, Adjacency.ADD_REMOVE)
    elif mechanism is ClientMechanism.ROUTE:
        ratio = HISTOGRAM_RATIO if histogram_ratio is None else histogram_ratio
        release = RoutedSums(1.0, start, ratio, rate, Adjacency.ADD_REMOVE)
    else:
        release = SampledSum(1.0, start, rate, Adjacency.ADD_REMOVE)
    unit = UnitPlan(POPULATION, (PlannedRelease(SUMS, release, rounds),))
    plan = PrivacyPlan(Unit.CLIENT, Adjacency.ADD_REMOVE, MODELS, (unit,))
    if epsilon is not None:
        plan = calibrate(plan, Budget(epsilon, delta), accountant=accountant.value, mode=mode)
    promise = guarantee(
        plan,
        delta=delta,
        accountant=accountant.value,
        mode=mode,
        caveats=_delta_caveats(delta, clients, "clients"),
    )
    noise_on_sum = _noise(plan, SUMS)
    content = {"noise_multiplier": noise_on_sum / scale, "noise_on_sum": noise_on_sum}
    final = plan.units[0].release(SUMS).mechanism
    if isinstance(final, RoutedSums):
        content["histogram_noise_multiplier"] = final.histogram_multiplier
    if isinstance(final, RebalancedSums):
        content["identifier_noise_multiplier"] = final.identifier_multiplier
    _print(content | _facts(plan, promise, accountant.value), plan, promise, json)


def _check_either(epsilon: float | None, noise: float | None) -> None:
    if (epsilon is None) == (noise is None):
        given = "both were given" if epsilon is not None else "none was given"
        raise InputError(f"--epsilon, --noise: {given}, exactly one of them is allowed")


def _first_round(wanted: FirstRound, text: str, noise: float | None) -> Multiplier | None:
    if wanted is FirstRound.NONE:
        if text != "shared":
            raise InputError(f"--first-round-noise: {text} is not allowed with --first-round none")
        return None
    if text == "shared":
        return NoiseRule.SHARED if noise is None else noise
    if text == "auto":
        return NoiseRule.AUTO
    try:
        return float(text)
    except ValueError:
        raise InputError(
            f"--first-round-noise: {text!r} is not allowed, shared, auto or a number is"
        ) from None


def _selection_epsilon(selections: int, given: float | None, epsilon: float | None) -> float:
    if given is not None:
        return given
    if not selections:
        return 1.0  # of no selection
    if epsilon is None:
        raise InputError(
            "--selection-epsilon: nothing was given, a number is needed with --selections and --noise"
        )
    return SELECTION_SHARE * epsilon


def _delta_caveats(delta: float, units: int, name: str) -> tuple[str, ...]:
    return (f"delta is not below 1/{units}, the share of one of the {name}",) if delta * units >= 1 else ()


def _with_noise_given(schedule: SampleSchedule, noise: float, delta: float, accountant: str) -> PrivacyPlan:
    """The plan at a known training noise; `auto` then spends what 2 % of that noise are worth."""
    plan = schedule.plan(noise)
    if schedule.first_round is not NoiseRule.AUTO:
        return plan
    if schedule.rounds == 1:
        raise InputError("--first-round-noise: auto is not allowed with --noise and --rounds 1")
    quieter = schedule.plan(noise / (1.0 + FIRST_ROUND_SHARE)).units[0].without(FIRST_ROUND)
    allowed = epsilon_of(quieter.event, delta, accountant, plan.adjacency)
    return calibrate(plan, Budget(allowed, delta), accountant=accountant)


def _noise(plan: PrivacyPlan, name: str) -> float:
    releases = {release.name: release.mechanism for release in plan.units[0].releases}
    mechanism = releases.get(name, releases.get(FIRST_ROUND))
    assert isinstance(mechanism, NoisySum)
    return mechanism.multiplier


def _facts(plan: PrivacyPlan, promise: Guarantee, accountant: str) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "epsilon": promise.epsilon,
        "delta": promise.delta,
        "epsilon_replace_one": promise.epsilon_replace_one,
        "accountant": accountant,
        "adjacency": promise.adjacency.value,
        "mode": promise.mode.value,
        "guarantee": promise.line,
        "guarantee_text": promise.text,
        "meaning": promise.meaning.to_json(),
        "parts": _parts(plan, promise),
    }
    if promise.published_epsilon is not None:
        facts["published_epsilon"] = promise.published_epsilon
    return facts


def _parts(plan: PrivacyPlan, promise: Guarantee) -> list[dict[str, Any]]:
    """What each release is and costs: alone, and as a share of the divergence of all (both by RDP)."""
    unit = plan.units[0]
    portions = shares(
        [release.event for release in unit.releases], delta=promise.delta, adjacency=plan.adjacency
    )
    parts = []
    for release, cost, portion in zip(unit.releases, promise.releases, portions, strict=True):
        part: dict[str, Any] = {
            "release": release.name,
            "what": cost.what,
            "times": release.times,
            "noise": cost.noise,
            "share": portion,
            "epsilon_alone": cost.epsilon,
        }
        if isinstance(release.mechanism, NoisySum):
            part["noise_multiplier"] = release.mechanism.multiplier
        parts.append(part)
    return parts


def _alternatives(schedule: SampleSchedule, budget: Budget) -> dict[str, Any]:
    """Noise for the same budget with round 1 sharing it, by the publication, and under replace-one."""
    shared = NoiseRule.SHARED if schedule.first_round is not None else None
    found: dict[str, Any] = {}
    if schedule.first_round is not shared and schedule.mode is Mode.SOUND:
        found["shared_noise_multiplier"] = _needed(dataclasses.replace(schedule, first_round=shared), budget)
    if schedule.mode is Mode.SOUND and schedule.sampling is Sampling.POISSON:
        published = dataclasses.replace(schedule, first_round=shared, mode=Mode.PAPER)
        found["published_noise_multiplier"] = _needed(published, budget)
    if schedule.mode is Mode.PAPER:
        found["sound_noise_multiplier"] = _needed(dataclasses.replace(schedule, mode=Mode.SOUND), budget)
    if schedule.adjacency is not Adjacency.REPLACE_ONE:
        replaced = dataclasses.replace(schedule, adjacency=Adjacency.REPLACE_ONE, mode=Mode.SOUND)
        found["replace_one_noise_multiplier"] = _needed(replaced, budget)
    return found


def _needed(schedule: SampleSchedule, budget: Budget) -> float | None:
    """Training noise by RDP, None where no noise would do."""
    try:
        return _noise(calibrate(schedule.plan(), budget, mode=schedule.mode), TRAINING)
    except BudgetError:
        return None


def _draw(path: Path, schedule: SampleSchedule, promise: Guarantee) -> None:
    from coterie.privacy.figures import FORMATS, draw_noise

    if path.suffix.lower() not in FORMATS:
        raise InputError(f"--plot: {path} is not allowed, a file ending in {', '.join(FORMATS)} is")
    if not path.resolve().parent.is_dir():
        raise InputError(f"--plot: {path} cannot be written, its folder does not exist")
    if not 0 < promise.epsilon < math.inf:
        raise InputError("--plot: nothing to draw without a finite epsilon")
    selection_share = schedule.selection_epsilon / promise.epsilon

    def noise_at(epsilon: float, batch: int, first_round: Multiplier | None, mode: Mode) -> float | None:
        if mode is Mode.PAPER and schedule.sampling is Sampling.SHUFFLE:
            return None
        other = dataclasses.replace(
            schedule,
            batch=batch,
            first_round=first_round,
            selection_epsilon=selection_share * epsilon,
            mode=mode,
        )
        return _needed(other, Budget(epsilon, promise.delta))

    draw_noise(
        path,
        noise_at,
        epsilon=promise.epsilon,
        records=schedule.records,
        batch=schedule.batch,
        caption=promise.line,
    )
    err.print(f"plot: {path}", markup=False, highlight=False, soft_wrap=True)


_WORDS = {
    "shared_noise_multiplier": "noise if the first round shared it",
    "published_noise_multiplier": "noise by the publication's accounting",
    "sound_noise_multiplier": "noise by sound accounting",
    "replace_one_noise_multiplier": "noise under replace-one",
    "published_epsilon": "epsilon by the publication's accounting",
    "noise_on_sum": "noise on a cluster's sum / clip",
    "histogram_noise_multiplier": "noise on the histogram",
    "identifier_noise_multiplier": "noise on identifiers",
}


def _spelled_out(value: Any) -> Any:
    """The content with infinities as words."""
    if isinstance(value, dict):
        return {key: _spelled_out(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_spelled_out(inner) for inner in value]
    return number_to_json(value) if isinstance(value, float) else value


def _print(content: dict[str, Any], plan: PrivacyPlan, promise: Guarantee, json: bool) -> None:
    if json:
        print_json(_spelled_out(content))
        return
    rows = [
        [
            part["release"],
            str(part["times"]),
            f"{part['noise_multiplier']:.4f}" if "noise_multiplier" in part else "",
            round_up(part["epsilon_alone"]),
            f"{part['share']:.1%}",
        ]
        for part in content["parts"]
    ]
    total = sum(release.times for release in plan.units[0].releases)
    rows.append(["together", str(total), "", round_up(promise.epsilon), "100.0%"])
    print_table(["release", "times", "noise", "epsilon alone", "share of divergence"], rows)
    for key, words in _WORDS.items():
        if key in content:
            value = content[key]
            shown = "no noise would do" if value is None else f"{value:.4f}"
            if value is not None and "epsilon" in key:
                shown = round_up(value)
            out.print(f"{words}: {shown}", markup=False, highlight=False)
    out.print(promise.line, markup=False, highlight=False, soft_wrap=True)
    out.print(promise.text, markup=False, highlight=False, soft_wrap=True)
