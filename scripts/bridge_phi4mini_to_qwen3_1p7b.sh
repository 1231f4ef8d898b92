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
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@600
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -euo pipefail

if [ -z "${SLURM_JOB_ID:-}" ]; then cd "$(dirname "$0")/.."; fi # a job runs a copy of this file, in its own directory
if [ ! -f scripts/slurm_job.sh ]; then
  echo "$PWD has no scripts/slurm_job.sh: submit from the project's directory, or with sbatch --chdir=DIRECTORY" >&2
  exit 2
fi
export CONFIG=${CONFIG:-bridge_phi4mini_to_qwen3_1p7b}
export BRIDGE=${BRIDGE:-bridges/phi4mini_to_qwen3_1p7b}
export JOB_SCRIPT=bridge_phi4mini_to_qwen3_1p7b.sh # whose #SBATCH lines --dry-run reads
exec bash scripts/bridge_qwen3_4b_to_1p7b.sh "$@"
