"""`coterie plan`: what a budget needs in noise, what noise costs, and what an experiment will cost."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from json import dumps, loads
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from coterie.cli.console import complain, print_json, print_table, say
from coterie.cli.options import Json, Overrides, RecordAdjacency, check_plot
from coterie.errors import InputError
from coterie.privacy import (
    Adjacency,
    Budget,
    Guarantee,
    Mode,
    Multiplier,
    NoiseRule,
    calibrate,
    guarantee,
    paper,
)
from coterie.privacy.plans import (
    FIRST_ROUND,
    HISTOGRAM_RATIO,
    SELECTION_SHARE,
    ClientRule,
    ClientRun,
    RecordRun,
    Sampling,
    noise_of,
    parts_of,
)
from coterie.privacy.ranges import EPSILON
from coterie.privacy.units import round_up


class _FileOrCommand(TyperGroup):
    """What names no command is an experiment: `coterie plan mine.yaml`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, "--help"):
            args = ["experiment", *args]
        return super().parse_args(ctx, args)


plan_app = typer.Typer(
    name="plan",
    cls=_FileOrCommand,
    help="What an experiment will cost (coterie plan EXPERIMENT.yaml); budget to noise and noise to budget.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

RoundCount = Annotated[int, typer.Option(min=1, help="Rounds in all.")]
Delta = Annotated[float, typer.Option(help="Delta of the guarantee.")]
Epsilon = Annotated[float | None, typer.Option(help="Budget: find the noise for it (inf: no privacy).")]
Accounting = Annotated[Literal["rdp", "pld"], typer.Option(help="Accountant that proves the plan.")]


@plan_app.command()
def experiment(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="EXPERIMENT", help="Experiment file (YAML); without one, the built-in default."
        ),
    ] = None,
    overrides: Overrides = None,
    json: Json = False,
) -> None:
    """What an experiment will cost, release by release; of its data, counts alone matter."""
    from coterie.experiment.experiment_file import read_experiment
    from coterie.experiment.local import calibrate as calibrate_experiment
    from coterie.experiment.loop import training_noise
    from coterie.experiment.recipe import usability

    chosen = read_experiment(file, overrides or [])
    calibrated = calibrate_experiment(chosen, counted=True)
    found, usable = calibrated.experiment, usability(calibrated)
    numbers = {key: found.number(key) for key in chosen.auto}
    promise, first = calibrated.guarantee, noise_of(calibrated.plan, FIRST_ROUND)
    content: dict[str, Any] = {"noise_multiplier": training_noise(calibrated.plan)}
    if first is not None:
        content["first_round_noise_multiplier"] = first
    content |= _facts(promise, chosen.privacy.accountant) | {
        "releases": [release.to_json() for release in promise.releases],
        "per_client": promise.per_client_json(),
        "sized": numbers,
        "usable": None if usable is None else {"verdict": usable.verdict, "line": usable.line},
    }
    rows = [
        [f"{release.name}: {release.what}", str(release.times), release.noise, round_up(release.epsilon)]
        for release in promise.releases
    ]
    headings = ["release", "times", "noise", "epsilon alone"]

    def show() -> None:
        print_table(headings, rows, title=chosen.algorithm.name)
        if numbers:
            say(f"by recipe: {', '.join(f'{key} {number:g}' for key, number in numbers.items())}")
        if usable is not None:
            say(usable.line)

    _print(content, promise, json, show)


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
        Literal["full", "none"], typer.Option(help="A full-batch first round, or none.")
    ] = "full",
    first_round_noise: Annotated[
        str, typer.Option(metavar="shared|auto|FLOAT", help="Noise multiplier of the first round.")
    ] = "shared",
    selections: Annotated[int, typer.Option(min=0, help="Private selections by the client.")] = 0,
    selection_epsilon: Annotated[
        float | None, typer.Option(help="Epsilon of each selection; by default 3 % of --epsilon.")
    ] = None,
    accountant: Accounting = "rdp",
    adjacency: Annotated[
        RecordAdjacency,
        typer.Option(help="How neighbours differ: a record counts for nothing, or is another."),
    ] = "zero-out",
    mode: Annotated[
        Mode,
        typer.Option(help="sound proves what it prints; paper repeats the publication's arithmetic."),
    ] = Mode.SOUND,
    sampling: Annotated[
        Sampling,
        typer.Option(help="Poisson batches, or a shuffled order (not amplified)."),
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
    if noise is not None and first_round_noise == "auto" and rounds == 1:
        raise InputError("--first-round-noise: auto is not allowed with --noise and --rounds 1")
    run = RecordRun(
        records=records,
        batch=batch,
        rounds=rounds,
        epochs=epochs,
        first_round=_first_round(first_round, first_round_noise, noise),
        selections=selections,
        selection_epsilon=_selection_epsilon(selections, selection_epsilon, epsilon),
        adjacency=Adjacency(adjacency),
        sampling=sampling,
        mode=mode,
    )
    if epsilon is not None:
        plan = run.calibrated(Budget(epsilon, delta), accountant)
    else:
        assert noise is not None
        plan = run.with_noise(noise, delta, accountant)
    caveats = _delta_caveats(delta, records, "records")
    promise = guarantee(plan, delta=delta, accountant=accountant, mode=run.mode, caveats=caveats)
    content: dict[str, Any] = {"noise_multiplier": run.training_noise(plan)}
    if run.first_round is not None:
        content["first_round_noise_multiplier"] = noise_of(plan, FIRST_ROUND)
    content |= _facts(promise, accountant, parts=parts_of(plan, promise))
    if epsilon is not None and math.isfinite(epsilon):
        content |= run.alternatives(Budget(epsilon, delta))
    elif mode is Mode.SOUND and sampling is Sampling.POISSON:
        content["published_epsilon"] = paper.epsilon(plan.units[0], delta)
    if plot is not None:
        _draw(plot, run, promise)
    _print(content, promise, json, lambda: _print_parts(content, promise))


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
    mechanism: Annotated[ClientRule, typer.Option(help="How clusters are filled and noised.")] = "route",
    histogram_ratio: Annotated[
        float | None,
        typer.Option(help=f"Histogram noise over sum noise (route); by default {HISTOGRAM_RATIO:g}."),
    ] = None,
    accountant: Accounting = "rdp",
    json: Json = False,
) -> None:
    """Client-level privacy with a trusted server: noisy cluster sums of sampled clients."""
    _check_either(epsilon, noise)
    run = ClientRun(clients, rate, rounds, mechanism, histogram_ratio)
    if identifier_noise is not None:
        if noise is None or not run.is_published:
            raise InputError(
                f"--identifier-noise: {identifier_noise:g} is only allowed with --noise and "
                "--mechanism rebalance or paper"
            )
        if noise == 0:
            raise InputError(f"--identifier-noise: {identifier_noise:g} is not allowed with --noise 0")
        run = ClientRun(clients, rate, rounds, mechanism, identifier_noise / noise)
    if histogram_ratio is not None and mechanism != "route":
        raise InputError(f"--histogram-ratio: {histogram_ratio:g} is only allowed with --mechanism route")
    plan = run.plan(noise)
    if epsilon is not None:
        plan = calibrate(plan, Budget(epsilon, delta), accountant=accountant, mode=run.mode)
    caveats = _delta_caveats(delta, clients, "clients")
    promise = guarantee(plan, delta=delta, accountant=accountant, mode=run.mode, caveats=caveats)
    content = run.noises(plan) | _facts(promise, accountant, parts=parts_of(plan, promise))
    _print(content, promise, json, lambda: _print_parts(content, promise))


