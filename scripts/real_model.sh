#!/bin/bash
# A real language model on two CPU cores: makes a damaged student from SmolLM2-135M-Instruct, distils it back on its own
# responses to the prompts in examples/real_model, and compares it with its teacher before and after.
#
#   bash scripts/real_model.sh                       20 of the 30 layers, those of most influence
#   bash scripts/real_model.sh --student quantised   all layers, their weights rounded to 2 bits
#   bash scripts/real_model.sh train.steps=10        further arguments are key=value settings of conf/real_model.yaml
#
# --heldout N compares on N held-out prompts instead of 64. Started again, it goes on where it stopped; only the first
# start needs a package index.
set -euo pipefail
. "$(dirname "$0")/environment.sh"

student=pruned heldout=64 settings=() output=
while [ $# -gt 0 ]; do
  case "$1" in
    --student | --heldout)
      if [ $# = 1 ]; then
        echo "error: $1 needs a value; expected pruned or quantised for --student, a number for --heldout: add it" >&2
        exit 2
      fi
      declare "${1#--}=$2"
      shift
      ;;
    output=*) output=${1#output=} ;;
    *) settings+=("$1") ;;
  esac
  shift
done
case "$student" in pruned | quantised) ;; *)
  echo "error: --student $student: expected pruned or quantised; choose one" >&2
  exit 2
  ;;
esac

teacher=models/SmolLM2-135M-Instruct
home=runs/real_model
output=${output:-$home/distilled-$student}
mkdir -p "$home"
echo "1/5 the teacher: $teacher" >&2
bash scripts/fetch_smollm2.sh
echo "2/5 the student: $home/$student" >&2
if [ ! -f "$home/$student.txt" ]; then
  if [ "$student" = pruned ]; then
    python checkpoint_tools/prune_layers.py --hf-path "$teacher" --output "$home/pruned" --keep 20 \
      --prompts examples/real_model/train.jsonl --count 64 >"$home/making-$student.txt"
  else
    python checkpoint_tools/round_weights.py --hf-path "$teacher" --output "$home/quantised" --bits 2 \
      >"$home/making-$student.txt"
  fi
  mv "$home/making-$student.txt" "$home/$student.txt"
fi
tail -n 2 "$home/$student.txt" >&2
map=()
# the map names every layer; a choice of layers brings its own map, or the paper's
if [ "$student" = pruned ] && [[ " ${settings[*]} " != *" loss.representation.layers="* ]]; then
  map=("$(tail -n 1 "$home/pruned.txt")")  # each layer is compared with the teacher's layer whose weights it has
fi
echo "3/5 distilling on two ranks" >&2
torchrun --nproc-per-node 2 --standalone -m nemo_oprd train --config-name real_model \
  student.hf_path="$home/$student" "${map[@]}" "${settings[@]}" output="$output"
echo "4/5 comparing with the teacher on $heldout held-out prompts" >&2
OMP_NUM_THREADS=2 nemo-oprd compare --teacher "$teacher" --prompts examples/real_model/heldout.jsonl \
  --count "$heldout" --output "$output/compare" before="$home/$student" distilled="$output/hf"
echo "5/5 drawing the curves" >&2
nemo-oprd report "$output"
