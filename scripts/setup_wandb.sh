#!/bin/bash
# Makes the environment of the test that runs W&B offline: .venv-wandb, which holds W&B and sees the packages of .venv. It
# is apart from .venv because W&B brings some twenty packages that nothing else here needs.
#
#   bash scripts/setup_wandb.sh
#
# Needs access to a package index; the Python is that of .venv. An environment that is up to date is kept.
set -euo pipefail
. "$(dirname "$0")/environment.sh"
ready=.venv-wandb/ready
wanted="$(cat requirements-wandb.txt requirements-cpu.txt | cksum) $(minor_version .venv/bin/python)"
if [ "$(cat "$ready" 2>/dev/null)" = "$wanted" ]; then
  exit 0
fi
echo "installing W&B into .venv-wandb (only once)" >&2
rm -rf .venv-wandb
.venv/bin/python -m venv .venv-wandb
packages=lib/python$(minor_version .venv/bin/python)/site-packages
# later on Python's path than the environment's own packages
realpath ".venv/$packages" >".venv-wandb/$packages/trainer.pth"
.venv-wandb/bin/python -m pip install --quiet --disable-pip-version-check --requirement requirements-wandb.txt
echo "$wanted" >"$ready"
