"""What a site's own folder tells of an experiment, counted again from its ledger."""

from dataclasses import dataclass
from pathlib import Path

from coterie.engines.flower.contract import Contract
from coterie.engines.flower.kept import Finished, Signed, SiteFolder
from coterie.engines.flower.review import in_words
from coterie.errors import LedgerError
from coterie.experiment.site_models import SiteModels
from coterie.privacy import Guarantee, LedgerView


@dataclass(frozen=True)
class SiteRecord:
    """An experiment that is over, as a site saw it.

    Args:
        spent: epsilon, counted again from plan and ledger.
        releases: of each kind, how often it was planned, and how often it was made.
        agreed: the contract in words.
    """

    path: Path
    contract: Contract
    models: SiteModels
    spent: float
    epsilon: float
    releases: dict[str, tuple[int, int]]
    agreed: list[tuple[str, str]]

    @property
    def promise(self) -> Guarantee:
        return self.models.trained.promise


def read_site(path: Path) -> SiteRecord:
    """Read a site's folder; an error that names the file where something does not fit the rest."""
    files = SiteFolder(path)
    signed, end, models = Signed.load(files.contract), Finished.load(files.finished), SiteModels.open(path)
    contract = signed.contract
    ledger = LedgerView.read(files.ledger, contract.own_plan)
    ledger.check_seen(signed.ledger, files.contract.name)
    ledger.check_seen(end.ledger, files.finished.name)
    spent = end.epsilon if contract.trusted is not None else ledger.spent()
    if abs(spent - end.epsilon) > 1e-9 * max(1.0, spent):
        raise LedgerError(f"{files.finished}: epsilon {end.epsilon} does not follow from the ledger")
    releases = {
        release.name: (release.times, ledger.executed(unit.subject)[release.name])
        for unit in contract.units
        for release in unit.releases
    }
    agreed = in_words(contract, models.trained.promise, int(models.rows.shape[1]))
    return SiteRecord(path, contract, models, spent, signed.epsilon, releases, agreed)
