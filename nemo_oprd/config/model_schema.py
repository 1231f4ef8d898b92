"""The keys of a model: its source, its builder and its layout; and the keys of the student and of teachers."""

from __future__ import annotations

from dataclasses import field
from typing import Any, Literal

from pydantic import field_validator, model_validator
from pydantic.dataclasses import dataclass

from nemo_oprd.batch.layout import Layout
from nemo_oprd.config.rollout_schema import TeacherServerConfig
from nemo_oprd.config.teacher_kinds import TeacherEngine, TeacherWeights
from nemo_oprd.config.types import (
    STRICT,
    Decay,
    FilePath,
    Free,
    Learned,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Size,
)
from nemo_oprd.losses.import_path import is_import_path


@dataclass(config=STRICT, frozen=True)
class ParallelConfig:
    """Parallel sizes of one role. The data-parallel size follows from the number of ranks that the role has."""

    tensor: Size = 1
    """tensor-parallel size"""
    sequence: bool = False
    """sequence parallelism within the tensor-parallel ranks"""
    pipeline: Size = 1
    """pipeline-parallel size"""
    virtual_pipeline: Size = 1
    """model chunks per pipeline rank (interleaved schedule); 1 is off"""
    context: Size = 1
    """context-parallel size"""
    first_stage_layers: Size | None = None
    """layers of the first pipeline stage; null: as many as the others"""
    last_stage_layers: Size | None = None
    """layers of the last pipeline stage; null: as many as the others"""
    expert: Size = 1
    """expert-parallel size: the experts of a layer are split over so many ranks of a stage"""
    expert_tensor: Size = 1
    """tensor-parallel size of each expert, instead of parallel.tensor"""
    dispatcher: Literal["alltoall", "allgather", "deepep"] = "alltoall"
    """how tokens travel to the ranks of their experts"""

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
        """Returns the role's layout on `ranks` consecutive ranks. Raises ValueError if the sizes don't fit them."""
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
            data=ranks // needed,
            pipeline=self.pipeline,
            virtual_pipeline=self.virtual_pipeline,
            sequence=self.sequence and self.tensor > 1,
            first_rank=first_rank,
            first_stage_layers=self.first_stage_layers,
            last_stage_layers=self.last_stage_layers,
            expert=self.expert,
            expert_tensor=self.expert_tensor,
            dispatcher=self.dispatcher,
        )


def _check_system_prompt(text: str | None, key: str) -> str | None:
    if text is not None and not text.strip():
        raise ValueError(f"{key}={text!r}: expected text that is not blank; write it, or set null")
    return text


@dataclass(config=STRICT, frozen=True)
class ModelSource:
    """The source of a model: a Hugging Face directory, or a Megatron checkpoint."""

    hf_path: Learned[FilePath | None] = None
    """directory of a Hugging Face model; beside `checkpoint`, only its config.json and tokenizer"""
    checkpoint: Learned[FilePath | None] = None
    """Megatron checkpoint of `checkpoint_tools/hf_to_megatron.py`, a run, or Megatron-Bridge"""
    provider: Learned[str] = "own"
    """who builds the model: own, bridge (Megatron-Bridge), or MODULE:FUNCTION of a recipe

    Megatron-Bridge has families that this project does not have. The function is a recipe of Megatron-Bridge, or one of
    yours that returns a recipe or its model provider (docs/nemo.md).
    """

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
        """Returns the path of the weights."""
        return str(self.checkpoint or self.hf_path)


@dataclass(config=STRICT, frozen=True)
class ModelConfig(ModelSource):
    """A model and its layout."""

    parallel: Free[ParallelConfig] = field(default_factory=ParallelConfig)


@dataclass(config=STRICT, frozen=True)
class StudentConfig(ModelConfig):
    """The trained model. The keys of routers are for a student with experts (docs/experts.md)."""

    recompute: Free[Literal["none", "selective", "full"]] = "none"
    """which activations are computed again in the backward pass"""
    recompute_method: Free[Literal["uniform", "block"]] = "uniform"
    """Megatron's distribution of full recomputation over layers"""
    recompute_num_layers: Free[PositiveInt] = 1
    """layers per recomputed group (uniform), or recomputed layers per stage (block)"""
    router_aux_loss: Learned[NonNegativeFloat] = 0.0
    """weight of the routers' load-balancing loss, for a student with experts"""
    router_z_loss: Learned[NonNegativeFloat] = 0.0
    """weight of the routers' z-loss"""
    router_dtype: Learned[Literal["fp32"] | None] = None
    """fp32: the routers compute in float32; null: in `precision`"""
    router_replay: Learned[bool] = False
    """tokens visit in training the experts that they visited while they were sampled"""

    @model_validator(mode="after")
    def _check(self) -> StudentConfig:
        if self.recompute != "full" and (self.recompute_num_layers, self.recompute_method) != (1, "uniform"):
            raise ValueError(
                f"student.recompute_num_layers={self.recompute_num_layers} and student.recompute_method="
                f"{self.recompute_method} are for student.recompute=full, but it is {self.recompute}; leave them out"
            )
        return self


