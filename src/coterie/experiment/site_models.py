"""The models that a site took home when an experiment between sites was over, to be used there."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from coterie.algorithms.protocol import Assignment, Parts, Vector
from coterie.data import Task
from coterie.data.preprocessing import Preprocessing
from coterie.data.task_file import read_task
from coterie.engines.flower.taken_home import FACTS, FOLDER, GUARANTEE, MODELS, TASK, TakenHome, read_models
from coterie.errors import InputError
from coterie.experiment.folder import RunFolder
from coterie.experiment.trained import TrainedRun
from coterie.experiment.usable import Trained, UsableModels
from coterie.files import digest_file, read_json
from coterie.models.preprocessed import PreprocessedModel
from coterie.privacy import Guarantee


def folder_of(path: Path) -> Path | None:
    """Where the models are of a site's folder, or of that folder itself; None where there are none."""
    return next((folder for folder in (path / FOLDER, path) if (folder / FACTS).is_file()), None)


def is_site_folder(path: Path) -> bool:
    """Whether a folder is that of a site whose experiment is over."""
    return (path / "finished.json").is_file() and (path / "contract.json").is_file()


@dataclass(frozen=True)
class SiteModels(UsableModels):
    """What a site took home, checked."""

    folder: Path
    facts: TakenHome

    @classmethod
    def open(cls, path: Path) -> "SiteModels":
        folder = folder_of(path)
        if folder is None:
            raise InputError(f"{path}: no models of an experiment that is over")
        return cls(folder, TakenHome.load(folder))

    @property
    def path(self) -> Path:
        return self.folder

    @cached_property
    def trained(self) -> Trained:
        facts, promise = self.facts, Guarantee.from_json(read_json(self.folder / GUARANTEE))
        return Trained(facts.algorithm, facts.rounds, facts.model, facts.seed, facts.additive, promise)

    @cached_property
    def described(self) -> tuple[Task, Preprocessing]:
        return read_task(self.folder / TASK)

    @property
    def clients(self) -> tuple[str, ...]:
        return (self.facts.client,)

    @cached_property
    def served(self) -> Assignment:
        """The site itself, by the row that it uses."""
        models, personal = read_models(self.folder)
        row = (self.facts.cluster or 0) if len(models) > 1 else 0
        InputError.when(row >= len(models), f"{self.folder / MODELS}: damaged")
        own = {}
        if personal is not None and self.personal_parts is not None:
            whole = models[row].copy()
            whole[self.personal_parts.personal[: len(whole)]] = personal
            own = {self.facts.client: whole}
        return Assignment(models, {self.facts.client: row}, own)

    @cached_property
    def personal_parts(self) -> Parts | None:
        if not self.facts.personal:
            return None
        models, _ = read_models(self.folder)
        mask = np.zeros(models.shape[1], dtype=np.bool_)
        for first, end in self.facts.personal:
            mask[first:end] = True
        return Parts(shared=np.zeros_like(mask), personal=mask)

    def chosen(self, client: str | None = None, cluster: int | None = None) -> tuple[Vector, int | None]:
        """The site's own model; where it has several to choose from, also another."""
        own, rows = self.facts.cluster, range(len(self.rows))
        if client not in (None, self.facts.client):
            raise InputError(
                f"client: {client!r}; this folder has the model of {self.facts.client} alone; allowed: that"
            )
        if cluster is None or cluster == own:
            return self.served.model_of(self.facts.client), own
        if len(rows) == 1 or cluster not in rows or self.personal_parts is not None:
            raise InputError(
                f"cluster: {cluster}; {self.folder} has the model that {self.facts.client} uses, of cluster "
                f"{own}; allowed: that, or nothing"
            )
        return self.rows[cluster], cluster

    def to_export(
        self, client: str | None, cluster: int | None
    ) -> dict[str, tuple[PreprocessedModel, dict[str, Any]]]:
        """The model that the site uses, or the one that is asked for."""
        if cluster is None or cluster == self.facts.cluster:
            return {"client": (self.model(client, cluster), {"client": self.facts.client})}
        return {f"cluster-{cluster}": (self.model(client, cluster), {"cluster": cluster, "clients": []})}

    def digests(self) -> Mapping[str, str]:
        return {name: digest_file(self.folder / name) for name in (MODELS, TASK)}


def open_models(path: Path) -> UsableModels:
    """The models of a finished run, or those that a site took home."""
    if not RunFolder(path).exists and folder_of(path) is not None:
        return SiteModels.open(path)
    return TrainedRun.open(path)
