"""From a configuration to the roles of this process: layouts, groups, models. Shared by train, verify and evaluate."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from nemo_oprd.config.schema import Config, ModelSource, TeacherSource
from nemo_oprd.distillation.ema_teacher import EmaTeacher
from nemo_oprd.distillation.objective import Objective
from nemo_oprd.distillation.step import System
from nemo_oprd.distillation.student import Student
from nemo_oprd.distillation.teacher import Teacher
from nemo_oprd.distillation.teacher_routing import Routing
from nemo_oprd.layout import Layout
from nemo_oprd.megatron.model import build_chunks
from nemo_oprd.megatron.parallel import Role, device, init_distributed, make_role, seed_everything
from nemo_oprd.models import ModelSpec, read_model_spec
from nemo_oprd.setup.preflight import check_layouts, model_directory
from nemo_oprd.tokenization.tokenizer import Tokenizer
from nemo_oprd.weights.hf import HFCheckpoint, load_hf


def same_tokenizer(student: ModelSource, teacher: ModelSource) -> bool:
    """Whether both models come with a tokenizer, the same one."""
    directories = [model_directory(model) for model in (student, teacher)]
    try:
        return len({Tokenizer.load(directory).fingerprint() for directory in directories}) == 1
    except ValueError:  # there is none
        return False


@dataclass(frozen=True)
class RunPlan:
    """What a run will build, found to be possible: nothing is loaded, no other rank was asked, no file written."""

    objectives: list[Objective]
    student_layout: Layout
    teacher_layout: Layout
    read_student: Callable[[str], torch.Tensor]
    read_teachers: list[Callable[[str], torch.Tensor]]

    @property
    def objective(self) -> Objective:
        """See `System.objective`."""
        return self.objectives[0]


def make_plan(config: Config, *, fitting: bool = False) -> RunPlan:
    """Every check of models, layouts and weights that is possible before models are built.

    Args:
        fitting: a bridge between the two models is to be made, so their shapes may differ.

    Raises:
        ValueError: bad configuration, models or weights.
    """
    student, teachers = config.student, config.teacher_sources
    student_spec = read_model_spec(model_directory(student))
    specs = [read_model_spec(model_directory(teacher)) for teacher in teachers]
    objectives = [
        Objective.build(
            config, student_spec, spec, partial(same_tokenizer, student, source), source=source, fitting=fitting
        )
        for spec, source in zip(specs, teachers, strict=True)
    ]
    student_layout, teacher_layout = check_layouts(config, student_spec, specs, world_size())
    read_student = open_model(student, student_spec)
    read_teachers = [open_model(teacher, spec) for teacher, spec in zip(teachers, specs, strict=True)]
    return RunPlan(objectives, student_layout, teacher_layout, read_student, read_teachers)


def make_system(config: Config, plan: RunPlan | None = None, *, trainable: bool = True) -> System:
    """Joins the process group and builds both models.

    Args:
        plan: from `make_plan`, if that was done before.
        trainable: the student gets gradients and an optimizer.

    Raises:
        ValueError: as `make_plan`, which is done here unless it was before.
    """
    plan = plan or make_plan(config)
    init_distributed()
    objectives = [objective.on(device()) for objective in plan.objectives]
    student_role = make_role("student", plan.student_layout)
    teacher_role = make_role("teacher", plan.teacher_layout)
    seed_everything(config.seed, student_role if student_role.is_member else teacher_role)
    student = Student(config, student_role, objectives, plan.read_student, plan.read_teachers, trainable=trainable)
    teachers = [
        make_teacher(config, student, teacher_role, objective, read, source)
        for objective, read, source in zip(objectives, plan.read_teachers, config.teacher_sources, strict=True)
    ]
    dist.barrier()  # one may have read its weights from a cold disk: what comes next is counted from here, on all ranks
    return System(config, student, teachers, Routing(tuple(config.teacher_sources)))


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


def open_model(model: ModelSource, spec: ModelSpec) -> Callable[[str], torch.Tensor]:
    """A function that reads one HF-named tensor of a model, from either kind of source.

    Raises:
        ValueError: a file is missing or damaged, or holds other tensors than a model of `spec` has.
    """
    from nemo_oprd.weights.convert import MegatronCheckpoint, check_source

    if model.hf_path:
        checkpoint = HFCheckpoint(model.hf_path)
        check_source(checkpoint, spec)
        return checkpoint.__getitem__
    return MegatronCheckpoint(str(model.checkpoint)).__getitem__


def make_teacher(
    config: Config,
    student: Student,
    role: Role,
    objective: Objective,
    read: Callable[[str], torch.Tensor],
    source: TeacherSource,
) -> Teacher:
    """A teacher, no deeper than needed, without its LM head where nobody asks for it; or the student as its own."""
    weights = config.teacher.weights
    if weights == "student":
        return Teacher(objective, student.role, student.chunks or None, student.dtype)
    chunks = None
    if role.is_member:
        # a moving average is saved, which Megatron does with the head only
        head = weights == "ema" or (objective.output is not None and objective.output.sampled)
        chunks = build_chunks(objective.teacher, role, student.dtype, depth=objective.teacher_depth, head=head)
        for chunk in chunks:
            chunk.requires_grad_(False)
            chunk.eval()
        load_hf(chunks, objective.teacher, role, read, str(model_directory(source)))
    teacher = Teacher(objective, role, chunks, student.dtype)
    if weights == "ema" and chunks is not None:
        student.average = EmaTeacher(chunks, config.teacher.ema_decay)
    if config.teacher.offload:
        teacher.offload()
    return teacher
