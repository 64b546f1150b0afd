"""Ours against peers doing the same work, in one run: sample gradients per second and whole rounds."""
