#!/bin/bash
# A small run of the main job on two CPU cores: makes a small model pair, converts it, distils the student on its own
# rollouts with the student at TP2 and the teacher at TP1, evaluates before and after, exports the student, draws curves.
# Arguments are key=value settings; rollout.engine=vllm installs vLLM first, and samples with it; teacher.engine=vllm lets
# a vLLM server compute the teacher, from its Hugging Face directory.
set -euo pipefail
. "$(dirname "$0")/environment.sh"

default=runs/quickstart output= served=()
for argument in "$@"; do
  case "$argument" in
    rollout.engine=vllm)
      bash scripts/setup_vllm.sh
      default=runs/quickstart_vllm
      ;;
    teacher.engine=vllm)
      bash scripts/setup_vllm.sh
      default=runs/quickstart_served_teacher
      served=(teacher.checkpoint=null teacher.hf_path=runs/toy/teacher evaluation.teacher=false)
      ;;
    output=*) output=${argument#output=} ;;
  esac
done
output=${output:-$default}

echo "1/4 making a small student-teacher pair (addition with scratch digits)" >&2
OMP_NUM_THREADS=2 nemo-oprd toy --output runs/toy --seed 0 || {
  status=$?
  if [ $status = 2 ]; then  # refused, with the reason in one line
    echo "If an earlier version made runs/toy, its runs are outdated, too: rm -r runs/toy runs/quickstart" >&2
  fi
  exit $status
}
echo "2/4 converting both models from Hugging Face to Megatron" >&2
for role in student teacher; do
  if [ ! -d "runs/toy/$role-megatron" ]; then
    python checkpoint_tools/hf_to_megatron.py --hf-path "runs/toy/$role" --output "runs/toy/$role-megatron"
  fi
done
echo "3/4 distilling on two ranks: student TP2, teacher TP1" >&2
torchrun --nproc-per-node 2 --standalone -m nemo_oprd train --config-name quickstart "${served[@]}" "$@" output="$output"
echo "4/4 drawing the curves, on a page for a browser" >&2
nemo-oprd report "$output"
