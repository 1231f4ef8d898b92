"""A table of the rollout engines by name: the checks of each, its ranks and GPUs, and its constructor.

The table imports no torch; `make_engine` imports an engine's own module. No other module compares the names of engines.
`config/teacher_kinds.py` lists the fields of a response that each engine records, because configurations are checked
against them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from nemo_oprd.batch.layout import Layout
from nemo_oprd.config.rollout_schema import RolloutConfig
from nemo_oprd.config.schema import Config
from nemo_oprd.config.teacher_kinds import EngineName
from nemo_oprd.models import ModelSpec
from nemo_oprd.run.provider import BRIDGE
from nemo_oprd.vllm.endpoint import check_endpoints
from nemo_oprd.vllm.launch import check_head_size, check_model, find_python
from nemo_oprd.vllm.placement import dedicated_ranks

if TYPE_CHECKING:
    from nemo_oprd.data.token_ids import TokenIds
    from nemo_oprd.rollout.engine import RolloutEngine

# the arguments of `make_engine`
Build: TypeAlias = "Callable[[Config, ModelSpec, Path, Layout, tuple[int, ...], TokenIds | None], RolloutEngine]"


@dataclass(frozen=True)
class Groups:
    """The groups of GPUs, or the servers, that sample in parallel, each on `gpus` GPUs and with the whole model.

    Attributes:
        placement: on the student's GPUs, on ranks that hold nothing else, or on external servers.
        memory: the fraction of a GPU's memory that a server takes; 0 for an engine in the trainer's processes.
    """

    count: int
    gpus: int
    placement: Literal["colocated", "dedicated", "elsewhere"] = "colocated"
    memory: float = 0.0


@dataclass(frozen=True)
class EngineKind:
    """One rollout engine.

    Attributes:
        label: its name in reports.
        key: the group of configuration keys with its settings; `KEY.tensor` is the number of GPUs of a group.
        in_process: it samples in the trainer's processes from a copy of the student, in their remaining memory.
        check: raises ValueError unless it is installed, or given addresses, and can run the model; imports no torch.
        check_device: raises ValueError if it can't run the model on this machine; needs no process group.
        trainer_ranks: returns how many of the given ranks hold models of the trainer; the engine has the ranks after
            them. Raises ValueError if none remains.
        groups: returns the groups that sample for a student on the given number of ranks.
        build: makes the engine, from the arguments of `make_engine`.
        sampled_with: entries that identify the engine in files about kept responses. Files of versions that had only
            the in-process engine lack them, so its entries are empty.
    """

    label: str
    key: str
    in_process: bool
    check: Callable[[RolloutConfig, ModelSpec], None]
    check_device: Callable[[RolloutConfig, ModelSpec], None]
    trainer_ranks: Callable[[RolloutConfig, int], int]
    groups: Callable[[RolloutConfig, int], Groups]
    build: Build
    sampled_with: Mapping[str, str] = field(default_factory=dict)

    def check_here(self, rollout: RolloutConfig, spec: ModelSpec) -> None:
        """Raises ValueError unless the engine can run the model on this machine: `check` and `check_device`."""
        self.check(rollout, spec)
        self.check_device(rollout, spec)


def make_engine(
    config: Config,
    spec: ModelSpec,
    directory: Path,
    ranks: Layout,
    eos_ids: tuple[int, ...],
    sampled: TokenIds | None = None,
) -> RolloutEngine:
    """Makes the engine `config.rollout.engine`, without weights until `update_weights` or `load`. All ranks call this.

    An engine that is a separate program starts in the background, while models are loaded.

    Args:
        spec: the architecture of the model to sample from.
        directory: where the model's config.json is.
        ranks: the layout of the student, whose ranks the engine may use.
        eos_ids: ids that end a response.
        sampled: the ids that may be sampled; None: all rows of the model's embedding, even those without a token.

    Raises:
        ValueError: the engine does not fit the ranks or the model, or it is not installed.
    """
    kind = ENGINES[config.rollout.engine]
    kind.check_here(config.rollout, spec)
    return kind.build(config, spec, directory, ranks, eos_ids, sampled)


def _check_family(rollout: RolloutConfig, spec: ModelSpec) -> None:
    if not spec.family.own and rollout.expert > 1:
        raise ValueError(
            f"rollout.expert={rollout.expert}, but the in-process engine samples {spec.model_type} models, which "
            "Megatron-Bridge builds, without a cache and each rank by itself; expected 1: remove rollout.expert, or "
            "set rollout.engine=vllm"
        )


def _build_in_process(
    config: Config, spec: ModelSpec, directory: Path, ranks: Layout, eos_ids: tuple[int, ...], sampled: TokenIds | None
) -> RolloutEngine:
    from nemo_oprd.rollout.in_process_engine import MegatronEngine

    given: dict[str, Any] = {"precision": config.precision, "router_dtype": config.student.router_dtype}
    if not spec.family.own:
        from nemo_oprd.megatron.megatron_bridge.build import make_provider

        given["provider"] = make_provider("rollout.engine=megatron: provider", BRIDGE, directory)
    return MegatronEngine(config.rollout, spec, ranks, eos_ids, sampled, **given)


def _check_vllm(rollout: RolloutConfig, spec: ModelSpec) -> None:
    check_model(rollout.vllm.tensor, spec)
    check_endpoints(rollout.vllm.endpoints, rollout.vllm.token_file)
    if not rollout.vllm.endpoints:
        find_python(rollout.vllm)


def _check_vllm_device(rollout: RolloutConfig, spec: ModelSpec) -> None:
    import torch

    colocated = not rollout.vllm.endpoints and rollout.vllm.placement == "colocated"
    if rollout.max_lag and colocated and torch.cuda.is_available():
        raise ValueError(
            f"rollout.max_lag={rollout.max_lag} with rollout.vllm.placement=colocated: servers on the student's GPUs "
            "can't sample while these compute an update; expected GPUs of their own: set "
            "rollout.vllm.placement=dedicated, or rollout.max_lag=0"
        )
    if not rollout.vllm.endpoints and not torch.cuda.is_available():
        check_head_size(spec)


def _ranks_without_servers(rollout: RolloutConfig, ranks: int) -> int:
    servers = dedicated_ranks(rollout.vllm)
    if servers >= ranks:
        raise ValueError(
            f"rollout.vllm.placement=dedicated with {servers} rank(s) of servers leaves none of the {ranks} "
            "rank(s) for the student; start more ranks, or use rollout.vllm.placement=colocated"
        )
    return ranks - servers


def _vllm_servers(rollout: RolloutConfig, ranks: int) -> Groups:
    vllm = rollout.vllm
    if vllm.endpoints:
        return Groups(len(vllm.endpoints), vllm.tensor, "elsewhere", vllm.memory_share)
    dedicated = dedicated_ranks(vllm) // vllm.tensor
    count = dedicated or vllm.replicas or max(1, ranks // vllm.tensor)
    return Groups(count, vllm.tensor, vllm.placement, vllm.memory_share)


def _build_vllm(*arguments: Any) -> RolloutEngine:
    from nemo_oprd.vllm.engine import VllmEngine

    return VllmEngine(*arguments)


ENGINES: dict[EngineName, EngineKind] = {
    "megatron": EngineKind(
        label="in-process engine",
        key="rollout",
        in_process=True,
        check=_check_family,
        check_device=lambda rollout, spec: None,
        trainer_ranks=lambda rollout, ranks: ranks,
        groups=lambda rollout, ranks: Groups(ranks // rollout.tensor, rollout.tensor),
        build=_build_in_process,
    ),
    "vllm": EngineKind(
        label="vLLM",
        key="rollout.vllm",
        in_process=False,
        check=_check_vllm,
        check_device=_check_vllm_device,
        trainer_ranks=_ranks_without_servers,
        groups=_vllm_servers,
        build=_build_vllm,
        sampled_with={"engine": "vllm"},
    ),
}
