"""The charts of a run's report as pictures of their own, for documents.

coterie run --set seeds.noise=0 --out runs/demo
python benchmarks/pictures.py runs/demo docs --charts releases responsibilities accuracy epsilon

Writes docs/run-NAME.svg for each chart, with the report's own style sheet inside.
"""

import argparse
import re
from importlib import resources
from pathlib import Path

from coterie.experiment.folder import RunFolder

_CHART = re.compile(
    r'<svg viewBox="0 0 (\d+) (\d+)" role="img" aria-labelledby="([\w-]+)-title.*?</svg>', re.DOTALL
)


def charts_of(report: str) -> dict[str, str]:
    """Every chart of a report by its name, as a document of its own."""
    style = resources.files("coterie.report").joinpath("style.css").read_text(encoding="utf-8")
    style = re.sub(r"@media[^{]*\{(?:[^{}]*\{[^{}]*\})*[^{}]*\}", "", style)  # one look, on white
    found = {}
    for chart in _CHART.finditer(report):
        width, height, name = chart.groups()
        size = f'width="{width}" height="{height}" font-family="sans-serif"'
        opening = f'<svg xmlns="http://www.w3.org/2000/svg" {size} '
        body = chart.group(0).replace("<svg ", opening, 1)
        head, _, rest = body.partition(">")
        paper = '<rect width="100%" height="100%" fill="#ffffff"/>'
        found[name] = f"{head}><style>{style}</style>{paper}{rest}\n"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="folder of a finished run")
    parser.add_argument("into", type=Path, help="folder to write to")
    parser.add_argument("--charts", nargs="*", help="only these; by default, all")
    arguments = parser.parse_args()
    charts = charts_of(RunFolder(arguments.run).report.read_text(encoding="utf-8"))
    for name in arguments.charts or charts:
        if name not in charts:
            raise SystemExit(f"{name}: no such chart in this report; there are {', '.join(charts)}")
        file = arguments.into / f"run-{name}.svg"
        file.write_text(charts[name], encoding="utf-8")
        print(file)


if __name__ == "__main__":
    main()
