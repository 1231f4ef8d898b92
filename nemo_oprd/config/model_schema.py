"""The keys of a model: where it comes from, who builds it, and its layout; those of the student. See `schema.py`."""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from pydantic import field_validator, model_validator
from pydantic.dataclasses import dataclass

from nemo_oprd.config.types import STRICT, FilePath, NonNegativeFloat, PositiveInt, Size
from nemo_oprd.layout import Layout
from nemo_oprd.losses.import_path import is_import_path


@dataclass(config=STRICT)
class ParallelConfig:
    """Parallel sizes of one role. The data-parallel size follows from the number of ranks that the role has."""

    tensor: Size = 1
    sequence: bool = False
    pipeline: Size = 1
    virtual_pipeline: Size = 1
    context: Size = 1
    first_stage_layers: Size | None = None
    last_stage_layers: Size | None = None
    expert: Size = 1
    expert_tensor: Size = 1
    dispatcher: Literal["alltoall", "allgather", "deepep"] = "alltoall"

    @model_validator(mode="after")
    def _check(self) -> ParallelConfig:
        if self.expert_tensor > 1 and self.context > 1:
            raise ValueError(
                f"{{key}}.expert_tensor={self.expert_tensor} with {{key}}.context={self.context} is not supported; "
                "expected one of them to be 1: split the experts with {key}.expert instead"
            )
        if self.virtual_pipeline > 1 and self.pipeline == 1:
            raise ValueError(  # {key}: student.parallel or teacher.parallel
                f"{{key}}.virtual_pipeline={self.virtual_pipeline} needs {{key}}.pipeline > 1; raise that, or set "
                "virtual_pipeline to 1"
            )
        return self

    def layout(self, ranks: int, first_rank: int, role: str) -> Layout:
        """The role's layout on `ranks` consecutive ranks.

        Raises:
            ValueError: the sizes don't fit the ranks.
        """
        needed = self.tensor * self.pipeline * self.context
        if ranks % needed:
            raise ValueError(
                f"{role}.parallel: tensor={self.tensor} * pipeline={self.pipeline} * context={self.context} = {needed} "
                f"does not divide the {ranks} rank(s) of this role; start a multiple of {needed} ranks or change sizes"
            )
        stage = ranks // self.pipeline
        if stage % (self.expert * self.expert_tensor):
            raise ValueError(
                f"{role}.parallel: expert={self.expert} * expert_tensor={self.expert_tensor} does not divide the "
                f"{stage} rank(s) of a pipeline stage; choose a divisor, or start more ranks"
            )
        return Layout(
            self.tensor,
            self.context,
            ranks // needed,
            self.pipeline,
            self.virtual_pipeline,
            self.sequence and self.tensor > 1,
            first_rank,
            self.first_stage_layers,
            self.last_stage_layers,
            self.expert,
            self.expert_tensor,
            self.dispatcher,
        )


@dataclass(config=STRICT)
class ModelSource:
    """Where a model comes from: a Hugging Face directory, or a Megatron checkpoint.

    With both, `hf_path` has the checkpoint's config.json and tokenizer only. `provider` says who builds the model (see
    docs/nemo.md): `own` this project, `bridge` Megatron-Bridge, which has families that this project does not have, and
    MODULE:FUNCTION a recipe of Megatron-Bridge, or a function of yours that returns one or its model provider.
    """

    hf_path: FilePath | None = None
    checkpoint: FilePath | None = None
    provider: str = "own"

    @field_validator("provider")
    @classmethod
    def _check_provider(cls, provider: str) -> str:
        if provider not in ("own", "bridge") and not is_import_path(provider):
            raise ValueError(
                f"provider={provider!r}; expected own, bridge, or MODULE:FUNCTION, for example "
                "megatron.bridge.recipes:qwen3_600m_sft_config"
            )
        return provider

    @property
    def path(self) -> str:
        """Where the weights are."""
        return str(self.checkpoint or self.hf_path)


@dataclass(config=STRICT)
class ModelConfig(ModelSource):
    """A model and its layout."""

    parallel: ParallelConfig = field(default_factory=ParallelConfig)


@dataclass(config=STRICT)
class StudentConfig(ModelConfig):
    """The trained model.

    The other keys are for a student with experts (docs/experts.md). `router_aux_loss` and `router_z_loss` are the
    weights of two losses of its routers, the load-balancing loss and the z-loss, in the total loss. With `router_dtype:
    fp32` its routers compute in float32 beside weights in bf16, in training and in the in-process engine. With
    `router_replay` its tokens visit in training the experts that they visited while they were sampled.
    """

    recompute: Literal["none", "selective", "full"] = "none"
    recompute_method: Literal["uniform", "block"] = "uniform"
    recompute_num_layers: PositiveInt = 1
    router_aux_loss: NonNegativeFloat = 0.0
    router_z_loss: NonNegativeFloat = 0.0
    router_dtype: Literal["fp32"] | None = None
    router_replay: bool = False

    @model_validator(mode="after")
    def _check(self) -> StudentConfig:
        if self.recompute != "full" and (self.recompute_num_layers, self.recompute_method) != (1, "uniform"):
            raise ValueError(
                f"student.recompute_num_layers={self.recompute_num_layers} and student.recompute_method="
                f"{self.recompute_method} are for student.recompute=full, but it is {self.recompute}; leave them out"
            )
        return self
