"""Reports: one self-contained HTML page for a run and for a comparison."""

from coterie.report.comparison import write_comparison_report
from coterie.report.run import write_run_report

__all__ = ["write_comparison_report", "write_run_report"]
