"""One description of what lies before a network, applied alike by numpy in training and by torch after it."""

import numpy as np
import pytest
import torch
from torch import nn

from coterie.data import DataSettings, Task, load_dataset
from coterie.data.client_files import Clipped, read_client
from coterie.data.columns import Column
from coterie.data.preprocessing import (
    ArrayInputs,
    Label,
    Preprocessing,
    ScalingStep,
    TableInputs,
    TokenInputs,
)
from coterie.data.raw import raw_records
from coterie.errors import DataError
from coterie.models.preprocessed import PreprocessedModel

TABLE = TableInputs(
    columns=(
        Column(column="age", range=(18, 90)),
        Column(column="smoker", categories=("no", "yes")),
        Column(column="pressure", range=(80, 200), missing="indicator", missing_values=(0,)),
        Column(column="stage", categories=(1, 2, 3), missing="indicator"),
    )
)
ROWS = [
    {"age": 30.1, "smoker": "yes", "pressure": 0, "stage": 2},
    {"age": 17.0, "smoker": "no", "pressure": None, "stage": None},
    {"age": 66.6, "smoker": "no", "pressure": 123.4, "stage": 3},
]
RNG = np.random.default_rng(4)
PIXELS = (
    ScalingStep(do="divide", by=(255,)),
    ScalingStep(do="subtract", by=(0.3, 0.2, 0.1)),
    ScalingStep(do="divide", by=(0.7, 0.6, 0.5)),
)
INPUTS = {
    "standard pixels": (ArrayInputs(shape=(3, 4, 4), steps=PIXELS), RNG.integers(0, 256, (50, 3, 4, 4))),
    "clipped array": (
        ArrayInputs(
            shape=(5,), steps=(ScalingStep(do="clip", by=(-0.1, 0.3)), ScalingStep(do="divide", by=(0.3,)))
        ),
        RNG.normal(size=(50, 5)),
    ),
    "by feature": (
        ArrayInputs(
            shape=(3,), steps=(ScalingStep(do="divide", by=(1, 100, 7)), ScalingStep(do="clip", by=(0, 1)))
        ),
        RNG.uniform(0, 90, (50, 3)),
    ),
    "table": (
        TABLE,
        np.column_stack(
            [
                RNG.uniform(10, 99, 50),
                RNG.integers(0, 2, 50),
                RNG.choice([0, np.nan, 99.9], 50),
                RNG.choice([0, 2, np.nan], 50),
            ]
        ),
    ),
    "tokens": (TokenInputs(length=6, vocabulary=9), RNG.integers(0, 9, (50, 6))),
}


@pytest.mark.parametrize("name", INPUTS)
def test_training_and_prediction_scale_to_the_same_bits(name: str) -> None:
    inputs, raw = INPUTS[name]
    seen = inputs.features(raw)
    task = Task("classification", seen.shape[1:], 2)
    model = PreprocessedModel(nn.Identity(), task, Preprocessing(inputs=inputs, label=Label(classes=2)))
    np.testing.assert_array_equal(model(torch.from_numpy(raw)).numpy(), seen)
    assert model(torch.from_numpy(raw)).numpy().dtype == seen.dtype
    again = Preprocessing.model_validate_json(model.preprocessing.model_dump_json())
    np.testing.assert_array_equal(again.inputs.features(raw), seen)


def test_a_table_is_scaled_as_declared() -> None:
    described = Preprocessing(inputs=TABLE, label=Label(classes=2))
    raw = raw_records(ROWS, described)
    np.testing.assert_array_equal(raw[:, 1], [1, 0, 0])
    np.testing.assert_allclose(
        TABLE.features(raw),
        [
            [2 * 12.1 / 72 - 1, 0, 1, 0, 1, 0, 1, 0, 0],
            [-1, 1, 0, 0, 1, 0, 0, 0, 1],
            [2 * 48.6 / 72 - 1, 1, 0, 2 * 43.4 / 120 - 1, 0, 0, 0, 1, 0],
        ],
        rtol=1e-6,
    )


def test_rows_by_name_columns_and_raw_rows_are_the_same_records() -> None:
    described = Preprocessing(inputs=TABLE, label=Label(classes=2))
    rows = raw_records(ROWS, described)
    columns = {name: [row[name] for row in ROWS] for name in ROWS[0]}
    columns["another"] = [None] * 3
    np.testing.assert_array_equal(raw_records(columns, described), rows)
    np.testing.assert_array_equal(raw_records(rows.tolist(), described), rows)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([{"age": 30}], "no column 'smoker'"),
        ([{**ROWS[0], "smoker": "maybe"}], "'maybe'; allowed: no, yes"),
        ([{**ROWS[0], "age": None}], "column age: no value"),
        (np.zeros((2, 3)), "shape"),
        (np.array([[30.0, 2.0, 1.0, 1.0]]), "column smoker: 2.0; allowed: 0 to 1"),
        (np.array([[np.nan, 1.0, 1.0, 1.0]]), "column age: nan"),
        (["text"], "other things than numbers"),
        ({"age": [1, 2], "smoker": ["no"], "pressure": [1], "stage": [1]}, "different lengths"),
    ],
)
def test_records_that_were_not_declared_so_are_refused(values: object, said: str) -> None:
    with pytest.raises(DataError, match=said) as refused:
        raw_records(values, Preprocessing(inputs=TABLE, label=Label(classes=2)))
    assert "\n" not in str(refused.value)


