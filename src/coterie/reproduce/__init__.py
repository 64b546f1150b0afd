"""Published experiments as data, how they are run, and the printed tables beside ours.

>>> import coterie as ct
>>> ct.reproduce("rdpcfl-mnist", "runs/mnist", scale="quick")  # doctest: +SKIP

Here belong the declarations (`declared`, the YAML files), the printed numbers (`printed`, `published/`), the
folder that a reproduction fills (`running`, `runs`), its table (`table`, `markdown`), figures
and page, and the computations behind figures that need no run. What an experiment is and how a grid of them
runs belongs to `coterie.experiment`; how pages and figures look belongs to `coterie.report`.

Every YAML file in this folder is one reproduction; its file name is what `coterie reproduce` calls it. To add
one, add a file:

    title: what it reproduces, as a heading
    line: the same in one line, for the list of names
    publication:                    # optional: which printed numbers stand beside ours
      source: rc-dpfl-preprint      # a file in published/
      data: mnist
      shift: rotation
      rows: {r-dpcfl: rc-dpfl}      # our row: the publication's, where the names differ
    base: {...}                     # sections of an experiment, for both scales
    scales:
      quick:
        base: {...}                 # laid over the common base, section by section
        vary: {privacy.epsilon: [5, 10]}
        algorithms:                 # each with its own seeds, and settings where it needs them
        - {name: r-dpcfl, seeds: [0, 1]}
        - {name: global, seeds: [0], set: {privacy.clip: 0.5}, label: global with a small clip}
        best_of: privacy.clip       # of a key under vary: show each row at its best value only
        differs: [one sentence for everything that is not as in the publication]
        panels: {clips: [global, global with a small clip]}     # rows that the figure `panels` draws together
        matrices: [global]          # rows of which the figure `leakage` draws every pair; by default all
        references: 30              # epochs of the central models for F_acc and F_loss, one for each seed
      paper: {...}
    figures: [budgets, rounds]      # names of coterie.reproduce.figures.FIGURES

Nothing else has to be registered. Every cell is an ordinary run with its own ledger and guarantee.
"""

import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    """`coterie.reproduce(NAME, ...)` runs a published experiment, though this package has the name."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        from coterie.reproduce.running import reproduce

        return reproduce(*arguments, **options)


sys.modules[__name__].__class__ = _Callable
