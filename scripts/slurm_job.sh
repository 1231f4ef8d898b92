# Sourced by the sbatch scripts, in the repository: how a job starts its ranks, and how it ends.
#
# Every GPU has a task of its own, which gets Slurm's signals itself. Ten minutes before the job's time is over
# (--signal) a command finishes its step and saves (exit code 75), and the job puts itself into the queue again. A job
# that starts again goes on from what was saved: same command, same output directory.
export PYTHON=${PYTHON:-python}
HEAD_NODE=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR=${MASTER_ADDR:-$HEAD_NODE} MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))}
# starts of one job, this one included, after which it does not queue itself again
MAX_STARTS=${MAX_STARTS:-100}

# Sequence parallelism and the overlap of communication with computation rely on one hardware queue.
export CUDA_DEVICE_MAX_CONNECTIONS=1
# Packs and responses differ in length from step to step: segments that can grow don't leave holes.
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
# Each rank would start a thread per core of the node, next to all the others.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-8}}

# on_all_ranks COMMAND [key=value ...]: runs `nemo-oprd COMMAND`; its exit code is left in $code
code=0
on_all_ranks() {
  # shellcheck disable=SC2016 # the variables are each task's own
  srun --kill-on-bad-exit=1 bash -c '
    export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
    command=$1
    shift
    exec "$PYTHON" -m nemo_oprd "$command" --config-name "$CONFIG" "$@"
  ' task "$@" || code=$?
}

# ends the job with $code; one that was stopped and has saved is queued again
leave() {
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
}
