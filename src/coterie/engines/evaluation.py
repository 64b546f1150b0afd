"""Private scores: how well models do on held-out records, as noisy sums that are charged before any is read.

A score is a bounded statistic of one record (right or wrong, the bounded error of a regression) or of one
client (the share of its held-out records that its model gets right). Losses are not bounded and never leave.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from coterie.engines.clients import TrainingFacts
from coterie.engines.local import input_hash
from coterie.privacy import (
    EVALUATION,
    POPULATION,
    Charge,
    JointScores,
    Ledger,
    NoisyScores,
    PrivacyPlan,
    Released,
    held_out,
)
from coterie.privacy.mechanisms import HALF
from coterie.privacy.ranges import gaussian

Floats = NDArray[np.float64]
M = TypeVar("M", NoisyScores, JointScores)


@dataclass(frozen=True)
class PrivateScores:
    """Answers for held-out records on this machine.

    Args:
        context: whatever else decides a score beside the models; noise must not repeat when it differs.
    """

    facts: TrainingFacts
    plan: PrivacyPlan
    ledger: Ledger
    context: str

    def of_records(
        self,
        models: Mapping[str, NDArray[np.float32]],
        round: int,
        count: Callable[[], Mapping[str, float]],
    ) -> dict[str, Released[float]]:
        """Noisy number of held-out records of each client that its model gets right.

        Args:
            models: that each client would use.
            count: reads the records; called once everything is charged.
        """
        mechanisms, charges = self._charged(NoisyScores, models, round)
        totals = count()
        return {
            client: self._noisy(mechanism, totals[client] - HALF * mechanism.units, charges[client])
            for client, mechanism in mechanisms.items()
        }

    def _charged(
        self, kind: type[M], models: Mapping[str, NDArray[np.float32]], round: int
    ) -> tuple[dict[str, M], dict[str, Charge]]:
        """What is planned for the held-out records of each client, and its charge, once it is written."""
        mechanisms = {client: self.plan.planned(kind, EVALUATION, held_out(client)) for client in models}
        charges = {
            client: Charge(held_out(client), round, EVALUATION, input_hash(self.context, model))
            for client, model in models.items()
        }
        self.ledger.charge(list(charges.values()))
        return mechanisms, charges

    def jointly_of_records(
        self,
        models: Mapping[str, NDArray[np.float32]],
        round: int,
        count: Callable[[], Mapping[str, Floats]],
    ) -> dict[str, Released[Floats]]:
        """Noisy sums of all statistics over the held-out records of each client, centred.

        Args:
            count: reads the records; called once everything is charged.
        """
        mechanisms, charges = self._charged(JointScores, models, round)
        totals = count()
        return {
            client: self._noisy_vector(mechanism, mechanism.centred(totals[client], mechanism.units), charge)
            for (client, mechanism), charge in zip(mechanisms.items(), charges.values(), strict=True)
        }

    def jointly_of_clients(
        self, models: NDArray[np.float32], round: int, means: Callable[[], Mapping[str, Floats]]
    ) -> Released[Floats]:
        """Noisy sum over all clients of the mean of all statistics over the records of each, centred.

        Args:
            means: asks the clients; one that does not answer adds nothing.
        """
        mechanism = self.plan.planned(JointScores, EVALUATION, POPULATION)
        charge = Charge(POPULATION, round, EVALUATION, input_hash(self.context, models))
        self.ledger.charge([charge])
        rows = [mechanism.centred(mean, 1.0) for mean in means().values()]
        # No longer than an honest mean can be, whatever it was made of.
        rows = [row * min(1.0, mechanism.clip / max(float(np.linalg.norm(row)), HALF)) for row in rows]
        total = np.sum([np.zeros(len(mechanism.weights)), *rows], axis=0)
        return self._noisy_vector(mechanism, total, charge)

    def _noisy_vector(self, mechanism: JointScores, centred: Floats, charge: Charge) -> Released[Floats]:
        stream, std = self.facts.stream("noise", charge), mechanism.noise_std
        rest = {"multiplier": mechanism.multiplier, "clip": mechanism.clip}
        return Released(centred + gaussian(stream, len(centred), std, **rest), std)

    def of_clients(
        self, models: NDArray[np.float32], round: int, shares: Callable[[], Mapping[str, float]]
    ) -> Released[float]:
        """Noisy sum over all clients of the share of held-out records that each gets right.

        Args:
            models: those that clients use or choose from.
            shares: asks the clients; one that does not answer adds nothing, like one that is right by half.
        """
        mechanism = self.plan.planned(NoisyScores, EVALUATION, POPULATION)
        charge = Charge(POPULATION, round, EVALUATION, input_hash(self.context, models))
        self.ledger.charge([charge])
        total = sum(min(max(share, 0.0), 1.0) - HALF for share in shares().values())
        return self._noisy(mechanism, total, charge)

    def _noisy(self, mechanism: NoisyScores, centred: float, charge: Charge) -> Released[float]:
        """The sum with its noise, and the halves given back."""
        stream, std = self.facts.stream("noise", charge), mechanism.noise_std
        noise = gaussian(stream, 1, std, multiplier=mechanism.multiplier, clip=HALF)
        return Released(centred + float(noise[0]) + HALF * mechanism.units, std)
