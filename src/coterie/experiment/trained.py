"""What a finished run folder is good for: its models, with everything between raw values and answers.

A folder holds all that is needed: which model each client uses, the parameters, the network, and in
`task.json` the public constants by which raw values became what the network saw in training.
"""

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ValidationError

from coterie.algorithms import AnyAlgorithm
from coterie.algorithms.protocol import Assignment, Choice, OwnChoice, Parts, Vector
from coterie.data import Federation, Task
from coterie.data.preprocessing import Preprocessing
from coterie.data.raw import raw_records
from coterie.errors import InputError
from coterie.experiment import checkpoint
from coterie.experiment.calibrated import build_algorithm
from coterie.experiment.checkpoint import Checkpoint
from coterie.experiment.experiment_file import read_experiment
from coterie.experiment.folder import RunFolder
from coterie.experiment.own_code import check_code, code_of
from coterie.experiment.recorded import check_folder
from coterie.experiment.result import RunResult
from coterie.experiment.schema import Experiment
from coterie.files import Json, read_json
from coterie.models import build_model
from coterie.models.preprocessed import PreprocessedModel
from coterie.privacy.plain import MalformedError, record
from coterie.settings import explain
from coterie.training.parameters import Layout

FORMAT = 1
AT_ONCE = 1024
"""Records that go through a model together."""
Labels: TypeAlias = NDArray[Any]
"""Classes by name, or values in the label's units."""


def task_facts(federation: Federation) -> Json:
    """What the models of a run on these records are for, as its folder keeps it."""
    described = federation.preprocessing or Preprocessing.as_it_is(federation.task)
    return {
        "format": FORMAT,
        "task": record(Task).write(federation.task),
        "preprocessing": described.model_dump(mode="json", exclude_none=True),
    }


