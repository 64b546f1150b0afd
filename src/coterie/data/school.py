"""Exam scores of London pupils; a client is one school (Inner London Education Authority)."""

import numpy as np

from coterie.data.dataset_files import dataset_files, reading
from coterie.data.preprocessing import Label, Preprocessing
from coterie.data.records import Dataset, Records, Task
from coterie.errors import DataError

_FEATURES = 28
# Columns 3 and 4 are percentages (free school meals, pupils in the top verbal-reasoning band), the last is a
# constant, all others are indicators. Scores end at 70.
_LARGEST = np.where(np.isin(np.arange(_FEATURES), (3, 4)), 100.0, 1.0).astype(np.float32)
_LARGEST_SCORE = 70.0
# A squared error of 0.1 is 22 of the 70 points.
_ERROR_CAP = 0.1


def read_school() -> Dataset:
    """15,362 pupils of 139 schools; percentages / 100, target / 70."""
    (path,) = dataset_files("school", ("school.mat",))
    from scipy.io import loadmat

    with reading(path, Exception):  # the parser of .mat files raises whatever a broken byte leads to
        content = loadmat(path)
        features = [np.asarray(part, dtype=np.float32) for part in content["X"][0]]
        targets = [np.asarray(part, dtype=np.float32).reshape(-1) for part in content["Y"][0]]
    for school, (pupils, scores) in enumerate(zip(features, targets, strict=False)):
        if pupils.shape != (len(scores), _FEATURES):
            raise DataError(
                f"{path}: school {school}: features of shape {pupils.shape} for {len(scores)} scores; "
                f"allowed: ({len(scores)}, {_FEATURES})"
            )
    if not features or len(features) != len(targets):
        raise DataError(f"{path}: {len(features)} schools in X, {len(targets)} in Y")
    task = Task("regression", (_FEATURES,), 0, error_cap=_ERROR_CAP)
    scaled = ("divide", tuple(_LARGEST.tolist())), ("clip", (0.0, 1.0))
    described = Preprocessing.of_array(task, *scaled, label=Label(range=(0.0, _LARGEST_SCORE)))
    schools = {
        f"school-{index:03d}": Records(
            described.inputs.features(pupils), np.clip(scores / np.float32(_LARGEST_SCORE), 0.0, 1.0)
        )
        for index, (pupils, scores) in enumerate(zip(features, targets, strict=True))
    }
    note = "School (ILEA); percentages / 100, exam score / 70"
    return Dataset.of_owners("school", schools, task, note, preprocessing=described)
