"""What a site has of an experiment that is over: the model that it uses, and what was promised to it.

Models are released values. The site's own choice among them, where it chose for itself, and the parameters
that it keeps for itself are its secrets, so the folder is for its owner alone. Reading it needs no Flower.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from coterie.data import Federation
from coterie.data.task_file import task_facts
from coterie.errors import InputError
from coterie.files import digest_file, read_arrays, read_json, replacing, write_arrays, write_json
from coterie.models import ModelSettings
from coterie.privacy import Guarantee, Unit
from coterie.settings import RECORDED, Settings, explain

FOLDER = "model"
FACTS, MODELS, TASK, GUARANTEE = "model.json", "models.safetensors", "task.json", "guarantee.json"


class TakenHome(Settings):
    """The facts beside the models, in `model.json`.

    Args:
        client: the site's name.
        contract: the name by which messages referred to what it agreed to.
        cluster: the number of the model that it uses; None where models have none.
        models: how many there are: the one that it uses, or all of those that it chose from.
        personal: ranges of parameters that it keeps for itself, as pairs of first and one after the last.
        epsilon: what was spent of its records.
        digests: SHA-256 of the other files.
    """

    format: Literal[1] = 1
    client: str
    experiment: str
    contract: str
    algorithm: str
    unit: Unit
    rounds: int
    cluster: int | None
    models: int
    personal: tuple[tuple[int, int], ...] = ()
    model: ModelSettings
    seed: int
    additive: bool
    epsilon: float
    digests: dict[str, str]

    @classmethod
    def load(cls, folder: Path) -> Self:
        """The facts of a folder whose other files are as they were written."""
        path = folder / FACTS
        content = read_json(path)
        try:
            found = cls.model_validate(content, context=RECORDED)
        except ValidationError as mistake:
            raise InputError(f"{path}: {explain(mistake, cls)}") from None
        for name in (MODELS, TASK, GUARANTEE):
            whole = (folder / name).is_file() and digest_file(folder / name) == found.digests.get(name)
            InputError.when(not whole, f"{folder / name}: not as it was written when the experiment ended")
        return found


def write_taken_home(
    state: Path,
    alone: Federation,
    promise: Guarantee,
    models: NDArray[np.float32],
    personal: NDArray[np.float32] | None,
    facts: Mapping[str, Any],
) -> Path:
    """Put the models into the site's folder, all files at once; what an end cut short left is replaced.

    Args:
        alone: the site and its records, of which the task and its preprocessing are kept.
        personal: the parameters that are the site's own.
        facts: of `TakenHome`, all but those that follow from the rest.
    """
    target = state / FOLDER
    shutil.rmtree(target, ignore_errors=True)
    with replacing(target, folder=True) as draft:
        draft.chmod(0o700)
        write_arrays(
            draft / MODELS, {"models": models, **({} if personal is None else {"personal": personal})}
        )
        write_json(draft / TASK, task_facts(alone))
        write_json(draft / GUARANTEE, promise.to_json())
        digests = {name: digest_file(draft / name) for name in (MODELS, TASK, GUARANTEE)}
        found = TakenHome.model_validate(
            {**facts, "models": len(models), "digests": digests}, context=RECORDED
        )
        write_json(draft / FACTS, found.model_dump(mode="json"))
    return target


def read_models(folder: Path) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
    """The models, one per row, and the parameters that are the site's own."""
    found = read_arrays(folder / MODELS) or {}
    models = found.get("models")
    if models is None or models.ndim != 2 or models.dtype != np.float32:
        raise InputError(f"{folder / MODELS}: damaged")
    return models, found.get("personal")