def read_task(path: Path) -> tuple[Task, Preprocessing]:
    """What `task_facts` wrote into a file."""
    content = read_json(path)
    if content.get("format") != FORMAT:
        raise InputError(f"{path}: of another version (format {content.get('format')}, ours is {FORMAT})")
    try:
        return record(Task).read(content["task"]), Preprocessing.model_validate(content["preprocessing"])
    except ValidationError as mistake:
        raise InputError(f"{path}: {explain(mistake, Preprocessing)}") from None
    except (KeyError, TypeError, ValueError, MalformedError) as mistake:
        raise InputError(f"{path}: not the task of a run ({type(mistake).__name__})") from None


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
class TrainedRun:
    """A finished run folder, checked, and what is in it, read when it is asked for."""

    files: RunFolder

    @classmethod
    def open(cls, path: str | Path) -> "TrainedRun":
        """The run in a folder; an InputError where there is none whose models can be used."""
        files = RunFolder(Path(path))
        for problem, holds in (
            ("not a run folder", not files.exists),
            ("not finished; coterie run --resume goes on with it", not files.finished),
            ("trained between sites, whose raw values are known to them alone", files.sites.exists()),
            (
                "written by an earlier version, without task.json, so how its raw values were scaled is not "
                "known; run it anew",
                not files.task.exists(),
            ),
        ):
            if holds:
                raise InputError(f"{files.path}: {problem}")
        check_folder(files)
        return cls(files)

    @cached_property
    def experiment(self) -> Experiment:
        """What was run; an InputError where models are the user's own code, and that has changed."""
        found = read_experiment(self.files.experiment)
        check_code(self.files.code, code_of(found, served=True))  # what it says of data is of no use here
        return found

    @cached_property
    def result(self) -> RunResult:
        return RunResult.load(self.files.path)

    @cached_property
    def _described(self) -> tuple[Task, Preprocessing]:
        return read_task(self.files.task)

    @property
    def task(self) -> Task:
        return self._described[0]

    @property
    def preprocessing(self) -> Preprocessing:
        return self._described[1]

    @cached_property
    def clients(self) -> tuple[str, ...]:
        return tuple(self._truth)

    @cached_property
    def _truth(self) -> dict[str, int | None]:
        """Every client, with its true cluster where that is known."""
        known = read_json(self.files.federation)["clients"]
        return {str(client["name"]): client["true_cluster"] for client in known}

    # --- which model --------------------------------------------------------------------------------

    @cached_property
    def algorithm(self) -> AnyAlgorithm:
        truth = {client: own for client, own in self._truth.items() if own is not None}
        return build_algorithm(self.experiment, truth or None)

    @cached_property
    def _saved(self) -> Checkpoint:
        saved = checkpoint.load(self.files.checkpoint, self.algorithm.state_type)
        if saved is None:
            raise InputError(f"{self.files.checkpoint}: the models were dropped on purpose; run it anew")
        return saved

    @cached_property
    def served(self) -> Assignment | OwnChoice:
        """Which model each client would use now, as far as the server knows."""
        served = self.algorithm.models(self._saved.state)
        size = int(read_json(self.files.federation)["parameters"])
        for name, own in {"models": served.models, **self._saved.personal}.items():
            whole = name == "models"
            fits = own.dtype == np.float32 and (own.shape[1:] == (size,) if whole else own.ndim == 1)
            InputError.when(not fits, f"{self.files.checkpoint}: damaged checkpoint ({name}: {own.shape})")
        return served

    @property
    def rows(self) -> NDArray[np.float32]:
        """The models of the clusters, one per row."""
        return self.served.models

    @property
    def personal_parts(self) -> Parts | None:
        """Which parameters every client keeps for itself, where it keeps any."""
        parts = self.served.parts if isinstance(self.served, OwnChoice) else None
        return parts if parts is not None and parts.personal.any() else None

    def chosen(self, client: str | None = None, cluster: int | None = None) -> tuple[Vector, int]:
        """The parameters of a client's model, or of a cluster's, and the number of the cluster."""
        served, count = self.served, len(self.rows)
        clusters = f"cluster 0 to {count - 1}" if count > 1 else "cluster 0"
        if client is not None and cluster is not None:
            raise InputError(f"client, cluster: {client} and {cluster} are both given; allowed: one of them")
        if client is not None:
            return self._of_client(client, clusters)
        if cluster is None and (count > 1 or self.personal_parts is not None):
            raise InputError(
                f"client, cluster: {self.files.path} has several models; name a client or {clusters}"
            )
        row = cluster or 0
        if not 0 <= row < count:
            raise InputError(f"cluster: {row} is not a model of {self.files.path}; allowed: {clusters}")
        if self.personal_parts is not None:
            raise InputError(
                f"cluster: {row}; clients of {self.algorithm.name} keep a part of the model for themselves, "
                "so that no other is whole; name a client"
            )
        return served.models[row], row

    def _of_client(self, client: str, clusters: str) -> tuple[Vector, int]:
        served = self.served
        if client not in self.clients:
            near = difflib.get_close_matches(client, self.clients, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise InputError(
                f"client: {client!r} took no part{hint}; allowed: a client of the run, {clusters}"
            )
        if isinstance(served, Assignment):
            return served.model_of(client), served.cluster_of[client]
        if served.choice is not Choice.GIVEN:
            raise InputError(
                f"client: which model {client} uses is its own secret choice, which the run does not keep; "
                f"name {clusters}"
            )
        return self._own(client, served.models[0]), 0

    def _own(self, client: str, model: Vector) -> Vector:
        """The model with what the client keeps for itself."""
        parts = self.personal_parts
        if parts is None or client not in self._saved.personal:
            return model
        whole = model.copy()
        whole[parts.personal] = self._saved.personal[client]
        return whole

    def evaluated(self) -> Assignment:
        """Which model each client used when the run was evaluated; where it chose itself, as it then said."""
        served, known = self.served, self.result.clusters
        if isinstance(served, Assignment):
            return served
        if not known:
            raise InputError(
                f"{self.files.path}: which model a client uses is its own secret choice, and the run was not "
                "evaluated exactly, so nothing tells it; name a cluster"
            )
        own = self._saved.personal if self.personal_parts is not None else ()
        return Assignment(
            served.models,
            dict(known),
            {client: self._own(client, served.models[known[client]]) for client in own},
        )

    # --- models and what they say -------------------------------------------------------------------

    def network(self, parameters: Vector) -> torch.nn.Module:
        """The run's network with these parameters."""
        experiment = self.experiment
        seed, additive = experiment.seeds.simulation, self.algorithm.additive
        network = build_model(experiment.model, self.task, seed, additive=additive)
        network.load_state_dict(Layout.of(network).split(torch.from_numpy(parameters)), strict=False)
        return network.requires_grad_(False).eval()

    def model(self, client: str | None = None, cluster: int | None = None) -> PreprocessedModel:
        """The model of a client or of a cluster, with preprocessing inside."""
        parameters, _ = self.chosen(client, cluster)
        return PreprocessedModel(self.network(parameters), self.task, self.preprocessing)

    def inputs(self, values: object) -> NDArray[Any]:
        """What models take of arrays, data frames, rows by name or texts."""
        return raw_records(values, self.preprocessing)

    def answer(
        self, raw: NDArray[Any], client: str | None = None, cluster: int | None = None
    ) -> ModelAnswers:
        """What a client's or cluster's model says of raw records."""
        parameters, row = self.chosen(client, cluster)
        model = PreprocessedModel(self.network(parameters), self.task, self.preprocessing)
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
    starts = range(0, max(1, len(records)), AT_ONCE)
    parts = (np.ascontiguousarray(records[first : first + AT_ONCE]) for first in starts)
    return torch.cat([compute(torch.from_numpy(part)) for part in parts])
