"""Algorithms that protect one record of one client from an untrusted server."""
