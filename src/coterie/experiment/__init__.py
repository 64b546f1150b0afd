"""One run as data: experiment file, runner, run folder, resume, sweeps and metrics."""
