#!/bin/bash
# R1-Distill-Qwen-1.5B from JustRL-1.5B on a Slurm cluster: `sbatch scripts/oprd_1p5b.sh [key=value ...]`.
#
# One task per node starts one process per GPU. Give other sizes on the command line (sbatch's win over these):
#   sbatch --nodes=2 scripts/oprd_1p5b.sh student.parallel.tensor=2 teacher.parallel.tensor=1
# A requeued job goes on from its last checkpoint: same command, same output directory.
#SBATCH --job-name=oprd_1p5b
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -euo pipefail

cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}"
CONFIG=${CONFIG:-oprd_1p5b}
PYTHON=${PYTHON:-python}
PROCESSES=${PROCESSES:-${SLURM_GPUS_ON_NODE:-8}}
HEAD_NODE=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_ADDR=${MASTER_ADDR:-$HEAD_NODE}
MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))}

# Sequence parallelism and the overlap of communication with computation rely on one hardware queue.
export CUDA_DEVICE_MAX_CONNECTIONS=1

srun --kill-on-bad-exit=1 bash -c '
  exec "$0" -m torch.distributed.run --nnodes "$SLURM_NNODES" --node-rank "$SLURM_NODEID" \
    --nproc-per-node "$1" --master-addr "$2" --master-port "$3" -m nemo_oprd train --config-name "$4" "${@:5}"
' "$PYTHON" "$PROCESSES" "$MASTER_ADDR" "$MASTER_PORT" "$CONFIG" \
  student.parallel.tensor=2 teacher.parallel.tensor=1 rollout.tensor=1 "$@"
