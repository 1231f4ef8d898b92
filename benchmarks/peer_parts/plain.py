"""A plain loop over Hugging Face models for `benchmarks.peers`: what one writes without a framework.

Both models are eager modules with transformers' default attention. Sequences are padded on the right and masked, the
logits of a batch exist as a whole, autograd differentiates the loss, and AdamW is PyTorch's fused one. Several ranks
are wrapped by DistributedDataParallel, each with its part of the batch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn.functional import log_softmax, pad
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

from benchmarks.peer_parts.cases import BETAS, CLIP, EPS, ONE_BY_ONE, PAPER, RATE, ROWS, WEIGHT_DECAY
from benchmarks.peer_parts.process import WARM_UPS, Measurement

RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
Sequence = tuple[torch.Tensor, int]  # ids of prompt and response, tokens of the prompt


def read_sequences(path: str) -> list[Sequence]:
    """The sequences of all ranks."""
    records = [json.loads(line) for line in Path(path).read_text().splitlines()]
    return [(torch.tensor(r["prompt_ids"] + r["response_ids"]), len(r["prompt_ids"])) for r in records]


def padded(sequences: list[Sequence], last_k: int | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, attention mask and whether a token is supervised, [B, S] each."""
    length = max(len(ids) for ids, _ in sequences)
    ids_BS = torch.stack([pad(ids, (0, length - len(ids))) for ids, _ in sequences])
    mask_BS, rows_BS = torch.zeros_like(ids_BS), torch.zeros_like(ids_BS, dtype=torch.bool)
    for row, (ids, prompt) in enumerate(sequences):
        mask_BS[row, : len(ids)] = 1
        first = prompt if last_k is None else max(prompt, len(ids) - last_k)
        rows_BS[row, first : len(ids)] = True
    return ids_BS, mask_BS, rows_BS


def supervised(sequences: Iterable[Sequence], last_k: int | None) -> int:
    """The supervised tokens of some sequences."""
    return sum(len(ids) - prompt if last_k is None else min(last_k, len(ids) - prompt) for ids, prompt in sequences)


def divergence(task: str, student_NV: torch.Tensor, teacher_NV: torch.Tensor, tokens_N: torch.Tensor) -> tuple:
    """Sums over N rows: of the values, and of what has the gradient of the loss."""
    if task == "top_16":
        ids_NK = student_NV.topk(16).indices
        student_NV, teacher_NV = student_NV.gather(1, ids_NK), teacher_NV.gather(1, ids_NK)
    p_NV, q_NV = log_softmax(student_NV, 1), log_softmax(teacher_NV, 1)
    if task == "sampled_token":
        own_N, other_N = (each.gather(1, tokens_N[:, None])[:, 0] for each in (p_NV, q_NV))
        gap_N = (own_N - other_N).detach()
        return gap_N.sum(), (gap_N * own_N).sum()
    value = (p_NV.exp() * (p_NV - q_NV)).sum()
    return value, value


