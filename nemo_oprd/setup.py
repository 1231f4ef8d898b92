"""From a configuration to the roles of this process: layouts, groups, models. Shared by train, verify and evaluate."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from nemo_oprd.batch import StepPlan
from nemo_oprd.config import Config, ModelConfig
from nemo_oprd.families import ModelSpec, read_model_spec
from nemo_oprd.layout import Layout
from nemo_oprd.megatron.measure import StepResult
from nemo_oprd.megatron.model import build_chunks
from nemo_oprd.megatron.parallel import Role, device, init_distributed, make_role, seed_everything
from nemo_oprd.megatron.student import Student
from nemo_oprd.megatron.torch_dist import hf_directory
from nemo_oprd.megatron.weights import HFCheckpoint, load_hf
from nemo_oprd.objective import Objective
from nemo_oprd.teacher.runner import Teacher
from nemo_oprd.tokens.tokenizer import Tokenizer
from nemo_oprd.types import Rollout, TeacherTargets


class Clock:
    """Seconds per phase of the current step. A phase that is entered again adds to its time."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start


@dataclass
class System:
    """The two models of a run on this rank, and the step they make together."""

    config: Config
    objective: Objective
    student: Student
    teacher: Teacher
    _kept: TeacherTargets | None = None  # for the next update on the same rollouts

    def accumulate(
        self,
        rollouts: list[Rollout],
        clock: Clock | None = None,
        *,
        step: int | None = None,
        reuse: int = 0,
        whole_gradients: bool = False,
    ) -> StepResult | None:
        """Teacher forward, transport, student forward/backward on one batch. None on ranks outside the student.

        The weights of the terms are those of the update after `step` others; None takes the largest of the run. `reuse`
        counts updates on the same rollouts: the teacher doesn't read them again where its targets fit into one wave.

        The batch goes through in waves of `teacher.resident_microbatches`, which bounds the targets that are held.
        Their gradients add up, and are reduced over ranks with the last one.
        """
        clock = clock or Clock()
        # what the teacher reads can change from step to step
        self.teacher.objective = objective = self.objective if step is None else self.objective.at(step)
        plan = self.plan(rollouts, objective)
        waves = plan.waves(self.config.teacher.resident_microbatches)
        self.student.start_step(plan, len(rollouts), step, reuse)
        for number, wave in enumerate(waves, start=1):
            with clock("teacher"):
                targets = self._kept if reuse and self._kept is not None else self.teach(rollouts, wave)
            more_to_come = step is not None and reuse + 1 < self.config.train.updates_per_rollout
            self._kept = targets if more_to_come and len(waves) == 1 else None
            with clock("update"):
                self.student.forward_backward(
                    rollouts, wave, targets, last=number == len(waves), whole_gradients=whole_gradients
                )
            del targets  # before the next wave's come
        return self.student.finish_step()

    def check_gradients(self) -> str:
        """One real forward and backward on a few short random responses, before anything is sampled.

        Returns:
            What was found, in words.

        Raises:
            CaptureError: a supervised layer does not receive its gradient exactly once on the stage that owns it.
        """
        draw = np.random.default_rng(self.config.seed)
        known = min(self.objective.student.vocab_size, self.objective.teacher.vocab_size)
        ids = draw.integers(0, known, (2 * self.student.role.layout.data, 12)).tolist()
        result = self.accumulate([Rollout(row[:4], row[4:]) for row in ids])
        if result is not None and result.trouble:
            raise ValueError(
                f"{result.trouble}, on random tokens before the first step: expected finite numbers; the weights of "
                "student or teacher are damaged, or too large for this precision"
            )
        return "guard: " + "; ".join(self._found(result) or ["no term has a weight above 0, so nothing is trained"])

    def _found(self, result: StepResult | None) -> list[str]:
        found, layers = [], len(self.objective.layers)
        if self.objective.weight > 0 and layers and (result is None or not result.identical_layers):
            found.append(f"each of the {layers} supervised layers received its gradient once, on its own stage")
        elif self.objective.weight > 0 and layers and result is not None:
            found.append(
                f"student and teacher are identical at {len(result.identical_layers)} of the {layers} supervised "
                "layers, where a gradient of zero is right; the others received theirs once, on their own stage"
            )
        if self.objective.trains_head:
            found.append("the output-space term went back through the head once per microbatch")
        return found

    def plan(self, rollouts: list[Rollout], objective: Objective | None = None) -> StepPlan:
        """The batch packed for the student, for all terms or those of `objective`. What no supervised row depends on is
        not computed."""
        objective, budget = objective or self.objective, self.config.train.tokens_per_microbatch
        output = None if objective.output is None else objective.output.rows(rollouts)
        return StepPlan.of(objective.rows(rollouts), output, len(rollouts), self.student.role.layout, budget)

    def teach(self, rollouts: list[Rollout], student_plan: StepPlan) -> TeacherTargets:
        """What the teacher has to say about the rows of `student_plan`, on the ranks that need it."""
        budget = self.config.train.tokens_per_microbatch
        teacher_plan = student_plan.for_teacher(self.teacher.role.layout, len(rollouts), budget)
        read = [rollout.as_read_by_teacher() for rollout in rollouts]
        return self.teacher.targets(read, teacher_plan, student_plan, self.student.role)


