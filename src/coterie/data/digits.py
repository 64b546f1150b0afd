"""The 8x8 handwritten digits bundled with scikit-learn: real data that needs no download."""

import numpy as np

from coterie.data.preprocessing import Preprocessing
from coterie.data.records import Dataset, Records, Task


def read_digits() -> Dataset:
    """1,797 images of shape (1, 8, 8); pixels are divided by 16, the largest value the format allows."""
    from sklearn.datasets import load_digits  # takes a second to import

    images, targets = load_digits(return_X_y=True)
    task = Task("classification", (1, 8, 8), 10)
    described = Preprocessing.of_array(task, ("divide", (16.0,)))
    features = described.inputs.features(images.reshape(-1, *task.shape))
    return Dataset(
        "digits",
        Records(features, targets.astype(np.int64)),
        None,
        task,
        "UCI optical recognition of handwritten digits, as shipped with scikit-learn; pixels / 16",
        preprocessing=described,
    )
