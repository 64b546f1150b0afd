"""What is known about a leakage, as plain data: the objects that `coterie leakage --json` prints."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from coterie.groups.design import Requirement, check, search, solve_pair
from coterie.groups.leakage import Leakage
from coterie.privacy import Guarantee
from coterie.privacy.units import number_to_json

Facts = dict[str, Any]


def cells(table: npt.NDArray[Any]) -> list[Any]:
    """Nested lists, null where nothing is defined: below 0 in whole numbers, not a number in others."""
    found = table.astype(object)
    found[table < 0 if np.issubdtype(table.dtype, np.integer) else np.isnan(table)] = None
    return list(found.tolist())


def leakage_facts(found: Leakage) -> Facts:
    """Everything about every pair of workers."""
    structure, schedule = found.structure, found.schedule
    worst, observer = found.most_exposed(), found.sees_most()
    facts: Facts = {
        "counts": cells(found.counts),
        "epsilon_counts": cells(found.epsilon_counts),
        "epsilon": cells(found.epsilon),
        "per_worker": cells(found.per_worker),
        "first_epoch": cells(np.nan_to_num(found.first_epoch, nan=-1, posinf=-1).astype(np.int64)),
        "structure": {
            "kind": structure.kind,
            "workers": structure.workers,
            "groups": [list(members) for members in structure.groups],
        },
        "algorithm": schedule.algorithm.value,
        "period": schedule.period,
        "epochs": found.epoch,
        "rate": [noise.rate for noise in schedule.noises],
        "noise": [noise.multiplier for noise in schedule.noises],
        "delta": found.delta,
        "accountant": "rdp",
        "mode": schedule.mode.value,
        "threat_model": int(found.threat),
        **_said(None if worst is None else found.guarantee(*worst)),
    }
    if found.published_counts is not None and found.published_epsilon is not None:
        facts["published_counts"] = cells(found.published_counts)
        facts["published_epsilon"] = cells(found.published_epsilon)
    if worst is not None and observer is not None:
        facts["most_exposed"] = {
            "target": worst[0],
            "observer": worst[1],
            "counts": int(found.counts[worst]),
            "epsilon_counts": float(found.epsilon_counts[worst]),
            "epsilon": float(found.epsilon[worst]),
        }
        facts["sees_most"] = {"observer": observer[0], "mean_epsilon": observer[1]}
    return facts


def coalition_facts(found: Leakage, members: Sequence[int]) -> Facts:
    """What observers learn who tell each other everything."""
    counts, by_counts, best = found.coalition(members)
    promise = found.guarantee(int(np.nanargmax(best)), *members) if np.isfinite(best).any() else None
    return {
        "members": list(members),
        "counts": cells(counts),
        "epsilon_counts": cells(by_counts),
        "epsilon": cells(best),
        **_said(promise),
    }


def pair_facts(found: Leakage, target: int, observer: int, wanted: float | None) -> Facts:
    """One target and one observer; and what would bring them within an epsilon, if one is wanted."""
    promise, first = found.guarantee(target, observer), found.first_epoch[target, observer]
    facts = {
        "target": target,
        "observer": observer,
        "counts": int(found.counts[target, observer]),
        "epsilon": promise.epsilon,
        "first_epoch": int(first) if np.isfinite(first) else None,
        **_said(promise),
    }
    if wanted is None:
        return facts
    factor, period = solve_pair(found, target, observer, wanted)
    needed = None if factor is None else [factor * noise.multiplier for noise in found.schedule.noises]
    alike = needed[0] if needed is not None and len(set(needed)) == 1 else needed
    return facts | {"wanted": number_to_json(wanted), "noise": alike, "period": period}


def requirement_facts(found: Leakage, demands: Sequence[Requirement]) -> Facts:
    """Whether each demand is met, and which periods and noises would meet them all."""
    return {
        "requirements": [
            {
                "requirement": verdict.requirement.text(found.structure),
                "met": verdict.met,
                "epsilon": verdict.epsilon,
                "pair": None if verdict.pair is None else list(verdict.pair),
                "trusted_pairs": verdict.trusted,
            }
            for verdict in check(found, demands)
        ],
        "designs": [
            {
                "period": design.period,
                "noise": [noise.multiplier for noise in design.schedule.noises],
                "any_noise": design.any_noise,
            }
            for design in search(found, demands)
        ],
    }


def _said(promise: Guarantee | None) -> Facts:
    return {
        "guarantee": None if promise is None else promise.line,
        "guarantee_text": None if promise is None else promise.text,
    }
