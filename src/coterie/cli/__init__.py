"""The command line: a file for each command, which parses, calls and prints; `main` registers them.

What a command computes belongs to the room below; what several commands print or ask for stands in `console`
and `options`.
"""