@dataclass(config=STRICT, frozen=True)
class TeacherConfig(ModelConfig):
    """The model that the student learns from. With `teachers`, the keys besides the model hold for each of them."""

    engine: Learned[TeacherEngine] = "megatron"
    """who computes its states: Megatron in this job, or vLLM servers, which run any family that vLLM has

    With `vllm` the run starts servers that load the model from `hf_path` (docs/teacher_placement.md).
    """
    vllm: TeacherServerConfig = field(default_factory=TeacherServerConfig)
    placement: Free[Literal["colocated", "dedicated"]] = "colocated"
    """on the student's ranks, or on the last ranks of the job"""
    ranks: Free[Size | None] = None
    """ranks of a dedicated teacher; null: tensor * pipeline * context"""
    reads: Learned[Literal["ids", "text"]] = "ids"
    """the student's token ids, or the text in the teacher's own tokens and chat template

    Where the tokenizers differ, `text` is the only choice (docs/tokenizers.md).
    """
    prompt: Learned[str | None] = None
    """template of the prompt that the teacher reads: {prompt}, {answer}, {hint}; null: the student's

    The template replaces the last message, for which {prompt} stands; {answer} and {hint} are fields of the prompt
    file.
    """
    system_prompt: Learned[str | None] = None
    """system message that the teacher reads, in place of a row's or before all others; null: the student's

    With this key or one of the next two, the teacher reads a prompt of its own, in its own chat template.
    """
    chat_template: Learned[FilePath | None] = None
    """Jinja file in place of the chat template of the teacher's tokenizer; null: its own"""
    chat_template_args: Learned[dict[str, Any]] = field(default_factory=dict)
    """variables for the teacher's chat template, merged over `data.chat_template_args`"""
    weights: Learned[TeacherWeights] = "own"
    """its own, or the student's: current, moving average, or before training

    With others than its own the student is its own teacher (self-distillation). `student` makes no second copy. `ema`
    averages over the updates. With these two the teacher has the student's layout; `initial` weights are frozen.
    """
    ema_decay: Learned[Decay] = 0.999
    """decay of the moving average with `weights: ema`"""
    resident_microbatches: Free[Literal["auto"] | PositiveInt | None] = None
    """microbatches with targets in memory at a time; null: all; auto: what fits

    Microbatches of the student, of a step.
    """
    offload: Free[bool] = False
    """keep the weights in host memory while the teacher computes nothing

    Of several teachers one at a time is then in device memory; without it all of them are.
    """

    @model_validator(mode="after")
    def _check(self) -> TeacherConfig:
        if self.prompt is not None and "{prompt}" not in self.prompt:
            raise ValueError(
                f"teacher.prompt={self.prompt!r}: expected a text with {{prompt}}, which stands for what the student "
                "reads; put it in"
            )
        _check_system_prompt(self.system_prompt, "teacher.system_prompt")
        if self.placement == "colocated" and self.ranks is not None:
            raise ValueError(f"teacher.ranks={self.ranks} is for teacher.placement=dedicated; set it to null")
        return self


@dataclass(config=STRICT, frozen=True)
class TeacherSource(ModelSource):
    """One of several teachers: its model, and the responses that it teaches."""

    data_sources: Learned[list[str] | None] = None
    """data sources whose responses it teaches; null: all that no other teacher has"""
    weight: Learned[PositiveFloat] = 1.0
    """multiplies the loss of its responses"""
    bridge: Learned[FilePath | None] = None
    """directory of its bridge; null: it has the student's shape"""
    name: Free[str | None] = None
    """its name in metrics; null: its data sources"""
    system_prompt: Learned[str | None] = None
    """system message that it reads; null: `teacher.system_prompt`"""
    chat_template: Learned[FilePath | None] = None
    """Jinja file in place of the chat template of its tokenizer; null: `teacher.chat_template`"""
    chat_template_args: Learned[dict[str, Any]] = field(default_factory=dict)
    """variables for its chat template, merged over `teacher.chat_template_args`"""
    engine: Learned[TeacherEngine | None] = None
    """who computes its states; null: `teacher.engine`"""
    endpoints: Free[list[str] | None] = None
    """addresses of its servers, which somebody else runs; null: `teacher.vllm.endpoints`"""

    @field_validator("system_prompt")
    @classmethod
    def _check_own_system_prompt(cls, text: str | None) -> str | None:
        return _check_system_prompt(text, "system_prompt")

    @property
    def label(self) -> str:
        """Returns the teacher's name in metrics and messages."""
        return self.name or "+".join(self.data_sources or ["others"])
