"""The command line: one file per command, which parses, calls and prints.

What a command computes belongs into the room it is about; here are options, tables, progress and exit codes.
"""