def _check_either(epsilon: float | None, noise: float | None) -> None:
    if (epsilon is None) == (noise is None):
        given = "both were given" if epsilon is not None else "none was given"
        raise InputError(f"--epsilon, --noise: {given}, exactly one of them is allowed")
    if epsilon is not None:
        EPSILON.check("--epsilon", epsilon)


def _first_round(wanted: str, text: str, noise: float | None) -> Multiplier | None:
    if wanted == "none":
        if text != "shared":
            raise InputError(f"--first-round-noise: {text} is not allowed with --first-round none")
        return None
    if text == "shared" and noise is not None:
        return noise
    try:
        return NoiseRule(text) if text in ("shared", "auto") else float(text)
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


def _facts(promise: Guarantee, accountant: str, **more: object) -> dict[str, Any]:
    published = promise.published_epsilon
    return {
        "epsilon": promise.epsilon,
        "delta": promise.delta,
        "epsilon_replace_one": promise.epsilon_replace_one,
        "accountant": accountant,
        "adjacency": promise.adjacency.value,
        "mode": promise.mode.value,
        "guarantee": promise.line,
        "guarantee_text": promise.text,
        "meaning": promise.meaning.to_json(),
        **more,
        **({} if published is None else {"published_epsilon": published}),
    }


def _draw(path: Path, run: RecordRun, promise: Guarantee) -> None:
    from coterie.report.noise import draw_noise

    check_plot(path)
    if not 0 < promise.epsilon < math.inf:
        raise InputError("--plot: nothing to draw without a finite epsilon")
    share = run.selection_epsilon / promise.epsilon

    def noise_at(epsilon: float, batch: int, first_round: Multiplier | None, mode: Mode) -> float | None:
        if mode is Mode.PAPER and run.sampling is Sampling.SHUFFLE:
            return None
        other = replace(
            run, batch=batch, first_round=first_round, selection_epsilon=share * epsilon, mode=mode
        )
        return other.needed(Budget(epsilon, promise.delta))

    draw_noise(
        path, noise_at, epsilon=promise.epsilon, records=run.records, batch=run.batch, caption=promise.line
    )
    complain(f"plot: {path}", style="none")


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


def _print(content: Mapping[str, Any], promise: Guarantee, json: bool, show: Callable[[], None]) -> None:
    """The content with infinities as words, or what there is to show of it and the guarantee."""
    if json:
        print_json(loads(dumps(content), parse_constant=lambda _: "inf"))
        return
    show()
    say(promise.line)
    say(promise.text)


def _print_parts(content: Mapping[str, Any], promise: Guarantee) -> None:
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
    total = sum(part["times"] for part in content["parts"])
    rows.append(["together", str(total), "", round_up(promise.epsilon), "100.0%"])
    print_table(["release", "times", "noise", "epsilon alone", "share of divergence"], rows)
    for key, words in _WORDS.items():
        if key in content:
            spelled = round_up if "epsilon" in key else "{:.4f}".format
            say(f"{words}: {'no noise would do' if content[key] is None else spelled(content[key])}")
