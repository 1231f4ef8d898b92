"""The configuration schema: one dataclass per group of keys, with the type, range and default of every key.

A key is documented below its field, and the type around it says whether a run that goes on may change it; `keys.py`
reads both. Pydantic checks types and ranges, and a group's own validator the rules between keys of that group. Rules
between groups are in `checks.py`; rules that need the models' config.json are in `setup/preflight.py`.
"""

from __future__ import annotations

from dataclasses import dataclass as frozen_dataclass
from dataclasses import field
from typing import Any, Literal

from pydantic.dataclasses import dataclass

from nemo_oprd.config.bridge_schema import AlignmentConfig, BridgeConfig
from nemo_oprd.config.data_schema import DataConfig
from nemo_oprd.config.logging_schema import EvaluationConfig, LoggingConfig
from nemo_oprd.config.loss_schema import AdaptiveConfig, LossConfig, OutputLossConfig, RepresentationLossConfig
from nemo_oprd.config.model_schema import ModelSource, ParallelConfig, StudentConfig, TeacherConfig, TeacherSource
from nemo_oprd.config.rollout_schema import RolloutConfig, VllmConfig
from nemo_oprd.config.server_schema import ServerConfig
from nemo_oprd.config.teacher_kinds import SERVED, TEACHER_KINDS
from nemo_oprd.config.train_schema import TrainConfig
from nemo_oprd.config.types import STRICT, FilePath, Fixed, Free, Learned, NonNegativeInt
from nemo_oprd.layout import Layout

__all__ = [
    "AdaptiveConfig",
    "Config",
    "EvaluationConfig",
    "LoggingConfig",
    "ModelSource",
    "OutputLossConfig",
    "ParallelConfig",
    "RepresentationLossConfig",
    "RolloutConfig",
    "ServerConfig",
    "StudentConfig",
    "TeacherConfig",
    "TeacherSource",
    "TrainConfig",
    "VllmConfig",
]


@frozen_dataclass(frozen=True)
class OwnConversation:
    """How a teacher's conversation differs from the student's, by the keys with these names.

    Attributes:
        chat_template_args: all that its template gets, those of `data` included.
        is_set: whether any of the keys is set for this teacher.
    """

    system_prompt: str | None
    chat_template: str | None
    chat_template_args: dict[str, Any]
    is_set: bool


@dataclass(config=STRICT)
class Config:
    """A complete run."""

    output: Free[FilePath] = "runs/run"
    """directory of the run"""
    precision: Fixed[Literal["fp32", "bf16"]] = "bf16"
    """of both models and of what is sent between them; optimizer states and gradients are float32"""
    seed: Fixed[NonNegativeInt] = 0
    """of sampling, the order of prompts and everything else that is random"""
    student: StudentConfig = field(default_factory=StudentConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    teachers: Learned[list[TeacherSource]] = field(default_factory=list)
    """several teachers, each with its responses; replaces `teacher.hf_path`"""
    bridge: BridgeConfig = field(default_factory=BridgeConfig)
    alignment: AlignmentConfig = field(default_factory=AlignmentConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    data: Learned[DataConfig] = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluation: Free[EvaluationConfig] = field(default_factory=EvaluationConfig)
    logging: Free[LoggingConfig] = field(default_factory=LoggingConfig)

    @property
    def response_limit(self) -> tuple[str, int]:
        """The key that limits the sampled training responses, and the most tokens of one."""
        k, limit = self.loss.representation.k, self.rollout.max_new_tokens
        stops = self.rollout.stop_after == "supervised" and k < limit
        return ("loss.representation.k", k) if stops else ("rollout.max_new_tokens", limit)

    @property
    def teacher_sources(self) -> list[TeacherSource]:
        """The list of several teachers, or the only teacher, which has all responses."""
        if self.teachers:
            return self.teachers
        model = self.teacher if TEACHER_KINDS[self.teacher.weights].own_model else self.student
        bridge = None if self.bridge.path == "none" else self.bridge.path
        return [TeacherSource(model.hf_path, model.checkpoint, model.provider, bridge=bridge)]

    def distributes_optimizer(self, student: Layout) -> bool:
        """Whether the state of the student's optimizer is divided over its data-parallel ranks."""
        chosen = self.train.distributed_optimizer
        if chosen == "auto":
            # Megatron's plain bf16 optimizer can't save projectors, which are float32
            return student.data * student.context > 1 or (self.bridge.train and self.precision == "bf16")
        return chosen

    def conversation_of(self, number: int) -> OwnConversation:
        """The keys of teacher `number`'s conversation: its own, or those of `teacher`."""
        shared, own = self.teacher, self.teacher_sources[number]
        system_prompt = own.system_prompt if own.system_prompt is not None else shared.system_prompt
        chat_template = own.chat_template or shared.chat_template
        variables = {**shared.chat_template_args, **own.chat_template_args}
        is_set = system_prompt is not None or chat_template is not None or bool(variables)
        return OwnConversation(
            system_prompt, chat_template, {**self.data.chat_template_args, **variables}, is_set=is_set
        )

    def has_own_prompt(self, number: int) -> bool:
        """Whether teacher `number` reads another prompt than the student, before the student's response ids."""
        return self.teacher.prompt is not None or self.conversation_of(number).is_set

    @property
    def own_prompts(self) -> list[int]:
        """The numbers of the teachers that read another prompt than the student."""
        return [number for number in range(len(self.teacher_sources)) if self.has_own_prompt(number)]

    def is_served(self, source: TeacherSource) -> bool:
        """Whether vLLM servers compute this teacher."""
        return SERVED[source.engine or self.teacher.engine]

    @property
    def served_teachers(self) -> list[int]:
        """The numbers of the teachers that vLLM servers compute."""
        return [number for number, source in enumerate(self.teacher_sources) if self.is_served(source)]

    @property
    def started_teachers(self) -> list[int]:
        """The numbers of the teachers whose vLLM servers this run starts."""
        return [number for number in self.served_teachers if not self.teacher_endpoints(number)]

    @property
    def has_own_teachers(self) -> bool:
        """Whether ranks of this job compute a teacher."""
        return len(self.served_teachers) < len(self.teacher_sources)

    @property
    def teacher_server_share(self) -> float:
        """The fraction of a GPU's memory that one teacher's server takes; `auto` is divided among those of a GPU."""
        settings = self.teacher.vllm
        if settings.gpu_memory_utilization != "auto" or settings.placement == "dedicated":
            return settings.memory_share
        return settings.memory_share / max(1, len(self.started_teachers))

    def teacher_endpoints(self, number: int) -> list[str]:
        """The addresses of the servers of teacher `number` that somebody else runs; empty: this run starts them."""
        own = self.teacher_sources[number].endpoints
        return self.teacher.vllm.endpoints if own is None else own
