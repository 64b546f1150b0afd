"""The result of an audit, and the file that keeps it.

`audit.json` is one JSON object, read by `read_audit`, written by `AuditResult.save`:

    version           1
    coterie           the version that was attacked
    when              the date, YYYY-MM-DD (UTC)
    experiment        what was audited: the algorithm and the data by name, or the contract's experiment
    verdict           holds | violated | underpowered: the worst of all releases
    confidence        of all releases together, 0.95
    correction        how it is shared among them
    seconds           it took
    releases          a list, one entry for each release that was attacked:
        name              as the plan calls it what              it lets out, in words uses              of
        the release that one trial saw, for which the claim is adjacency         between which neighbours the
        claim is claimed_epsilon   at `delta`, by `accountant`; "inf" where nothing is claimed lower_bound
        on epsilon at `delta`, at `confidence` delta             the plan's, or that at which the claim broke
        accountant        by which the claim was computed confidence        of this release's bound trials
        in both worlds together verdict           holds | violated | underpowered trials_needed     where
        underpowered: with how many the best attack that the claim allows would show half
                          of it, or null
        canary            the scene that served best statistic         the statistic that served best mu_lower
        the largest mu of Gaussian differential privacy that is ruled out; null for a whole run mu_estimate
        an estimate, no bound; null for a whole run curve             the receiver curve: pairs of false and
        true positive rates claimed_curve     the claimed one, at the same false positive rates: at most so
        many true positives
    not_audited       a list of [release, why] of what was not attacked

The file stands beside a run or anywhere else. It is no part of what a run's seal covers, so `coterie verify`
says of the folder what it said before."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.audit.verdicts import AuditVerdict
from coterie.errors import InputError
from coterie.files import read_json, write_json

AUDIT_FILE = "audit.json"
VERSION = 1
_ORDER = (AuditVerdict.VIOLATED, AuditVerdict.UNDERPOWERED, AuditVerdict.HOLDS)


def points(xs: NDArray[np.float64], ys: NDArray[np.float64]) -> tuple[tuple[float, float], ...]:
    """A curve as a file tells it."""
    return tuple((round(x, 5), round(y, 5)) for x, y in zip(xs.tolist(), ys.tolist(), strict=True))


@dataclass(frozen=True)
class ReleaseAudit:
    """One release, what is claimed of it and what an attack found; the fields are those of the file."""

    name: str
    what: str
    uses: int
    adjacency: str
    claimed_epsilon: float
    lower_bound: float
    delta: float
    accountant: str
    confidence: float
    trials: int
    verdict: AuditVerdict
    canary: str
    statistic: str
    trials_needed: int | None = None
    mu_lower: float | None = None
    mu_estimate: float | None = None
    curve: Sequence[tuple[float, float]] = ()
    claimed_curve: Sequence[tuple[float, float]] = ()

    def to_json(self) -> dict[str, Any]:
        content = dict(vars(self))
        for key in ("claimed_epsilon", "lower_bound"):
            content[key] = content[key] if math.isfinite(content[key]) else "inf"
        return content | {
            "verdict": str(self.verdict),
            "curve": [list(point) for point in self.curve],
            "claimed_curve": [list(point) for point in self.claimed_curve],
        }

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> "ReleaseAudit":
        fields = dict(content)
        for key in ("claimed_epsilon", "lower_bound"):
            fields[key] = float(fields[key])
        fields["verdict"] = AuditVerdict(fields["verdict"])
        for key in ("curve", "claimed_curve"):
            fields[key] = tuple((float(x), float(y)) for x, y in fields[key])
        return cls(**fields)


@dataclass(frozen=True)
class AuditResult:
    """What an audit found."""

    experiment: str
    releases: tuple[ReleaseAudit, ...]
    confidence: float
    correction: str
    seconds: float
    coterie: str
    when: str
    not_audited: tuple[tuple[str, str], ...] = ()
    folder: Path | None = None

    @property
    def page(self) -> Path | None:
        """The page that shows it, where it was written."""
        return None if self.folder is None else page_in(self.folder)

    @property
    def verdict(self) -> AuditVerdict:
        """The worst of all; of nothing nothing is known."""
        found = {release.verdict for release in self.releases}
        return next((verdict for verdict in _ORDER if verdict in found), AuditVerdict.UNDERPOWERED)

    def __repr__(self) -> str:
        lines = [f"Audit of {self.experiment}: {self.verdict}"]
        lines += [
            f"  {release.name}: at least {release.lower_bound:.3g} of {release.claimed_epsilon:.3g} claimed, "
            f"delta {release.delta:.2g}, {release.trials:,} trials: {release.verdict}"
            for release in self.releases
        ]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "coterie": self.coterie,
            "when": self.when,
            "experiment": self.experiment,
            "verdict": str(self.verdict),
            "confidence": self.confidence,
            "correction": self.correction,
            "seconds": self.seconds,
            "releases": [release.to_json() for release in self.releases],
            "not_audited": [list(each) for each in self.not_audited],
        }

    def save(self, folder: Path) -> Path:
        """Write the file into a folder; returns its path."""
        path = folder / AUDIT_FILE
        write_json(path, self.to_json())
        return path


def page_in(folder: Path) -> Path:
    """The page of an audit: beside a run, whose report is another, it has a name of its own."""
    return folder / ("audit.html" if (folder / "experiment.yaml").exists() else "report.html")


def read_audit(path: Path) -> AuditResult:
    """The audit that a file, or the file in a folder, tells."""
    file = path / AUDIT_FILE if path.is_dir() else path
    content = read_json(file)
    if not isinstance(content, dict) or content.get("version") != VERSION:
        raise InputError(f"{file}: not an audit of version {VERSION}")
    try:
        return AuditResult(
            str(content["experiment"]),
            tuple(ReleaseAudit.read(release) for release in content["releases"]),
            float(content["confidence"]),
            str(content["correction"]),
            float(content["seconds"]),
            str(content["coterie"]),
            str(content["when"]),
            tuple((str(name), str(why)) for name, why in content["not_audited"]),
            file.parent,
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        raise InputError(f"{file}: malformed audit") from None
