#!/bin/bash
# Distils Qwen3.5-35B-A3B into Qwen3.5-4B on a Slurm cluster, both stages:
# `sbatch scripts/bridge_qwen3p5_35b_a3b_to_4b.sh [key=value ...]`.
#
# Student TP2, teacher EP8 fit 2 to 8 nodes of 8 GPUs with 80 GB (docs/plan.md).
# Signals, resuming, BRIDGE and --dry-run are those of scripts/bridge_qwen3_4b_to_1p7b.sh. Megatron-Bridge must be there, such as
# in NVIDIA's container of NeMo: SRUN_ARGS or LAUNCH_PREFIX name one, PYTHON another interpreter (scripts/slurm_job.sh).
#SBATCH --job-name=bridge_qwen3p5_35b_a3b_to_4b
#SBATCH --nodes=2
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
export CONFIG=${CONFIG:-bridge_qwen3p5_35b_a3b_to_4b}
export BRIDGE=${BRIDGE:-bridges/qwen3p5_35b_a3b_to_4b}
export PAIR_SIZES="student.parallel.tensor=2 student.parallel.sequence=true teacher.parallel.expert=8"
export JOB_SCRIPT=bridge_qwen3p5_35b_a3b_to_4b.sh # whose #SBATCH lines --dry-run reads
exec bash scripts/bridge_qwen3_4b_to_1p7b.sh "$@"
