"""Central models without privacy, trained once for each federation and shared by all runs of a reproduction.

F_acc and F_loss compare a client with the best model of its cluster. That model depends on data, network and
seed but on no algorithm and no budget, so that one file under `references/` serves every cell.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path

import torch

from coterie.experiment import folder
from coterie.experiment.local import calibrate, load_federation, truth_of
from coterie.experiment.metrics import Scores
from coterie.experiment.references import train_references
from coterie.experiment.schema import Experiment
from coterie.privacy.plan import canonical_json
from coterie.training.scoring import Score


def ensure(out: Path, experiments: Iterable[Experiment], epochs: int) -> None:
    """Train and write what is missing for these runs."""
    for experiment in experiments:
        path = _path(out, experiment)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            folder.write_json(path, _train(experiment, epochs))


def read(out: Path, experiment: Experiment) -> Scores | None:
    """Score of each client under the best model of its cluster, if that was trained."""
    path = _path(out, experiment)
    if not path.exists():
        return None
    content = folder.read_json(path)["clients"]
    return {client: Score(**score) for client, score in content.items()}


def _path(out: Path, experiment: Experiment) -> Path:
    dump = experiment.model_dump(mode="json")
    decides = {section: dump[section] for section in ("data", "federation", "model")}
    text = canonical_json({**decides, "seed": experiment.seeds.simulation})
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return out / "references" / f"seed-{experiment.seeds.simulation}-{digest}.json"


def _train(experiment: Experiment, epochs: int) -> folder.Json:
    federation = load_federation(experiment)
    calibrated, seed = calibrate(experiment, federation), experiment.seeds.simulation
    cluster_of = truth_of(federation) or dict.fromkeys(calibrated.facts.clients, 0)
    start = torch.from_numpy(calibrated.facts.initialise(seed)).to(calibrated.learner.device)
    scores = train_references(federation, calibrated.learner, start, cluster_of, seed, epochs)
    return {
        "note": "trained centrally without privacy, for evaluation only",
        "epochs": epochs,
        "clients": {client: {"accuracy": s.accuracy, "loss": s.loss} for client, s in scores.items()},
    }
