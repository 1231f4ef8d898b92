"""The rollout engine that a configuration asks for."""

from __future__ import annotations

from pathlib import Path

import torch

from nemo_oprd.config.schema import Config
from nemo_oprd.layout import Layout
from nemo_oprd.models import ModelSpec
from nemo_oprd.rollout.engine import RolloutEngine
from nemo_oprd.rollout.in_process.engine import MegatronEngine
from nemo_oprd.rollout.vllm.launch import check_head_size


def check_on_device(config: Config, spec: ModelSpec) -> None:
    """Raises ValueError if the engine can't sample from the model on this machine; needs no process group.

    Args:
        spec: the architecture of the model to sample from.
    """
    if config.rollout.engine == "vllm" and not config.rollout.vllm.endpoints and not torch.cuda.is_available():
        check_head_size(spec)


def make_engine(
    config: Config,
    spec: ModelSpec,
    directory: Path,
    ranks: Layout,
    eos_ids: tuple[int, ...],
    vocab_limit: int | None = None,
) -> RolloutEngine:
    """The engine of `config.rollout.engine`, without weights until `update_weights` or `load`. Every rank calls this.

    An engine that is a program of its own is started and not waited for, so that it starts while models are loaded.

    Args:
        spec: the architecture of the model to sample from.
        directory: where the model's config.json is.
        ranks: the layout of the student, whose ranks the engine may use.
        eos_ids: ids that end a response.
        vocab_limit: only ids below this one are sampled; None: all ids of the model's vocabulary.

    Raises:
        ValueError: the engine does not fit the ranks or the model, or it is not installed.
    """
    if config.rollout.engine == "vllm":
        from nemo_oprd.rollout.vllm.engine import VllmEngine

        return VllmEngine(config, spec, directory, ranks, eos_ids, vocab_limit)
    return MegatronEngine(config, spec, ranks, eos_ids, vocab_limit)
