#!/bin/bash
# Distils Qwen3-4B into Qwen3-1.7B-Base on a Slurm cluster, first through a bridge, then on distributions:
# `sbatch scripts/bridge_then_opd.sh [key=value ...]`. The bridge is fitted unless it exists.
#
# Sizes, signals, resuming and --dry-run are those of scripts/bridge_qwen3_4b_to_1p7b.sh.
#SBATCH --job-name=bridge_then_opd
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
export CONFIG=${CONFIG:-bridge_then_opd_qwen3_4b_to_1p7b}
export JOB_SCRIPT=bridge_then_opd.sh # whose #SBATCH lines --dry-run reads
exec bash scripts/bridge_qwen3_4b_to_1p7b.sh "$@"
