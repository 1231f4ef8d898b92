"""From a configuration to the roles of this process: layouts, groups, models. Shared by train, verify and evaluate."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from nemo_oprd.batch import BatchPlan
from nemo_oprd.config import Config, ModelConfig
from nemo_oprd.families import ModelSpec, read_model_spec
from nemo_oprd.layout import Layout
from nemo_oprd.megatron.model import build_chunks
from nemo_oprd.megatron.parallel import Role, init_distributed, make_role, seed_everything
from nemo_oprd.megatron.student import StepResult, Student
from nemo_oprd.megatron.torch_dist import hf_directory
from nemo_oprd.megatron.weights import HFCheckpoint, load_hf
from nemo_oprd.objective import Objective
from nemo_oprd.teacher.runner import Teacher
from nemo_oprd.tokens.tokenizer import Tokenizer
from nemo_oprd.types import Rollout, TeacherTargets


@dataclass
class System:
    """The two models of a run on this rank, and the step they make together."""

    config: Config
    objective: Objective
    student: Student
    teacher: Teacher

    def accumulate(self, rollouts: list[Rollout], *, whole_gradients: bool = False) -> StepResult | None:
        """Teacher forward, transport, student forward/backward on one batch. None on ranks outside the student."""
        student_plan, targets = self.teach(rollouts)
        return self.student.forward_backward(rollouts, student_plan, targets, whole_gradients=whole_gradients)

    def teach(self, rollouts: list[Rollout]) -> tuple[BatchPlan, TeacherTargets]:
        """The student's plan of the batch, and the teacher's targets for it."""
        table = self.objective.rows(rollouts)
        lengths = [rollout.length for rollout in rollouts]
        budget = self.config.train.tokens_per_microbatch
        teacher_plan = BatchPlan.of(table, lengths, self.teacher.role.layout, budget)
        student_plan = BatchPlan.of(table, lengths, self.student.role.layout, budget)
        targets = self.teacher.targets(
            rollouts, teacher_plan, student_plan, self.student.role, self.objective.student.num_layers
        )
        return student_plan, targets


def model_directory(model: ModelConfig) -> Path:
    """Where a model's config.json and tokenizer are: the HF directory, or the copy inside a Megatron checkpoint.

    Raises:
        ValueError: the checkpoint is none.
    """
    return Path(model.hf_path) if model.hf_path else hf_directory(Path(str(model.checkpoint)))


def make_layouts(config: Config, world_size: int) -> tuple[Layout, Layout]:
    """(student layout, teacher layout) on `world_size` ranks.

    Raises:
        ValueError: the sizes don't fit the ranks.
    """
    teacher = config.teacher.parallel
    if config.teacher.placement == "colocated":
        return (
            config.student.parallel.layout(world_size, 0, "student"),
            teacher.layout(world_size, 0, "teacher"),
        )
    ranks = config.teacher.ranks or teacher.tensor * teacher.pipeline * teacher.context
    if not 0 < ranks < world_size:
        raise ValueError(
            f"teacher.placement=dedicated with {ranks} teacher rank(s) leaves none of the {world_size} rank(s) for the "
            "student; start more ranks or use teacher.placement=colocated"
        )
    return (
        config.student.parallel.layout(world_size - ranks, 0, "student"),
        teacher.layout(ranks, world_size - ranks, "teacher"),
    )


def make_system(config: Config) -> System:
    """Joins the process group and builds both models. Every check that needs no weights comes first.

    Raises:
        ValueError: bad configuration, models or weights.
    """
    student_spec = read_model_spec(model_directory(config.student))
    teacher_spec = read_model_spec(model_directory(config.teacher))
    objective = Objective.of(config, student_spec, teacher_spec)
    student_layout, teacher_layout = make_layouts(config, world_size())
    for role, spec, layout in (("student", student_spec, student_layout), ("teacher", teacher_spec, teacher_layout)):
        spec.check_tensor_parallel(layout.tensor, f"{role}.parallel.tensor")
        layout.layers_per_stage(spec.num_layers)
    student_spec.check_tensor_parallel(config.rollout.tensor, "rollout.tensor")
    check_rollout_ranks(config, student_layout.size)
    check_recompute(config, student_spec.num_layers)
    read_student, read_teacher = open_model(config.student, student_spec), open_model(config.teacher, teacher_spec)
    init_distributed()
    student_role = make_role("student", student_layout)
    teacher_role = make_role("teacher", teacher_layout)
    seed_everything(config.seed, student_role if student_role.here else teacher_role)
    student = Student(config, student_role, objective, read_student)
    teacher = make_teacher(config, teacher_spec, teacher_role, objective, read_teacher)
    return System(config, objective, student, teacher)


def world_size() -> int:
    """Ranks of this job, also before the process group is joined."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def check_vocabulary(tokenizer: Tokenizer, spec: ModelSpec, source: Path) -> None:
    """Raises ValueError where the tokenizer makes ids, or stops at ids, that the model doesn't know."""
    largest = max(tokenizer.vocab_size - 1, *tokenizer.eos_ids)
    if largest >= spec.vocab_size:
        raise ValueError(
            f"{source}: the tokenizer knows ids up to {largest} (stop ids {list(tokenizer.eos_ids)}), but "
            "config.json says "
            f"vocab_size={spec.vocab_size}; expected ids 0..{spec.vocab_size - 1}: copy the tokenizer of this very "
            "model"
        )


def check_rollout_ranks(config: Config, ranks: int) -> None:
    """Raises ValueError unless `rollout.tensor` divides the student's ranks."""
    if ranks % config.rollout.tensor:
        raise ValueError(
            f"rollout.tensor={config.rollout.tensor} does not divide the student's {ranks} rank(s); choose a divisor"
        )


def check_recompute(config: Config, num_layers: int) -> None:
    """Raises ValueError where more layers are to be recomputed at a time than the model has."""
    if config.student.recompute_num_layers > num_layers:
        raise ValueError(
            f"student.recompute_num_layers={config.student.recompute_num_layers}: expected at most the model's "
            f"{num_layers} layers; choose 1 to {num_layers}"
        )


def open_model(model: ModelConfig, spec: ModelSpec) -> Callable[[str], torch.Tensor]:
    """A function that reads one HF-named tensor of a model, from either kind of source.

    Raises:
        ValueError: a file is missing or damaged, or holds other tensors than a model of `spec` has.
    """
    from nemo_oprd.megatron.convert import MegatronCheckpoint, check_source

    if model.hf_path:
        checkpoint = HFCheckpoint(model.hf_path)
        check_source(checkpoint, spec)
        return checkpoint.__getitem__
    return MegatronCheckpoint(str(model.checkpoint)).__getitem__


def make_teacher(
    config: Config, spec: ModelSpec, role: Role, objective: Objective, read: Callable[[str], torch.Tensor]
) -> Teacher:
    """The frozen teacher, no deeper than needed and without its LM head."""
    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    chunks = None
    if role.here:
        depth = max(objective.layers.values())
        chunks = build_chunks(spec, role, dtype, depth=depth, head=False)
        for chunk in chunks:
            chunk.requires_grad_(False)
            chunk.eval()
        load_hf(chunks, spec, role, read, str(model_directory(config.teacher)))
    return Teacher(spec, role, chunks, objective.layers, objective.teacher_final, dtype)
