"""The rollout's part of vLLM's workers: receives weights, reports the received tensors, and masks unknown ids.

vLLM imports this module in its own environment, which has nothing of nemo_oprd but this folder, on PYTHONPATH.
vLLM finds it by `--worker-extension-cls`, `--logits-processors` and the name of the weight-transfer backend.

Weights arrive in buckets (`nemo_oprd_buckets.py`) by one of three transports: `file`, a file in shared memory; `group`,
broadcasts in a process group with the trainer's first rank; `ipc`, memory of the trainer's process on the same GPU.
`group` over NCCL and `ipc` have not been run.
"""

from __future__ import annotations

import base64
import datetime
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from nemo_oprd_buckets import Bucket, Digest, receive_all
from nemo_oprd_files import open_bucket
from nemo_oprd_group import Group
from nemo_oprd_reload import begin_reload, finish_reload, give_up_reload, load, not_loaded
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.v1.sample.logits_processor import LogitsProcessor

BACKEND = "nemo_oprd"
# keys of `additional_config`: the id from which on no id is sampled, and runs (first id, end) of more unsampled ids
KNOWN_IDS, GAPS = "nemo_oprd_known_ids", "nemo_oprd_gaps"


@dataclass
class InitInfo(WeightTransferInitInfo):
    """The process group of the transport `group`; without a host there is none.

    The trainer is rank 0. This server's workers have the ranks from `first_rank`.
    """

    host: str = ""
    port: int = 0
    prefix: str = ""
    first_rank: int = 0
    size: int = 0
    backend: str = "gloo"
    timeout_s: float = 60.0


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One bucket in a file or in GPU memory; without either, the workers receive all buckets from the process group.

    `handles` maps the UUID of a GPU to the handle of the trainer's memory there, see `memory_handle` in transport.py.
    """

    path: str = ""
    handles: dict[str, list[Any]] = field(default_factory=dict)
    entries: list[dict[str, Any]] = field(default_factory=list)
    bytes: int = 0


class Receiver(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads buckets into the model and keeps the digest of the tensors since `start_weight_update`."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    group: Any = None
    unfinished = False
    digest = Digest()

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Joins the trainer's process group, if there is one."""
        self.group = None
        if init_info.host:
            parallel = self.parallel_config
            rank = init_info.first_rank + parallel.data_parallel_index * parallel.world_size + parallel.rank
            info, timeout = init_info, datetime.timedelta(seconds=init_info.timeout_s)
            with self._one_answer():
                store = dist.TCPStore(info.host, info.port, is_master=False, timeout=timeout)
                group = Group(
                    store,
                    info.prefix,
                    rank,
                    size=info.size,
                    backend=info.backend,
                    device=self.device,
                    timeout_s=info.timeout_s,
                )
                self.group = group.open()

    @contextmanager
    def _one_answer(self) -> Iterator[None]:
        """Lets only the last worker raise an error of this context.

        vLLM reads the workers' answers up to the first failure, and would take the remaining ones for answers to the
        next call. All workers fail together: they get the same files, and a member that leaves a group ends it for all.
        A tensor that one worker alone failed to load is missing in its digest.
        """
        try:
            yield
        except Exception:
            if self.parallel_config.rank + 1 == self.parallel_config.world_size:
                raise

    def start_weight_update(self) -> None:
        """Prepares vLLM's layerwise reload, which rebuilds a layer once all of its tensors have arrived."""
        self.give_up()
        self.unfinished = True
        begin_reload(self.model)
        self.digest = Digest()

    def give_up(self) -> None:
        """Ends an update that has begun and was never finished.

        Otherwise layers that got no tensor would have no weights, so that a request would end the engine, and layers
        that got some would count these towards the next update.
        """
        if self.unfinished:
            give_up_reload(self.model, self.model_config)
            self.unfinished = False

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Loads one bucket, or all buckets of the group."""
        info = self.parse_update_info(update_info)
        with self._one_answer():
            self.receive_weights(info)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Loads one bucket from a file or from GPU memory, or all buckets of the group; see `UpdateInfo`."""
        if update_info.path:
            self._load(Bucket.of(update_info.entries, map_bucket(update_info.path, update_info.bytes)))
        elif update_info.handles:
            # vLLM keeps the tensors of a layer until all of them have come; the trainer uses the memory again before
            self._load(Bucket.of(update_info.entries, self._shared_memory(update_info).clone()))
            torch.accelerator.synchronize()
        else:
            receive_all(self.group, self._load)

    def _load(self, bucket: Bucket) -> None:
        load(self.model, bucket.tensors())
        self.digest.add(bucket)

    def _shared_memory(self, update_info: UpdateInfo) -> torch.Tensor:
        uuid = str(torch.cuda.get_device_properties(self.device).uuid)
        handle = update_info.handles[uuid]
        fields = [base64.b64decode(part["bytes"]) if isinstance(part, dict) else part for part in handle]
        fields[0] = self.device.index  # the trainer's process may have another index for the same GPU
        storage = torch.UntypedStorage._new_shared_cuda(*fields)
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)[: update_info.bytes]

    def finish_weight_update(self) -> None:
        """Rebuilds the layers that waited, and the packed copies that vLLM's reload leaves stale."""
        finish_reload(self.model, self.model_config)
        self.unfinished = False

    def shutdown(self) -> None:
        """Leaves the process group."""
        self.group = None


