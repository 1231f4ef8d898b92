"""From a configuration to the models of this process: files, layouts, groups, roles. Shared by all commands."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property

import torch.distributed as dist

from nemo_oprd.config.schema import Config, ModelSource
from nemo_oprd.distillation.ema_teacher import EmaTeacher
from nemo_oprd.distillation.models import Models
from nemo_oprd.distillation.objective import Objective
from nemo_oprd.distillation.student import Student
from nemo_oprd.distillation.teacher import Teacher
from nemo_oprd.distillation.teacher_routing import Routing
from nemo_oprd.distillation.watched_metrics import ModelNeeds, WatchedMetrics
from nemo_oprd.layout import Layout
from nemo_oprd.megatron.model import build_chunks
from nemo_oprd.megatron.parallel import Role, device, init_distributed, make_role, seed_everything
from nemo_oprd.models import ModelSpec, read_model_spec
from nemo_oprd.setup.preflight import check_layouts, model_directory
from nemo_oprd.tokenization.tokenizer import Tokenizer
from nemo_oprd.weights.hf import HFCheckpoint, TensorReader, load_hf


class ModelFiles:
    """One model on disk, opened once: its architecture now, its tokenizer and its weights when first asked for.

    Attributes:
        directory: where config.json and the tokenizer are: the HF directory, or the copy inside a Megatron checkpoint.
        spec: the architecture.

    Raises:
        ValueError: there is no such model, or one of an unsupported kind; on access, no tokenizer or no weights.
    """

    def __init__(self, source: ModelSource) -> None:
        self.source = source
        self.directory = model_directory(source)
        self.spec: ModelSpec = read_model_spec(self.directory)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that comes with the model; it makes no ids that the model doesn't know."""
        return Tokenizer.load(self.directory)

    @cached_property
    def read(self) -> TensorReader:
        """Reads one HF-named tensor, from either kind of source.

        Raises:
            ValueError: a file is missing or damaged, or holds other tensors than a model of this architecture has.
        """
        from nemo_oprd.weights.convert import MegatronCheckpoint, check_source

        if self.source.hf_path:
            checkpoint = HFCheckpoint(self.source.hf_path)
            check_source(checkpoint, self.spec)
            return checkpoint.__getitem__
        return MegatronCheckpoint(str(self.source.checkpoint)).__getitem__

    def check_vocabulary(self) -> None:
        """Raises ValueError where the tokenizer makes ids, or stops at ids, that the model doesn't know."""
        tokenizer, spec = self.tokenizer, self.spec
        largest = max(tokenizer.vocab_size - 1, *tokenizer.eos_ids)
        if largest >= spec.vocab_size:
            raise ValueError(
                f"{self.directory}: the tokenizer knows ids up to {largest} (stop ids {list(tokenizer.eos_ids)}), but "
                f"config.json says vocab_size={spec.vocab_size}; expected ids 0..{spec.vocab_size - 1}: copy the "
                "tokenizer of this very model"
            )


class RunFiles:
    """The models of a configuration, each opened once."""

    def __init__(self, config: Config) -> None:
        """Raises ValueError as `ModelFiles`."""
        self.student = ModelFiles(config.student)
        self.teachers = [
            # a student that is its own teacher
            self.student if _same_source(source, config.student) else ModelFiles(source)
            for source in config.teacher_sources
        ]

    def same_tokenizer(self, number: int) -> bool:
        """Whether the student and this teacher come with a tokenizer, the same one."""
        try:
            return self.student.tokenizer.fingerprint() == self.teachers[number].tokenizer.fingerprint()
        except ValueError:  # there is none
            return False


def _same_source(one: ModelSource, other: ModelSource) -> bool:
    return (one.hf_path, one.checkpoint) == (other.hf_path, other.checkpoint)


@dataclass(frozen=True)
class RunPlan:
    """What a run will build, found to be possible: nothing is loaded, no other rank was asked, no file written."""

    files: RunFiles
    objective: Objective
    watched: WatchedMetrics | None
    student_layout: Layout
    teacher_layout: Layout

    @property
    def needs(self) -> ModelNeeds:
        """What the models must be able to compute."""
        return ModelNeeds.build(self.objective, self.watched)


def make_plan(config: Config, files: RunFiles | None = None, *, fitting: bool = False) -> RunPlan:
    """Every check of models, layouts and weights that is possible before models are built.

    Args:
        files: the models, if they were opened before.
        fitting: a bridge between the two models is to be made, so their shapes may differ.

    Raises:
        ValueError: bad configuration, models or weights.
    """
    files = files or RunFiles(config)
    student, teachers = files.student.spec, [teacher.spec for teacher in files.teachers]
    objective = Objective.build(config, student, teachers, files.same_tokenizer, fitting=fitting)
    watched = None if fitting else WatchedMetrics.build(config.loss.output, config.logging, config.seed)
    student_layout, teacher_layout = check_layouts(config, student, teachers, world_size())
    for model in (files.student, *files.teachers):
        _ = model.read  # opens the weights: what is wrong with them is found before anything is built
    return RunPlan(files, objective, watched, student_layout, teacher_layout)


def build_models(config: Config, plan: RunPlan | None = None, *, trainable: bool = True) -> Models:
    """Joins the process group and builds student and teachers.

    Args:
        plan: from `make_plan`, if that was done before.
        trainable: the student gets gradients and an optimizer.

    Raises:
        ValueError: as `make_plan`, which is done here unless it was before.
    """
    plan = plan or make_plan(config)
    init_distributed()
    objective, needs = plan.objective.on(device()), plan.needs
    student_role = make_role("student", plan.student_layout)
    teacher_role = make_role("teacher", plan.teacher_layout)
    coords = student_role.coords or teacher_role.coords
    seed_everything(config.seed, coords.tensor if coords else 0)
    student = Student(
        config,
        student_role,
        objective,
        needs,
        plan.files.student.read,
        [teacher.read for teacher in plan.files.teachers],
        source=config.student.path,
        trainable=trainable,
    )
    teachers = [
        _build_teacher(config, student, teacher_role, needs, number, files)
        for number, files in enumerate(plan.files.teachers)
    ]
    dist.barrier()  # one may have read its weights from a cold disk: what comes next is counted from here, on all ranks
    return Models(config, objective, plan.watched, student, teachers, Routing(tuple(config.teacher_sources)))


def _build_teacher(
    config: Config, student: Student, role: Role, needs: ModelNeeds, number: int, files: ModelFiles
) -> Teacher:
    """A teacher, no deeper than needed, without its LM head where no update asks for it; or the student as its own."""
    weights = config.teacher.weights
    if weights == "student":
        return Teacher(number, student.role, student.chunks or None, student.dtype)
    chunks = None
    if role.is_member:
        # a moving average is saved, which Megatron does with the head only
        head = weights == "ema" or needs.teacher_logprobs
        depth = needs.teacher_depth(student.objective, number)
        chunks = build_chunks(files.spec, role, student.dtype, depth=depth, head=head)
        for chunk in chunks:
            chunk.requires_grad_(False)
            chunk.eval()
        load_hf(chunks, files.spec, role, files.read, str(files.directory))
    teacher = Teacher(number, role, chunks, student.dtype)
    if weights == "ema" and chunks is not None:
        student.average = EmaTeacher(chunks, config.teacher.ema_decay)
    if config.teacher.offload:
        teacher.offload()
    return teacher


def world_size() -> int:
    """Ranks of this job, also before the process group is joined."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
