"""The papers' networks, and the way in for a user's own `nn.Module`: registry, checks, state as one vector.

Whether a model keeps records apart is proven in `training`; how it learns, too. Settings can be read without
torch; everything else is loaded when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from coterie.models.settings import OWN_CODE, ModelSettings, code_caveats

if TYPE_CHECKING:
    from coterie.models.check import check_model
    from coterie.models.features import PublicFeatures, network_task, public_features
    from coterie.models.registry import build_model, parameters_of

_HOMES = {
    "PublicFeatures": "features",
    "build_model": "registry",
    "check_model": "check",
    "network_task": "features",
    "parameters_of": "registry",
    "public_features": "features",
}
"""Where each name that needs torch lives."""

__all__ = [
    "OWN_CODE",
    "ModelSettings",
    "PublicFeatures",
    "build_model",
    "check_model",
    "code_caveats",
    "network_task",
    "parameters_of",
    "public_features",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'coterie.models' has no attribute '{name}'")
    return getattr(import_module(f"coterie.models.{_HOMES[name]}"), name)
