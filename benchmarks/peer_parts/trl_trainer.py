"""TRL's `DistillationTrainer` for `benchmarks.peers`, on given completions instead of sampled ones.

Runs in .venv-peers. Two methods are replaced, those that tokenize and that sample; all that follows is TRL's own. Its
default of gradient checkpointing is off, because no other product computes a layer twice, and bf16 is off; the loss is
its default, the reverse KL over the whole vocabulary, mean over all tokens.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl import DistillationConfig, DistillationTrainer

from benchmarks.peer_parts.cases import BETAS, CLIP, EPS, RATE, WEIGHT_DECAY
from benchmarks.peer_parts.process import WARM_UPS, Measurement


class GivenCompletions(DistillationTrainer):
    """TRL's trainer, whose prompts are the numbers of given rollouts."""

    rollouts: list[dict[str, Any]]
    losses: list[float]

    def _tokenize_prompts(self, prompts: list[str]) -> tuple:
        self._drawn = [self.rollouts[int(number)] for number in prompts]
        return [each["prompt_ids"] for each in self._drawn], None, {}

    def _generate_single_turn(self, prompt_ids: list[list[int]], *_: Any, **__: Any) -> list[list[int]]:
        return [each["response_ids"] for each in self._drawn]

    def training_step(self, *given: Any, **named: Any) -> torch.Tensor:
        """Keeps the loss, which the log rounds."""
        loss = super().training_step(*given, **named)
        self.losses.append(float(loss))
        return loss


class Watch(TrainerCallback):
    """Measures the updates from their beginning to the end of the optimizer's step."""

    def __init__(self, measured: Measurement) -> None:
        self._measured = measured

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """All is loaded."""
        self._measured.ready()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """The batch's numbers are there; nothing is computed."""
        self._measured.begin()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """The weights have changed."""
        self._measured.end()


def configure(spec: dict[str, Any], output: str, responses: int) -> DistillationConfig:
    """The shared settings in TRL's words."""
    return DistillationConfig(
        output_dir=output,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=responses // spec["ranks"],
        max_steps=WARM_UPS + spec["updates"],
        max_completion_length=max(spec["responses"]),
        shuffle_dataset=False,
        optim="adamw_torch_fused",
        learning_rate=RATE,
        lr_scheduler_type="constant",
        weight_decay=WEIGHT_DECAY,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        adam_epsilon=EPS,
        max_grad_norm=CLIP,
        logging_steps=1,  # for the norms of the gradients
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        ddp_backend="gloo" if spec["ranks"] > 1 else None,
    )


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of two tokens: the trainer reads only which ids end and pad."""
    inner = Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")


def main() -> None:
    """Builds the trainer and measures its updates."""
    measured = Measurement()
    spec = measured.spec
    torch.set_num_threads(spec["threads"])
    rollouts = [json.loads(line) for line in Path(spec["rollouts"]).read_text().splitlines()]
    prompts = [str(number) for number in range(len(rollouts))] * (WARM_UPS + spec["updates"])
    with tempfile.TemporaryDirectory() as output:
        trainer = GivenCompletions(
            model=spec["student"],
            teacher_model=spec["teacher"],
            args=configure(spec, output, len(rollouts)),
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=tokenizer(),
            callbacks=[Watch(measured)],
        )
        trainer.rollouts, trainer.losses = rollouts, []
        trainer.train()
    measured.losses = trainer.losses  # with several ranks the rank's share, times the ranks
    measured.norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    measured.finish(parameters=trained, version=f"{trl.__version__}, transformers {transformers.__version__}")


if __name__ == "__main__":
    main()
