"""The base of every mistake Coterie reports, and those about budgets.

It lives in the lowest room so that `coterie.privacy` can be used alone; the
rest of the house imports it through `coterie.errors`.
"""


class CoterieError(Exception):
    """A mistake we can explain in one line; the command line prints it without a traceback."""

    exit_code = 1

    @classmethod
    def when(cls, wrong: bool, said: str) -> None:
        """Raise it if something is wrong."""
        if wrong:
            raise cls(said)


class PrivacyInputError(CoterieError):
    """A parameter of a privacy computation that has no meaning (a rate above one, a negative clip)."""

    exit_code = 2


class RangeError(PrivacyInputError):
    """A number so small or so large that machine arithmetic would not keep the promise made with it."""


class BudgetError(CoterieError):
    """The budget does not allow what was asked."""

    exit_code = 3


class PlanError(CoterieError):
    """A release that the plan did not declare, or an event no accountant can bound."""


class NoiseError(CoterieError):
    """Noise about to be drawn that is not the noise that was planned: nothing is released."""


class LedgerError(CoterieError):
    """A ledger or another file that claims depend on is damaged, was changed, or belongs to another plan."""

    exit_code = 4
