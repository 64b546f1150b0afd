"""Central models without privacy, trained once for each federation and shared by all runs of a reproduction.

F_acc and F_loss compare a client with the best model of its cluster. That model depends on data, network and
seed but on no algorithm and no budget, so that one file under `references/` serves every cell.
"""

import hashlib
from dataclasses import asdict
from pathlib import Path

from coterie.experiment.evaluator import train_references
from coterie.experiment.local import calibrate
from coterie.experiment.result import Scores
from coterie.experiment.schema import Experiment
from coterie.files import read_json, write_json
from coterie.privacy.plan import canonical_json
from coterie.training.scoring import Score


def central_scores(out: Path, experiment: Experiment, epochs: int = 0) -> Scores | None:
    """Score of each client under the best model of its cluster: as stored, or trained now.

    Args:
        epochs: how long to train where nothing is stored; 0 trains none.
    """
    seed, dump = experiment.seeds.simulation, experiment.model_dump(mode="json")
    decides = {section: dump[section] for section in ("data", "federation", "model")}
    digest = hashlib.sha256(canonical_json({**decides, "seed": seed}).encode()).hexdigest()[:12]
    path = out / "references" / f"seed-{seed}-{digest}.json"
    if not path.exists():
        if not epochs:
            return None
        path.parent.mkdir(parents=True, exist_ok=True)
        calibrated = calibrate(experiment)
        clusters = calibrated.population.truth or dict.fromkeys(calibrated.facts.clients, 0)
        trained = train_references(calibrated, clusters, epochs)
        scores = {client: asdict(score) for client, score in trained.items()}
        note = "trained centrally without privacy, for evaluation only"
        write_json(path, {"note": note, "epochs": epochs, "clients": scores})
    return {client: Score(**score) for client, score in read_json(path)["clients"].items()}
