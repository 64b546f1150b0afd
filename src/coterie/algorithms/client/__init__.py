"""Algorithms that protect one client; the server that sums is trusted, whoever sees the models is not."""
