#!/bin/bash
# Tests of the supported Python and Megatron-core that .venv does not have, in the environment of Megatron-Bridge
# (scripts/setup_nemo_bridge.sh): layouts, golden cases, conversion, checkpoints, experts, adopted models, Transformer
# Engine's stand-in, rehearsals. scripts/test.sh --integration calls this script; tests/e2e/test_other_python.py adds whole runs.
# Without arguments, these files' tests of the default lane; with --full, those of the full lane, too. Other arguments go to
# pytest and replace the files.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONWARNINGS=${PYTHONWARNINGS:-ignore}
other=.venv-nemo-bridge
core='from importlib.metadata import version; print(version("megatron-core"))'
if [ ! -f "$other/ready" ]; then
  echo "skipped: $other is missing; bash scripts/setup_nemo_bridge.sh makes it"
  exit 0
fi
if [ "$("$other/bin/python" -c "$core")" = "$(.venv/bin/python -c "$core")" ]; then
  echo "skipped: .venv and $other have the same Megatron-core; PYTHON_FOR_NEMO_BRIDGE=python3.11 makes the other one"
  exit 0
fi
left_out="full or slow"
if [ "$*" = --full ]; then
  left_out=slow
  shift
fi
if [ $# = 0 ]; then
  set -- -m "not ($left_out or slurm or vllm or nemo or smollm or wandb or chromium or npm or recipes)" \
    tests/unit/megatron/test_{megatron_calls,cpu_patches}.py tests/unit/run/test_checkpoints.py \
    tests/functional/test_{layouts,golden,step,convert,adopt,forward_step,expert_layouts,expert_training}.py \
    tests/functional/test_{transformer_engine,capacity,generate,rehearsal}.py
fi
# away from .venv's cache, because both may run at the same time
exec "$other/bin/python" -m pytest -p no:cacheprovider "$@"
