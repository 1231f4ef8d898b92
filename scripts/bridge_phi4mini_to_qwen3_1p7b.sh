#!/bin/bash
# Distils Phi-4-mini-reasoning into Qwen3-1.7B-Base across tokenizers on a Slurm cluster, both stages:
# `sbatch scripts/bridge_phi4mini_to_qwen3_1p7b.sh [key=value ...]`.
#
# Sizes, signals, resuming and --dry-run are those of scripts/bridge_qwen3_4b_to_1p7b.sh.
#SBATCH --job-name=bridge_phi4mini_to_qwen3_1p7b
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@600
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -euo pipefail

cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}"
export CONFIG=${CONFIG:-bridge_phi4mini_to_qwen3_1p7b}
export BRIDGE=${BRIDGE:-bridges/phi4mini_to_qwen3_1p7b}
export JOB_SCRIPT=bridge_phi4mini_to_qwen3_1p7b.sh # whose #SBATCH lines --dry-run reads
exec bash scripts/bridge_qwen3_4b_to_1p7b.sh "$@"
