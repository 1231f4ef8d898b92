#!/bin/bash
# Makes the environment of TRL, with which benchmarks.peers compares this project: .venv-peers, which holds TRL and sees the
# packages of .venv, so that all products are measured with the same torch and the same transformers.
#
#   bash scripts/setup_peers.sh
#
# Needs access to a package index; the Python is that of .venv. An environment that is up to date is kept.
set -euo pipefail
. "$(dirname "$0")/environment.sh"
ready=.venv-peers/ready
wanted="$(cat requirements-peers.txt requirements-cpu.txt | cksum) $(minor_version .venv/bin/python)"
if [ "$(cat "$ready" 2>/dev/null)" = "$wanted" ]; then
  exit 0
fi
echo "installing TRL into .venv-peers (only once)" >&2
rm -rf .venv-peers
.venv/bin/python -m venv .venv-peers
packages=lib/python$(minor_version .venv/bin/python)/site-packages
# later on Python's path than the environment's own packages
realpath ".venv/$packages" >".venv-peers/$packages/trainer.pth"
pip=(.venv-peers/bin/python -m pip --quiet --disable-pip-version-check)
# exactly these packages: pip would replace what .venv pins
"${pip[@]}" install --no-deps --requirement requirements-peers.txt
.venv-peers/bin/python -W ignore -c 'from trl import DistillationTrainer'
echo "$wanted" >"$ready"
