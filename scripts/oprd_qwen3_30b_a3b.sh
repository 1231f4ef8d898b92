#!/bin/bash
# Distils a specialist into Qwen3-30B-A3B on a Slurm cluster: `sbatch scripts/oprd_qwen3_30b_a3b.sh [key=value ...]`.
#
# Student PP2 EP8 and teacher TP2 EP8 fit 2 to 8 nodes of 8 GPUs with 80 GB (arguments of sbatch override the #SBATCH lines):
#   sbatch --nodes=8 scripts/oprd_qwen3_30b_a3b.sh teacher.hf_path=models/mine
# With --dry-run it prints what the run needs and starts nothing. scripts/slurm_job.sh describes that, containers, and what
# happens at the time limit and after a requeue.
#SBATCH --job-name=oprd_qwen3_30b_a3b
#SBATCH --nodes=4
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
export CONFIG=${CONFIG:-oprd_qwen3_30b_a3b}
. scripts/slurm_job.sh

on_all_ranks train student.parallel.pipeline=2 student.parallel.expert=8 \
  teacher.parallel.tensor=2 teacher.parallel.sequence=true teacher.parallel.expert=8 "$@"
leave
