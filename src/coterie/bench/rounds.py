"""A round of client-level learning: some clients sampled of many, a few local epochs of plain SGD each.

Ours samples, trains, clips and adds noise, with a ledger; the peers train every client of an equally large
sample and add up the updates.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from coterie.algorithms.protocol import Choice, Cohort, CohortJob, LocalTraining, Opened, Sum
from coterie.bench.peers import installed_round_peers
from coterie.bench.timing import OURS, Timing, Watch, Way, take_turns
from coterie.bench.work import ROUNDS, RandomClients
from coterie.privacy.plans import SUMS, CohortReleases, client_plan


@dataclass(frozen=True, kw_only=True)
class RoundWork(RandomClients):
    """One round that everybody does."""

    records: int = 60
    sampled: int
    epochs: int = 5
    batch: int = 10
    lr: float = 0.05

    def samples(self, clients: int) -> int:
        """Records that go through a model when so many clients train."""
        return clients * self.epochs * self.records


def compare_rounds(
    work: RoundWork, device: torch.device, repeats: int, warm_up: int, watch: Watch
) -> list[Timing]:
    """Ours and every installed peer on the same round."""
    trained = {client.name: client.train for client in work.federation().clients}
    records = {name: (own.features, own.targets) for name, own in trained.items()}
    with our_round(work, device) as ours:
        ways: dict[str, Way] = {OURS: ours}
        for name, peer in installed_round_peers().items():
            run = peer(work.build().to(device), records, work.sampled, work.lr, work.epochs, work.batch)
            ways[name] = lambda run=run: work.samples(run())  # type: ignore[misc]
        name = f"{work.model}, {work.sampled} of {work.clients} clients, client-level"
        return take_turns(name, ways, device, repeats, watch, warm_up)


@contextmanager
def our_round(work: RoundWork, device: torch.device) -> Iterator[Way]:
    """Our own round: sampled, charged, trained, clipped and noised."""
    plan = client_plan(CohortReleases(work.sampled / work.clients).sums(noise=1.0), ROUNDS)
    training = LocalTraining(work.epochs, work.batch, work.lr)
    job = CohortJob(work.names, work.start()[None], training, Choice.GIVEN)
    rounds = iter(range(1, ROUNDS))
    with work.engine(plan, work.lr, device) as engine:

        def run() -> int:
            number = next(rounds)
            cohort = engine.answer(Cohort(SUMS, job), number)
            assert isinstance(cohort, Opened)
            # How many came is a secret that no answer tells; a benchmark must know.
            came = len(engine.cohorts._open[cohort.number].sampled)
            engine.answer(Sum(cohort), number)
            return work.samples(came)

        yield run
