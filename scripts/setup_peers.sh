#!/bin/bash
# Makes the environment of TRL, with which benchmarks.peers compares this project: .venv-peers. All products are measured
# with the same torch and the same transformers, those of .venv.
#
#   bash scripts/setup_peers.sh
#
# Needs access to a package index. Exactly the pinned packages are installed: pip would replace what .venv pins.
exec bash "$(dirname "${BASH_SOURCE[0]}")/added_packages.sh" .venv-peers requirements-peers.txt TRL \
  'from trl import DistillationTrainer' --no-deps
