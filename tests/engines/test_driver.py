"""Works side by side: each ends with its own result, or with its own failure."""

from collections.abc import Generator
from typing import Any

import numpy as np
import pytest

from coterie.algorithms.protocol import Choices, Select
from coterie.engines.driver import addressed, answer_together


class Breaking:
    """An engine that answers, or breaks in some way."""

    waited, personal = 0.0, {}

    def __init__(self, mistake: Exception | None) -> None:
        self.mistake = mistake

    def answer(self, request: Any, round: int) -> Choices:
        if self.mistake is not None:
            raise self.mistake
        return Choices({})


def asking() -> Generator[Any, Any, str]:
    for _ in range(2):
        yield Select("selection", (), np.zeros((1, 1), dtype=np.float32))
    return "done"


@pytest.mark.parametrize("mistake", [ValueError("odd"), StopIteration("as if all were done")])
def test_an_engine_that_breaks_is_a_failure_of_its_own_work_and_never_a_result(mistake: Exception) -> None:
    engines = {"breaks": Breaking(mistake), "answers": Breaking(None)}
    found = answer_together({name: addressed(asking(), engine, 1) for name, engine in engines.items()})
    assert found.results == {"answers": "done"}
    assert set(found.failures) == {"breaks"}
