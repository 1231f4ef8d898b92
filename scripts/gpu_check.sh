#!/bin/bash
# Says what one GPU computes, how much memory a step needs beside what `plan` says, and how fast it is: docs/gpu_check.md
#   bash scripts/gpu_check.sh [--output DIR] [--json FILE] [--minutes 5] [--parts NAMES] [--layers N] [--quick | --rehearse]
#                             [--beside FILE] [--scratch DIR] [--wheels DIR]
# Runs in .venv-gpu where scripts/setup_gpu.sh has made it, otherwise in the active Python if it has torch (PYTHON=... names
# another), otherwise in the project's environment. Where torch sees no GPU it stops with torch's reason, but for --quick and
# --rehearse, which need none.
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
. scripts/gpu_python.sh
on_cpu=${NEMO_OPRD_CPU:-}
case " ${arguments[*]} " in *" --quick "* | *" --rehearse "*) on_cpu=1 ;; esac
if [ -n "$on_cpu" ]; then export NEMO_OPRD_CPU=1; fi # for the parts, where a launcher promises GPUs
# choose_python: sets PYTHON, to nothing where no Python has torch; one line and status 2 where torch sees no GPU and the CPU
# is not meant
choose_python() {
  local candidates=(python python3) candidate reason status=0 no_gpu=
  if [ -z "${PYTHON:-}" ]; then
    gpu_environment || status=$?
    if [ "$status" -eq 2 ]; then return 2; fi
  fi
  if [ -n "${PYTHON:-}" ]; then candidates=("$PYTHON"); fi
  for candidate in "${candidates[@]}"; do
    status=0
    reason=$(sees_gpu "$candidate") || status=$?
    if [ "$status" -eq 0 ]; then PYTHON=$candidate; return; fi
    if [ "$status" -eq 1 ] || [ -n "${PYTHON:-}" ]; then no_gpu="$candidate: ${reason:-it does not run}"; break; fi
  done
  if [ -n "$no_gpu" ] && [ -z "$on_cpu" ]; then
    echo "$no_gpu; expected a GPU, and a driver for this torch's CUDA (docs/cluster.md); --quick and --rehearse need none" >&2
    return 2
  fi
}
choose_python || exit 2
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
