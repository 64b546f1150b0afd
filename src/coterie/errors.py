"""Mistakes that the command line reports in one line, with the exit code of each kind."""

from coterie.privacy.errors import BudgetError, CoterieError, LedgerError, PlanError

__all__ = ["BudgetError", "CoterieError", "DataError", "InputError", "LedgerError", "PlanError"]


class InputError(CoterieError):
    """Something the user wrote is wrong: it names the key or file, the value and what is allowed."""

    exit_code = 2


class DataError(InputError):
    """A data file or record that cannot be used as it is."""
