"""`coterie leakage`: who can learn how much about whom in overlapping groups, before anyone trains."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from coterie.cli.console import complain, print_result, print_table, say
from coterie.cli.options import Json, check_plot
from coterie.errors import InputError
from coterie.groups import (
    GroupAlgorithm,
    GroupSchedule,
    Leakage,
    Shape,
    Structure,
    Threat,
    drawn_labels,
    history,
    named_structure,
    read_labels,
    read_requirements,
)
from coterie.groups import leakage as leakage_of
from coterie.groups.answers import coalition_facts, leakage_facts, pair_facts, requirement_facts
from coterie.groups.pairs import MOST_WORKERS
from coterie.privacy import Mode
from coterie.privacy.ranges import EPSILON, SEED, Range
from coterie.privacy.units import round_up

_MOST_ROWS = 12
_MOST_EPOCHS_DRAWN = 40


def leakage(
    structure: Annotated[
        str, typer.Option(metavar="global|ring|string|clustered|label|FILE", help="Who is in which group.")
    ],
    epochs: Annotated[int, typer.Option(help="Index of the newest model seen; one group makes one less.")],
    rate: Annotated[str, typer.Option(help="Participation rate of all groups, or one for each (a,b,c).")],
    noise: Annotated[str, typer.Option(help="Noise on a sum / clip, of all groups or one for each.")],
    delta: Annotated[float, typer.Option(help="Delta of every epsilon.")],
    workers: Annotated[int | None, typer.Option(help="Workers in all; a file says it itself.")] = None,
    groups: Annotated[int | None, typer.Option(help="Groups in all; a file says it itself.")] = None,
    period: Annotated[int, typer.Option(help="Epochs from one merge of models to the next (S).")] = 1,
    algorithm: Annotated[
        GroupAlgorithm, typer.Option(help="A release each epoch, or one each period.")
    ] = GroupAlgorithm.DP_OGL,
    mode: Annotated[
        Mode, typer.Option(help="sound proves what it prints; paper adds the publication's arithmetic.")
    ] = Mode.SOUND,
    threat_model: Annotated[
        int | None,
        typer.Option(
            metavar="1|2",
            help="Observers: anyone (1), or only workers of other groups (2); by default 2 for dp-ogl-plus.",
        ),
    ] = None,
    coalition: Annotated[
        str | None, typer.Option(metavar="I,J,...", help="Observers that tell each other everything.")
    ] = None,
    target_pair: Annotated[
        str | None, typer.Option(metavar="N,I", help="One target and one observer to look at.")
    ] = None,
    epsilon: Annotated[
        float | None, typer.Option(help="With --target-pair: find the noise or period that stays within it.")
    ] = None,
    requirements: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="What workers demand; says whether it is met and finds what is."),
    ] = None,
    labels: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Labels of every worker, for the structure label.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Draws labels for the structure label without a file (0).")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw structure, heatmap and epsilon against epoch.")
    ] = None,
    json: Json = False,
) -> None:
    if epsilon is not None:
        InputError.when(target_pair is None, f"--epsilon: {epsilon:g} is only allowed with --target-pair")
        EPSILON.check("--epsilon", epsilon)
    SEED.check("--seed", seed or 0)
    if threat_model not in (None, 1, 2):
        raise InputError(f"--threat-model: {threat_model} is not allowed, 1 or 2 is")
    if plot is not None:
        check_plot(plot)
    who = _structure(structure, workers, groups, labels, seed)
    schedule = GroupSchedule.of(
        len(who.groups),
        period=period,
        rate=_numbers("--rate", rate),
        noise=_numbers("--noise", noise),
        algorithm=algorithm,
        mode=mode,
    )
    threat = None if threat_model is None else Threat(threat_model)
    found = leakage_of(who, schedule, epoch=epochs, delta=delta, threat=threat)
    content = leakage_facts(found)
    if coalition is not None:
        content["coalition"] = coalition_facts(found, _workers("--coalition", coalition, who))
    if target_pair is not None:
        pair = _workers("--target-pair", target_pair, who)
        if len(pair) != 2:
            raise InputError(
                f"--target-pair: {target_pair!r} is not allowed, a target and an observer like 3,7 are"
            )
        content["target_pair"] = pair_facts(found, pair[0], pair[1], epsilon)
    if requirements is not None:
        content |= requirement_facts(found, read_requirements(requirements, who))
    if plot is not None:
        _draw(plot, found, content["guarantee"] or "")
    print_result(content, json, lambda: _print(found, content))


def _structure(
    name: str, workers: int | None, groups: int | None, labels: Path | None, seed: int | None
) -> Structure:
    if seed is not None and (labels is not None or name != Shape.LABEL):
        raise InputError(f"--seed: {seed} is only allowed with --structure label and without --labels")
    if labels is not None and name != Shape.LABEL:
        raise InputError(f"--labels: {labels} is only allowed with --structure label")
    held = None if labels is None else read_labels(labels)
    if held is not None and workers is None:
        workers = len(held)
    if workers is not None:
        Range(1, MOST_WORKERS, whole=True).check("--workers", workers)
    if held is not None and len(held) != workers:
        raise InputError(f"--workers: {workers} is not allowed, {labels} has {len(held)}")
    return named_structure(
        name, workers, groups, lambda: held or drawn_labels(workers or 0, seed or 0), prefix="--"
    )


def _numbers(key: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"{key}: {text!r} is not allowed, a number or numbers like 0.5,0.7 are") from None


def _workers(key: str, text: str, structure: Structure) -> list[int]:
    found = []
    for part in text.split(","):
        try:
            found.append(structure.worker(part.strip()))
        except InputError as mistake:
            raise InputError(f"{key}: {text!r} is not allowed ({mistake})") from None
    if len(set(found)) != len(found):
        raise InputError(f"{key}: {text!r} is not allowed, different workers are")
    return found


def _draw(path: Path, found: Leakage, caption: str) -> None:
    from coterie.report.structures import draw

    epochs = np.unique(np.linspace(1, found.epoch, min(found.epoch, _MOST_EPOCHS_DRAWN)).astype(int)).tolist()
    draw(path, found, history(found, epochs), caption)
    complain(f"plot: {path}", style="none")


def _print(found: Leakage, content: dict[str, Any]) -> None:
    structure, schedule = found.structure, found.schedule
    say(
        f"{structure.summary}; {schedule.algorithm}, a merge every {schedule.period} epochs, "
        f"rate {_span(content['rate'])}, noise {_span(content['noise'])}; models up to index {found.epoch}"
    )
    if content["guarantee"] is None:
        say("nobody observes anybody in this threat model: all workers share a group")
    else:
        _print_workers(found)
        _print_distances(found)
        worst, most = content["most_exposed"], content["sees_most"]
        say(
            f"most exposed: worker {structure.name(worst['target'])}; worker "
            f"{structure.name(worst['observer'])} holds {worst['counts']} releases of its groups, epsilon "
            f"{round_up(worst['epsilon'])}"
        )
        say(
            f"sees most: worker {structure.name(most['observer'])}, mean epsilon "
            f"{round_up(most['mean_epsilon'])} over the workers it may look at"
        )
        say(content["guarantee"])
    for key, tell in (("coalition", _say_coalition), ("target_pair", _say_pair)):
        if key in content:
            tell(structure, content[key])
    if "requirements" in content:
        _print_requirements(structure, content)


def _print_workers(found: Leakage) -> None:
    """Workers that leak alike share a line, the most exposed first."""
    structure = found.structure
    kinds: dict[tuple[str, ...], list[int]] = {}
    for worker in np.argsort(-np.nan_to_num(found.per_worker, nan=-1.0), kind="stable"):
        row = np.where(found.defined[worker], found.epsilon[worker], -1.0)
        observer = int(np.argmax(row))
        if row[observer] < 0:
            continue
        groups = str(int(structure.membership[worker].sum()))
        kinds.setdefault((groups, *_most(found, (worker, observer))), []).append(int(worker))
    rows = [
        [
            ", ".join(map(structure.name, people[:6])) + (f", ... ({len(people)})" if people[6:] else ""),
            *kind,
        ]
        for kind, people in kinds.items()
    ]
    print_table(
        ["workers", "groups", "releases seen", "epsilon by counts", "epsilon"],
        rows[:_MOST_ROWS],
        title="Each worker against the observer that learns most",
    )
    if rows[_MOST_ROWS:]:
        say(f"... and {len(rows) - _MOST_ROWS} more kinds of workers, less exposed")


def _most(found: Leakage, where: Any) -> tuple[str, str, str]:
    """The most releases seen among some pairs, and both epsilons."""
    by_counts, best = (round_up(float(table[where].max())) for table in (found.epsilon_counts, found.epsilon))
    return str(int(found.counts[where].max())), by_counts, best


def _print_distances(found: Leakage) -> None:
    first = np.where(found.defined, found.first_epoch, np.nan)
    cases = ((epoch, first == epoch) for epoch in np.unique(first[~np.isnan(first)])[:_MOST_ROWS])
    print_table(
        ["something arrives at index", "pairs", "releases seen", "epsilon by counts", "epsilon"],
        [
            [f"{epoch:.0f}" if np.isfinite(epoch) else "never", str(int(where.sum())), *_most(found, where)]
            for epoch, where in cases
        ],
        title="Pairs by when the target first reaches the observer",
    )


def _say_coalition(structure: Structure, facts: dict[str, Any]) -> None:
    members = ", ".join(structure.name(member) for member in facts["members"])
    values = [value for value in facts["epsilon"] if value is not None]
    if not values:
        say(f"coalition of {members}: nobody is left to look at")
        return
    worst = facts["epsilon"].index(max(values))
    say(
        f"coalition of {members}: learns most about worker {structure.name(worst)}, "
        f"{facts['counts'][worst]} releases, epsilon {round_up(max(values))}"
    )
    say(facts["guarantee"])


def _say_pair(structure: Structure, facts: dict[str, Any]) -> None:
    target, observer = structure.name(facts["target"]), structure.name(facts["observer"])
    first = facts["first_epoch"]
    arrival = "none can ever arrive" if first is None else f"the first arrives with model {first}"
    say(f"worker {target} against worker {observer}: {facts['counts']} releases, {arrival}")
    say(facts["guarantee"])
    if "wanted" not in facts:
        return
    noise = facts["noise"]
    louder = "no noise does"
    if noise is not None:
        louder = "noise " + ", ".join(map(at_least, [noise] if isinstance(noise, float) else noise))
    if facts["epsilon"] == 0:
        louder = "any noise does"
    longer = "no period does" if facts["period"] is None else f"a merge every {facts['period']} epochs"
    say(f"epsilon at most {float(facts['wanted']):g}: {louder} at this period; {longer} at this noise")


def _print_requirements(structure: Structure, content: dict[str, Any]) -> None:
    verdicts, designs = content["requirements"], content["designs"][:_MOST_ROWS]
    print_table(
        ["requirement", "met", "epsilon", "worst pair"],
        [
            [
                verdict["requirement"],
                "yes" if verdict["met"] else "no",
                round_up(verdict["epsilon"]),
                " against ".join(map(structure.name, verdict["pair"] or ())) or "no such pair",
            ]
            for verdict in verdicts
        ],
        title="Requirements",
    )
    trusted = max(verdict["trusted_pairs"] for verdict in verdicts)
    if trusted:
        say(
            f"threat model 2 trusts members of a common group: up to {trusted} pairs that a requirement "
            "speaks of were not looked at"
        )
    print_table(
        ["period", "least noise"],
        [
            [str(design["period"]), "any" if design["any_noise"] else _span(design["noise"], at_least)]
            for design in designs
        ],
        title="What meets them all, least noisy first",
    )


def _span(values: Sequence[float], spelled: Callable[[float], str] = "{:g}".format) -> str:
    """The least and the largest, or the one value that all have."""
    return " to ".join(dict.fromkeys(map(spelled, (min(values), max(values)))))


def at_least(noise: float) -> str:
    """Four digits, never less than the value: whoever types them in again must not fall short."""
    scale = 10.0 ** (3 - math.floor(math.log10(noise)))
    return f"{math.ceil(noise * scale) / scale:.4g}"
