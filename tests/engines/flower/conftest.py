"""Flower is an extra: without it these tests are left out (`make test` installs it)."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("flwr") else ["test_*.py"]
