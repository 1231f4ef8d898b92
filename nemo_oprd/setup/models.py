"""From a configuration to the models of this process: files, layouts, groups, roles. Shared by all commands."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

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
from nemo_oprd.tokenization.tokenizer import Tokenizer
from nemo_oprd.weights.hf import HFCheckpoint, TensorReader, load_hf
from nemo_oprd.weights.torch_dist import hf_directory


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
        self.directory = Path(source.hf_path) if source.hf_path else hf_directory(Path(str(source.checkpoint)))
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


def make_layouts(config: Config, world_size: int) -> tuple[Layout, Layout]:
    """(student layout, teacher layout) on `world_size` ranks.

    Raises:
        ValueError: the sizes don't fit the ranks.
    """
    teacher = config.teacher.parallel
    if config.teacher.placement == "colocated":
        student = config.student.parallel.layout(world_size, 0, "student")
        is_student = config.teacher.weights in ("student", "ema")
        return student, student if is_student else teacher.layout(world_size, 0, "teacher")
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
    student_layout, teacher_layout = make_layouts(config, world_size())
    roles = [("student", student, student_layout), *(("teacher", spec, teacher_layout) for spec in teachers)]
    for role, spec, layout in roles:
        spec.check_tensor_parallel(layout.tensor, f"{role}.parallel.tensor")
        layout.layers_per_stage(spec.num_layers)
    student.check_tensor_parallel(config.rollout.tensor, "rollout.tensor")
    check_rollout_ranks(config, student_layout.size)
    check_recompute(config, student.num_layers)
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
