"""Serve the mean over rounds instead of the last round's models: less noise, and nothing more is released.

The noise of the rounds is independent, so that it averages out, while late models change slowly. Later rounds
weigh more (polynomial-decay averaging, Shamir and Zhang 2013), which forgets the beginning without having to
know where the end is. Averaging touches released values only: it costs no privacy. Training goes on from the
last models, as it would without.
"""

from dataclasses import fields, make_dataclass, replace
from typing import Any

import numpy as np

from coterie.algorithms.protocol import (
    Algorithm,
    Assignment,
    Models,
    OwnChoice,
    PublicFacts,
    Rng,
    Rounds,
    State,
)
from coterie.errors import InputError
from coterie.privacy import PrivacyPlan

_FORWARDED = (
    *("name", "unit", "settings_type", "needs_truth", "additive", "personal"),
    *("observer", "local_training", "local_gradients", "findings"),
)


def smoothed(algorithm: Algorithm[Any]) -> Algorithm[Any]:
    """The algorithm as its schedule wants it: as it is, or serving means over rounds."""
    return Smoothed(algorithm) if algorithm.schedule.averaging else algorithm


class Smoothed(Algorithm[Any]):
    """Another algorithm whose models are means over the rounds so far."""

    def __init__(self, algorithm: Algorithm[Any]) -> None:
        super().__init__(algorithm.settings, algorithm.schedule, algorithm.privacy)
        self.algorithm = algorithm
        for same in _FORWARDED:
            setattr(self, same, getattr(algorithm, same))
        kind, mean = algorithm.state_type, [("mean", Models), ("mean_from", int)]
        for taken in {name for name, _ in mean} & {field.name for field in fields(kind)}:
            raise InputError(
                f"schedule.averaging: {kind.__name__} has a field {taken!r}, which the mean needs; rename it"
            )
        growing = {**kind.growing, "mean": 0} if "models" in kind.growing else kind.growing
        self.state_type = make_dataclass(  # type: ignore[misc]
            f"Smoothed{kind.__name__}",
            mean,
            bases=(kind,),
            namespace={"growing": growing},
            frozen=True,
            kw_only=True,
        )

    def plan(self, facts: PublicFacts) -> PrivacyPlan:
        return self.algorithm.plan(facts)

    def start(self, facts: PublicFacts, rng: Rng) -> State:
        return self._with_mean(self.algorithm.start(facts, rng), None)

    def round(self, state: Any) -> Rounds[State]:
        return self._with_mean((yield from self.algorithm.round(state)), state)

    def models(self, state: Any) -> Assignment | OwnChoice:
        return replace(self.algorithm.models(state), models=state.mean)

    def _with_mean(self, state: State, before: Any | None) -> State:
        """The state with the mean that follows; where models are replaced or added, it begins anew."""
        models = self.algorithm.models(state).models
        if before is None:
            mean, begun = models, state.round
        elif before.mean.shape != models.shape or state.replaced_after == state.round:
            mean, begun = models, state.round - 1
        else:
            begun = before.mean_from
            decay = self.schedule.averaging
            share = (decay + 1) / (state.round - begun + decay)
            mean = before.mean + np.float32(share) * (models - before.mean)
        return self.state_type(**{**vars(state), "mean": mean, "mean_from": begun})
