#!/bin/bash
# Makes an environment of pinned packages with this project in it, beside .venv, whose pins differ. Called by the
# scripts setup_nemo.sh and setup_nemo_run.sh:
#
#   bash scripts/pinned_environment.sh FOLDER REQUIREMENTS WHAT PYTHON_CODE
#
# Needs Python 3.11 (PYTHON_FOR_NEMO names another one) and access to a package index. An environment that is complete and up to date is
# kept. PYTHON_CODE must run in it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=$1 requirements=$2 what=$3 code=$4
stamp="$(cat "$requirements" pyproject.toml | cksum) $PWD"
if [ "$(cat "$folder/ready" 2>/dev/null)" = "$stamp" ]; then
  echo "$folder is complete" >&2
  exit 0
fi
echo "installing $what into $folder (only once; takes some minutes)" >&2
rm -rf "$folder"
"${PYTHON_FOR_NEMO:-python3.11}" -m venv "$folder"
pip=("$folder/bin/python" -m pip install --quiet --disable-pip-version-check)
# exactly these packages: they were resolved once, and another resolution may not exist
"${pip[@]}" --no-deps --requirement "$requirements"
"${pip[@]}" --no-deps --no-build-isolation --editable .
log=$(mktemp)
trap 'rm -f "$log"' EXIT
"$folder/bin/python" -c "$code" 2>"$log" || {
  cat "$log" >&2
  exit 1
}
echo "$stamp" >"$folder/ready"
