#!/bin/bash
# OPRD-Bridge on a Slurm cluster, both stages: `sbatch scripts/bridge_qwen3_4b_to_1p7b.sh [key=value ...]`.
#
# Stage 1 fits the bridge in $BRIDGE unless it exists, stage 2 distils through the bridge. Settings apply to both stages;
# the variable chooses the bridge's directory: BRIDGE=bridges/mine sbatch scripts/bridge_qwen3_4b_to_1p7b.sh bridge.rank=16
# The scripts of other pairs set CONFIG, BRIDGE and PAIR_SIZES, the sizes of their models' layouts, and run this one.
# With --dry-run it prints what each stage needs and starts nothing. scripts/slurm_job.sh describes that, containers, and
# what happens at the time limit and after a requeue.
#SBATCH --job-name=bridge_qwen3_4b_to_1p7b
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
export CONFIG=${CONFIG:-bridge_qwen3_4b_to_1p7b}
BRIDGE=${BRIDGE:-bridges/qwen3_4b_to_1p7b}
. scripts/slurm_job.sh

words sizes "${PAIR_SIZES:-student.parallel.tensor=2 teacher.parallel.tensor=2 rollout.tensor=1}"
if [ ! -f "$BRIDGE/bridge.json" ]; then # fit-bridge writes this file last
  on_all_ranks fit-bridge "${sizes[@]}" "$@" output="$BRIDGE"
fi
if [ "$code" -eq 0 ]; then
  on_all_ranks train "${sizes[@]}" bridge.path="$BRIDGE" "$@"
fi
leave
