"""What makes a federation unusable, and what its fingerprint notices."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from coterie.data import Client, Federation, Records, Task, check_federation
from coterie.errors import DataError

TASK = Task("classification", (3,), 4)


def records(count: int = 5) -> Records:
    return Records(np.ones((count, 3), dtype=np.float32), np.zeros(count, dtype=np.int64))


def client(name: str = "a", **parts: Records) -> Client:
    return Client(name, **{"train": records(), "validation": records(0), "test": records(2), **parts})


def federation(*clients: Client) -> Federation:
    return Federation(clients, TASK)


def spoilt(**changes: object) -> Records:
    features, targets = records().features.copy(), records().targets.copy()
    if "feature" in changes:
        features[3, 1] = changes["feature"]
    if "label" in changes:
        targets[4] = changes["label"]
    return Records(features, targets)


def test_a_sound_federation_passes() -> None:
    check_federation(federation(client("a"), client("b")))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_features_that_are_not_finite_are_refused_with_client_and_row(value: float) -> None:
    with pytest.raises(DataError, match=r"client b, training records: row 3 has feature -?(nan|inf)"):
        check_federation(federation(client("a"), client("b", train=spoilt(feature=value))))


@pytest.mark.parametrize("part", ["train", "validation", "test"])
@pytest.mark.parametrize("label", [-1, 4])
def test_labels_out_of_range_are_refused_in_every_part(part: str, label: int) -> None:
    with pytest.raises(DataError, match=rf"client a.*row 4 has label {label}; allowed: 0 to 3"):
        check_federation(federation(client(**{part: spoilt(label=label)})))


@pytest.mark.parametrize(("part", "word"), [("train", "training"), ("test", "test")])
def test_a_client_without_records_is_refused(part: str, word: str) -> None:
    with pytest.raises(DataError, match=f"client a: no {word} records"):
        check_federation(federation(client(**{part: records(0)})))


def test_mixed_shapes_are_refused() -> None:
    wide = Records(np.ones((5, 4), dtype=np.float32), np.zeros(5, dtype=np.int64))
    with pytest.raises(DataError, match=r"client b.*shape \(4,\), the task has \(3,\)"):
        check_federation(federation(client("a"), client("b", train=wide)))


def test_rows_without_targets_are_refused() -> None:
    torn = Records(records(5).features, records(4).targets)
    with pytest.raises(DataError, match=r"5 rows of features, targets of shape \(4,\)"):
        check_federation(federation(client(train=torn)))


def test_other_number_types_are_refused() -> None:
    double = Records(records().features.astype(np.float64), records().targets)
    with pytest.raises(DataError, match="type float64"):
        check_federation(federation(client(train=double)))


def test_tokens_outside_the_vocabulary_are_refused() -> None:
    text = Records(np.full((4, 3), 7, dtype=np.int64), np.zeros(4, dtype=np.int64))
    task = Task("classification", (3,), 7, vocabulary=7)
    with pytest.raises(DataError, match="token 7; allowed: 0 to 6"):
        check_federation(Federation((Client("a", text, text, text),), task))


def test_regression_targets_must_be_finite() -> None:
    sick = Records(records().features, np.array([0, 1, np.nan, 2, 3], dtype=np.float32))
    with pytest.raises(DataError, match="row 2 has target nan"):
        check_federation(Federation((Client("a", sick, sick, sick),), Task("regression", (3,), 0)))


def test_no_clients_equal_names_and_a_truth_of_another_length_are_refused() -> None:
    with pytest.raises(DataError, match="no clients"):
        check_federation(federation())
    with pytest.raises(DataError, match="client a: 2 clients have this name"):
        check_federation(federation(client("a"), client("a")))
    with pytest.raises(DataError, match="2 of 1 clients"):
        check_federation(replace(federation(client("a")), truth=(0, 1)))


def test_fingerprint_notices_values_shapes_names_order_and_truth() -> None:
    base = federation(client("a"), client("b"))
    others = [
        federation(client("b"), client("a")),
        federation(client("a"), client("c")),
        federation(client("a"), client("b", train=spoilt(feature=2.0))),
        federation(client("a"), client("b", test=spoilt(label=1))),
        federation(client("a"), client("b", train=records(4), validation=records(1))),
        replace(base, truth=(0, 1)),
        replace(base, task=replace(TASK, classes=5)),
    ]
    prints = {one.fingerprint() for one in others}
    assert len(prints) == len(others)
    assert base.fingerprint() not in prints
    assert base.fingerprint() == federation(client("a"), client("b")).fingerprint()
