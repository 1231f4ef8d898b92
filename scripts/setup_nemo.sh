#!/bin/bash
# Makes the environment of examples/nemo/oprd.py: .venv-nemo, with nemo-toolkit and this project, on CPUs. It is apart
# from .venv, because NeMo needs older versions of hydra-core, omegaconf, fsspec and packaging.
#
#   bash scripts/setup_nemo.sh
#
# Needs Python 3.11 (PYTHON_FOR_NEMO names another one) and access to a package index. An environment that is complete is kept.
exec bash "$(dirname "${BASH_SOURCE[0]}")/pinned_environment.sh" .venv-nemo requirements-nemo-cpu.txt nemo-toolkit '
import nemo, nemo.utils.exp_manager, nemo.core.config, nemo_oprd.integrations, torch
print("nemo-toolkit", nemo.__version__, "torch", torch.__version__)'
