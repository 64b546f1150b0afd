"""Coterie as an ordinary Flower app: all code is in the installed package."""

from coterie.engines.flower.clientapp import app as client
from coterie.experiment.serving import app as server

__all__ = ["client", "server"]
