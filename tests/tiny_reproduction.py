"""A reproduction small enough to be run in a test, as text in the form of those in the package."""

_TEXT = """
title: A tiny one
line: digits beside the numbers of MNIST, which is nonsense but quick
publication: {{source: rc-dpfl-preprint, data: mnist, shift: rotation, rows: {{r-dpcfl: rc-dpfl}}}}
base:
  federation: {{sizes: [2, 3], records_per_client: 60, test_per_client: 20}}
  evaluation: {{references: false}}
scales:
  quick:
    base: {{schedule: {{rounds: {rounds}, batch: 20}}}}
    vary: {{privacy.epsilon: {epsilons}}}
    algorithms: {algorithms}
    differs: [Digits instead of MNIST.]
    references: {references}
  paper: {{}}
figures: {figures}
"""


def tiny_text(*, rounds: int, epsilons: str, algorithms: str, figures: str, references: int = 0) -> str:
    """The file; lists are written as in YAML."""
    return _TEXT.format(
        rounds=rounds, epsilons=epsilons, algorithms=algorithms, figures=figures, references=references
    )
