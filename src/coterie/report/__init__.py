"""Reports: one self-contained HTML page for a run, for a comparison and for a reproduction."""

from coterie.report.comparison import write_comparison_report
from coterie.report.reproduction import write_reproduction_report
from coterie.report.run import write_run_report

__all__ = ["write_comparison_report", "write_reproduction_report", "write_run_report"]
