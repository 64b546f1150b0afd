"""The papers' networks, and the door for a user's own."""

from coterie.models.check import check_model
from coterie.models.registry import ModelSettings, blamed, build_model, model_names

__all__ = ["ModelSettings", "blamed", "build_model", "check_model", "model_names"]
