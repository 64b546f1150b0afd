"""The report that a site keeps of an experiment between sites: what it promised, what left, what it got."""

from pathlib import Path

from coterie.experiment.shown import release_table
from coterie.experiment.site_record import SiteRecord, read_site
from coterie.files import write_text
from coterie.report.numbers import epsilon
from coterie.report.page import page
from coterie.table import Table

REPORT = "report.html"


def write_site_report(state: Path) -> Path:
    """Write `report.html` into a site's folder, and return its path."""
    target = state / REPORT
    write_text(target, site_report(read_site(state)))
    return target


def site_report(site: SiteRecord) -> str:
    """The whole page."""
    facts = site.models.facts
    rows = [
        {"Release": name, "Agreed": f"{planned:,}", "Made": f"{made:,}"}
        for name, (planned, made) in site.releases.items()
    ]
    return page(
        "site",
        f"{facts.client} in {facts.algorithm}",
        facts.experiment[:12],
        site=site,
        facts=facts,
        promise=site.promise,
        spent=epsilon(site.spent),
        allowed=epsilon(site.epsilon),
        releases=release_table(site.promise),
        left=Table.of(rows, "How often something left this site"),
        chose=facts.models > 1 or bool(facts.personal),
    )
