"""One run as data: experiment file, the run loop for every engine, run folder, resume, sweeps, metrics.

What an algorithm does in a round is in `algorithms`, who answers it in `engines`, what is shown of a run in
`report`, and which runs a publication printed in `reproduce`.
"""
