"""`dp-fedavg`: one model for everyone, private for whole clients.

McMahan, Ramage, Talwar and Zhang, "Learning Differentially Private Recurrent Language Models", ICLR 2018.
"""

from coterie.algorithms.client.client_level import ClientLevel, ClientLevelState
from coterie.algorithms.clusters import equal_starts
from coterie.algorithms.protocol import PublicFacts, Rng, Rounds, Sum, Sums, ask


class FedAvg(ClientLevel[ClientLevelState]):
    name = "dp-fedavg"

    def start(self, facts: PublicFacts, rng: Rng) -> ClientLevelState:
        return ClientLevelState(0, facts.clients, *equal_starts(facts, rng, 1), clip=self.first_clip())

    def round(self, state: ClientLevelState) -> Rounds[ClientLevelState]:
        cohort = yield from self.opened(state)
        sums = yield from ask(Sum(cohort), Sums)
        return self.moved(state, sums, self.expected(state))
