"""Digits of several sites, by default four, in folders of their own: some upright, some upside down."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from coterie.data import DataSettings, load_dataset

NAMES = ("amber", "birch", "cedar", "dune")
TRUTH = {"amber": 0, "birch": 0, "cedar": 1, "dune": 1}
DECLARATION = """\
task: classification
label: {classes: 10}
features: {shape: [1, 8, 8], range: [0, 1]}
"""


def write_sites(
    folder: Path, records: int = 400, seed: int = 0, truth: Mapping[str, int] = TRUTH
) -> dict[str, Path]:
    """A folder for each site, and one with all of them for a simulation (`together`).

    Args:
        truth: the clusters of the sites: 0 is upright, 1 upside down.
    """
    images = load_dataset(DataSettings(name="digits"), seed).train
    order = np.random.default_rng(seed).permutation(len(images))
    together = folder / "together"
    folders = {name: folder / name for name in truth}
    for path in (together, *folders.values()):
        path.mkdir(parents=True)
        (path / "federation.yaml").write_text(DECLARATION)
    for index, name in enumerate(truth):
        mine = images.take(order[index * records : (index + 1) * records])
        features = mine.features[:, :, ::-1, ::-1] if truth[name] else mine.features
        for path in (together, folders[name]):
            np.savez(path / f"{name}.npz", x=np.ascontiguousarray(features), y=mine.targets)
    return folders
