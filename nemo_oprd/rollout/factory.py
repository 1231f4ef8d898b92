"""The registry of rollout engines, by their names in `rollout.engine`."""

from __future__ import annotations

from nemo_oprd.config.schema import Config
from nemo_oprd.layout import Layout
from nemo_oprd.models import ModelSpec
from nemo_oprd.rollout.engine import RolloutEngine
from nemo_oprd.rollout.megatron_engine import MegatronEngine

ENGINES = {"megatron": MegatronEngine}


def make_engine(
    config: Config, spec: ModelSpec, ranks: Layout, eos_ids: tuple[int, ...], vocab_limit: int | None = None
) -> RolloutEngine:
    """The engine of `config.rollout.engine`, without weights until `update_weights` or `load`. Every rank calls this.

    Args:
        spec: the architecture of the model to sample from.
        ranks: the layout whose ranks the engine may use.
        eos_ids: ids that end a response.
        vocab_limit: only ids below this one are sampled; None: all ids of the model's vocabulary.

    Raises:
        ValueError: there is no such engine, or its layout does not fit the ranks or the model.
    """
    if config.rollout.engine not in ENGINES:
        raise ValueError(f"rollout.engine={config.rollout.engine}: expected one of {sorted(ENGINES)}; choose one")
    return ENGINES[config.rollout.engine](config, spec, ranks, eos_ids, vocab_limit)
