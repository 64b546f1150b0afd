"""The room as a library of its own: light to import, silent, complete."""

import subprocess
import sys
from pathlib import Path

import coterie.privacy

HERE = Path(__file__).parent


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)


def test_import_brings_neither_torch_nor_plots_nor_other_rooms():
    code = (
        "import sys, coterie.privacy;"
        "print([m for m in sys.modules if m.split('.')[0] in ('torch', 'sklearn', 'matplotlib', 'pydantic')"
        " or m.startswith('coterie.') and not m.startswith('coterie.privacy')])"
    )
    assert run(code).stdout.strip() == "[]"


def test_calibration_prints_nothing():
    code = (
        f"import sys; sys.path.insert(0, {str(HERE)!r}); from privacy_oracles import record_plan;"
        "from coterie.privacy import Budget, calibrate, guarantee;"
        "plan = calibrate(record_plan(rounds=5, records=100, batch=70), Budget(8.0, 1e-3), accountant='pld');"
        "str(guarantee(plan, delta=1e-3))"
    )
    done = run(code)
    assert done.stdout == ""
    assert done.stderr == ""


def test_everything_promised_is_there():
    for name in coterie.privacy.__all__:
        assert hasattr(coterie.privacy, name)


def test_example_of_the_documentation_runs():
    page = (HERE.parents[1] / "docs" / "privacy.md").read_text(encoding="utf-8")
    code = page.split("```python\n")[1].split("```")[0]
    printed = run(code).stdout
    assert printed.startswith("(eps=3.00, delta=1e-4)-DP for one record of hospital A")
