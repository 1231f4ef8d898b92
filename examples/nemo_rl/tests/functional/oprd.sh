#!/bin/bash
# One step of two updates on two GPUs, with models of one width. Runs in NeMo-RL's research/oprd.
set -euo pipefail
cd "$(dirname "$0")/../.."
run=tests/functional/oprd
rm -rf "$run" && mkdir -p "$run"
uv run run_oprd.py --config configs/oprd_math.yaml \
    policy.model_name=Qwen/Qwen3-0.6B-Base teacher.model_name=Qwen/Qwen3-0.6B \
    policy.megatron_cfg.tensor_model_parallel_size=1 policy.megatron_cfg.pipeline_model_parallel_size=1 \
    policy.megatron_cfg.context_parallel_size=1 policy.max_total_sequence_length=512 \
    policy.train_global_batch_size=4 distillation.num_prompts_per_step=8 distillation.max_num_steps=1 \
    distillation.val_period=0 checkpointing.enabled=false logger.wandb_enabled=false logger.log_dir="$run/logs" \
    cluster.gpus_per_node=2 cluster.num_nodes=1 "$@" 2>&1 | tee "$run/run.log"
grep -q "Training Results" "$run/run.log"
echo "Functional test passed: oprd.sh"
