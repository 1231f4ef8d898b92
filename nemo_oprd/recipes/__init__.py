"""Training runs as functions of launchers, one per file in conf/. `nemo_run.py` is for nemo-run."""
