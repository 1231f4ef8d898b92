"""Trains a recipe of Megatron-Bridge with the hidden-state loss on recorded rollouts. docs/nemo.md explains it.

    torchrun --nproc-per-node 8 examples/nemo/bridge_finetune.py --recipe qwen3_1p7b_sft_config \
        --teacher MODEL --rollouts FILE --pretrained CHECKPOINTS --output DIR --updates 200 --length 4096
"""

import argparse
from functools import partial

from megatron.bridge import AutoBridge, recipes
from megatron.bridge.training.finetune import finetune

from nemo_oprd.integrations.bridge_data import RecordedRollouts
from nemo_oprd.integrations.forward_step import OPRDForwardStep
from nemo_oprd.integrations.hidden_states import RepresentationLossConfig


def parse(arguments=None):
    """The command line."""
    parser = argparse.ArgumentParser(description="A recipe of Megatron-Bridge with the hidden-state loss.")
    add = partial(parser.add_argument, required=True)
    add("--recipe", help="a function of megatron.bridge.recipes, such as qwen3_1p7b_sft_config")
    add("--teacher", metavar="MODEL", help="directory of a Hugging Face model of the student's width")
    add("--rollouts", metavar="FILE", help="JSONL of responses, as rollout.save=true records them")
    add(
        "--pretrained", metavar="DIR", help="checkpoints with the student's weights: AutoBridge.import_ckpt, or a run's"
    )
    add("--output", metavar="DIR", help="where checkpoints are written, and read to resume")
    add("--updates", type=int)
    add("--length", type=int, help="tokens to which responses with their prompts are padded")
    return parser.parse_args(arguments)


def configure(options):
    """The recipe with what the hidden-state loss needs, and its forward step."""
    config, loss = getattr(recipes, options.recipe)(), RepresentationLossConfig(kind="mse", k=2000)
    teacher = AutoBridge.from_hf_pretrained(options.teacher).to_megatron_provider()

    # injected gradients contain 1 / counts of the whole batch: nothing may divide them again
    config.model.calculate_per_token_loss = True
    config.ddp.average_in_collective = False
    # the loss gives the LM head no gradient, so weight decay alone would change it
    config.optimizer.weight_decay = 0.0
    config.scheduler.start_weight_decay = config.scheduler.end_weight_decay = 0.0

    config.model.seq_length = options.length
    config.dataset = RecordedRollouts(
        file=options.rollouts,
        seq_length=options.length,
        vocab_size=config.model.vocab_size,
        global_batch_size=config.train.global_batch_size,
        loss=loss,
    )
    config.train.train_iters = options.updates
    config.train.eval_iters = 0
    config.checkpoint.pretrained_checkpoint = options.pretrained
    config.checkpoint.save = config.checkpoint.load = options.output
    return config, OPRDForwardStep(config.model, teacher, loss)


if __name__ == "__main__":
    finetune(*configure(parse()))
