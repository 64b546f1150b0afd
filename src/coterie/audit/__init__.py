"""Attacks on our own releases, through the engines that run: is what is claimed contradicted?

>>> import coterie as ct
>>> ct.audit("experiment.yaml", seconds=300).verdict  # doctest: +SKIP

Here are the games of the definition of differential privacy (two neighbouring worlds, many trials, a
statistic), bounds on epsilon from below, and what they say of a claim. Nothing here adds noise, clips or
samples: engines do, and a game that did it again would attack its own copy. No record of anybody is read.
"""

import sys
from types import ModuleType
from typing import Any


class _CallableAudit(ModuleType):
    """`coterie.audit(EXPERIMENT, ...)` attacks an experiment, though this package has the name."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        from coterie.audit.auditing import audit

        return audit(*arguments, **options)


sys.modules[__name__].__class__ = _CallableAudit