def map_bucket(path: str, size: int) -> torch.Tensor:
    """Maps a file in the run's folder; returns its bytes, uint8 [size]. ValueError as `open_bucket`."""
    file = open_bucket(path, size)
    try:
        return torch.from_file(f"/proc/self/fd/{file}", size=size, dtype=torch.uint8)
    finally:
        os.close(file)


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, Receiver)


class WorkerExtension:
    """Methods that vLLM adds to its worker; the trainer calls them by `/collective_rpc`."""

    def nemo_oprd_received(self) -> dict[str, Any]:
        """Returns digest and number of the tensors since `start_weight_update`, and names of modules that got none."""
        engine: Any = self.weight_transfer_engine  # type: ignore[attr-defined]
        stale = not_loaded(engine.model)
        return {"digest": engine.digest.value(), "tensors": len(engine.digest.tensors), "stale": stale}

    def nemo_oprd_give_up(self) -> None:
        """Ends an update that a trainer has begun and never finished, so that the next one can begin."""
        worker: Any = self
        worker.weight_transfer_engine.give_up()  # even after an error, when vLLM considers the update over
        if worker._weight_update_active:
            worker._weight_update_active = False
            worker.weight_transfer_engine.reset_weight_update_target()

    def nemo_oprd_describe(self) -> dict[str, Any]:
        """Describes the model and settings of the server, as far as the trainer relies on them."""
        config = self.vllm_config  # type: ignore[attr-defined]
        model, text = config.model_config, config.model_config.hf_text_config
        keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
        return {
            **{key: getattr(text, key) for key in (*keys, "vocab_size", "model_type")},
            "tie_word_embeddings": bool(text.tie_word_embeddings),
            "rope_parameters": dict(text.rope_parameters or {}),
            "experts": experts_of(text),
            "known_ids": (config.additional_config or {}).get(KNOWN_IDS),
            "gaps": [list(gap) for gap in (config.additional_config or {}).get(GAPS, [])],
            "dtype": str(model.dtype).removeprefix("torch."),
            "max_model_len": model.max_model_len,
            "logprobs_mode": str(model.logprobs_mode),
            "workers": config.parallel_config.world_size,
            "device": self.device.type,  # type: ignore[attr-defined]
        }


def experts_of(config: Any) -> list[Any] | None:
    """Returns the number of experts, experts per token, an expert's feed-forward size, whether weights are normalised.

    None for a model without experts; normalised: divided by their sum. Mixtral's config has other names for the first
    and the third, and lacks the last.
    """
    count = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    if not count:
        return None
    size = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    return [count, config.num_experts_per_tok, size, bool(getattr(config, "norm_topk_prob", True))]


class VocabularyMask(LogitsProcessor):
    """Masks ids without a token: padding, gaps between tokens, or ids unknown to the teacher."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        given = vllm_config.additional_config or {}
        self.known = given[KNOWN_IDS]
        self.gaps = torch.tensor([i for start, end in given.get(GAPS, []) for i in range(start, end)], device=device)

    def is_argmax_invariant(self) -> bool:
        """Returns False: greedy sampling needs the mask, too."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """Does nothing: the mask does not depend on the requests."""

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Masks the logits [requests, vocabulary] in place."""
        logits[:, self.known :] = -float("inf")
        if len(self.gaps):
            logits.index_fill_(1, self.gaps, -float("inf"))
        return logits
