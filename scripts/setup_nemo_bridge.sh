#!/bin/bash
# Makes the environment in which Megatron-Bridge runs without a GPU: .venv-nemo-bridge, apart from the trainer's, because
# Megatron-Bridge 0.3 needs transformers 4 and hydra-core 1.3.2. The tests marked `nemo` use it (docs/nemo.md). On a
# machine with GPUs, use NVIDIA's container of NeMo, which has Transformer Engine.
#
#   bash scripts/setup_nemo_bridge.sh
#
# Needs Python 3.11 (or PYTHON_FOR_NEMO_BRIDGE) and access to a package index. An environment that is complete and up to
# date is kept.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
requirements=requirements-nemo-bridge-cpu.txt
ready=.venv-nemo-bridge/ready
if [ "$(cat "$ready" 2>/dev/null)" = "$(cksum <"$requirements")" ]; then
  echo ".venv-nemo-bridge is complete" >&2
  exit 0
fi
echo "installing Megatron-Bridge into .venv-nemo-bridge (only once; takes some minutes)" >&2
rm -rf .venv-nemo-bridge
"${PYTHON_FOR_NEMO_BRIDGE:-python3.11}" -m venv .venv-nemo-bridge
.venv-nemo-bridge/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement "$requirements"
# what the tests import; Megatron-Bridge cannot be imported without Transformer Engine or the stand-in
log=$(mktemp)
trap 'rm -f "$log"' EXIT
PYTHONPATH=.:tests/functional/te_stand_in .venv-nemo-bridge/bin/python -W ignore -c \
  'import nemo_oprd.nemo, megatron.bridge.training.train, torch
from megatron.bridge.package_info import __version__
print("Megatron-Bridge", __version__, "torch", torch.__version__)' 2>"$log" || {
  cat "$log" >&2
  exit 1
}
cksum <"$requirements" >"$ready"
