#!/bin/bash
# Makes the environment in which training runs on GPUs: .venv-gpu, with a CUDA build of torch, Transformer Engine and this
# project. The scripts for Slurm and scripts/gpu_check.sh use it by themselves. It is apart from .venv, whose packages are
# those of the tests on CPUs and which scripts/test.sh keeps up to date.
#
#   bash scripts/setup_gpu.sh [--dry-run]     --dry-run prints the commands and runs none
#
#   CUDA             13, for drivers from 580 on, or 12, for drivers from 525 on (13)
#   PYTHON_FOR_GPU   interpreter that makes the environment (the newest of python3.13, python3.12 and python3.11)
#   TORCH            requirement of torch (CUDA 13: torch==2.14.1, CUDA 12: torch==2.10.0)
#   ENGINE           version of Transformer Engine (2.20.2, with Python 3.11: 2.11.0)
#   MAX_JOBS         compilers that run at the same time (as many as fit the cores and the free memory)
#   CXX              the C++ compiler (c++)
#   APEX             a checkout of NVIDIA's Apex to build, too; the package "apex" of the index is another project
#
# Transformer Engine's part for torch is compiled against the torch that is installed: torch comes first, and the build
# may not take another one (--no-build-isolation). Only C++ is compiled, with the headers of CUDA that the package index
# has for torch's version: it needs a C++20 compiler and no CUDA toolkit, and does not look at one that is loaded. Apex
# alone has CUDA code and needs nvcc. Driver and compiler are checked before anything is downloaded. Without a GPU, as on
# a login node, all but the GPU itself is checked at the end.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# stop LINE: ends the script with one line that says what is wrong
stop() {
  echo "$1" >&2
  exit 2
}

dry_run=
case "${1:-}" in
  "") ;;
  --dry-run) dry_run=1 ;;
  *) stop "$1: expected --dry-run or nothing" ;;
esac
. scripts/interpreter.sh
python=${PYTHON_FOR_GPU:-$(newest_python)}
here=.venv-gpu/bin/python
constraints=.venv-gpu/constraints.txt

# check_driver: stops where the driver is older than torch needs; names the driver that jobs need where there is none
check_driver() {
  local driver least=580 other="; for drivers from 525 on: CUDA=12 bash scripts/setup_gpu.sh"
  if [ "$CUDA" = 12 ]; then least=525 other=; fi
  driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null) || driver= # one line per GPU
  if [[ ! $driver =~ ^([0-9]+)\. ]]; then
    echo "no driver on this machine (nvidia-smi): where jobs run, CUDA $CUDA needs driver $least or later$other" >&2
  elif [ "${BASH_REMATCH[1]}" -lt "$least" ]; then
    stop "driver ${driver%%$'\n'*}: expected $least or later for CUDA $CUDA$other"
  fi
}

# compile: compiles three lines that need C++20 and the interpreter's headers
compile() {
  local include
  include=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
  printf '#include <concepts>\n#include <Python.h>\nstatic_assert(std::integral<int>);\n' |
    "${CXX:-c++}" -std=c++20 -fsyntax-only -I"$include" -x c++ -
}

# check_compiler: stops where Transformer Engine could not be compiled
check_compiler() {
  local said
  if [ -z "$dry_run" ] && ! said=$(compile 2>&1); then
    said=$(grep -m 1 -E 'error:|not found' <<<"$said" || head -n 1 <<<"$said")
    stop "${CXX:-c++} can't compile C++20 with Python.h: $said; expected g++ 11 or clang 14, or later, and the headers of \
$python (python3-dev): load a module of your site, or name a compiler with CXX="
  fi
}

