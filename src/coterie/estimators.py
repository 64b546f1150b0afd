"""Estimators that follow scikit-learn: fit on an array with the clients' ids beside it, predict, score.

A fit is an ordinary run: `run_` has its ledger and its metrics, `guarantee_` its sentence. Nothing is held
out and nothing is judged inside a fit, unless `test_share` asks for it.
"""

import shutil
import warnings
import weakref
from collections.abc import Mapping, Sequence
from numbers import Integral
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, ClassVar, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.metrics import accuracy_score, r2_score
from sklearn.utils import check_random_state, column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_consistent_length, check_is_fitted, validate_data

from coterie import api
from coterie.algorithms.protocol import Assignment
from coterie.data.client_files import DECLARATION
from coterie.data.columns import public_range
from coterie.data.frames import file_names
from coterie.errors import InputError
from coterie.experiment import local
from coterie.experiment.folder import RunFolder
from coterie.experiment.trained import TrainedRun
from coterie.experiment.usable import in_parts
from coterie.files import write_text, yaml_text
from coterie.models.preprocessed import PreprocessedModel

Array = NDArray[Any]
Bounds = tuple[float, float] | Sequence[tuple[float, float]] | Mapping[str, tuple[float, float]] | None
ONE_CLIENT = "all"
"""What the only client is called where nobody names any."""
_LARGEST_BATCH = 24
_FROM_DATA = (
    "bounds: taken from the data; what an extreme tells of a single record is not covered by the guarantee, "
    "whose line says so; give bounds that are known without looking"
)


class FitError(InputError, ValueError):
    """What was given to an estimator is wrong."""


