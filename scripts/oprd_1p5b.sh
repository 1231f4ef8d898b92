#!/bin/bash
# R1-Distill-Qwen-1.5B from JustRL-1.5B on a Slurm cluster: `sbatch scripts/oprd_1p5b.sh [key=value ...]`.
#
# Every GPU has a task of its own, which gets Slurm's signals itself. Give other sizes on the command line (sbatch's win
# over these):
#   sbatch --nodes=2 scripts/oprd_1p5b.sh student.parallel.tensor=2 teacher.parallel.tensor=1
# Ten minutes before its time is over the job finishes the step, saves (exit code 75), and puts itself into the queue
# again. A job that starts again goes on from its last checkpoint: same command, same output directory.
#SBATCH --job-name=oprd_1p5b
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
export CONFIG=${CONFIG:-oprd_1p5b} PYTHON=${PYTHON:-python}
HEAD_NODE=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR=${MASTER_ADDR:-$HEAD_NODE} MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))}
# starts of one job, this one included, after which it does not queue itself again
MAX_STARTS=${MAX_STARTS:-100}

# Sequence parallelism and the overlap of communication with computation rely on one hardware queue.
export CUDA_DEVICE_MAX_CONNECTIONS=1

code=0
# shellcheck disable=SC2016 # the variables are each task's own
srun --kill-on-bad-exit=1 bash -c '
  export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
  exec "$PYTHON" -m nemo_oprd train --config-name "$CONFIG" "$@"
' task student.parallel.tensor=2 teacher.parallel.tensor=1 rollout.tensor=1 "$@" || code=$?

if [ "$code" -eq 75 ]; then
  starts=$((${SLURM_RESTART_COUNT:-0} + 1))
  if [ "$starts" -ge "$MAX_STARTS" ]; then
    echo "stopped and saved after $starts starts (MAX_STARTS): submit the same command again to go on" >&2
  elif scontrol requeue "$SLURM_JOB_ID"; then
    sleep 60 # Slurm ends this start of the job; an exit of its own could be taken for the end of the job
  else
    echo "stopped and saved, but this job can't be requeued: submit the same command again to go on" >&2
  fi
fi
exit "$code"
