"""What a finished run folder is good for: its models, with everything between raw values and answers.

A folder holds all that is needed: which model each client uses, the parameters, the network, and in
`task.json` the public constants by which raw values became what the network saw in training.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from coterie.algorithms import AnyAlgorithm
from coterie.algorithms.protocol import Assignment, Choice, OwnChoice, Parts, Vector
from coterie.data import Task
from coterie.data.preprocessing import Preprocessing
from coterie.data.task_file import read_task
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
from coterie.experiment.usable import Trained, UsableModels
from coterie.files import digest_file, read_json
from coterie.models.preprocessed import PreprocessedModel
from coterie.privacy import Guarantee


@dataclass(frozen=True)
class TrainedRun(UsableModels):
    """A finished run folder, checked, and what is in it, read when it is asked for."""

    files: RunFolder

    @classmethod
    def open(cls, path: str | Path) -> "TrainedRun":
        """The run in a folder; an InputError where there is none whose models can be used."""
        files = RunFolder(Path(path))
        for problem, holds in (
            ("not a run folder", not files.exists),
            ("not finished; coterie run --resume goes on with it", not files.finished),
            (
                "trained between sites, whose raw values are known to them alone; each site has its model in "
                "its own folder (coterie predict STATE)",
                files.sites.exists(),
            ),
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

    @property
    def path(self) -> Path:
        return self.files.path

    @cached_property
    def trained(self) -> Trained:
        experiment, result = self.experiment, self.result
        return Trained(
            result.algorithm,
            result.rounds,
            experiment.model,
            experiment.seeds.simulation,
            self.algorithm.additive,
            Guarantee.from_json(read_json(self.files.guarantee)),
        )

    @cached_property
    def described(self) -> tuple[Task, Preprocessing]:
        return read_task(self.files.task)

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

    def to_export(
        self, client: str | None, cluster: int | None
    ) -> dict[str, tuple[PreprocessedModel, dict[str, Any]]]:
        """All clusters' models, or the one that is asked for."""
        if client is not None or (cluster is None and self.personal_parts is not None):
            return {"client": (self.model(client, cluster), {"client": client})}
        rows = range(len(self.rows)) if cluster is None else [cluster]
        return {f"cluster-{row}": (self.model(cluster=row), self._users(row)) for row in rows}

    def _users(self, row: int) -> dict[str, Any]:
        """Which cluster a model is of, and who uses it, as far as the server knows."""
        known = self.served.cluster_of if isinstance(self.served, Assignment) else {}
        return {"cluster": row, "clients": [each for each, own in known.items() if own == row]}

    def digests(self) -> Mapping[str, str]:
        saved = max(self.files.checkpoint.glob("round-*"))
        return {path.name: digest_file(path) for path in (saved / "state.safetensors", self.files.task)}

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