def model_directory(model: ModelConfig) -> Path:
    """Where a model's config.json and tokenizer are: the HF directory, or the copy inside a Megatron checkpoint.

    Raises:
        ValueError: the checkpoint is none.
    """
    return Path(model.hf_path) if model.hf_path else hf_directory(Path(str(model.checkpoint)))


def same_tokenizer(config: Config) -> bool:
    """Whether both models come with a tokenizer, the same one."""
    directories = [model_directory(model) for model in (config.student, config.teacher)]
    try:
        return len({Tokenizer.load(directory).fingerprint() for directory in directories}) == 1
    except ValueError:  # there is none
        return False


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


@dataclass(frozen=True)
class Plan:
    """What a run will build, found to be possible: nothing is loaded, no other rank was asked, no file written."""

    objective: Objective
    student_layout: Layout
    teacher_layout: Layout
    read_student: Callable[[str], torch.Tensor]
    read_teacher: Callable[[str], torch.Tensor]


def make_plan(config: Config, *, fitting: bool = False) -> Plan:
    """Every check of models, layouts and weights that is possible before models are built.

    Args:
        fitting: a bridge between the two models is to be made, so their shapes may differ.

    Raises:
        ValueError: bad configuration, models or weights.
    """
    student_spec = read_model_spec(model_directory(config.student))
    teacher_spec = read_model_spec(model_directory(config.teacher))
    objective = Objective.of(config, student_spec, teacher_spec, lambda: same_tokenizer(config), fitting=fitting)
    student_layout, teacher_layout = make_layouts(config, world_size())
    for role, spec, layout in (("student", student_spec, student_layout), ("teacher", teacher_spec, teacher_layout)):
        spec.check_tensor_parallel(layout.tensor, f"{role}.parallel.tensor")
        layout.layers_per_stage(spec.num_layers)
    student_spec.check_tensor_parallel(config.rollout.tensor, "rollout.tensor")
    check_rollout_ranks(config, student_layout.size)
    check_recompute(config, student_spec.num_layers)
    read_student, read_teacher = open_model(config.student, student_spec), open_model(config.teacher, teacher_spec)
    return Plan(objective, student_layout, teacher_layout, read_student, read_teacher)


def make_system(config: Config, plan: Plan | None = None, *, trainable: bool = True) -> System:
    """Joins the process group and builds both models.

    Args:
        plan: from `make_plan`, if that was done before.
        trainable: the student gets gradients and an optimizer.

    Raises:
        ValueError: as `make_plan`, which is done here unless it was before.
    """
    plan = plan or make_plan(config)
    init_distributed()
    objective = plan.objective.on(device())
    student_role = make_role("student", plan.student_layout)
    teacher_role = make_role("teacher", plan.teacher_layout)
    seed_everything(config.seed, student_role if student_role.here else teacher_role)
    student = Student(config, student_role, objective, plan.read_student, plan.read_teacher, trainable=trainable)
    teacher = make_teacher(config, objective.teacher, teacher_role, objective, plan.read_teacher)
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
        head = objective.output is not None and objective.output.sampled
        chunks = build_chunks(spec, role, dtype, depth=objective.teacher_depth, head=head)
        for chunk in chunks:
            chunk.requires_grad_(False)
            chunk.eval()
        load_hf(chunks, spec, role, read, str(model_directory(config.teacher)))
    teacher = Teacher(objective, role, chunks, dtype)
    if config.teacher.offload:
        teacher.offload()
    return teacher
