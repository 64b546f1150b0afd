"""What a run tells while it goes on, and what it found: the same on this machine and between sites."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from coterie.errors import InputError
from coterie.experiment.folder import RunFolder
from coterie.experiment.metrics import Fairness, Groups, Spread
from coterie.files import read_json
from coterie.privacy.units import number_from_json, number_to_json


@dataclass(frozen=True)
class RoundReport:
    """What a run tells after each round.

    Args:
        epsilon: spent so far, by the unit that spent most.
        answered, missing: between sites, who answered and why others did not; nobody where that is a secret.
        spent: between sites, what each was asked for so far; a client that was missing may have spent less.
        budget: of each of those.
    """

    round: int
    rounds: int
    accuracy: float | None
    epsilon: float
    seconds: float
    answered: tuple[str, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict)
    spent: Mapping[str, float] = field(default_factory=dict)
    budget: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Callbacks:
    """Functions to call while a run goes on; sites join, with so many records each, and agree."""

    joined: Callable[[Mapping[str, int]], None] = lambda records: None
    agreed: Callable[[str], None] = lambda guarantee: None
    round: Callable[[RoundReport], None] = lambda report: None


BETWEEN_SITES = (
    *("folder", "algorithm", "clusters", "clusters_found", "accuracy", "loss", "guarantee", "guarantee_text"),
    *("epsilon", "delta", "rounds", "seconds", "participation", "asked", "warnings", "per_client"),
)
"""What the server of a run between sites knows, in the order of its file."""


@dataclass(frozen=True)
class RunResult:
    """What a finished run found, as stored in `result.json`.

    Args:
        accuracy: None where nothing was evaluated.
        cluster_accuracy: mean accuracy of each true cluster, where it is known.
        loss: as fairness and accuracies of clusters: where evaluation is exact.
        clusters: empty where which model a client uses is known to itself alone.
        guarantee, guarantee_text: its line and its paragraph.
        noise_multiplier: as the speed, not a number where it is not told.
        groups: majority, minority and worst client, where the true clusters are known.
        minority_found: whether the smallest true cluster was found, where there is one.
        clustering_accuracy: share of clients in the right cluster under the best matching with the truth.
        live_clusters: models that at least one client in a hundred uses.
        models: the models themselves, where they are small enough to be looked at.
        whole_tests: accuracy on the whole test set, under each true cluster's shift, of its most used model.
        per_worker: epsilon of each worker against the one that learns most, where workers observe each other.
        per_client: epsilon, delta and records of every client, or of the population.
        participation: of each site, requests answered and missed; empty where who was asked is a secret.
        asked: epsilon of what each site was asked for; empty where clients are no sites.
    """

    folder: Path
    algorithm: str
    accuracy: Spread | None
    cluster_accuracy: Mapping[str, float] | None = field(default=None, kw_only=True)
    loss: Spread | None
    fairness: Fairness | None = field(default=None, kw_only=True)
    clusters: Mapping[str, int]
    clusters_found: bool | None
    guarantee: str
    guarantee_text: str
    epsilon: float
    delta: float
    noise_multiplier: float = field(default=math.nan, kw_only=True)
    rounds: int
    seconds: float
    sample_gradients_per_second: float = field(default=math.nan, kw_only=True)
    warnings: tuple[str, ...]
    groups: Groups | None = None
    minority_found: bool | None = None
    clustering_accuracy: float | None = None
    live_clusters: int = 1
    models: tuple[tuple[float, ...], ...] | None = None
    whole_tests: Mapping[str, float] | None = None
    per_worker: Mapping[str, float | None] | None = None
    per_client: Mapping[str, object] = field(default_factory=dict)
    participation: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    asked: Mapping[str, float] = field(default_factory=dict)

    @property
    def report(self) -> Path:
        return RunFolder(self.folder).report

    def to_json(self) -> dict[str, Any]:
        asked = {name: number_to_json(value) for name, value in self.asked.items()}
        spelled = {"folder": str(self.folder), "epsilon": number_to_json(self.epsilon), "asked": asked}
        content = {**asdict(self), **spelled, "warnings": list(self.warnings)}
        if self.asked:
            return {**{key: content[key] for key in BETWEEN_SITES}, "engine": "flower"}
        del content["participation"], content["asked"]
        return {**content, "report": str(self.report)}

    @classmethod
    def load(cls, path: Path) -> "RunResult":
        content = read_json(RunFolder(path).result)
        known = {key: value for key, value in content.items() if key not in ("report", "engine")}
        try:
            return cls(
                **{
                    **known,
                    "folder": path,
                    "epsilon": number_from_json(content["epsilon"]),
                    "accuracy": Spread.from_json(content["accuracy"]) if content["accuracy"] else None,
                    "loss": Spread.from_json(content["loss"]) if content["loss"] else None,
                    "fairness": Fairness(**content["fairness"]) if content.get("fairness") else None,
                    "groups": Groups(**content["groups"]) if content.get("groups") else None,
                    "warnings": tuple(content["warnings"]),
                    "models": tuple(map(tuple, content["models"])) if content.get("models") else None,
                    "asked": {name: number_from_json(it) for name, it in content.get("asked", {}).items()},
                }
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputError(f"{RunFolder(path).result}: not a result of this version ({error})") from None

    def __repr__(self) -> str:
        found = {True: ", clusters found", False: ", clusters not found", None: ""}[self.clusters_found]
        reached = "not evaluated" if self.accuracy is None else f"mean accuracy {self.accuracy.mean:.1%}"
        return f"RunResult({self.algorithm}: {reached}{found}; {self.guarantee})"
