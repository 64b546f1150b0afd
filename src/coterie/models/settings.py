"""The `model` section of an experiment.

Reading one loads no network, and so not torch: a site that waits for a contract does without.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from typing import Any, Self

from pydantic import Field, PositiveInt, ValidationInfo, model_validator

from coterie.plugins import FEATURES, MODEL
from coterie.settings import NamedSettings, is_recorded

NONE = "none"
OURS = (NONE, "scattering")
"""Features that are ours."""
OWN_FEATURES = (
    "features are made by the user's own frozen encoder, which is trusted to have seen no record that is "
    "protected here, and to keep nothing between records"
)


class Networks(Mapping[str, Callable[..., Any]]):
    """The functions in `networks` that build a model, by the names that experiments use."""

    _names = ("softmax", "linear", "mlp", "cnn", "resnet18", "mcmahan-cnn", "lstm", "ngrams")

    def __getitem__(self, name: str) -> Callable[..., Any]:
        if name not in self._names:
            raise KeyError(name)
        found: Callable[..., Any] = getattr(import_module("coterie.models.networks"), name.replace("-", "_"))
        return found

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


NETWORKS = Networks()
OWN_CODE = "the model is the user's own code, which is trusted to keep nothing between records"
WIDEST = 2**16
"""Width of a layer beyond which a model, which a server may name to a site, is a way to fill its memory."""


class ModelSettings(NamedSettings):
    """Which model, and the options that are its own.

    `package.module:function`, or a name of the entry points `coterie.models`, is a user's own: the function
    gets the task and returns an `nn.Module` that maps features of shape (n, *task.shape) to outputs of shape
    (n, task.outputs).
    """

    functions = NETWORKS
    plugin, takes_own = MODEL, True

    name: str = Field("softmax", description=" | ".join([*NETWORKS, MODEL.form]))
    hidden: PositiveInt | None = Field(
        None, le=WIDEST, description="mlp, mcmahan-cnn, lstm: width of a hidden layer (64, 512, 256)"
    )
    embedding: PositiveInt | None = Field(
        None, le=WIDEST, description="lstm: width of the character embedding (8)"
    )
    layers: PositiveInt | None = Field(None, le=64, description="lstm: number of LSTM layers (2)")
    order: PositiveInt | None = Field(None, le=4, description="ngrams: last tokens that count (2)")
    bias: bool | None = Field(
        None,
        description="softmax, linear: whether outputs have constants of their own (true); a constant is "
        "one more feature, 1 for every record: half of every squared norm where features have norm 1",
    )
    features: str = Field(
        NONE,
        description="what the network sees of a record: none (itself) | scattering (wavelets, of images) | "
        f"{FEATURES.form} (a frozen encoder)",
    )

    @model_validator(mode="after")
    def _known_features(self, info: ValidationInfo) -> Self:
        known = self.features in OURS or is_recorded(info) or FEATURES.target(self.features) is not None
        if not known:
            raise ValueError(f"features: {FEATURES.unknown(self.features, OURS)}")
        return self

    @property
    def own_features(self) -> bool:
        """Whether features are made by a user's own code."""
        return self.features not in OURS

    def given(self) -> dict[str, Any]:
        """The options of the network that were set."""
        return {name: value for name, value in super().given().items() if name != "features"}

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        # Noise is bound to what this says: a model without these keys says what it always said.
        newer = (("features", NONE), ("bias", None))
        return [pair for pair in super().__repr_args__() if pair not in newer]


def code_caveats(settings: ModelSettings) -> Iterator[str]:
    """What a guarantee must add where a model, or what it sees of records, is a user's own code."""
    if settings.own:
        yield OWN_CODE
    if settings.own_features:
        yield OWN_FEATURES
