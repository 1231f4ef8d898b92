#!/bin/bash
# Fetches Transformer Engine's Python files, with which `nemo-oprd rehearse --layers te` and its tests build Transformer
# Engine's layers without a GPU (docs/rehearsal.md): 1 MB for .venv, and for .venv-nemo-bridge where it is there, each in a
# folder of its version in the user's cache. No environment is changed: what is compiled is missing, and Megatron-core
# would fail to import the rest. Needs access to a package index. Makes .venv if it is missing; files that are there are kept.
set -euo pipefail
. "$(dirname "$0")/environment.sh"
for python in .venv/bin/python .venv-nemo-bridge/bin/python; do
  if [ -x "$python" ]; then
    read -r folder version < <(PYTHONPATH=. "$python" -c \
      'from nemo_oprd.tools.rehearse.layers import accepted, folder; print(folder(), accepted()[1])')
    if [ ! -d "$folder/transformer_engine-$version.dist-info" ]; then
      "$python" -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target "$folder" \
        "transformer-engine==$version"
    fi
    echo "Transformer Engine $version: $folder"
  fi
done
