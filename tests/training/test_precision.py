"""Who asks for float32 gets it, in whatever is computed of a client's records."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from coterie.algorithms.protocol import TrainJob
from coterie.bench.work import Work
from coterie.engines.clients import Clients
from coterie.privacy import Charge, RecordSums, plans
from coterie.training.learner import Batch, Learner, precision
from coterie.training.local_sgd import LocalSGD
from coterie.training.scoring import padded_loss_sums, same_bits_anywhere, score_sums

CPU = torch.device("cpu")
WORK = Work(model="softmax", clients=2, records=6, batch=3, shape=(5,))
SEEN: list[tuple[bool, bool]] = []


def note(gradient: object = None) -> None:
    SEEN.append((torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32))


class Watched(nn.Linear):
    """Notes whether a GPU might round factors now; of a kind that layer rules do not know."""

    def forward(self, inputs: Tensor) -> Tensor:
        note()
        outputs = super().forward(inputs)
        if outputs.requires_grad:  # the way back, too
            outputs.register_hook(note)
        return outputs


@pytest.fixture(autouse=True)
def as_torch_comes() -> Iterator[None]:
    """Convolutions may round their factors unless somebody says that they must not."""
    SEEN.clear()
    with precision(tf32=True):
        yield


def clients(full_precision: bool) -> Clients:
    torch.manual_seed(0)
    learner = Learner(
        nn.Sequential(Watched(5, 10)), WORK.task, CPU, mapped=False, full_precision=full_precision
    )
    assert learner.book is None
    with WORK.private_engine(CPU) as engine:
        return Clients(engine.facts, learner, engine.clients.table, 1)


@pytest.mark.parametrize("full_precision", [True, False])
@pytest.mark.parametrize("asked", ["train", "learn", "sketch", "score", "choose", "probe"])
def test_float32_holds_in_everything_that_is_computed_of_records(asked: str, full_precision: bool) -> None:
    own, start = clients(full_precision), np.ones(60, np.float32) * 0.1
    records = own.records["client-0"]
    SEEN.clear()
    if asked == "train":
        planned = plans.RecordReleases(6, clip=1.0).steps(plans.TRAINING, 1, 3, 1.0)
        assert isinstance(planned.mechanism, RecordSums)
        own.train(TrainJob("client-0", start), planned.mechanism, Charge("client-0", 1, "training", "hash"))
    elif asked == "learn":
        own.learn("client-0", start, LocalSGD(epochs=1, batch=3, lr=0.1), seed=0)
    elif asked == "sketch":
        own.sketch("client-0", start, 4)
    elif asked == "score":
        own.score("client-0", start[None])
        score_sums(own.learner, torch.from_numpy(start), records, [len(records)])
    elif asked == "choose":
        padded_loss_sums(own.learner, torch.from_numpy(start[None]), [records], size=8)
    else:
        same_bits_anywhere(own.learner, size=8)
    assert set(SEEN) == {(not full_precision, not full_precision)}
    assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == (True, True)


@pytest.mark.parametrize("full_precision", [True, False])
def test_float32_holds_where_layer_rules_compute(
    full_precision: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    learner = Learner(nn.Linear(5, 10), WORK.task, CPU, full_precision=full_precision)
    assert learner.book is not None

    def noted(*given: Tensor) -> Tensor:
        note()
        return torch.zeros(2, 10)

    monkeypatch.setattr(learner.book, "outputs", noted)
    monkeypatch.setattr(learner.book, "rows", noted)
    batch = Batch(torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64))
    learner.predict(learner.initial(), batch.features)
    learner.gradients(learner.initial(), batch)
    assert len(SEEN) == 2
    assert set(SEEN) == {(not full_precision, not full_precision)}