# free_jobs: prints how many compilers fit the cores and the free memory of this machine, or of its control groups
free_jobs() {
  local cores free group limit jobs
  local each=$((4 * 1024 * 1024)) # kB: the largest file takes 3.5 GB
  cores=$(nproc)
  free=$(awk '$1 == "MemAvailable:" { print $2 }' /proc/meminfo)
  group=$(sed -n 's/^0:://p' /proc/self/cgroup)
  while [[ $group == /?* ]]; do
    limit=$(cat "/sys/fs/cgroup$group/memory.max" 2>/dev/null) || limit=max
    if [[ $limit =~ ^[0-9]+$ ]] && ((limit / 1024 < free)); then free=$((limit / 1024)); fi
    group=${group%/*}
  done
  jobs=$((free / each < cores ? free / each : cores))
  echo $((jobs > 0 ? jobs : 1))
}

run() {
  echo "+ $*" >&2
  if [ -z "$dry_run" ]; then "$@"; fi
}

# pairs that are built for each other, and what torch's packages lack for the build
engine=2.20.2 newer=()
case "${CUDA:=13}" in
  13) torch=torch==2.14.1 headers=('nvidia-cuda-crt==13.0.*' 'nvidia-cuda-cccl==13.0.*') ;;
  12)
    torch=torch==2.10.0 headers=('nvidia-cuda-nvcc-cu12==12.8.*' 'nvidia-cuda-cccl-cu12==12.8.*')
    # this torch asks for 9.10: before 9.12 Transformer Engine does not build, and before 9.18 gradients of packed
    # sequences can be NaN on Hopper (its issue 2186); minor versions of cuDNN replace each other
    newer=(--no-deps nvidia-cudnn-cu12==9.24.0.43)
    ;;
  *) stop "CUDA=$CUDA: expected 13 or 12, the major version that torch is built with; set one of them, or leave it out" ;;
esac
minor=$(minor_version "$python" 2>/dev/null) ||
  stop "PYTHON_FOR_GPU=$python: expected a command that runs Python 3.11, 3.12 or 3.13; name another one, or leave it out"
if [ "$minor" = 3.11 ]; then
  engine=2.11.0 # the last one that Megatron-core supports for this Python
  # its build asks the compiler of CUDA 13 for the version
  if [ "$CUDA" = 13 ]; then headers+=('nvidia-cuda-nvcc==13.0.*' 'nvidia-nvvm==13.0.*'); fi
fi
torch=${TORCH:-$torch} engine=${ENGINE:-$engine}
pip_install=("$here" -m pip install --disable-pip-version-check --constraint "$constraints")

check_driver
check_compiler
run "$python" -m venv --clear .venv-gpu
if [ -z "$dry_run" ]; then
  # the versions of the tests, but for torch, which is the one that is installed first
  grep -E '^[A-Za-z0-9_.-]+==' requirements-cpu.txt | grep -v '^torch==' >"$constraints"
  printf '%s\n' "transformer-engine==$engine" "transformer-engine-torch==$engine" >>"$constraints"
fi
run "${pip_install[@]}" "$torch"
if [ -z "$dry_run" ]; then
  found=$("$here" -c 'import torch; print(torch.__version__.split("+")[0], torch.version.cuda)')
  read -r version cuda <<<"$found"
  if [ "${cuda%%.*}" != "$CUDA" ]; then
    stop "torch $version is a build for CUDA ${cuda/None/none}: expected CUDA $CUDA; set CUDA, TORCH or another package index"
  fi
  echo "torch==$version" >>"$constraints"
fi
if [ -n "${newer[*]}" ]; then run "${pip_install[@]}" "${newer[@]}"; fi
# headers, and what builds Transformer Engine, Apex and this project
run "${pip_install[@]}" "${headers[@]}" 'setuptools>=61' wheel packaging ninja pybind11 cmake hatchling editables
# the headers of the packages, not those of a toolkit
toolkit=(-u CUDA_HOME -u CUDA_PATH -u CPLUS_INCLUDE_PATH)
packages=.venv-gpu/lib/python3.*/site-packages/nvidia
folders=$packages/*/include
if [ -z "$dry_run" ]; then
  folders=$(printf ":$PWD/%s" $folders)
  if [ "$engine" = 2.11.0 ]; then # knows no other way to name them
    toolkit+=("CUDA_HOME=$PWD/$(dirname "$(dirname $packages/*/include/cuda_runtime.h)")")
  fi
fi
build=(env "${toolkit[@]}" NVTE_BUILD_USE_NVIDIA_WHEELS=1 "CPATH=${folders#:}" "MAX_JOBS=${MAX_JOBS:-$(free_jobs)}")
# pip's cache would give what was once built here against another torch
run "${build[@]}" "${pip_install[@]}" --no-build-isolation --no-cache-dir "transformer-engine[pytorch]==$engine"
if [ -n "${APEX:-}" ]; then
  # core kernels only: fused layer norm, fused optimizer, accumulation of weight gradients
  run env APEX_CPP_EXT=1 APEX_CUDA_EXT=1 "${pip_install[@]}" --no-build-isolation "$APEX"
fi
run "${pip_install[@]}" --no-build-isolation --editable '.[te]'
# once more: the last steps have brought torch's own back
if [ -n "${newer[*]}" ]; then run "${pip_install[@]}" "${newer[@]}"; fi
# Without a toolkit, Transformer Engine 2.20.2 looks for CUDA 12's runtime in a folder that no package makes
if [ "$CUDA" = 12 ]; then run ln -sfn cuda_runtime "$(echo $packages)/cuda_cudart"; fi
if [[ $(nvidia-smi -L 2>/dev/null) == *GPU* ]]; then
  run "$here" scripts/check_gpu_environment.py
else
  run "$here" scripts/check_gpu_environment.py --without-gpu
  echo "no GPU on this machine: check on one with $here scripts/check_gpu_environment.py" >&2
fi
if [ -z "$dry_run" ]; then touch .venv-gpu/ready; fi # what scripts/gpu_python.sh looks for