class _Clustered(BaseEstimator):  # type: ignore[misc]
    """What both estimators share; parameters are documented there."""

    task: ClassVar[str]
    model_name: ClassVar[str]

    # --- fit ------------------------------------------------------------------------------------------

    def _fit(
        self, X: Array, label: Mapping[str, Any], targets: Array, clients: object, *, known: bool
    ) -> None:
        """Write the records as a federation of files, run the experiment, keep its models.

        Args:
            label: what is declared of the targets.
            known: whether that was known without looking.
        """
        ids = np.full(len(X), ONE_CLIENT) if clients is None else column_or_1d(clients)
        check_consistent_length(X, ids)
        if any(each is None or each != each for each in ids.tolist()):
            raise FitError("clients: some records have none (None or NaN); allowed: an id for every record")
        if len({type(each) for each in ids.tolist()}) > 1:
            raise FitError("clients: ids of several types; allowed: all numbers, or all texts")
        self.clients_, owner = np.unique(ids, return_inverse=True)
        named = file_names([str(each) for each in self.clients_])
        names = [named[str(each)] for each in self.clients_]
        if len(set(map(str, self.clients_))) < len(self.clients_):
            raise FitError("clients: two of them read alike as text; allowed: ids that differ as text")
        home = self._home()
        data, columns = home / "data", self._columns()
        data.mkdir(parents=True)
        target = _other_than(columns, "label")
        ranges = zip(columns, self._ranges(X, columns), strict=True)
        declared = {
            "task": self.task,
            "label": {"column": target, **label},
            "features": [{"column": column, "range": [low, high]} for column, (low, high) in ranges],
            "declared": "in-advance" if known and self.bounds is not None else "from-data",
        }
        write_text(data / DECLARATION, yaml_text(declared))
        for place, name in enumerate(names):
            mine = owner == place
            table = {**dict(zip(columns, X[mine].T, strict=True)), target: targets[mine]}
            pq.write_table(pa.table(table), data / f"{name}.parquet")
        start = api.run if self.out is not None else local.run  # a report for whoever keeps the folder
        try:
            self.run_ = start(self._experiment(data, owner), home / "run")
        except BaseException:
            if not RunFolder(home / "run").exists:  # nothing was charged
                shutil.rmtree(home)
            raise
        self.guarantee_ = self.run_.guarantee
        self._keep_models(dict(zip(names, self.clients_.tolist(), strict=True)))

    def _home(self) -> Path:
        """The folder of records and run: the one that was asked for, or one that goes with the estimator."""
        if self.out is not None:
            home = Path(self.out)
            if home.exists():
                raise FitError(f"out: {home} exists already; allowed: a folder that is not there yet")
            return home
        home = Path(mkdtemp(prefix="coterie-"))
        weakref.finalize(self, shutil.rmtree, home, ignore_errors=True)
        return home

    def _columns(self) -> list[str]:
        return list(getattr(self, "feature_names_in_", [f"x{place}" for place in range(self.n_features_in_)]))

    def _ranges(self, X: Array, columns: list[str]) -> list[tuple[float, float]]:
        """The declared range of every column, or that of its values."""
        if self.bounds is None:
            warnings.warn(_FROM_DATA, UserWarning, stacklevel=4)
            ends = np.column_stack([X.min(axis=0), X.max(axis=0)]).tolist()
            return [(low, high) if low < high else (low - 1.0, high + 1.0) for low, high in ends]
        if isinstance(self.bounds, Mapping):
            if missing := [column for column in columns if column not in self.bounds]:
                raise FitError(f"bounds: nothing for {missing[0]!r}; allowed: a range for every column")
            pairs = [self.bounds[column] for column in columns]
        else:
            pairs = list(self.bounds)
            if np.shape(self.bounds) == (2,):
                pairs = [tuple(self.bounds)] * len(columns)
        if np.shape(pairs) != (len(columns), 2):
            raise FitError(
                f"bounds: {self.bounds!r}; allowed: (low, high) for all columns, or such a pair for each of "
                f"the {len(columns)}"
            )
        ranges = [(float(low), float(high)) for low, high in pairs]
        for column, (low, high) in zip(columns, ranges, strict=True):
            try:
                public_range((low, high))
            except ValueError as wrong:
                raise FitError(f"bounds: ({low:g}, {high:g}) for {column!r} {wrong}") from None
        return ranges

    def _experiment(self, data: Path, owner: Array) -> dict[str, Any]:
        smallest = int(np.bincount(owner).min())
        batch = max(1, min(_LARGEST_BATCH, smallest // 4)) if self.batch is None else self.batch
        state = self.random_state
        seed = None if state is None else state if isinstance(state, Integral) else _drawn_seed(state)
        if self.unit == "person":
            raise FitError(
                "unit: person; an estimator is not told whose each record is; allowed: record, client (a run "
                "on coterie.federation(..., person=COLUMN) protects persons)"
            )
        algorithm = {"name": self.algorithm} if isinstance(self.algorithm, str) else dict(self.algorithm)
        if algorithm["name"] == "auto":
            algorithm["name"] = self._suitable(len(self.clients_))
        return {
            "data": {"name": "folder", "path": str(data)},
            "federation": {"kind": "natural", "minimum_records": 1, "test_share": self.test_share},
            "model": {"name": self.model or self.model_name},
            "algorithm": algorithm,
            "privacy": {
                "unit": self.unit,
                "epsilon": self.epsilon,
                "clip": self.clip,
                **({} if self.delta is None else {"delta": self.delta}),
            },
            "schedule": {"rounds": self.rounds, "batch": batch, "lr": self.lr},
            "seeds": {"simulation": int(seed or 0), "noise": None if seed is None else int(seed)},
            "evaluation": {"kind": "private" if self.test_share else "none"},
        }

    def _suitable(self, clients: int) -> str:
        """The algorithm for so many clients: clusters cannot be told among fewer than three."""
        if self.unit == "record":
            return "r-dpcfl" if clients > 2 else "global"
        return "dp-fedavg"

    def _keep_models(self, ids: Mapping[str, Any]) -> None:
        """The model of every cluster, and which of them each client uses: needed without the folder, too."""
        trained = TrainedRun.open(self.run_.folder)
        served = trained.served
        self._models: dict[int, PreprocessedModel] = {}
        self.clusters_: dict[Any, int] = {}
        if trained.personal_parts is None:
            self._models = {row: trained.model(cluster=row) for row in range(len(served.models))}
            if isinstance(served, Assignment):
                self.clusters_ = {ids[name]: row for name, row in served.cluster_of.items()}
        else:  # every client's model is its own
            self._models = {row: trained.model(client=name) for row, name in enumerate(ids)}
            self.clusters_ = {own: row for row, own in enumerate(ids.values())}

    # --- predict --------------------------------------------------------------------------------------

    def _outputs(self, X: ArrayLike, clients: object, cluster: int | None) -> NDArray[np.float32]:
        """What the models say of every record: logits, or values in the label's units."""
        check_is_fitted(self)
        raw = validate_data(self, X, reset=False, dtype=np.float64)
        rows = self._rows(len(raw), clients, cluster)
        parts = {int(row): in_parts(self._models[int(row)], raw[rows == row]) for row in np.unique(rows)}
        first = next(iter(parts.values()))
        found = torch.empty((len(raw), *first.shape[1:]), dtype=first.dtype)
        for row, outputs in parts.items():
            found[torch.from_numpy(rows == row)] = outputs
        outputs_of_all: NDArray[np.float32] = found.numpy()
        return outputs_of_all

    def _rows(self, records: int, clients: object, cluster: int | None) -> NDArray[np.int64]:
        """Which model each record goes to."""
        count = len(self._models)
        allowed = f"0 to {count - 1}" if count > 1 else "0"
        if cluster is not None:
            if clients is not None:
                raise FitError("clients, cluster: both are given; allowed: one of them")
            if not isinstance(cluster, Integral) or int(cluster) not in self._models:
                raise FitError(f"cluster: {cluster!r} is none of the fitted models; allowed: {allowed}")
            return np.full(records, int(cluster))
        if clients is None:
            if count > 1:
                raise FitError(
                    f"clients: {count} models were fitted, so each record needs the id of its client "
                    f"(clients=ids), or all of them a cluster (cluster={allowed})"
                )
            return np.zeros(records, dtype=np.int64)
        ids = column_or_1d(clients)
        check_consistent_length(ids, np.empty(records))
        unseen = [each for each in dict.fromkeys(ids.tolist()) if each not in self.clusters_]
        if unseen and not self.clusters_:
            raise FitError(
                f"clients: which model a client of {self.run_.algorithm} uses is its own secret choice; give "
                f"cluster={allowed} instead"
            )
        if unseen:
            raise FitError(
                f"clients: {unseen[0]!r} was not there when the estimator was fitted; give cluster={allowed} "
                "for the records of newcomers (coterie assign chooses one privately), or fit again with them"
            )
        return np.array([self.clusters_[each] for each in ids.tolist()], dtype=np.int64)


def _drawn_seed(state: object) -> int:
    return int(check_random_state(state).randint(2**31 - 1))


def _other_than(taken: Sequence[str], name: str) -> str:
    while name in taken:
        name += "_"
    return name


class ClusteredClassifier(ClassifierMixin, _Clustered):  # type: ignore[misc]
    """Classify the records of many clients, one model for each cluster of alike ones, under privacy.

    Args:
        epsilon, delta: the budget of every unit; delta None: a tenth of one over their number.
        algorithm: the name of an algorithm for this unit, or its whole section as a dict; auto: r-dpcfl where
            records of three or more clients are protected, else one model for all.
        bounds: (low, high) for all columns, a pair for each, or pairs by column; None takes them from the
            data, warns, and the line of the guarantee says so.
        classes: every class that there may be; None takes them from y, and the guarantee's line says so.
        unit: what is protected: record or client.
        rounds, batch, lr, clip: the schedule; batch None: a quarter of the smallest client's records, at
            most 24.
        model: the name of a network; None: softmax regression.
        test_share: share of each client's records to hold out and score privately; 0: none.
        random_state: None draws noise in secret; a number makes it a simulation, as the guarantee then says.
        out: a folder to keep records, run and report in; None: one that is deleted with the estimator.

    Attributes:
        guarantee_: the sentence that says what was spent, for whom and against whom.
        run_: the run, with its metrics and clients.
        classes_, clients_: as they came, in order.
        clusters_: the model of each client, where the run tells it.

    Without `clients`, all records are of one client.

    Example:
        >>> import coterie as ct
        >>> import numpy as np
        >>> X, ids = np.random.default_rng(0).random((400, 3)), np.repeat(["a", "b"], 200)
        >>> y = (X[:, 0] > 0.5).astype(int)
        >>> fitted = ct.ClusteredClassifier(epsilon=8, bounds=(0, 1)).fit(X, y, clients=ids)  # doctest: +SKIP
        >>> fitted.predict(X, clients=ids), fitted.guarantee_  # doctest: +SKIP
    """

    task, model_name = "classification", "softmax"

    def __init__(
        self,
        epsilon: float = 8.0,
        *,
        delta: float | None = None,
        algorithm: str | Mapping[str, object] = "auto",
        bounds: Bounds = None,
        classes: Sequence[object] | None = None,
        unit: str = "record",
        rounds: int = 30,
        batch: int | None = None,
        lr: float = 0.5,
        clip: float = 1.0,
        model: str | None = None,
        test_share: float = 0.0,
        random_state: int | np.random.RandomState | None = None,
        out: str | Path | None = None,
    ) -> None:
        self.epsilon = epsilon
        self.delta = delta
        self.algorithm = algorithm
        self.bounds = bounds
        self.classes = classes
        self.unit = unit
        self.rounds = rounds
        self.batch = batch
        self.lr = lr
        self.clip = clip
        self.model = model
        self.test_share = test_share
        self.random_state = random_state
        self.out = out

    def fit(self, X: ArrayLike, y: ArrayLike, clients: ArrayLike | None = None) -> Self:
        """Train on records with their labels; `clients` has the id of each record's client."""
        raw, labels = validate_data(self, X, y, dtype=np.float64, ensure_min_samples=2)
        check_classification_targets(labels)
        self.classes_ = np.unique(labels if self.classes is None else np.asarray(self.classes))
        if len(self.classes_) < 2:
            raise FitError(f"y: one class only, {self.classes_[0]!r}; allowed: two or more")
        targets = np.searchsorted(self.classes_, labels).clip(max=len(self.classes_) - 1)
        if unknown := labels[self.classes_[targets] != labels].tolist():
            raise FitError(f"y: {unknown[0]!r} is none of the declared classes")
        label = {"classes": len(self.classes_)}
        self._fit(raw, label, targets, clients, known=self.classes is not None)
        return self

    def predict_proba(
        self, X: ArrayLike, clients: ArrayLike | None = None, cluster: int | None = None
    ) -> NDArray[np.float64]:
        """How probable each class is, by the model of each record's client, or of one cluster for all."""
        outputs = self._outputs(X, clients, cluster)
        shares: NDArray[np.float64] = torch.softmax(torch.from_numpy(outputs).double(), dim=1).numpy()
        return shares

    def predict(self, X: ArrayLike, clients: ArrayLike | None = None, cluster: int | None = None) -> Array:
        """The class of every record."""
        outputs = self._outputs(X, clients, cluster)
        found: Array = self.classes_[outputs.argmax(axis=1)]
        return found

    def score(
        self,
        X: ArrayLike,
        y: ArrayLike,
        sample_weight: ArrayLike | None = None,
        clients: ArrayLike | None = None,
        cluster: int | None = None,
    ) -> float:
        """The share of records that are classified right: exact, outside the guarantee."""
        said = self.predict(X, clients=clients, cluster=cluster)
        return float(accuracy_score(y, said, sample_weight=sample_weight))


class ClusteredRegressor(RegressorMixin, _Clustered):  # type: ignore[misc]
    """Predict a number for the records of many clients, one model for each cluster, under privacy.

    Args:
        label_bounds: (low, high) of the target; None takes them from y, and the guarantee's line says so.
        others: as of `ClusteredClassifier`; model None: linear regression.

    Example:
        >>> import coterie as ct
        >>> import numpy as np
        >>> X, ids = np.random.default_rng(0).random((400, 3)), np.repeat(["a", "b"], 200)
        >>> ages = ct.ClusteredRegressor(bounds=(0, 1), label_bounds=(0, 3))
        >>> ages.fit(X, X.sum(axis=1), clients=ids).predict(X, clients=ids)  # doctest: +SKIP
    """

    task, model_name = "regression", "linear"

    def __init__(
        self,
        epsilon: float = 8.0,
        *,
        delta: float | None = None,
        algorithm: str | Mapping[str, object] = "auto",
        bounds: Bounds = None,
        label_bounds: tuple[float, float] | None = None,
        unit: str = "record",
        rounds: int = 30,
        batch: int | None = None,
        lr: float = 0.1,
        clip: float = 1.0,
        model: str | None = None,
        test_share: float = 0.0,
        random_state: int | np.random.RandomState | None = None,
        out: str | Path | None = None,
    ) -> None:
        self.epsilon = epsilon
        self.delta = delta
        self.algorithm = algorithm
        self.bounds = bounds
        self.label_bounds = label_bounds
        self.unit = unit
        self.rounds = rounds
        self.batch = batch
        self.lr = lr
        self.clip = clip
        self.model = model
        self.test_share = test_share
        self.random_state = random_state
        self.out = out

    def fit(self, X: ArrayLike, y: ArrayLike, clients: ArrayLike | None = None) -> Self:
        """Train on records with their targets; `clients` has the id of each record's client."""
        raw, targets = validate_data(self, X, y, dtype=np.float64, ensure_min_samples=2, y_numeric=True)
        targets = targets.astype(np.float64)
        low, high = (targets.min(), targets.max()) if self.label_bounds is None else self.label_bounds
        if self.label_bounds is None and low == high:
            low, high = low - 1.0, high + 1.0
        label = {"range": [float(low), float(high)]}
        self._fit(raw, label, targets, clients, known=self.label_bounds is not None)
        return self

    def predict(self, X: ArrayLike, clients: ArrayLike | None = None, cluster: int | None = None) -> Array:
        """The target of every record, in its own units."""
        outputs = self._outputs(X, clients, cluster)
        return outputs.astype(np.float64)

    def score(
        self,
        X: ArrayLike,
        y: ArrayLike,
        sample_weight: ArrayLike | None = None,
        clients: ArrayLike | None = None,
        cluster: int | None = None,
    ) -> float:
        """R squared: exact, outside the guarantee."""
        said = self.predict(X, clients=clients, cluster=cluster)
        return float(r2_score(y, said, sample_weight=sample_weight))
