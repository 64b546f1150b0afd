"""The card of a site: what it can claim of its own records in an experiment between sites that is over."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie import __version__
from coterie.engines.flower.contract import cost, cost_of_scores
from coterie.engines.flower.taken_home import TASK
from coterie.errors import InputError
from coterie.experiment.card import Card, PrivacyClaim, declared_columns
from coterie.experiment.folder import RunFolder
from coterie.experiment.registered import History, history_of
from coterie.experiment.site_models import is_site_folder
from coterie.experiment.site_record import SiteRecord, read_site
from coterie.groups import Observer
from coterie.privacy import Guarantee, PrivacyPlan, Unit


@dataclass(frozen=True)
class SiteCard(PrivacyClaim):
    """The card of what a site took part in, from its contract, its ledger and its register."""

    site: SiteRecord

    @property
    def path(self) -> Path:
        return self.site.path

    @property
    def name(self) -> str:
        return self.site.contract.client

    @property
    def promise(self) -> Guarantee:
        return self.site.promise

    @property
    def plan(self) -> PrivacyPlan:
        return self.site.contract.own_plan

    @property
    def accountant(self) -> str:
        return self.site.contract.accountant

    @property
    def watched(self) -> Observer | None:
        return self.site.contract.watched

    @property
    def version(self) -> str:
        return __version__

    @property
    def history(self) -> History | None:
        return history_of(RunFolder(self.path))

    def epsilon_at(self, delta: float) -> float:
        """By the site's own arithmetic, as when it agreed."""
        contract = self.site.contract
        return max(cost(contract, delta), cost_of_scores(contract, delta))

    def unprotected(self) -> list[str]:
        contract = self.site.contract
        rows = "persons" if contract.plan.unit is Unit.PERSON else "records"
        return [
            f"that {contract.client} takes part, and how many {rows} it has: {contract.records:,} to train "
            f"on, {contract.held_out:,} held out",
            f"the schedule: {contract.rounds} rounds, batch, step size, clip and noise",
            "the shape of a record, the classes or the range of the label, declared ranges and categories",
            "in which rounds it answered",
        ]

    def data(self) -> dict[str, Any]:
        return {
            "source": "this site's own records",
            "own_records": True,
            "type": "static",
            "access": "non-interactive",
            "declared_columns_only": declared_columns(self.site.models.folder / TASK),
        }

    def scores(self) -> dict[str, Any]:
        return {"utility": None, "worst_client": None}

    def no_history(self) -> str:
        return "this site's contract was entered in no register"


def card_of(path: Path) -> PrivacyClaim:
    """The card of a run's folder, or of a site's whose experiment is over."""
    if is_site_folder(path):
        return SiteCard(read_site(path))
    begun = (path / "contract.json").is_file() and (path / "noise.key").is_file()
    InputError.when(begun, f"{path}: this site's experiment is not over, so there is nothing to state yet")
    return Card.of(path)
