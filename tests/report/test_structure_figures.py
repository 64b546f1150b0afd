"""The figure is written for every kind of structure."""

import pytest

from coterie.groups import (
    GroupAlgorithm,
    GroupSchedule,
    clustered,
    drawn_labels,
    global_structure,
    history,
    label,
    leakage,
    ring,
)
from coterie.privacy import Mode
from coterie.report.structures import draw


@pytest.mark.parametrize(
    ("structure", "algorithm", "mode"),
    [
        (ring(12, 4), GroupAlgorithm.DP_OGL, Mode.PAPER),
        (label(drawn_labels(9, 2), 5), GroupAlgorithm.DP_OGL, Mode.SOUND),
        (clustered(6, 2), GroupAlgorithm.DP_OGL_PLUS, Mode.SOUND),
        (global_structure(3), GroupAlgorithm.DP_OGL_PLUS, Mode.SOUND),
    ],
    ids=str,
)
def test_figure_shows_structure_matrix_and_growth(tmp_path, structure, algorithm, mode):
    schedule = GroupSchedule.of(
        len(structure.groups), period=3, rate=0.5, noise=2.0, algorithm=algorithm, mode=mode
    )
    found = leakage(structure, schedule, epoch=10, delta=1e-5)
    path = tmp_path / "leakage.svg"
    draw(path, found, history(found, range(1, 11)), "what holds")
    text = path.read_text()
    assert "what holds" in text
    assert f"{structure.workers} workers" in text
    assert "mean over workers" in text or "No observer" in text
