"""Models that can be used: with everything between raw values and answers, wherever they were trained."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from coterie.algorithms.protocol import Assignment, OwnChoice, Parts, Vector
from coterie.data import Task
from coterie.data.preprocessing import Preprocessing
from coterie.data.raw import raw_records
from coterie.errors import InputError
from coterie.models import ModelSettings, build_model, public_features
from coterie.models.preprocessed import PreprocessedModel
from coterie.privacy import Guarantee
from coterie.training.parameters import Layout

AT_ONCE = 1024
"""Records that go through a model together."""
Labels: TypeAlias = NDArray[Any]
"""Classes by name, or values in the label's units."""


@dataclass(frozen=True)
class ModelAnswers:
    """What a model says of records.

    Args:
        labels: classes by name, or values in the label's units.
        outputs: logits, or the same values.
        cluster: the model's number, where it is that of a cluster.
    """

    labels: Labels
    outputs: NDArray[np.float32]
    probabilities: NDArray[np.float64] | None
    cluster: int | None

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Trained:
    """What is said of models: how they came about, and what is promised of that.

    Args:
        seed: of the network's fixed parts, where it has any.
        additive: whether the network is two of its kind, outputs added.
    """

    algorithm: str
    rounds: int
    model: ModelSettings
    seed: int
    additive: bool
    promise: Guarantee


class UsableModels(ABC):
    """The models in a folder, checked, and read when they are asked for."""

    @property
    @abstractmethod
    def path(self) -> Path:
        """The folder."""

    @property
    @abstractmethod
    def trained(self) -> Trained:
        """How they came about; an InputError where models are the user's own code, and that has changed."""

    @property
    @abstractmethod
    def described(self) -> tuple[Task, Preprocessing]:
        """What they are for, and how raw values become what they see."""

    @property
    @abstractmethod
    def clients(self) -> tuple[str, ...]:
        """Whose models these are."""

    @property
    @abstractmethod
    def served(self) -> Assignment | OwnChoice:
        """Which model each client would use now, as far as is known here."""

    @property
    @abstractmethod
    def personal_parts(self) -> Parts | None:
        """Which parameters every client keeps for itself, where it keeps any."""

    @abstractmethod
    def chosen(self, client: str | None = None, cluster: int | None = None) -> tuple[Vector, int | None]:
        """The parameters of a client's model, or of a cluster's, and the number of the cluster."""

    @abstractmethod
    def to_export(
        self, client: str | None, cluster: int | None
    ) -> dict[str, tuple[PreprocessedModel, dict[str, Any]]]:
        """What is exported, by the name of its file: a model, and whose it is."""

    @abstractmethod
    def digests(self) -> Mapping[str, str]:
        """Hashes of the files that models and task are read from."""

    # --- models and what they say -------------------------------------------------------------------

    @property
    def task(self) -> Task:
        return self.described[0]

    @property
    def preprocessing(self) -> Preprocessing:
        return self.described[1]

    @property
    def rows(self) -> NDArray[np.float32]:
        """The models of the clusters, one per row."""
        return self.served.models

    def network(self, parameters: Vector) -> torch.nn.Module:
        """The network with these parameters."""
        trained = self.trained
        network = build_model(trained.model, self.task, trained.seed, additive=trained.additive)
        network.load_state_dict(Layout.of(network).split(torch.from_numpy(parameters)), strict=False)
        return network.requires_grad_(False).eval()

    def model(self, client: str | None = None, cluster: int | None = None) -> PreprocessedModel:
        """The model of a client or of a cluster, with preprocessing inside."""
        parameters, _ = self._asked(client, cluster)
        return self.around(self.network(parameters))

    def _asked(self, client: object, cluster: object) -> tuple[Vector, int | None]:
        """`chosen`, for whoever may give anything."""
        if client is not None:
            InputError.unless_a(str, "client", client, "a client's name, a text")
        if cluster is not None:
            InputError.unless_a(Integral, "cluster", cluster, "the number of a cluster, from 0")
        return self.chosen(client, cluster)  # type: ignore[arg-type]

    def around(self, network: torch.nn.Module) -> PreprocessedModel:
        """A network of this kind with preprocessing and public features before it."""
        public = public_features(self.trained.model.features, self.task)
        return PreprocessedModel(network, self.task, self.preprocessing, public)

    def inputs(self, values: object) -> NDArray[Any]:
        """What models take of arrays, data frames, rows by name or texts."""
        return raw_records(values, self.preprocessing)

    def answer(
        self, raw: NDArray[Any], client: str | None = None, cluster: int | None = None
    ) -> ModelAnswers:
        """What a client's or cluster's model says of raw records."""
        parameters, row = self._asked(client, cluster)
        model = self.around(self.network(parameters))
        return answers(model, in_parts(model, raw), row)


def answers(model: PreprocessedModel, outputs: torch.Tensor, cluster: int | None) -> ModelAnswers:
    """What outputs of a model, or values of a regression, mean."""
    values = outputs.numpy()
    if model.task.kind == "regression":
        return ModelAnswers(values, values, None, cluster)
    names = np.array(model.preprocessing.label.names)
    shares = torch.softmax(outputs.double(), dim=1).numpy()
    return ModelAnswers(names[outputs.argmax(dim=1).numpy()], values, shares, cluster)


@torch.no_grad()
def in_parts(compute: Callable[..., torch.Tensor], records: NDArray[Any]) -> torch.Tensor:
    """What is computed of records, some at a time: many take no more memory than what is found."""
    if not len(records):  # no library takes a spectrum of nothing
        return compute(torch.from_numpy(np.zeros((1, *records.shape[1:]), records.dtype)))[:0]
    starts = range(0, len(records), AT_ONCE)
    parts = (np.ascontiguousarray(records[first : first + AT_ONCE]) for first in starts)
    return torch.cat([compute(torch.from_numpy(part)) for part in parts])
