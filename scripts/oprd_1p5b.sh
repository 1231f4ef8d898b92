#!/bin/bash
# Distils JustRL-1.5B into R1-Distill-Qwen-1.5B on a Slurm cluster: `sbatch scripts/oprd_1p5b.sh [key=value ...]`.
#
# Set other sizes on the command line (arguments of sbatch override the #SBATCH lines):
#   sbatch --nodes=2 scripts/oprd_1p5b.sh student.parallel.tensor=2 teacher.parallel.tensor=1
# With --dry-run it prints what the run needs and starts nothing. scripts/slurm_job.sh describes that, containers, and what
# happens at the time limit and after a requeue.
#SBATCH --job-name=oprd_1p5b
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
export CONFIG=${CONFIG:-oprd_1p5b}
. scripts/slurm_job.sh

on_all_ranks train student.parallel.tensor=2 teacher.parallel.tensor=1 rollout.tensor=1 "$@"
leave
