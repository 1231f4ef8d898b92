# Sourced by the sbatch scripts in the repository: starts the ranks of a job, and ends or requeues the job.
#
# There is one task per GPU, and every task receives Slurm's signals directly. Ten minutes before the job's time limit
# (--signal), a command finishes its step, saves and exits with code 75; the job then requeues itself. A restarted job
# resumes from the last checkpoint: same command, same output directory.
#
# The arguments of a script are key=value settings. With --dry-run, the script starts no training: it prints what the run
# needs (`nemo-oprd plan`), for the very arguments that the job would pass, and exits with the plan's exit code:
#   sbatch scripts/oprd_1p5b.sh --dry-run                     for the nodes of the job, in the job's environment
#   bash scripts/oprd_1p5b.sh --dry-run [--nodes=N]           without Slurm, for N nodes or those of the #SBATCH line
# --gpu=NAME (h100, ...) names the GPU to plan for, if it is not the plan's default, --gpu-memory=GB its memory. With
# --rehearse, too, the training that was planned is then rehearsed (`nemo-oprd rehearse`, docs/rehearsal.md), which takes
# minutes; the exit code is the larger.
#
# Environment variables, which `sbatch` passes on (docs/cluster.md has examples):
#   PYTHON          the interpreter of a task. Default: .venv-gpu/bin/python, if scripts/setup_gpu.sh has made it and no
#                   container is used, otherwise python
#   NEMO_OPRD_CPU   1: the job is meant for CPUs. Otherwise every node must have as many GPUs as tasks
#   SRUN_ARGS       further arguments of srun, such as "--container-image=FILE --container-mounts=A:B" of pyxis
#   LAUNCH_PREFIX   what each task is started by, such as "apptainer exec --nv FILE"
#   MAX_STARTS      the number of starts, including this one, after which a job no longer requeues itself (100)
# SRUN_ARGS and LAUNCH_PREFIX are split at blanks, and nothing in them is a quote: no argument can contain a blank.

# words NAME TEXT: makes the array NAME of TEXT's words
words() {
  IFS=$' \t\n' read -r -d '' -a "$1" <<<"$2" || true # read returns 1 at the end of the text
}

# sbatch_line OPTION: the value of the script's line `#SBATCH --OPTION=VALUE`; JOB_SCRIPT is set by a script that calls
# another one
sbatch_line() {
  sed -n "/^#SBATCH --$1=/{s///p;q}" "scripts/${JOB_SCRIPT:-$(basename "$0")}"
}

dry_run= rehearse= nodes= gpu=() settings=()
for argument in "$@"; do
  case "$argument" in
    --dry-run) dry_run=1 ;;
    --rehearse) rehearse=1 ;;
    --nodes=[1-9]*) nodes=${argument#--nodes=} ;;
    --gpu=*) gpu+=(--gpu "${argument#--gpu=}") ;;
    --gpu-memory=*) gpu+=(--gpu-memory "${argument#--gpu-memory=}") ;;
    -*)
      echo "$argument: expected key=value settings, --dry-run, --rehearse, --nodes=N, --gpu=NAME or --gpu-memory=GB; options of sbatch" \
        "stand before the script's name" >&2
      exit 2
      ;;
    *) settings+=("$argument") ;;
  esac
done
if [ -z "$dry_run" ] && [ -n "$nodes${gpu[*]}$rehearse" ]; then
  echo "--nodes, --gpu, --gpu-memory and --rehearse belong to --dry-run; options of sbatch stand before the script's name: sbatch --nodes=2 ..." >&2
  exit 2
fi
if [ -z "$dry_run" ] && [ -z "${SLURM_JOB_ID:-}" ]; then
  echo "this is no Slurm job: submit it with sbatch, or add --dry-run to see what it needs" >&2
  exit 2
fi
set -- "${settings[@]}" # the sourcing script's arguments

