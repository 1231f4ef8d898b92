#!/bin/bash
# Makes the environment in which training runs on GPUs: .venv-gpu, with a CUDA build of torch, Transformer Engine and this
# project. The scripts for Slurm and scripts/gpu_check.sh use it by themselves. It is apart from .venv, whose packages are
# those of the tests on CPUs and which scripts/test.sh keeps up to date.
#
#   bash scripts/setup_gpu.sh [--dry-run]     --dry-run prints the commands and runs none
#
#   PYTHON_FOR_GPU   interpreter that makes the environment (the newest of python3.13, python3.12 and python3.11)
#   TORCH            requirement of torch (torch==2.14.*)
#   APEX             a checkout of NVIDIA's Apex to build, too; the package "apex" of the index is another project
#
# Transformer Engine's part for torch is compiled against the torch that is installed: torch comes first, and the build
# may not take another one (--no-build-isolation). That needs a C++ compiler and a CUDA toolkit of the major version that
# torch was built with; CUDA_HOME names it where it isn't in /usr/local/cuda. Without a GPU, as on a login node, all but
# the GPU itself is checked at the end.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
dry_run=
case "${1:-}" in
  "") ;;
  --dry-run) dry_run=1 ;;
  *)
    echo "$1: expected --dry-run or nothing" >&2
    exit 2
    ;;
esac
. scripts/interpreter.sh
python=${PYTHON_FOR_GPU:-$(newest_python)}
here=.venv-gpu/bin/python
constraints=.venv-gpu/constraints.txt
# Transformer Engine would guess the toolkit from the place of nvcc, which may be a link
if [ -z "${CUDA_HOME:-}" ]; then
  if [ -d /usr/local/cuda ]; then
    export CUDA_HOME=/usr/local/cuda
  elif command -v nvcc >/dev/null; then
    CUDA_HOME=$(dirname "$(dirname "$(realpath "$(command -v nvcc)")")")
    export CUDA_HOME
  fi
fi
# the versions of the tests, but for torch, which is the one that is installed first
known=$(grep -E '^[A-Za-z0-9_.-]+==' requirements-cpu.txt | grep -v '^torch==')
# one line per range of Pythons; pip takes the one whose marker holds
mapfile -t engine < <(sed -n '/^te = \[/,/^]/s/^ *"\(.*\)",$/\1/p' pyproject.toml)

run() {
  echo "+ $*" >&2
  if [ -z "$dry_run" ]; then "$@"; fi
}
pip_install=("$here" -m pip install --disable-pip-version-check --constraint "$constraints")

run "$python" -m venv --clear .venv-gpu
if [ -z "$dry_run" ]; then echo "$known" >"$constraints"; fi
run "${pip_install[@]}" "${TORCH:-torch==2.14.*}"
if [ -z "$dry_run" ]; then
  "$here" -c 'from importlib.metadata import version; print("torch==" + version("torch"))' >>"$constraints"
  # headers of cuDNN and NCCL, which a toolkit does not have, come with torch's packages; those of a toolkit go first
  for folder in .venv-gpu/lib/python3*/site-packages/nvidia/*/include; do
    export CPATH="$PWD/$folder${CPATH:+:$CPATH}"
  done
fi
# what builds Transformer Engine, Apex and this project
run "${pip_install[@]}" 'setuptools>=61' wheel packaging ninja pybind11 cmake hatchling editables
run "${pip_install[@]}" --no-build-isolation "${engine[@]}"
if [ -n "${APEX:-}" ]; then
  # core kernels only: fused layer norm, fused optimizer, accumulation of weight gradients
  run env APEX_CPP_EXT=1 APEX_CUDA_EXT=1 "${pip_install[@]}" --no-build-isolation "$APEX"
fi
run "${pip_install[@]}" --no-build-isolation --editable '.[te]'
if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; then
  run "$here" scripts/check_gpu_environment.py
else
  run "$here" scripts/check_gpu_environment.py --without-gpu
  echo "no GPU on this machine: check on one with $here scripts/check_gpu_environment.py" >&2
fi
if [ -z "$dry_run" ]; then touch .venv-gpu/ready; fi # what scripts/gpu_python.sh looks for
