"""The papers' networks, and the way in for a user's own `nn.Module`: registry, checks, state as one vector.

Whether a model keeps records apart is proven in `training`; how it learns, too.
"""

from coterie.models.check import check_model
from coterie.models.features import PublicFeatures, network_task, public_features
from coterie.models.registry import OWN_CODE, ModelSettings, build_model, code_caveats, parameters_of

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
