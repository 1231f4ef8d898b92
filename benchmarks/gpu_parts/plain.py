"""The part `plain`: what a plain transformers pair takes for the same losses, as the paper's code computes them.

One response of 1,024 + 16,384 tokens, gradient checkpointing, whole logits, and for OPRD the states of all layers and
tokens stacked before the last ones are taken. Nothing of this project is measured here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_parts.measure import is_cuda, measured, place
from benchmarks.gpu_parts.outcome import Outcome, Settings
from benchmarks.gpu_parts.real_shape import QUICK, REAL, STD, Batch, save_configs


class PlainPair:
    """Student and teacher with random weights on this GPU, and the paper's losses of one response."""

    def __init__(self, settings: Settings, batch: Batch) -> None:
        save_configs(settings.scratch, batch.shape)
        self.batch = batch
        self.student, self.teacher = (
            self._model(settings, role, seed=seed) for seed, role in enumerate(("student", "teacher"))
        )
        self.teacher.requires_grad_(False).eval()
        self.student.gradient_checkpointing_enable({"use_reentrant": False})
        self.student.train()
        for parameter in self.student.parameters():
            parameter.grad = torch.zeros_like(parameter)
        draw = torch.Generator(place()).manual_seed(0)
        size = 1, batch.tokens
        self.ids = torch.randint(0, batch.shape.vocab_size, size, device=place(), generator=draw)
        self.sampled = self.ids[0, batch.prompt :]

    @staticmethod
    def _model(settings: Settings, role: str, *, seed: int) -> Any:
        from transformers import AutoConfig, AutoModelForCausalLM

        config: Any = AutoConfig.from_pretrained(settings.scratch / role)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
        model = model.to_empty(device=place())
        draw = torch.Generator(place()).manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.fill_(1.0)
                else:
                    parameter.normal_(0.0, STD, generator=draw)
        # the frequencies of positions have no values after to_empty
        with torch.device(place()):
            model.model.rotary_emb = type(model.model.rotary_emb)(config=config)
        return model

    def _states(self, model: Any) -> torch.Tensor:
        """[L, B, T, D] of all layers and tokens, stacked."""
        return torch.stack(model.model(self.ids, output_hidden_states=True, use_cache=False).hidden_states[1:])

    def _logits(self, model: Any) -> torch.Tensor:
        """Whole logits [T, V] of the response."""
        return model(self.ids, use_cache=False).logits[0, self.batch.prompt - 1 : -1]

    def oprd(self) -> None:
        """Squared distance of the last states of every layer."""
        last = slice(-self.batch.last_k, None)
        with torch.no_grad():
            target = self._states(self.teacher)[:, :, last]
        found = self._states(self.student)[:, :, last]
        (found.float() - target.float()).square().mean().backward()

    def sampled_token(self) -> None:
        """Reverse KL on the sampled tokens, whose gradient is that of REINFORCE."""
        with torch.no_grad():
            log_q = self._logits(self.teacher).float().log_softmax(-1).gather(1, self.sampled[:, None])[:, 0]
        log_p = self._logits(self.student).float().log_softmax(-1).gather(1, self.sampled[:, None])[:, 0]
        (log_p * (log_p - log_q).detach()).mean().backward()

    def top_16(self) -> None:
        """Reverse KL on the student's 16 most probable ids, renormalised."""
        with torch.no_grad():
            theirs = self._logits(self.teacher)
        ours = self._logits(self.student)
        support = ours.detach().topk(16, dim=-1).indices
        log_p, log_q = (x.float().log_softmax(-1).gather(1, support).log_softmax(-1) for x in (ours, theirs))
        (log_p.exp() * (log_p - log_q)).sum(-1).mean().backward()

    def full_vocab(self) -> None:
        """Reverse KL on the whole vocabulary."""
        with torch.no_grad():
            theirs = self._logits(self.teacher)
        log_p = self._logits(self.student).float().log_softmax(-1)
        log_q = theirs.float().log_softmax(-1)
        (log_p.exp() * (log_p - log_q)).sum(-1).mean().backward()


def plain(settings: Settings, outcome: Outcome) -> None:
    """Seconds and delta-peak of teacher, forward and backward pass, per objective; what does not fit is said."""
    pair = PlainPair(settings, QUICK if settings.quick else REAL)
    losses: dict[str, Callable[[], None]] = {
        name: getattr(pair, name) for name in ("oprd", "sampled_token", "top_16", "full_vocab")
    }
    for name, loss in losses.items():
        outcome.require(*_measure(outcome, name, loss, passes=1 if settings.quick else 2))
        gradients = (p.grad for p in pair.student.parameters())
        finite = all(bool(gradient.isfinite().all()) for gradient in gradients if gradient is not None)
        outcome.require(finite, f"{name}: a gradient is not finite")


def _measure(outcome: Outcome, name: str, loss: Callable[[], None], passes: int) -> tuple[bool, str]:
    """Adds a row; running out of memory is a result, not a problem."""
    try:
        found = measured(partial(loss), passes=passes)
    except torch.OutOfMemoryError as error:
        outcome.row(name, note=f"does not fit: {str(error).partition('.')[0]}")
        torch.cuda.empty_cache()
        return True, ""
    outcome.row(name, seconds=found.seconds, peak=found.peak, delta=found.delta, note="teacher, forward, backward")
    if is_cuda():
        torch.cuda.empty_cache()
    return found.seconds > 0, f"{name}: took no time"
