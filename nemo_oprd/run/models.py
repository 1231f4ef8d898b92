"""Opens the model files of a configuration, plans a run, and builds the models of this process in their groups."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from nemo_oprd.config.schema import Config
from nemo_oprd.config.teacher_kinds import TEACHER_KINDS
from nemo_oprd.data.token_ids import TokenIds
from nemo_oprd.data.tokenizer import Tokenizer, fingerprint
from nemo_oprd.distillation.distiller import Distiller
from nemo_oprd.distillation.metrics.watched_metrics import ModelNeeds, WatchedMetrics
from nemo_oprd.distillation.objective import Objective
from nemo_oprd.distillation.output_head import read_teacher_head
from nemo_oprd.distillation.student import ChunkBuilder, Student
from nemo_oprd.distillation.teacher import EmaTeacher, MegatronTeacher, Teacher
from nemo_oprd.megatron.model import DistillingModel, build_chunks
from nemo_oprd.megatron.parallel import Role, compute_dtype, device, init_distributed, make_role, seed_everything
from nemo_oprd.megatron.weights.hf import HFCheckpoint, ServedHead, TensorReader, finite, load_hf
from nemo_oprd.models.checkpoint_directory import checkpoint_directory
from nemo_oprd.run.checkpoint_directory import refuse_damage
from nemo_oprd.run.checks import trainer_ranks, wait_for_endpoints
from nemo_oprd.run.provider import OWN
from nemo_oprd.run.resolve import ResolvedModel, RunModels, RunSpec, resolve
from nemo_oprd.runtime.messages import is_first_rank

if TYPE_CHECKING:
    from nemo_oprd.vllm.teacher_servers import TeacherServers

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ChatTemplate:
    """A file with a chat template (None: the tokenizer's own), and the template's variables.

    Attributes:
        system_prompt: the system message, in place of a conversation's own; None: its own.
        keys: the group of these settings, for messages.
    """

    file: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    system_prompt: str | None = None
    keys: str = "data"


NO_CHAT_TEMPLATE = ChatTemplate()


def student_files(config: Config, model: ResolvedModel) -> ModelFiles:
    """Returns the student's files, whose tokenizer has the chat template of the configuration."""
    return ModelFiles(model, ChatTemplate(config.data.chat_template, config.data.chat_template_args))


class ModelFiles:
    """The files of one model. Opens its tokenizer and its weights on first access, once.

    `directory` and `spec` are those of the `ResolvedModel`.

    Raises:
        ValueError: on first access, there is no tokenizer or there are no weights.
    """

    def __init__(self, model: ResolvedModel, chat_template: ChatTemplate = NO_CHAT_TEMPLATE) -> None:
        """Opens nothing yet; applies `chat_template` to the tokenizer when that is loaded."""
        self.source, self.directory, self.spec = model.source, model.directory, model.spec
        self._served = model.served
        self._key, self._chat_template = model.key, chat_template

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Loads the tokenizer in the model's directory.

        Raises:
            ValueError: there is no tokenizer, or the chat template cannot be used.
        """
        tokenizer = Tokenizer.load(self.directory)
        template = self._chat_template
        tokenizer.set_chat_template(
            template.file, template.variables, system_prompt=template.system_prompt, keys=template.keys
        )
        return tokenizer

    @cached_property
    def read(self) -> TensorReader:
        """Returns the reader of the weights, opened on first access and kept until `close`.

        Raises:
            ValueError: as `open`.
        """
        return self.open()

    @property
    def weights_directory(self) -> Path:
        """Returns the HF directory or the Megatron checkpoint that holds the weights."""
        return checkpoint_directory(Path(self.source.path))

    @cached_property
    def build(self) -> ChunkBuilder:
        """Returns the builder of the model's chunks: this project's `build_chunks`, or Megatron-Bridge's provider.

        Raises:
            ValueError: there is no such provider, or it builds another model.
        """
        if self.source.provider == OWN:
            return build_chunks
        from nemo_oprd.megatron.megatron_bridge.build import build_from_provider, make_provider

        made = make_provider(f"{self._key}.provider", self.source.provider, self.directory)
        return partial(build_from_provider, made)

    def check_files(self) -> None:
        """Compares a training run's checkpoint with its digests. Every rank of the world calls this.

        Raises:
            ValueError: a file is not as it was written.
        """
        if self.source.checkpoint:
            refuse_damage(self.weights_directory, together=True)

    def close(self) -> None:
        """Closes the weights: open files stay mapped, and a Megatron checkpoint keeps the tensor that it read last."""
        self.__dict__.pop("read", None)

    def open(self) -> TensorReader:
        """Returns a function that reads a tensor of the model by its HF name, from HF files or a Megatron checkpoint.

        That function raises ValueError for a tensor that holds NaN or infinite values.
        For a model that runs on vLLM servers, it reads the LM head, whatever the name.

        Raises:
            ValueError: a file is missing or damaged, or its tensors are not those of this architecture.
        """
        from nemo_oprd.megatron.weights.megatron_checkpoint import MegatronCheckpoint, check_source

        if self.source.checkpoint:
            stored = MegatronCheckpoint(self.weights_directory, self.directory, self.spec.family)
            return finite(stored.__getitem__, stored.path)
        checkpoint = HFCheckpoint(str(self.source.hf_path))
        if self._served:
            return ServedHead(checkpoint, self.spec)
        check_source(checkpoint, self.spec)
        return finite(checkpoint.__getitem__, checkpoint.path)

    def check_vocabulary(self) -> None:
        """Raises ValueError if ids or stop ids are outside the model's vocabulary, or no stop id has a token."""
        tokenizer, spec = self.tokenizer, self.spec
        largest = max(tokenizer.vocab_size - 1, *tokenizer.eos_ids)
        if largest >= spec.vocab_size:
            raise ValueError(
                f"{self.directory}: the tokenizer knows ids up to {largest} (stop ids {list(tokenizer.eos_ids)}), but "
                f"config.json says vocab_size={spec.vocab_size}; expected ids 0..{spec.vocab_size - 1}: copy the "
                "tokenizer of this model"
            )
        known = tokenizer.ids(spec.vocab_size)
        if not any(i in known for i in tokenizer.eos_ids):
            raise ValueError(
                f"{self.directory}: no token has one of the stop ids {list(tokenizer.eos_ids)}, so that no response "
                f"would end; expected one of the ids that have a token, {known}: correct eos_token_id in "
                "generation_config.json"
            )


class RunFiles:
    """The files of a run's models, each opened once."""

    def __init__(self, config: Config, models: RunModels) -> None:
        self.models, self._config = models, config
        self._replays = config.rollout.replay is not None
        self.student = student_files(config, models.student)
        self.teachers = [self._teacher(config, number) for number in range(len(models.teachers))]

    def _teacher(self, config: Config, number: int) -> ModelFiles:
        """Returns a teacher's files; the student's if the teacher is the student and reads its conversation."""
        model, own = self.models.teachers[number].model, config.conversation_of(number)
        is_student = model is self.models.student
        if is_student and not own.is_set:
            return self.student
        file = own.chat_template or (config.data.chat_template if is_student else None)
        keys = f"teachers[{number}]" if config.teachers else "teacher"
        return ModelFiles(model, ChatTemplate(file, own.chat_template_args, own.system_prompt, keys))

    def conversations(self) -> dict[str, dict[str, Any]]:
        """Returns role -> rendering settings; of teachers only if they read text or prompts of their own."""
        if self._replays:
            return {}
        found = {"student": self.student.tokenizer.conversation()}
        for number, teacher in enumerate(self.teachers):
            if self._config.teacher.reads == "text" or self._config.has_own_prompt(number):
                found[f"teachers[{number}]" if self._config.teachers else "teacher"] = teacher.tokenizer.conversation()
        return found

    @cached_property
    def sampled_ids(self) -> TokenIds:
        """Returns the ids that may be sampled: those that have a token, and a row in every teacher that reads them.

        For recorded rollouts these are all ids for which the models have rows; no tokenizer is read.

        Raises:
            ValueError: the student has no tokenizer.
        """
        limit = self.models.vocab_limit
        return TokenIds(limit) if self._replays else self.student.tokenizer.ids(limit)

    def shared_ids(self, number: int) -> TokenIds | None:
        """Returns the ids on which student and teacher are compared; None if the teacher can't read the student's ids.

        With equal tokenizers these are all ids for which both models have rows. If the teacher has more tokens, they
        are the student's ids: rows that only the teacher uses carry no information about the student's.
        """
        student, teacher = self.student, self.teachers[number]
        limit = min(student.spec.vocab_size, teacher.spec.vocab_size)
        if teacher is student:
            return TokenIds(limit)
        try:
            ours, theirs = student.tokenizer, teacher.tokenizer
        except ValueError:  # a model has no tokenizer
            return None
        if fingerprint(ours) == fingerprint(theirs):
            return TokenIds(limit)
        return ours.ids(limit) if theirs.reads_ids_of(ours) else None


@dataclass(frozen=True)
class RunPlan:
    """The models that a run will build, and its objective.

    Making a plan loads no weights, writes no files and does not communicate.
    """

    spec: RunSpec
    files: RunFiles
    objective: Objective
    watched: WatchedMetrics | None

    @property
    def needs(self) -> ModelNeeds:
        """Returns the capabilities that the run needs of its models."""
        return ModelNeeds.build(self.objective, self.watched)


def make_plan(spec: RunSpec, files: RunFiles | None = None, *, fitting: bool = False) -> RunPlan:
    """Resolves the objective and opens bridges and weights, to find mistakes before models are built; returns the plan.

    Args:
        files: the models, if they are already open.
        fitting: for fit-bridge, whose models may differ in shape.

    Raises:
        ValueError: the configuration, a model or its weights are wrong.
    """
    config, models = spec.config, spec.models
    files = files or RunFiles(config, models)
    objective = Objective.build(
        config,
        models.student.spec,
        [(teacher.spec, teacher.pairs) for teacher in models.teachers],
        models.layer_weights,
        files.shared_ids,
        fitting=fitting,
    )
    if config.rollout.correction != "off" and config.rollout.replay is None:
        objective = replace(objective, sampled=files.sampled_ids)
    watched = None if fitting else WatchedMetrics.build(config.loss.output, config.logging, config.seed)
    for model in (files.student, *files.teachers):
        # opens the weights and makes providers, so that mistakes in them are found before models are built
        _ = model.read, model.build
    plan = RunPlan(spec, files, objective, watched)
    for served in (teacher.read for teacher in files.teachers if plan.needs.teacher_states):
        if isinstance(served, ServedHead):
            served.find()
    return plan


def build_distiller(plan: RunPlan, *, trainable: bool = True) -> Distiller:
    """Joins the process group, if this process has not, logs the notes on the models, builds student and teachers.

    Args:
        trainable: whether the student gets gradients and an optimizer.

    Raises:
        ValueError: weights do not fit their model, a checkpoint is damaged, or a server is missing or wrong.
    """
    wait_for_endpoints(plan.spec.config)  # for callers that have not, and have not joined yet
    init_distributed()
    if is_first_rank():
        for note in plan.spec.models.notes:
            logger.info(note)
    stored = {files.source.checkpoint: files for files in (plan.files.student, *plan.files.teachers)}
    for checkpoint, files in stored.items():
        if checkpoint:
            files.check_files()
    servers = _start_teacher_servers(plan)
    try:
        return _build(plan, servers, trainable=trainable)
    except BaseException:
        for each in servers.values():
            each.close()
        raise


def _start_teacher_servers(plan: RunPlan) -> dict[int, TeacherServers]:
    """Starts the servers of teachers with `teacher.engine=vllm`, without waiting for them; returns them by teacher."""
    run = plan.spec
    if not run.config.served_teachers:
        return {}
    from nemo_oprd.vllm.launch import DTYPES
    from nemo_oprd.vllm.teacher_bridge import ServedBridge
    from nemo_oprd.vllm.teacher_canary import Canary
    from nemo_oprd.vllm.teacher_servers import TeacherServers

    started = dict[int, TeacherServers]()
    try:
        for number in run.config.served_teachers:
            teacher = run.models.teachers[number]
            head = None
            if plan.needs.teacher_states:
                head = partial(read_teacher_head, teacher.spec, plan.files.teachers[number].open())
            # a server that several runs share must hold no data of one run
            is_shared = bool(run.config.teacher_endpoints(number))
            bridge = None if is_shared else ServedBridge.of(plan.objective.teachers[number])
            dtype, logprobs = DTYPES[run.config.precision], plan.needs.teacher_logprobs
            canary = Canary(teacher.spec, teacher.model.directory, dtype, head, bridge, logprobs)
            held = trainer_ranks(run.config, world_size())
            started[number] = TeacherServers(run.config, number, canary, run.reader_layout, held)
    except BaseException:
        for each in started.values():
            each.close()
        raise
    return started


def _served_teacher(number: int, readers: Role, dtype: torch.dtype, servers: TeacherServers) -> Teacher:
    from nemo_oprd.vllm.teacher_servers import ServedTeacher

    return ServedTeacher(number, readers, dtype, servers)


def _build(plan: RunPlan, servers: dict[int, TeacherServers], *, trainable: bool) -> Distiller:
    run, config = plan.spec, plan.spec.config
    objective, needs = plan.objective.on(device()), plan.needs
    student_role = make_role(
        "student", run.student_layout, saves=trainable, experts=run.models.student.spec.experts is not None
    )
    teacher_role = make_role("teacher", run.teacher_layout)
    reader_role = make_role("teacher", run.reader_layout) if servers else teacher_role
    coords = student_role.coords or teacher_role.coords
    seed_everything(config.seed, coords.tensor if coords else 0)
    dtype = compute_dtype(config.precision)
    average = None
    if TEACHER_KINDS[config.teacher.weights].averages and teacher_role.is_member:
        average = EmaTeacher(_teacher_chunks(plan, teacher_role, 0), config.teacher.ema_decay)
    student = Student(
        config,
        student_role,
        objective,
        needs,
        plan.files.student.read,
        [teacher.read for teacher in plan.files.teachers],
        source=config.student.path,
        build=plan.files.student.build,
        average=average,
        trainable=trainable,
    )
    if plan.files.student not in plan.files.teachers:
        plan.files.student.close()  # closed first: what was read of its files stays in memory until then
    teachers: list[Teacher] = []
    for number, files in enumerate(plan.files.teachers):
        if number in servers:
            teachers.append(_served_teacher(number, reader_role, dtype, servers[number]))
        else:
            teachers.append(_build_teacher(plan, student, teacher_role, number))
        if files not in plan.files.teachers[number + 1 :]:
            files.close()
    for each in servers.values():
        each.wait()
    dist.barrier()  # ranks take different times to read weights; the timeouts of later collectives start together here
    return Distiller(config, objective, plan.watched, student, teachers, run.models.routing)


def distiller_for(config: Config) -> Distiller:
    """Builds student and teachers of a configuration on the ranks of this job, for programs other than the commands.

    Raises:
        ValueError: as `resolve`, `make_plan` and `build_distiller`.
    """
    return build_distiller(make_plan(resolve(config, world_size())))


def _build_teacher(plan: RunPlan, student: Student, role: Role, number: int) -> Teacher:
    """Makes a teacher in the trainer's processes: the student, its average, or a model of its own."""
    config = plan.spec.config
    if not TEACHER_KINDS[config.teacher.weights].copied:
        return MegatronTeacher(number, student.role, student.dtype, student.chunks or None)
    chunks = None
    if student.average is not None:
        chunks = student.average.chunks
    elif role.is_member:
        chunks = _teacher_chunks(plan, role, number)
    teacher = MegatronTeacher(number, role, student.dtype, chunks)
    if config.teacher.offload:
        teacher.offload()
    return teacher


def _teacher_chunks(plan: RunPlan, role: Role, number: int) -> list[DistillingModel]:
    """Builds and loads this rank's part of a teacher: needed layers, and a head if needed or saved."""
    config, files, needs = plan.spec.config, plan.files.teachers[number], plan.needs
    kind = TEACHER_KINDS[config.teacher.weights]
    # a moving average is saved in checkpoints, and Megatron saves a model only with its head
    head = kind.averages or needs.teacher_logprobs
    depth = needs.teacher_depth(plan.objective, number)
    # a teacher with the student's weights routes in the student's precision
    router_dtype = None if kind.own_model else config.student.router_dtype
    dtype = compute_dtype(config.precision)
    chunks = files.build(files.spec, role, dtype, depth=depth, head=head, moe_router_dtype=router_dtype)
    for chunk in chunks:
        chunk.requires_grad_(False)
        chunk.eval()
    load_hf(chunks, files.spec, role, files.read, files.source.path)
    return chunks


def world_size() -> int:
    """Returns the number of ranks of this job; also valid before the process group is joined."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