words srun_args "${SRUN_ARGS:-}"
words launch_prefix "${LAUNCH_PREFIX:-}"
. scripts/gpu_python.sh
# choose_python: sets PYTHON where it is not given; one line and status 2 where a task could not start it
choose_python() {
  local status=0
  case " ${srun_args[*]} ${launch_prefix[*]} " in *" --container-"* | *apptainer* | *singularity*)
    PYTHON=${PYTHON:-python} # that of the image
    return
    ;;
  esac
  if [ -z "${PYTHON:-}" ]; then
    gpu_environment || status=$?
    if [ "$status" -ne 1 ]; then return "$status"; fi
    PYTHON=python
    # what LAUNCH_PREFIX starts may have a Python of its own
    if [ "${#launch_prefix[@]}" -gt 0 ] || has_packages python; then return; fi
    echo "there is no .venv-gpu in $PWD, and $(command -v python || echo "no python") has torch and megatron-core:" \
      "bash scripts/setup_gpu.sh makes the environment, or PYTHON= names an interpreter" >&2
    return 2
  fi
  if [ "${#launch_prefix[@]}" -eq 0 ] && ! command -v "$PYTHON" >/dev/null; then
    echo "PYTHON=$PYTHON: expected the name of an interpreter; correct it, or leave it out" >&2
    return 2
  fi
}
choose_python || exit 2

if [ -n "${SLURM_JOB_ID:-}" ]; then
  nodes=${nodes:-$SLURM_NNODES}
  tasks_per_node=${SLURM_NTASKS_PER_NODE:-$((SLURM_NTASKS / SLURM_NNODES))}
  # srun does not inherit --cpus-per-task from sbatch (Slurm 22.05 and later), and without it binds a task to one CPU.
  # Where sbatch was given none, the tasks share the node's, in whole cores of two threads.
  cpus=${SLURM_CPUS_PER_TASK:-$((SLURM_CPUS_ON_NODE / tasks_per_node))}
  if [ -z "${SLURM_CPUS_PER_TASK:-}" ] && [ "$cpus" -ge 2 ]; then
    cpus=$((cpus / 2 * 2))
  fi
  cpus=$((cpus > 0 ? cpus : 1))
else
  nodes=${nodes:-$(sbatch_line nodes)}
  tasks_per_node=$(sbatch_line ntasks-per-node)
fi
MAX_STARTS=${MAX_STARTS:-100}

code=0
# plan COMMAND [key=value ...]: what the ranks of `on_all_ranks` would need, and with --rehearse two steps of training on
# fake tensors; in a job, in the job's container
plan() {
  local command=$1 inside=() status=0 options
  shift
  if [ -n "${SLURM_JOB_ID:-}" ]; then
    inside=(srun --nodes=1 --ntasks=1 --ntasks-per-node=1 --cpus-per-task="$cpus" "${srun_args[@]}")
  fi
  options=(--config-name "$CONFIG" --ranks "$((nodes * tasks_per_node))" --gpus-per-node "$tasks_per_node" "${gpu[@]}")
  echo "plan of $command on $nodes nodes of $tasks_per_node GPUs:"
  "${inside[@]}" "${launch_prefix[@]}" "$PYTHON" -m nemo_oprd plan "${options[@]}" "$@" || code=$?
  if [ -n "$rehearse" ] && [ "$command" = train ] && [ "$code" -le 1 ]; then # 2: a mistake, which the plan has named
    echo "rehearsal of $command:"
    "${inside[@]}" "${launch_prefix[@]}" "$PYTHON" -m nemo_oprd rehearse "${options[@]}" "$@" || status=$?
    code=$((status > code ? status : code))
  fi
}

