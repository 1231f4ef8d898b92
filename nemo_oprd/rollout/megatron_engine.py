"""The in-process rollout engine: a second Megatron copy of the student in a layout of its own (TP and DP, no PP)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

from nemo_oprd.batch.types import Rollout
from nemo_oprd.config.schema import Config
from nemo_oprd.distillation.student import Student
from nemo_oprd.fault_tolerance.signals import agree
from nemo_oprd.layout import Layout
from nemo_oprd.megatron.model import build_chunks
from nemo_oprd.megatron.parallel import device, make_role, wait_for_all
from nemo_oprd.models import ModelSpec
from nemo_oprd.rollout.engine import GenerationCancelled, Request, SamplingParams
from nemo_oprd.rollout.generation import Generated, generate_batch
from nemo_oprd.weights.hf import load_hf, load_stream


class MegatronEngine:
    """Lives on the student's ranks. Every rank of the world builds it and takes part in its calls."""

    def __init__(
        self,
        config: Config,
        spec: ModelSpec,
        student_layout: Layout,
        eos_ids: tuple[int, ...],
        vocab_limit: int | None = None,
    ) -> None:
        """Weights are uninitialised until the first `update_weights`.

        Args:
            vocab_limit: only ids below are sampled; the model's vocabulary if None. A teacher of the same family may
                have fewer padding ids than the student, and can't read those that it doesn't have.

        Raises:
            ValueError: `rollout.tensor` fits neither the ranks nor the model.
        """
        tensor, ranks = config.rollout.tensor, student_layout.size
        if ranks % tensor:
            raise ValueError(f"rollout.tensor={tensor} does not divide the student's {ranks} rank(s)")
        layout = Layout(tensor=tensor, data=ranks // tensor, first_rank=student_layout.first_rank)
        self.spec, self.eos_ids, self.max_batch = spec, eos_ids, config.rollout.max_batch
        self.vocab_limit = vocab_limit or spec.vocab_size
        self.max_cache_tokens = config.rollout.max_cache_tokens
        self.role = make_role("rollout", layout)
        dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
        self.model = None
        if self.role.is_member:
            self.model = build_chunks(spec, self.role, dtype, local_layers=True)[0]
            self.model.eval().requires_grad_(False)

    def update_weights(self, student: Student) -> None:
        """One parameter at a time: gathered from the student's shards, cut into this engine's."""
        if self.model is not None:
            load_stream([self.model], self.spec, self.role, student.hf_weights())

    def load(self, read: Callable[[str], torch.Tensor], source: str) -> None:
        """Fills the engine from HF tensors instead, e.g. with the teacher's weights or a finished run's.

        Raises:
            ValueError: the weights are not of this architecture.
        """
        if self.model is not None:
            load_hf([self.model], self.spec, self.role, read, source)

    def generate(
        self, requests: list[Request], sampling: SamplingParams, give_up: Callable[[], bool] | None = None
    ) -> list[Rollout]:
        """See `RolloutEngine`. Raises ValueError if a prompt leaves no room for a response."""
        limit = self.spec.max_positions
        for request in requests:
            if len(request.prompt_ids) >= limit:
                raise ValueError(
                    f"a prompt of {len(request.prompt_ids)} tokens leaves no room in the model's {limit} positions; "
                    f"drop or shorten it: {str(request.prompt)[:80]!r}"
                )
        mine = self._generate_mine(requests, sampling, give_up) if self.model is not None else {}
        # Ranks can be done hours apart: those of a dedicated teacher wait out a whole validation set. No collective's
        # timeout should end that; where a rank has died, the watchdog ends the others.
        wait_for_all()
        if give_up is not None and agree(device(), mine is None)[0]:
            raise GenerationCancelled
        parts: list[dict[int, Generated] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, mine)
        everything = {index: generated for part in parts for index, generated in (part or {}).items()}
        return [_rollout(request, everything[i]) for i, request in enumerate(requests)]

    def _generate_mine(
        self, requests: list[Request], sampling: SamplingParams, give_up: Callable[[], bool] | None
    ) -> dict[int, Generated] | None:
        """This data-parallel rank's part, on its first tensor rank; None if it was given up."""
        at, data = self.role.coords, self.role.layout.data
        assert at is not None and self.model is not None
        # similar lengths together, dealt out over the data-parallel ranks
        order = sorted(range(len(requests)), key=lambda i: (len(requests[i].prompt_ids), i))[at.data :: data]
        results: dict[int, Generated] = {}
        enough = None if give_up is None else lambda: self._together(give_up())
        for batch in self._batches(order, requests, sampling.max_new_tokens):
            if enough is not None and enough():
                return None
            prompts = [requests[i].prompt_ids for i in batch]
            # each response has its own limit, whatever it is batched with
            limits = [min(sampling.max_new_tokens, self.spec.max_positions - len(prompt)) for prompt in prompts]
            steps = max(limits)
            uniforms = np.stack([np.random.default_rng([*sampling.key, i]).random(steps) for i in batch])
            generated = generate_batch(
                self.model,
                self.vocab_limit,
                prompts,
                uniforms,
                limits,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                eos_ids=self.eos_ids,
                is_cancelled=enough,
            )
            if generated is None:
                return None
            results.update(zip(batch, generated, strict=True))
        return results if at.tensor == 0 else {}

    def _together(self, flag: bool) -> bool:
        """Whether a tensor rank says so: they sample in step."""
        return agree(device(), flag, group=self.role.groups.tp)[0]  # type: ignore[attr-defined, union-attr]

    def _batches(self, order: list[int], requests: list[Request], max_new_tokens: int) -> list[list[int]]:
        """Requests in groups whose KV cache, at full length, stays within `rollout.max_cache_tokens`."""
        batches: list[list[int]] = []
        longest = 0
        for i in order:
            length = min(len(requests[i].prompt_ids) + max_new_tokens, self.spec.max_positions)
            longest = max(longest, length)
            full = not batches or len(batches[-1]) >= self.max_batch
            if full or (len(batches[-1]) + 1) * longest > self.max_cache_tokens:
                batches.append([])
                longest = length
            batches[-1].append(i)
        return batches


def _rollout(request: Request, generated: Generated) -> Rollout:
    return Rollout(
        prompt_ids=request.prompt_ids,
        response_ids=generated.ids,
        prompt=request.prompt,
        data_source=request.data_source,
        answer=request.answer,
        finish_reason="stop" if generated.finished else "length",
    )
