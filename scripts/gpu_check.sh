#!/bin/bash
# Checks whether this machine's GPU computes correctly, and measures its speed; unattended, at most ten minutes on one GPU:
#   bash scripts/gpu_check.sh [--output DIR] [--minutes 10] [--layers N] [--quick] [--jobs N] [--wheels DIR]
# Runs in the active Python if its torch sees a GPU (PYTHON=... names another), otherwise in the project's environment.
# --wheels DIR: installs the wheels in DIR for this run only; make them on a machine with a package index, for example
#   pip wheel --no-deps --constraint requirements-cpu.txt --wheel-dir DIR megatron-core einops hydra-core omegaconf \
#     antlr4-python3-runtime filelock pydantic pydantic-core annotated-types typing-inspection
set -euo pipefail
arguments=() wheels=
while [ $# -gt 0 ]; do
  case $1 in
    --wheels) wheels=$(realpath -e "${2:?--wheels needs a folder}"); shift 2 ;;
    # relative to the directory in which the command was started; environment.sh changes the directory
    --output | --scratch) arguments+=("$1" "$(realpath -m "${2:?$1 needs a folder}")"); shift 2 ;;
    *) arguments+=("$1"); shift ;;
  esac
done
cd "$(dirname "${BASH_SOURCE[0]}")/.."
sees_gpu='import sys, torch; sys.exit(not torch.cuda.is_available())'
if [ -z "${PYTHON:-}" ]; then
  for candidate in python python3; do
    if "$candidate" -c "$sees_gpu" 2>/dev/null; then PYTHON=$candidate; break; fi
  done
fi
if [ -z "${PYTHON:-}" ]; then
  . scripts/environment.sh
  PYTHON=python
fi
export PYTHONWARNINGS=${PYTHONWARNINGS:-ignore}
if [ -n "$wheels" ]; then
  site=$(mktemp -d)
  trap 'rm -rf "$site"' EXIT
  "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile --target "$site" \
    "$wheels"/*.whl
  export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
fi
"$PYTHON" benchmarks/gpu_check.py "${arguments[@]}"
