"""Algorithms that protect one worker from every other in overlapping groups; group masters are trusted."""