# check_gpus: ends the job with one line and code 2 where a node's tasks do not get one GPU each. srun gives them what
# --gpus-per-node says, which the scripts have a line for, whatever --gres or --gpus has given to the job.
check_gpus() {
  local gpus=${SLURM_GPUS_ON_NODE:-} given=${SLURM_GPUS_PER_NODE:-} each said
  case " ${NEMO_OPRD_CPU:-} ${srun_args[*]} " in " 1 "* | *" --gpus"* | *" --gres"*) return ;; esac
  if [ -z "$gpus" ]; then # this Slurm does not count GPUs
    gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
    said="nvidia-smi lists $gpus GPUs"
  else
    given=${given##*:} # of TYPE:NUMBER
    case "$given" in '' | *[!0-9]*) ;; *) gpus=$given ;; esac
    said="the tasks get $gpus GPUs (SLURM_GPUS_PER_NODE=${SLURM_GPUS_PER_NODE:-unset})"
  fi
  if [ "$gpus" -eq "$tasks_per_node" ]; then return; fi
  each=$((gpus > 0 && gpus < tasks_per_node ? gpus : tasks_per_node))
  echo "${SLURMD_NODENAME:-$(hostname)} has $tasks_per_node tasks, and $said; expected one GPU per task: submit with" \
    "--gpus-per-node=$each --ntasks-per-node=$each, without --gres and --gpus, or set NEMO_OPRD_CPU=1 for a job on CPUs" >&2
  exit 2
}

# free_port: a port that nothing on this node uses, that of the job's number or one far from those of the next jobs, which
# may start at the same moment. The script runs on the job's first node, where the first rank listens; all ranks are given
# the port.
free_port() {
  local port=$((20000 + SLURM_JOB_ID % 20000)) used
  used=$(sed -n 's/^ *[0-9]*: [0-9A-F]*:\([0-9A-F]\{4\}\) .*/\1/p' /proc/net/tcp /proc/net/tcp6 2>/dev/null || true)
  while grep -q "^$(printf %04X "$port")$" <<<"$used"; do
    port=$((20000 + (port - 20000 + 1009) % 20000))
  done
  echo "$port"
}

# on_all_ranks COMMAND [key=value ...]: runs `nemo-oprd COMMAND` on all ranks and stores its exit code in $code
on_all_ranks() {
  if [ -n "$dry_run" ]; then
    plan "$@"
    return
  fi
  check_gpus
  local command=$1 head_node variables
  shift
  head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
  # given to `env` in the container, because the values of a container image take precedence over srun's
  variables=(
    "MASTER_ADDR=${MASTER_ADDR:-$head_node}"
    "MASTER_PORT=${MASTER_PORT:-$(free_port)}"
    # packages in a user's home would take precedence over those of a container image
    PYTHONNOUSERSITE=1
    # sequence parallelism and the overlap of communication with computation rely on one hardware queue
    CUDA_DEVICE_MAX_CONNECTIONS=1
    # packs and responses differ in length from step to step; expandable segments avoid fragmentation
    "PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}"
    # without this limit, each rank would start one thread per CPU
    "OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-$((cpus < 8 ? cpus : 8))}}"
  )
  echo "$command: $nodes nodes x $tasks_per_node tasks, $cpus CPUs each; ${launch_prefix[*]} $PYTHON" >&2
  # shellcheck disable=SC2016 # each task expands the variables, outside of a container that LAUNCH_PREFIX starts
  srun --kill-on-bad-exit=1 --cpus-per-task="$cpus" "${srun_args[@]}" bash -c '
    exec "${@:2:$1}" env RANK="$SLURM_PROCID" LOCAL_RANK="$SLURM_LOCALID" WORLD_SIZE="$SLURM_NTASKS" "${@:2+$1}"
  ' task "${#launch_prefix[@]}" "${launch_prefix[@]}" "${variables[@]}" \
    "$PYTHON" -m nemo_oprd "$command" --config-name "$CONFIG" "$@" || code=$?
}

# ends the job with $code; requeues a job that was stopped and has saved
leave() {
  if [ "$code" -eq 75 ] && [ -z "$dry_run" ]; then
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
