#!/bin/bash
# Fetches what a GPU machine without a package index needs beside a torch and a transformers that are there:
#   bash scripts/gpu_wheels.sh DIR [--peers] [--te] [--architecture 90] [--limit-mib N]
# Then, there: bash scripts/gpu_check.sh --wheels DIR. The wheels are those of Python 3.12 on x86_64 (PYTHON_VERSION=3.13
# names another Python), whichever Python runs this; the versions are those of requirements-cpu.txt.
#   --peers        also TRL and Liger, to which the parts `head` and `plain` compare
#   --te           also Transformer Engine, of which one part is compiled here: needs TE_VENV=ENVIRONMENT with that Python
#                  and the machine's very version of torch, a CUDA toolkit (CUDA_HOME) and 10 to 20 minutes on two cores
#   --architecture 90  of its kernels those of compute capability 9.0 (the default); all: those of every GPU, 245 MB more
#   --limit-mib N  fails if DIR is larger in the end
set -euo pipefail
usage() {
  echo "$1: expected bash scripts/gpu_wheels.sh DIR [--peers] [--te] [--architecture 90] [--limit-mib N]" >&2
  exit 2
}
folder='' peers='' te='' limit='' architecture=90
while [ $# -gt 0 ]; do
  case $1 in
    --peers) peers=1 ;;
    --te) te=1 ;;
    --architecture)
      architecture=${2:-}
      [[ $architecture =~ ^([0-9]+|all)$ ]] || usage "--architecture ${2:-(nothing)}"
      shift
      ;;
    --limit-mib)
      limit=${2:-}
      [[ $limit =~ ^[0-9]+$ ]] || usage "--limit-mib ${limit:-(nothing)}"
      shift
      ;;
    -*) usage "$1" ;;
    *)
      [ -z "$folder" ] || usage "$1"
      folder=$(realpath -m "$1")
      ;;
  esac
  shift
done
[ -n "$folder" ] || usage "no folder"
if [ -n "$te" ] && [ ! -x "${TE_VENV:-}/bin/python" ]; then
  echo "TE_VENV=${TE_VENV:-} has no bin/python; expected an environment with the GPU machine's Python and torch, against" \
    "which Transformer Engine is compiled: name one" >&2
  exit 2
fi
root=$(realpath "$(dirname "${BASH_SOURCE[0]}")/..")
python=${PYTHON:-python3}
version=${PYTHON_VERSION:-3.12}
# what neither torch nor transformers brings; antlr4 has no wheel in the index and is built here, of Python alone
needed=(megatron-core einops hydra-core omegaconf filelock pydantic pydantic_core annotated-types typing-inspection PyYAML
  math-verify latex2sympy2_extended httpx2 httpcore2 truststore)
# of single parts, which are skipped without them
of_parts=(psutil sentencepiece)
built=(antlr4-python3-runtime)
# what Transformer Engine imports besides; its wheel also asks for packages that it does not import
engine_imports=(onnx==1.23.2 onnxscript==0.7.2 onnx_ir==1.1.0 ml_dtypes==0.6.0)
compared=(trl==1.16.0 liger-kernel==0.8.5 datasets==5.2.0 dill==0.4.1 multiprocess==0.70.19)
engine=2.20.2

# the requirement NAME==VERSION of requirements-cpu.txt; of two with markers the one of Python 3.12 and later
pinned() {
  local line
  line=$(grep -iE "^$1==" "$root/requirements-cpu.txt" | grep -v 'python_version <' | head -n 1 | cut -d';' -f1)
  [ -n "$line" ] || { echo "$1 is not in requirements-cpu.txt" >&2; exit 1; }
  echo "$line" | tr -d ' '
}

fetch() {
  "$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
    --python-version "$version" --dest "$folder" "$@"
}

mkdir -p "$folder"
requirements=()
for name in "${needed[@]}" "${of_parts[@]}"; do requirements+=("$(pinned "$name")"); done
fetch "${requirements[@]}"
for name in "${built[@]}"; do
  "$python" -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$folder" "$(pinned "$name")"
done
if [ -n "$peers" ]; then fetch "${compared[@]}"; fi
if [ -n "$te" ]; then
  # headers of cuDNN and NCCL come with torch's packages, the others with the toolkit
  for include in "$TE_VENV"/lib/python3*/site-packages/nvidia/*/include; do
    export CPATH="$include${CPATH:+:$CPATH}"
  done
  "$TE_VENV/bin/python" -m pip install --quiet --disable-pip-version-check 'setuptools<82' wheel packaging ninja pybind11
  PATH="$TE_VENV/bin:$PATH" NVTE_PYTORCH_FORCE_BUILD=TRUE "$TE_VENV/bin/python" -m pip wheel --quiet --no-cache-dir \
    --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir "$folder" "transformer-engine-torch==$engine"
  major=$("$TE_VENV/bin/python" -c 'import torch; print(torch.version.cuda.split(".")[0])')
  fetch "transformer-engine==$engine" "transformer-engine-cu$major==$engine" "${engine_imports[@]}" "$(pinned protobuf)"
  if [ "$architecture" != all ]; then
    "$TE_VENV/bin/python" "$root/scripts/one_architecture.py" "$folder/transformer_engine_cu$major-$engine"-*.whl \
      "$architecture"
  fi
fi
count=$(find "$folder" -name '*.whl' | wc -l)
size=$(du -sb "$folder" | cut -f1)
echo "$folder: $count wheels, $((size / 1000000)).$((size / 100000 % 10)) MB"
if [ -n "$limit" ] && [ "$size" -gt $((limit * 1048576)) ]; then
  echo "$folder: $((size / 1048576)).$((size * 10 / 1048576 % 10)) MiB; expected at most $limit: leave out --te or --peers, or give a larger limit" >&2
  exit 1
fi
