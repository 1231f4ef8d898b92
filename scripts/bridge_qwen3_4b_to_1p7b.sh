#!/bin/bash
# OPRD-Bridge on a Slurm cluster, both stages: `sbatch scripts/bridge_qwen3_4b_to_1p7b.sh [key=value ...]`.
#
# Stage 1 makes the bridge in $BRIDGE unless it is there, stage 2 distils through it. Settings go to both stages; where
# the bridge is kept is said by the variable: BRIDGE=bridges/mine sbatch scripts/bridge_qwen3_4b_to_1p7b.sh bridge.rank=16
# What happens at the time limit and when the job starts again: scripts/slurm_job.sh.
#SBATCH --job-name=bridge_qwen3_4b_to_1p7b
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
export CONFIG=${CONFIG:-bridge_qwen3_4b_to_1p7b}
BRIDGE=${BRIDGE:-bridges/qwen3_4b_to_1p7b}
. scripts/slurm_job.sh

SIZES=(student.parallel.tensor=2 teacher.parallel.tensor=2 rollout.tensor=1)
if [ ! -f "$BRIDGE/bridge.json" ]; then # written last
  on_all_ranks fit-bridge "${SIZES[@]}" "$@" output="$BRIDGE"
fi
if [ "$code" -eq 0 ]; then
  on_all_ranks train "${SIZES[@]}" bridge.path="$BRIDGE" "$@"
fi
leave
