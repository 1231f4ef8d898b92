#!/bin/bash
# Makes an environment of packages that see those of .venv, so that both run with the same torch. Called by the scripts
# setup_peers.sh and setup_wandb.sh:
#
#   bash scripts/added_packages.sh FOLDER REQUIREMENTS WHAT PYTHON_CODE [OPTION OF PIP]...
#
# Needs access to a package index; the Python is that of .venv. An environment that is up to date is kept. PYTHON_CODE must
# run in it.
set -euo pipefail
. "$(dirname "$0")/environment.sh"
folder=$1 requirements=$2 what=$3 code=$4
wanted="$(cat "$requirements" requirements-cpu.txt | cksum) $(minor_version .venv/bin/python)"
if [ "$(cat "$folder/ready" 2>/dev/null)" = "$wanted" ]; then
  exit 0
fi
echo "installing $what into $folder (only once)" >&2
rm -rf "$folder"
.venv/bin/python -m venv "$folder"
packages=lib/python$(minor_version .venv/bin/python)/site-packages
# later on Python's path than the environment's own packages
realpath ".venv/$packages" >"$folder/$packages/project.pth"
"$folder/bin/python" -m pip install --quiet --disable-pip-version-check "${@:5}" --requirement "$requirements"
"$folder/bin/python" -W ignore -c "$code"
echo "$wanted" >"$folder/ready"
