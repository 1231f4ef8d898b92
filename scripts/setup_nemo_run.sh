#!/bin/bash
# Makes the environment of `nemo oprd train`: .venv-nemo-run, with nemo-run and this project, on CPUs. It is apart from
# .venv and .venv-nemo, because nemo-run 0.11.1 works with leptonai < 0.28 only, which needs older versions of anyio, httpx
# and urllib3.
#
#   bash scripts/setup_nemo_run.sh
#
# Needs Python 3.11 (PYTHON_FOR_NEMO names another one) and access to a package index. An environment that is complete is kept.
exec bash "$(dirname "${BASH_SOURCE[0]}")/pinned_environment.sh" .venv-nemo-run requirements-nemo-run-cpu.txt nemo-run '
import nemo_oprd.integrations.nemo_run, nemo_run
print("nemo-run", nemo_run.__version__)'
