#!/bin/bash
# Makes the environment in which Megatron-Bridge runs without a GPU: .venv-nemo-bridge, apart from the trainer's, because
# Megatron-Bridge pins other versions. The tests marked `nemo` use it (docs/nemo.md). On a machine with GPUs, use NVIDIA's
# container of NeMo, which has Transformer Engine.
#
#   bash scripts/setup_nemo_bridge.sh
#
# With Python 3.12: Megatron-Bridge 0.6.2 and Megatron-core 0.19.2 (requirements-nemo-bridge-cpu.txt). Otherwise with
# Python 3.11: Megatron-Bridge 0.3.1 and Megatron-core 0.16.1 (requirements-nemo-bridge-cpu-3.11.txt). Python 3.13 is not
# looked for, because Megatron-Bridge 0.6.2 refuses it. PYTHON_FOR_NEMO_BRIDGE names another interpreter. Needs access to
# a package index. An environment that is complete and up to date is kept.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

. scripts/interpreter.sh
# best first; where a version of pyenv is not selected, its command on the path is a shim that does not run
candidates=()
for version in 3.12 3.11; do
  candidates+=("python$version")
  if command -v pyenv >/dev/null; then
    candidates+=("$(pyenv root)"/versions/"$version".*/bin/"python$version")
  fi
done
python=$(first_running "${PYTHON_FOR_NEMO_BRIDGE:-${candidates[@]}}") || {
  echo "no Python was found for Megatron-Bridge: none of '${PYTHON_FOR_NEMO_BRIDGE:-${candidates[*]}}' runs;" \
    "expected Python 3.12 or 3.11: install one, or name it with PYTHON_FOR_NEMO_BRIDGE=" >&2
  exit 1
}
case "$(minor_version "$python")" in
3.12) requirements=requirements-nemo-bridge-cpu.txt ;;
3.11) requirements=requirements-nemo-bridge-cpu-3.11.txt ;;
*)
  echo "PYTHON_FOR_NEMO_BRIDGE=$python is Python $(minor_version "$python"); expected 3.12 or 3.11: name another one" >&2
  exit 1
  ;;
esac

ready=.venv-nemo-bridge/ready
if [ "$(cat "$ready" 2>/dev/null)" = "$(cksum <"$requirements")" ]; then
  echo ".venv-nemo-bridge is complete" >&2
  exit 0
fi
echo "installing $requirements into .venv-nemo-bridge with $python (only once; takes some minutes)" >&2
rm -rf .venv-nemo-bridge
"$python" -m venv .venv-nemo-bridge
install=(.venv-nemo-bridge/bin/python -m pip install --quiet --disable-pip-version-check)
if [ "$requirements" = requirements-nemo-bridge-cpu.txt ]; then
  # for Python 3.12 the index may have torch's CUDA build only, which does not load without NVIDIA's libraries
  "${install[@]}" --constraint "$requirements" "$(grep '^torch==' "$requirements")"
fi
"${install[@]}" --no-deps --requirement "$requirements"
# configurations of published models, for tests/e2e/test_published_models.py alone
"${install[@]}" --no-deps aiconfigurator-core==0.12.0 || echo "aiconfigurator-core could not be installed" >&2
# what the tests import; Megatron-Bridge cannot be imported without Transformer Engine or the stand-in
log=$(mktemp)
trap 'rm -f "$log"' EXIT
PYTHONPATH=.:tests/functional/te_stand_in .venv-nemo-bridge/bin/python -W ignore -c \
  'import nemo_oprd.integrations, megatron.bridge.training.train, torch
from megatron.bridge.package_info import __version__
print("Megatron-Bridge", __version__, "torch", torch.__version__)' 2>"$log" || {
  cat "$log" >&2
  exit 1
}
cksum <"$requirements" >"$ready"
