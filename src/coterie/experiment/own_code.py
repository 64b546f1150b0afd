"""Which parts of an experiment are the user's own code, what a guarantee says of them, and which code it was.

Own code runs in the process that holds the records of a simulation, and nothing in Python keeps it from
looking at them, or from replacing what is ours. What it is handed is what it needs, what it asks for is
charged and refused as of anybody, and its plan is made of our mechanisms and proven by our arithmetic; that
it does nothing behind our back is trust, and the guarantee says so.
"""

import inspect
from collections.abc import Iterator
from pathlib import Path
from traceback import walk_tb
from typing import Any

from coterie.algorithms import find_algorithm
from coterie.algorithms.protocol import Algorithm, PublicFacts
from coterie.errors import CoterieError, InputError, PlanError, one_line
from coterie.experiment.schema import Experiment
from coterie.files import Json, read_json
from coterie.models import code_caveats
from coterie.plugins import ALGORITHM, DATA, FEATURES, FEDERATION, MODEL, PluginKind
from coterie.privacy import PrivacyPlan, Unit
from coterie.privacy.threats import THREATS

OWN_ALGORITHM = (
    "the algorithm is the user's own code: it is handed released values only, and is trusted to look for "
    "nothing else in the process that it runs in"
)
OWN_DATA = (
    "the data set is made by the user's own code, which is trusted to scale by public constants and to make "
    "each record of one individual's values alone"
)
OWN_FEDERATION = (
    "the user's own code decides who holds which records: the guarantee is for records as it dealt them"
)
EVERYONE_SEES = (
    "every worker is taken to see every release: what the user's own algorithm shows to whom is not proven"
)


def own_parts(experiment: Experiment, *, served: bool = False) -> Iterator[tuple[PluginKind, str]]:
    """The keys under which an experiment names the user's own code, each with the name.

    Args:
        served: between sites, which have records of their own, whatever the file says of data.
    """
    if experiment.own_algorithm:
        yield ALGORITHM, experiment.algorithm.name
    if experiment.model.own:
        yield MODEL, experiment.model.name
    if experiment.model.own_features:
        yield FEATURES, experiment.model.features
    if not served:
        for section, kind in ((experiment.data, DATA), (experiment.federation, FEDERATION)):
            if getattr(section, "own", False):
                yield kind, str(getattr(section, kind.key.rpartition(".")[2]))


def own_caveats(experiment: Experiment, *, served: bool = False) -> list[str]:
    """What a guarantee must add because of them."""
    kinds = {kind for kind, _ in own_parts(experiment, served=served)}
    said = {
        OWN_ALGORITHM: ALGORITHM in kinds,
        EVERYONE_SEES: ALGORITHM in kinds and experiment.privacy.unit is Unit.WORKER,
        OWN_DATA: DATA in kinds,
        OWN_FEDERATION: FEDERATION in kinds,
    }
    return [*(caveat for caveat, holds in said.items() if holds), *code_caveats(experiment.model)]


def code_of(experiment: Experiment, *, served: bool = False) -> Json | None:
    """Which code each of them is here, for the run's folder; None where all is ours."""
    return {kind.key: kind.code_of(name) for kind, name in own_parts(experiment, served=served)} or None


def check_code(path: Path, now: Json | None) -> None:
    """Refuse other code than a run was begun with: its rounds, or its models, would be of two programs."""
    begun = read_json(path) if now is not None and path.exists() else None
    check_same_code(begun, now, f"{path.parent} was begun with; go on with that, or start a new run")


def check_same_code(known: Json | None, here: Json | None, whose: str) -> None:
    """Refuse code that is not what is known of it; `whose` that is ends the line."""
    for key, now in (here or {}).items():
        if (known or {}).get(key) != now:
            was = _shown((known or {}).get(key) or {})
            raise InputError(
                f"{key}: {now['name']}: the code here ({_shown(now)}) is not the one ({was}) that {whose}"
            )


def _shown(code: Json) -> str:
    package = f"{code.get('package')} {code.get('version')}, " if code.get("package") else ""
    return f"{package}sha256 {str(code.get('sha256'))[:12]}" if code else "none"


def in_own_code(experiment: Experiment, mistake: Exception | SystemExit) -> InputError | None:
    """One line for what the user's own algorithm raised, which sees public and released values only."""
    if isinstance(mistake, CoterieError) or not experiment.own_algorithm:
        return None
    module = inspect.getmodule(find_algorithm(experiment.privacy.unit, experiment.algorithm.name))
    file = getattr(module, "__file__", None)
    lines = [line for frame, line in walk_tb(mistake.__traceback__) if frame.f_code.co_filename == file]
    said = f"algorithm.name: {experiment.algorithm.name}: {one_line(mistake)}"
    return InputError(f"{said}, at {file}:{lines[-1]}") if lines else None


def planned_by(experiment: Experiment, algorithm: Algorithm[Any], facts: PublicFacts) -> PrivacyPlan:
    """What an algorithm declares; own code's plan is checked, and what it raises is one line."""
    try:
        declared = algorithm.plan(facts)
    except (Exception, SystemExit) as mistake:
        if (theirs := in_own_code(experiment, mistake)) is not None:
            raise theirs from None
        raise
    if experiment.own_algorithm:
        check_plan_is_ours(experiment, declared)
    return declared


def check_plan_is_ours(experiment: Experiment, plan: object) -> None:
    """Refuse a plan of own code that our arithmetic would not speak for, or that no recount could read.

    Mechanisms bind what is released to what it costs; one that is not ours could say that it costs nothing.
    """
    name, privacy = experiment.algorithm.name, experiment.privacy
    # Not a subclass either, which could answer otherwise what it is asked.
    if type(plan) is not PrivacyPlan:
        raise PlanError(
            f"algorithm.name: {name}: its plan is a {type(plan).__name__}; allowed: a PrivacyPlan"
        )
    releases = [release for unit in plan.units for release in unit.releases]
    kinds = {type(part) for part in (*plan.units, *releases, *(each.mechanism for each in releases))}
    strange = sorted(kind.__name__ for kind in kinds if not kind.__module__.startswith("coterie.privacy."))
    problems = {
        f"is for unit {plan.unit}; privacy.unit is {privacy.unit}": plan.unit is not privacy.unit,
        f"is for {plan.adjacency}; privacy.adjacency is {privacy.adjacency}": (
            plan.adjacency is not privacy.adjacency
        ),
        f"counts {plan.persons}; privacy says {privacy.persons}": plan.persons != privacy.persons,
        "speaks of other observers than coterie.privacy does": plan.threat != THREATS[privacy.unit],
        f"has parts that are not of coterie.privacy: {', '.join(strange)}": bool(strange),
    }
    for problem in (said for said, holds in problems.items() if holds):
        raise PlanError(f"algorithm.name: {name}: its plan {problem}")
