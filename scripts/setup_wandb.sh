#!/bin/bash
# Makes the environment of the test that runs W&B offline: .venv-wandb. It is apart from .venv because W&B brings some twenty
# packages that nothing else here needs.
#
#   bash scripts/setup_wandb.sh
#
# Needs access to a package index.
exec bash "$(dirname "${BASH_SOURCE[0]}")/added_packages.sh" .venv-wandb requirements-wandb.txt W\&B 'import wandb'
