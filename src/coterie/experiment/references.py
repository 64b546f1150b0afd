"""Central models without privacy: what a cluster could reach at best. For evaluation only."""

from collections.abc import Mapping

import torch

from coterie.data import Federation
from coterie.experiment.calibrated import CalibratedRun
from coterie.experiment.metrics import Scores
from coterie.experiment.schema import EvaluationKind, Experiment
from coterie.privacy import Unit
from coterie.training.learner import Batch, Learner
from coterie.training.scoring import evaluate, join

EPOCHS = 30
BATCH = 64
QUICK_WORK = 5e9
"""Parameters times records that `references: auto` still trains."""


def wanted(experiment: Experiment, federation: Federation, parameters: int) -> bool:
    """Whether central models are trained beside a run: as the experiment says, or where that is quick."""
    asked = experiment.evaluation.references
    if experiment.evaluation_kind is not EvaluationKind.EXACT:
        return False
    if asked != "auto":
        return asked
    if experiment.privacy.unit is Unit.WORKER or experiment.own_records:
        return False  # workers in the same groups have nothing else in common; own records are not published
    records = sum(len(client.train) for client in federation.clients)
    return EPOCHS * records * parameters <= QUICK_WORK


def train_references(
    calibrated: CalibratedRun, cluster_of: Mapping[str, int], epochs: int = EPOCHS
) -> Scores:
    """Score of each client under a model trained on the pooled records of its cluster."""
    learner, federation, seed = (
        calibrated.learner,
        calibrated.federation,
        calibrated.experiment.seeds.simulation,
    )
    assert federation is not None
    start = torch.from_numpy(calibrated.facts.initialise(seed)).to(learner.device)
    scores = {}
    for cluster in sorted(set(cluster_of.values())):
        members = [client for client in federation.clients if cluster_of[client.name] == cluster]
        pooled = join([Batch.of(client.train, learner.device) for client in members])
        best = _train_centrally(learner, start, pooled, seed, epochs)
        for client in members:
            scores[client.name] = evaluate(learner, best, Batch.of(client.test, learner.device))
    return scores


def _train_centrally(
    learner: Learner, start: torch.Tensor, records: Batch, seed: int, epochs: int
) -> torch.Tensor:
    parameters = start.clone().requires_grad_(True)
    optimiser = torch.optim.Adam([parameters], lr=3e-3)
    shuffle = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        order = torch.randperm(len(records), generator=shuffle).to(learner.device)
        for batch in torch.split(order, BATCH):
            optimiser.zero_grad()
            learner.client_losses(parameters, records.take(batch)).mean().backward()  # type: ignore[no-untyped-call]
            optimiser.step()
    return parameters.detach()