def test_text_becomes_the_tokens_of_its_last_characters() -> None:
    inputs = TokenInputs(length=3, vocabulary=4, alphabet="abc")
    described = Preprocessing(inputs=inputs, label=Label(classes=4))
    np.testing.assert_array_equal(raw_records(["bbabc", "c?a"], described), [[0, 1, 2], [2, 3, 0]])
    with pytest.raises(DataError, match="text 0 of 2 characters; allowed: 3 or more"):
        raw_records(["ab"], described)
    with pytest.raises(DataError, match="row 1"):
        raw_records(np.array([[0, 1, 2], [0, 1, 4]]), described)


@pytest.mark.parametrize("name", ["digits", "glyphs", "lines"])
def test_built_in_data_say_how_they_were_scaled(name: str) -> None:
    options = {"size": 60} if name == "glyphs" else {}
    dataset = load_dataset(DataSettings(name=name, **options), 0)
    if name == "digits":
        from sklearn.datasets import load_digits

        raw = raw_records(load_digits().data, dataset.preprocessing)
        np.testing.assert_array_equal(dataset.preprocessing.inputs.features(raw), dataset.train.features)
    elif name == "glyphs":
        assert dataset.preprocessing.label.names == list("0123456789")
        np.testing.assert_array_equal(
            dataset.preprocessing.inputs.features(dataset.train.features), dataset.train.features
        )
    else:
        assert dataset.preprocessing is None


def test_targets_of_a_regression_come_back_in_units() -> None:
    label = Label(range=(10, 70))
    np.testing.assert_allclose(
        label.in_units(label.unit(np.array([10, 33.3, 90]))), [10, 33.3, 70], rtol=1e-6
    )


def test_labels_of_a_file_may_be_missing_where_none_is_needed(tmp_path) -> None:
    described = Preprocessing(inputs=TABLE, label=Label(column="ill", classes=("no", "yes")))
    header, row = "age,smoker,pressure,stage", "30,yes,,2"
    (tmp_path / "plain.csv").write_text(f"{header}\n{row}\n")
    (tmp_path / "empty.csv").write_text(f"{header},ill\n{row},\n")
    (tmp_path / "told.csv").write_text(f"{header},ill\n{row},yes\n{row},no\n")
    (tmp_path / "half.csv").write_text(f"{header},ill\n{row},yes\n{row},\n")
    for name, targets in (("plain", None), ("empty", None), ("told", [1, 0])):
        found = read_client(tmp_path / f"{name}.csv", described, Clipped(), labelled=False).targets
        assert (None if found is None else found.tolist()) == targets
    with pytest.raises(DataError, match="line 3, column ill: no label"):
        read_client(tmp_path / "half.csv", described, Clipped(), labelled=False)
    with pytest.raises(DataError, match="no column 'ill'"):
        read_client(tmp_path / "plain.csv", described, Clipped())


def test_a_data_frame_is_read_like_the_file_it_came_from(tmp_path) -> None:
    pandas = pytest.importorskip("pandas")
    columns = (
        *TABLE.columns,
        Column(column="since", dates=("2001-01-01", "2020-12-31"), missing="indicator"),
        Column(column="member", categories=("true", "false")),
    )
    described = Preprocessing(inputs=TableInputs(columns=columns), label=Label(column="ill", classes=2))
    frame = pandas.DataFrame(ROWS)
    frame["since"] = pandas.to_datetime(["2001-12-31", None, "2020-01-05"])
    frame["member"] = [True, False, True]
    frame["smoker"] = frame["smoker"].astype("category")
    raw = raw_records(frame, described)
    frame.to_csv(tmp_path / "a.csv", index=False)
    frame.to_parquet(tmp_path / "b.parquet")
    np.testing.assert_array_equal(raw[:, 5], [0, 1, 0])
    parquet = read_client(tmp_path / "b.parquet", described, Clipped(), labelled=False)
    np.testing.assert_array_equal(parquet.raw, raw)
    lower = (tmp_path / "a.csv").read_text().replace("True", "true").replace("False", "false")
    (tmp_path / "a.csv").write_text(lower)
    np.testing.assert_array_equal(
        read_client(tmp_path / "a.csv", described, Clipped(), labelled=False).raw, raw
    )
