"""The papers' networks, and the door for a user's own."""

from coterie.models.check import check_model
from coterie.models.registry import OWN_CODE, ModelSettings, build_model, code_caveats, model_names

__all__ = ["OWN_CODE", "ModelSettings", "build_model", "check_model", "code_caveats", "model_names"]
