#!/bin/bash
# Says what one GPU computes, how much memory a step needs beside what `plan` says, and how fast it is: docs/gpu_check.md
#   bash scripts/gpu_check.sh [--output DIR] [--json FILE] [--minutes 5] [--parts NAMES] [--layers N] [--quick | --rehearse]
#                             [--beside FILE] [--scratch DIR] [--wheels DIR]
# Runs in .venv-gpu (scripts/setup_gpu.sh) or the active Python, whichever first has a torch that sees a GPU (PYTHON=...
# names another), otherwise in the project's environment.
# In the container of a job, with the variables of docs/cluster.md (not yet run):
#   srun --nodes=1 --ntasks=1 --gpus=1 --cpus-per-task=16 $SRUN_ARGS $LAUNCH_PREFIX bash scripts/gpu_check.sh
# --wheels DIR: installs the wheels in DIR for this run only, beside a torch and transformers that are there;
# scripts/gpu_wheels.sh makes DIR on a machine with a package index.
set -euo pipefail
arguments=() wheels=
while [ $# -gt 0 ]; do
  case $1 in
    --wheels) wheels=$(realpath -e "${2:?--wheels needs a folder}"); shift 2 ;;
    # relative to the directory in which the command was started; environment.sh changes the directory
    --output | --scratch | --json | --beside) arguments+=("$1" "$(realpath -m "${2:?$1 needs a path}")"); shift 2 ;;
    *) arguments+=("$1"); shift ;;
  esac
done
cd "$(dirname "${BASH_SOURCE[0]}")/.."
sees_gpu='import sys, torch; sys.exit(not torch.cuda.is_available())'
if [ -z "${PYTHON:-}" ]; then
  for candidate in .venv-gpu/bin/python python python3; do
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
