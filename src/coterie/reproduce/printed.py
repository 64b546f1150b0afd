"""Numbers that publications print, with their source: the YAML files in `published/`, to set ours beside.

Example:
    >>> from coterie.reproduce.printed import read_publication
    >>> read_publication("rc-dpfl-preprint").printed("mnist", "rotation", "rc-dpfl", "mean", 3)
    Printed(mean=89.0, std=0.44, table=3)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from coterie.files import parse_yaml

Key = tuple[str, str, str, str, float]
"""Data, shift, algorithm, figure and epsilon."""


@dataclass(frozen=True)
class Printed:
    """One printed number and its table: the mean, and the standard deviation over seeds, where readable."""

    mean: float | None
    std: float | None
    table: int


@dataclass(frozen=True)
class Publication:
    """The numbers of one publication, all but f_loss in percent, and what it calls each of our algorithms.

    Args:
        setting: what it says of its runs; `rounds` and `seeds` where it does.
        otherwise: figures that we compute otherwise, and how.
    """

    source: str
    algorithms: Mapping[str, str]
    numbers: Mapping[Key, Printed]
    setting: Mapping[str, Any]
    otherwise: Mapping[str, str]

    def printed(self, data: str, shift: str, algorithm: str, figure: str, epsilon: float) -> Printed | None:
        """The number with its table, or None if the publication prints none for this."""
        return self.numbers.get((data, shift, algorithm, figure, epsilon))


def read_publication(name: str) -> Publication:
    """A publication in `published/`, checked to have a cell for every epsilon in every row."""
    text = resources.files(__package__).joinpath("published", f"{name}.yaml").read_text(encoding="utf-8")
    content = parse_yaml(text)
    source = content["source"]
    numbers: dict[Key, Printed] = {}
    for table in content["tables"]:
        epsilons = [float(epsilon) for epsilon in table.get("epsilons", content["epsilons"])]
        for algorithm, figures in table["cells"].items():
            for figure, row in figures.items():
                for epsilon, cell in zip(epsilons, row, strict=True):
                    mean, std = (*(cell or ()), None, None)[:2]
                    key = (table["data"], table["shift"], algorithm, figure, epsilon)
                    numbers.setdefault(key, Printed(mean, std, table["number"]))
    return Publication(
        source=f"{source['authors']}, {source['title']} ({source['year']}), {source['part']}",
        algorithms=content["algorithms"],
        numbers=numbers,
        setting=content["setting"],
        otherwise=content.get("otherwise", {}),
    )
