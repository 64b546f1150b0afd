"""The page of an audit: what is claimed, what an attack found, and receiver curves under the claimed ones."""

from collections.abc import Iterator
from pathlib import Path

from coterie.audit.result import AuditResult, ReleaseAudit, page_in, read_audit
from coterie.audit.verdicts import AuditVerdict
from coterie.files import write_text
from coterie.privacy.units import round_up, short_number
from coterie.report.charts import Scale, Series, line_figure
from coterie.report.drawing import Figure
from coterie.report.page import page
from coterie.table import NONE, Table

_HEADLINES = {
    AuditVerdict.HOLDS: "No attack found more than is claimed",
    AuditVerdict.VIOLATED: "An attack found more than is claimed",
    AuditVerdict.UNDERPOWERED: "No attack found more than is claimed, and more trials could have",
}


def write_audit_report(folder: Path) -> Path:
    """Write the page of the audit that a folder holds, and return its path."""
    target = page_in(folder)
    write_text(target, audit_page(read_audit(folder)))
    return target


def audit_page(result: AuditResult) -> str:
    """The whole page."""
    return page(
        "audit",
        _HEADLINES[result.verdict],
        result.experiment,
        Path(__file__).parent,
        result=result,
        broken=[each for each in result.releases if each.verdict is AuditVerdict.VIOLATED],
        releases=_table(result),
        details=[(each.name, _detail(each)) for each in result.releases],
        figures=list(receiver_curves(result)),
    )


def _table(result: AuditResult) -> Table:
    rows = [
        {
            "Release": each.name,
            "Claimed epsilon": round_up(each.claimed_epsilon),
            "Epsilon at least": f"{each.lower_bound:.3f}",
            "Delta": short_number(each.delta),
            "Trials": f"{each.trials:,}",
            "Mu at least": NONE if each.mu_lower is None else f"{each.mu_lower:.3f}",
            "Mu, an estimate": NONE if each.mu_estimate is None else f"{each.mu_estimate:.3f}",
            "Verdict": str(each.verdict),
        }
        for each in result.releases
    ]
    return Table.of(rows, "What is claimed of each release, and what an attack ruled out", words=("Verdict",))


def _detail(release: ReleaseAudit) -> str:
    uses = "one use" if release.uses == 1 else f"{release.uses} uses"
    needed = ""
    if release.verdict is AuditVerdict.UNDERPOWERED:
        more = "no number of trials" if release.trials_needed is None else f"{release.trials_needed:,} trials"
        needed = f" An attack as strong as the claim allows would show half of it with {more}."
    return (
        f"{release.what[:1].upper()}{release.what[1:]}. The claim is for {uses}, {release.adjacency}, by the "
        f"{release.accountant.upper()} accountant. The canary that served best: {release.canary}; the "
        f"statistic: {release.statistic}. Confidence {release.confidence:.2%}.{needed}"
    )


def receiver_curves(result: AuditResult) -> Iterator[Figure]:
    """For each release the attack's receiver curve under the one that the claim allows."""
    share = Scale("false positive rate", "{:.1f}".format, (0.0, 0.2, 0.4, 0.6, 0.8, 1.0))
    for number, each in enumerate(result.releases):
        if not each.curve:
            continue
        told = f"At least epsilon {each.lower_bound:.3f} against {round_up(each.claimed_epsilon)} claimed"
        yield line_figure(
            f"receiver-{number + 1}",
            f"True positives of the attack on: {each.name}",
            [
                Series("the most that the claim allows", each.claimed_curve, colour="ink", marks=[]),
                Series("the attack", each.curve, colour=1, marks=[]),
            ],
            share,
            Scale(label="{:.1f}".format, places=(0.0, 0.2, 0.4, 0.6, 0.8, 1.0)),
            f"{told} at delta {short_number(each.delta)}. Where the attack lies above the claim by more "
            "than chance, the claim is violated.",
        )
