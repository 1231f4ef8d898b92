"""The worker of one rank: its updates."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func


class MegatronPolicyWorkerImpl:
    """`train` on the attributes that NeMo-RL's constructor sets: model, cfg, optimizer, dp_size, sampling_params."""

    model: Any
    cfg: dict[str, Any]
    optimizer: Any
    dp_size: int
    sampling_params: Any
    megatron_cfg: Any

    def __init__(
        self,
        config: Any,
        tokenizer: Any,
        weights_path: str | None = None,
        optimizer_path: str | None = None,
        init_optimizer: bool = True,
        init_reference_model: bool = True,
        *,
        worker_sharding_annotations: Any,
        **kwargs: Any,
    ) -> None:
        raise NotImplementedError("the stand-in builds no models")

    def train(
        self,
        data: Any,
        loss_fn: Any,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
        check_dim_skip_keys: Any = None,
    ) -> dict[str, Any]:
        """The updates of this rank's responses, `gbs` over all data-parallel ranks each."""
        own, size = (
            (gbs or self.cfg["train_global_batch_size"]) // self.dp_size,
            mbs or self.cfg["train_micro_batch_size"],
        )
        losses: list[float] = []
        lines: list[dict[str, float]] = []
        firsts = range(0, data.size, own)
        for first in firsts:
            batch = data.slice(first, first + own)
            microbatches = [batch.slice(i, i + size) for i in range(0, own, size)]
            self.model.zero_grad_buffer()
            self.optimizer.zero_grad()
            found = get_forward_backward_func()(
                forward_step_func=partial(self._forward_step, loss_fn, len(microbatches)),
                data_iterator=iter(microbatches),
                model=self.model,
                num_microbatches=len(microbatches),
                seq_length=data["input_ids"].shape[1] * (size if self._packs else 1),
                micro_batch_size=1 if self._packs else size,
                forward_only=eval_mode,
            )
            self.optimizer.step()
            held = [found if parallel_state.is_pipeline_last_stage() else None]
            group = parallel_state.get_pipeline_model_parallel_group()
            dist.broadcast_object_list(held, parallel_state.get_pipeline_model_parallel_last_rank(), group)
            of_update = [{name: value / len(firsts) for name, value in line.items()} for line in held[0]]
            lines += of_update
            losses.append(sum(line["loss"] for line in of_update))
        total = torch.tensor(losses)
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        return {"global_loss": total, "all_mb_metrics": {"loss": [line["loss"] for line in lines]}}

    @property
    def _packs(self) -> bool:
        return bool(self.cfg["sequence_packing"]["enabled"])

    def _forward_step(self, loss_fn: Any, parts: int, microbatches: Iterator[Any], model: Any) -> Any:
        data = next(microbatches)
        inputs, bounds = self._packed(data) if self._packs else (self._whole(data), None)
        output = model(**inputs)
        if self.sampling_params is not None:  # on every pipeline stage, as NeMo-RL 0.7.0 does
            output.div_(self.sampling_params.temperature)

        def loss(output: torch.Tensor) -> Any:
            found = self._loss_per_sequence(loss_fn, data, output, bounds)
            # losses are the same on all context ranks; then the schedule's own scaling is undone
            ranks = parallel_state.get_context_parallel_world_size()
            return found[0] / ranks * parts / ranks, {"loss": found[1]}

        return output, loss

    def _loss_per_sequence(self, loss_fn: Any, data: Any, logits: torch.Tensor, bounds: Any) -> tuple[Any, float]:
        counts = torch.ones(()), torch.ones(())
        if bounds is None:
            value, metrics = loss_fn(data, *counts, logits=logits)
            return value, metrics["loss"]
        value, total, ranks = 0.0, 0.0, parallel_state.get_context_parallel_world_size()
        for i, (start, end) in enumerate(itertools.pairwise(bounds)):
            one = {
                name: rows[:, : end - start] if rows.dim() > 1 and rows.shape[1] > 1 else rows
                for name, rows in data.slice(i, i + 1).items()
            }
            part, metrics = loss_fn(one, *counts, logits=logits[:, start // ranks : end // ranks])
            value, total = value + part, total + metrics["loss"]
        return value, total

    def _whole(self, data: Any) -> dict[str, Any]:
        """An ordinary batch."""
        length = data["input_ids"].shape[1]
        ahead = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
        inputs = {"input_ids": data["input_ids"], "attention_mask": ahead, "loss_mask": data.get("mtp_loss_mask")}
        inputs["position_ids"] = torch.arange(length).expand_as(data["input_ids"])
        return {name: value for name, value in inputs.items() if value is not None}

    def _packed(self, data: Any) -> tuple[dict[str, Any], list[int]]:
        """Sequences without their padding, each filled up to a multiple, of which a context rank has two halves."""
        ranks, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
        multiple = self.cfg["make_sequence_length_divisible_by"]
        lengths = [-(-int(length) // multiple) * multiple for length in data["input_lengths"]]
        if parallel_state.get_pipeline_model_parallel_world_size() > 1:
            whole = data["input_ids"].shape[1] * data.size  # every pack has the same length
            lengths[-1] += whole - sum(lengths)
        bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)

        def pack(rows: torch.Tensor) -> torch.Tensor:
            parts = []
            for row, real, padded in zip(rows, data["input_lengths"], lengths, strict=True):
                full = torch.nn.functional.pad(row[: int(real)], (0, padded - int(real)))
                chunks = full.chunk(2 * ranks)
                parts.append(full if ranks == 1 else torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]]))
            return torch.cat(parts)[None]

        inputs = {"input_ids": pack(data["input_ids"]), "position_ids": None, "attention_mask": None}
        inputs["packed_seq_params"] = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths), cu_seqlens_q_padded=bounds, cu_seqlens_kv_padded=bounds,
        )  # fmt: skip
        if "mtp_loss_mask" in data:
            inputs["loss_mask"] = pack(data["mtp_loss_mask"])
        return inputs, bounds.tolist()

    def prepare_for_training(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to move."""

    def offload_before_refit(self) -> None:
        """Nothing to move."""
