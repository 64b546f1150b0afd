"""Coterie: differentially private federated learning in clusters and groups."""
