# Sourced by the sbatch scripts in the repository: starts the ranks of a job, and ends or requeues the job.
#
# There is one task per GPU, and every task receives Slurm's signals directly. Ten minutes before the job's time limit
# (--signal), a command finishes its step, saves and exits with code 75; the job then requeues itself. A restarted job
# resumes from the last checkpoint: same command, same output directory.
export PYTHON=${PYTHON:-python}
HEAD_NODE=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR=${MASTER_ADDR:-$HEAD_NODE} MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))}
# the number of starts, including this one, after which a job no longer requeues itself
MAX_STARTS=${MAX_STARTS:-100}

# Sequence parallelism and the overlap of communication with computation rely on one hardware queue.
export CUDA_DEVICE_MAX_CONNECTIONS=1
# Packs and responses differ in length from step to step; expandable segments avoid fragmentation.
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
# Without this limit, each rank would start one thread per core of the node.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-8}}

# on_all_ranks COMMAND [key=value ...]: runs `nemo-oprd COMMAND` on all ranks and stores its exit code in $code
code=0
on_all_ranks() {
  # shellcheck disable=SC2016 # each task expands the variables
  srun --kill-on-bad-exit=1 bash -c '
    export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
    command=$1
    shift
    exec "$PYTHON" -m nemo_oprd "$command" --config-name "$CONFIG" "$@"
  ' task "$@" || code=$?
}

# ends the job with $code; requeues a job that was stopped and has saved
leave() {
  if [ "$code" -eq 75 ]; then
    starts=$((${SLURM_RESTART_COUNT:-0} + 1))
    if [ "$starts" -ge "$MAX_STARTS" ]; then
      echo "stopped and saved after $starts starts (MAX_STARTS): submit the same command again to resume" >&2
    elif scontrol requeue "$SLURM_JOB_ID"; then
      sleep 60 # Slurm ends this start of the job; if the script exited first, Slurm could regard the job as finished
    else
      echo "stopped and saved, but this job cannot be requeued: submit the same command again to resume" >&2
    fi
  fi
  exit "$code"
}
