"""Diagnosis of heart disease; a client is one of four hospitals.

Investigators: Andras Janosi, William Steinbrunn, Matthias Pfisterer, Robert Detrano.
"""

import numpy as np

from coterie.data.columns import Column, label_index, read_columns
from coterie.data.dataset_files import dataset_files
from coterie.data.preprocessing import Label, Preprocessing, TableInputs
from coterie.data.records import Dataset, Records, Task
from coterie.data.tables import read_csv

_HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")

# What medicine expects of an adult patient, not what these patients happen to show.
_COLUMNS = (
    Column(column="age", range=(20, 90)),
    Column(column="sex", range=(0, 1)),
    Column(column="cp", categories=(1, 2, 3, 4)),
    # Nobody has a blood pressure or a cholesterol of 0: some hospitals wrote 0 for "not measured".
    Column(column="trestbps", range=(80, 200), missing="indicator", missing_values=(0,)),
    Column(column="chol", range=(100, 400), missing="indicator", missing_values=(0,)),
    Column(column="fbs", range=(0, 1), missing="indicator"),
    Column(column="restecg", categories=(0, 1, 2), missing="indicator"),
    Column(column="thalach", range=(60, 220), missing="indicator"),
    Column(column="exang", range=(0, 1), missing="indicator"),
    Column(column="oldpeak", range=(-2, 6), missing="indicator"),
    Column(column="slope", categories=(1, 2, 3), missing="indicator"),
    Column(column="ca", range=(0, 3), missing="indicator"),
    Column(column="thal", categories=(3, 6, 7), missing="indicator"),
)


def read_heart_disease() -> Dataset:
    """920 patients of four hospitals; the target is any narrowing of a vessel above 50 %."""
    paths = dataset_files("heart-disease", tuple(f"processed.{name}.data" for name in _HOSPITALS))
    header = (*(column.column for column in _COLUMNS), "num")
    inputs, hospitals = TableInputs(columns=_COLUMNS), {}
    for name, path in zip(_HOSPITALS, paths, strict=True):
        table = read_csv(path, header)
        narrowing = label_index(table, "num", (0, 1, 2, 3, 4))
        hospitals[name] = Records(
            inputs.features(read_columns(table, _COLUMNS)), (narrowing > 0).astype(np.int64)
        )
    return Dataset.of_owners(
        "heart-disease",
        hospitals,
        Task("classification", (sum(column.width for column in _COLUMNS),), 2),
        "UCI Heart Disease; clinical ranges mapped to [-1, 1], missing values by indicator",
        preprocessing=Preprocessing(inputs=inputs, label=Label(classes=("none", "narrowed"))),
    )