class Loop:
    """The models, the optimizer and one update of a case."""

    def __init__(self, spec: dict[str, Any]) -> None:
        """Loads both models."""
        self._task, self._product, self._last_k = spec["task"], spec["product"], spec["last_k"]
        self._on_states = self._task == "mse"
        self._student, self._teacher = (
            AutoModelForCausalLM.from_pretrained(spec[role], dtype=torch.float32) for role in ("student", "teacher")
        )
        self._student.train()
        self._teacher.requires_grad_(False).eval()
        if self._on_states and not self._student.config.tie_word_embeddings:
            self._student.lm_head.requires_grad_(False)  # no loss reaches it
        self.parameters = [p for p in self._student.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in self.parameters if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
            {"params": [p for p in self.parameters if p.ndim == 1], "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(groups, lr=RATE, betas=BETAS, eps=EPS, fused=True)
        everything = read_sequences(spec["rollouts"])
        self._count = supervised(everything, self._last_k)  # of all ranks
        mine = everything[RANK::RANKS]
        self._parts = [[each] for each in mine] if self._product == ONE_BY_ONE else [mine]
        self._wrapped: nn.Module = Wrapped(self._student, self._loss)
        if RANKS > 1:
            torch.distributed.init_process_group("gloo")
            self._wrapped = DistributedDataParallel(self._wrapped)

    def update(self) -> tuple[float, float]:
        """One update; returns the loss and the norm of the gradient, over all ranks."""
        total = 0.0
        for number, part in enumerate(self._parts, 1):
            last = number == len(self._parts)
            with nullcontext() if last or RANKS == 1 else self._wrapped.no_sync():  # type: ignore[operator]
                value, derived = self._wrapped(part)
                (derived * (RANKS / self._count)).backward()  # DistributedDataParallel takes the mean over ranks
            total += value.item() / self._count
        norm = nn.utils.clip_grad_norm_(self.parameters, CLIP)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return total, norm.item()

    def _loss(self, sequences: list[Sequence]) -> tuple:
        """The sum of the values over the supervised tokens, and what has its gradient."""
        ids_BS, mask_BS, rows_BS = padded(sequences, self._last_k)
        if self._on_states:
            return self._gap_of_states(ids_BS, mask_BS, rows_BS)
        # the distribution of a token is at the position before it
        before_BS, tokens_N = rows_BS.roll(-1, 1), ids_BS[rows_BS]
        student_NV = self._logits(self._student, ids_BS, mask_BS, before_BS)
        with torch.no_grad():
            teacher_NV = self._logits(self._teacher, ids_BS, mask_BS, before_BS)
        return divergence(self._task, student_NV, teacher_NV, tokens_N)

    def _logits(self, model: Any, ids_BS: torch.Tensor, mask_BS: torch.Tensor, rows_BS: torch.Tensor) -> torch.Tensor:
        """The logits of the supervised rows [N, V]."""
        if self._product == ROWS:
            states = model.model(input_ids=ids_BS, attention_mask=mask_BS, use_cache=False).last_hidden_state
            return model.lm_head(states[rows_BS])
        return model(input_ids=ids_BS, attention_mask=mask_BS, use_cache=False).logits[rows_BS]

    def _gap_of_states(self, ids_BS: torch.Tensor, mask_BS: torch.Tensor, rows_BS: torch.Tensor) -> tuple:
        """The squared differences of all layers' states, mean over layers and width."""
        given = {"input_ids": ids_BS, "attention_mask": mask_BS, "use_cache": False, "output_hidden_states": True}
        if self._product == PAPER:  # the whole model, whose logits nothing reads, and all states in one float32 tensor
            with torch.no_grad():
                teacher_LBSD = torch.stack(self._teacher(**given).hidden_states[1:]).float()
            student_LBSD = torch.stack(self._student(**given).hidden_states[1:]).float()
            gap_BS = (student_LBSD - teacher_LBSD).square().mean(-1).mean(0)
            value = (gap_BS * rows_BS).sum()
            return value.detach(), value
        with torch.no_grad():
            targets = self._teacher.model(**given).hidden_states[1:]
        states = self._student.model(**given).hidden_states[1:]
        gaps = [(s[rows_BS] - t[rows_BS]).square().mean(-1).sum() for s, t in zip(states, targets, strict=True)]
        value = torch.stack(gaps).mean()
        return value.detach(), value


class Wrapped(nn.Module):
    """The student and its loss as one module, as DistributedDataParallel expects."""

    def __init__(self, student: nn.Module, loss: Any) -> None:
        super().__init__()
        self.student, self._loss = student, loss

    def forward(self, sequences: list[Sequence]) -> Any:
        """See `Loop._loss`."""
        return self._loss(sequences)


def main() -> None:
    """Loads the models and measures the updates."""
    measured = Measurement()
    torch.set_num_threads(measured.spec["threads"])
    loop = Loop(measured.spec)
    measured.ready()
    for _ in range(WARM_UPS + measured.spec["updates"]):
        with measured.update():
            loss, norm = loop.update()
        measured.losses.append(loss)
        measured.norms.append(norm)
    trained = sum(p.numel() for p in loop.parameters)
    measured.finish(parameters=trained, version=transformers.__version__)


if __name__ == "__main__":
    main()
