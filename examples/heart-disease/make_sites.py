"""Write the four hospitals of UCI Heart Disease into four folders, as each would keep its own.

python examples/heart-disease/make_sites.py $COTERIE_DATA/heart-disease sites
"""

import sys
from pathlib import Path

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
COLUMNS = (
    *("age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak"),
    *("slope", "ca", "thal"),
)


def main(source: Path, target: Path) -> None:
    declaration = (Path(__file__).parent / "federation.yaml").read_text()
    for hospital in HOSPITALS:
        folder = target / hospital
        folder.mkdir(parents=True)
        (folder / "federation.yaml").write_text(declaration)
        lines = [",".join((*COLUMNS, "disease"))]
        for record in (source / f"processed.{hospital}.data").read_text().split():
            *values, narrowing = record.split(",")
            lines.append(",".join((*values, str(int(int(narrowing) > 0)))))
        (folder / f"{hospital}.csv").write_text("\n".join(lines) + "\n")
        print(f"{folder}: {len(lines) - 1} patients")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
