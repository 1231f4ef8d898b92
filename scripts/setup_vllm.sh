#!/bin/bash
# Makes the environment in which vLLM runs (rollout.engine=vllm): .venv-vllm, apart from the trainer's, because both pin
# other versions of the same packages. With a GPU it holds the CUDA build of vLLM, otherwise the CPU build.
#
#   bash scripts/setup_vllm.sh
#
# Needs Python 3.11, 3.12 or 3.13 (PYTHON_FOR_VLLM names one) and access to a package index. An environment that is complete
# and up to date is kept. CUDA is chosen if nvidia-smi lists a GPU; VLLM_TARGET=cpu or cuda decides otherwise.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
target=${VLLM_TARGET:-}
if [ -z "$target" ]; then
  target=cpu
  if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; then
    target=cuda
  fi
fi
case "$target" in cpu | cuda) ;; *)
  echo "VLLM_TARGET=$target: expected cpu or cuda; set one of them, or leave it out" >&2
  exit 2
  ;;
esac
ready=.venv-vllm/ready
# a login node without a GPU must not replace the CUDA environment that the compute nodes use
for there in ${VLLM_TARGET:-cuda cpu}; do
  if [ "$(cat "$ready" 2>/dev/null)" = "$there $(cksum <"requirements-vllm-$there.txt")" ]; then
    if [ "$there" = "$target" ] || [ "$there" = cuda ]; then
      echo ".venv-vllm is complete ($there)" >&2
      exit 0
    fi
  fi
done
echo "installing vLLM ($target) into .venv-vllm (only once; takes some minutes)" >&2
rm -rf .venv-vllm
. scripts/interpreter.sh
python=${PYTHON_FOR_VLLM:-$(first_running python3.11 python3.12 python3.13)} || {
  echo "no Python was found; expected one of python3.11, python3.12 and python3.13, or PYTHON_FOR_VLLM=" >&2
  exit 1
}
"$python" -m venv .venv-vllm
pip=(.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check)
if [ "$target" = cpu ]; then
  # exactly these packages: vLLM also asks for torchvision, torchaudio and torchcodec, whose wheels are CUDA builds that
  # break the import of transformers, and which a language model does not need
  "${pip[@]}" "$(grep '^torch==' requirements-vllm-cpu.txt)"
  "${pip[@]}" --no-deps --requirement requirements-vllm-cpu.txt
else
  "${pip[@]}" --requirement requirements-vllm-cuda.txt
fi
# what the servers of a run import; TORCH_COMPILE_DISABLE as in the servers
log=$(mktemp)
trap 'rm -f "$log"' EXIT
TORCH_COMPILE_DISABLE=1 VLLM_PLUGINS= PYTHONPATH=nemo_oprd/vllm/worker .venv-vllm/bin/python -c \
  'import nemo_oprd_worker, torch, vllm; print("vLLM", vllm.__version__, "torch", torch.__version__)' 2>"$log" || {
  cat "$log" >&2
  exit 1
}
echo "$target $(cksum <"requirements-vllm-$target.txt")" >"$ready"
