"""The layouts of a run, and the checks of a start that need no torch and no weights.

Each function `check_...` is one check. The checks of a stage are in a table with their codes, in order; `preflight.py`
lists the tables. `train` and the other commands stop at the first refusal; `doctor` reports all of a stage.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Generic, TypeVar

from nemo_oprd.batch.layout import Layout
from nemo_oprd.config.schema import Config, ModelSource, TeacherSource
from nemo_oprd.config.teacher_kinds import TEACHER_KINDS
from nemo_oprd.config.weight_schedule import largest
from nemo_oprd.evaluation.grading.graders import GraderChoice, check_judge
from nemo_oprd.losses.layer_mapping import check_norms_match, layer_pairs, supervised_layers
from nemo_oprd.models import ModelSpec, check_same_width
from nemo_oprd.models.rope import Rope
from nemo_oprd.run.engine_kinds import ENGINES
from nemo_oprd.runtime.disk import check_output
from nemo_oprd.runtime.messages import is_first_rank
from nemo_oprd.runtime.output_directories import check_directory
from nemo_oprd.vllm.endpoint import check_endpoints, wait_for_servers
from nemo_oprd.vllm.launch import TEACHER_KEY, find_python
from nemo_oprd.vllm.placement import dedicated_ranks

Stage = TypeVar("Stage")


@dataclass(frozen=True)
class Check(Generic[Stage]):
    """One check that a stage of a start has to pass.

    Attributes:
        code: its name, which `doctor` writes beside a refusal.
        function: raises ValueError if the stage cannot start; the message names the value, what was expected, and the
            fix.
        waits: whether it waits for other programs; `refusals` leaves it out once another check has failed.
    """

    code: str
    function: Callable[[Stage], object]
    waits: bool = False


@dataclass(frozen=True)
class Refusal:
    """A failed check: its code, and its error."""

    code: str
    error: ValueError


def refusals(checks: Iterable[Check[Stage]], stage: Stage) -> Iterator[Refusal]:
    """Makes the checks in order; yields those that fail. If the caller stops at one, later checks are not made.

    A check that fails with the message of an earlier one, because both read the same input, is left out.
    """
    said = set[str]()
    for check in checks:
        if check.waits and said:
            continue
        try:
            check.function(stage)
        except ValueError as error:
            if str(error) not in said:
                said.add(str(error))
                yield Refusal(check.code, error)


def stop_at_first(found: Iterable[Refusal]) -> None:
    """Raises the ValueError of the first refusal, if there is one."""
    for refusal in found:
        raise refusal.error


def make_layouts(config: Config, world_size: int) -> tuple[Layout, Layout]:
    """Returns (student layout, teacher layout) on `world_size` ranks.

    Raises:
        ValueError: the parallel sizes do not fit the number of ranks.
    """
    world_size = trainer_ranks(config, world_size)
    teacher = config.teacher.parallel
    if not config.has_own_teachers:
        student = config.student.parallel.layout(world_size, 0, "student")
        return student, reader_layout(student)
    if config.teacher.placement == "colocated":
        student = config.student.parallel.layout(world_size, 0, "student")
        is_student = TEACHER_KINDS[config.teacher.weights].moves
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


def reader_layout(student: Layout) -> Layout:
    """Returns the layout of a teacher on servers: the student's ranks request its states, in whole sequences."""
    return Layout(data=student.size, first_rank=student.first_rank)


def trainer_ranks(config: Config, world_size: int) -> int:
    """Returns the number of ranks that hold models of the trainer; the ranks after them hold dedicated servers.

    Raises:
        ValueError: no rank would remain.
    """
    ranks = ENGINES[config.rollout.engine].trainer_ranks(config.rollout, world_size)
    servers = dedicated_ranks(config.teacher.vllm) * len(config.started_teachers)
    if servers >= ranks:
        raise ValueError(
            f"teacher.vllm.placement=dedicated with {servers} rank(s) of servers leaves none of the {ranks} rank(s) "
            "for the student; start more ranks, or use teacher.vllm.placement=colocated"
        )
    return ranks - servers


def check_engine(config: Config, student: ModelSpec) -> None:
    """Raises ValueError unless the engine is installed, or has addresses of servers, and can run the student.

    Args:
        student: the architecture of the model to sample from.
    """
    ENGINES[config.rollout.engine].check(config.rollout, student)


def check_teacher_servers(config: Config) -> None:
    """Raises ValueError unless the servers of teachers with `teacher.engine=vllm` can start, or have addresses."""
    endpoints = _teacher_endpoints(config)
    for key, urls in endpoints.items():
        check_endpoints(urls, config.teacher.vllm.token_file, key, TEACHER_KEY)
    if config.started_teachers:
        find_python(config.teacher.vllm, TEACHER_KEY)


def wait_for_endpoints(config: Config) -> None:
    """Waits on the first rank, before the ranks join, until all external servers respond.

    The weights and settings of these servers are checked later, where they are used.

    Raises:
        ValueError: a server did not respond within its `start_timeout`.
        Stopped: SIGTERM or SIGUSR1 arrived.
    """
    if config.rollout.replay is None:
        wait_for_sampling_endpoints(config)
    if _may_wait():
        for key, urls in _teacher_endpoints(config).items():
            wait_for_servers(key, urls, config.teacher.vllm.start_timeout)


def wait_for_sampling_endpoints(config: Config) -> None:
    """Waits, as `wait_for_endpoints` does, for external servers that sample."""
    kind = ENGINES[config.rollout.engine]
    if _may_wait() and kind.groups(config.rollout, 1).placement == "elsewhere":
        wait_for_servers(f"{kind.key}.endpoints", config.rollout.vllm.endpoints, config.rollout.vllm.start_timeout)


def _may_wait() -> bool:
    """Returns whether this is the first rank, and no other rank waits for it in a collective."""
    distributed = sys.modules.get("torch.distributed")
    return is_first_rank() and not (distributed is not None and distributed.is_initialized())


def _teacher_endpoints(config: Config) -> dict[str, list[str]]:
    """Returns the addresses of external teacher servers, by the key that names them."""
    found = {}
    for number in config.served_teachers:
        if urls := config.teacher_endpoints(number):
            own = config.teachers and config.teachers[number].endpoints
            found[f"teachers[{number}].endpoints" if own else f"{TEACHER_KEY}.endpoints"] = urls
    return found


@dataclass(frozen=True)
class PlacedModels:
    """The models of a run on their ranks.

    Attributes:
        teachers: all teachers, including those on servers, which have no ranks.
    """

    config: Config
    student: ModelSpec
    teachers: Sequence[ModelSpec]
    student_layout: Layout
    teacher_layout: Layout


def check_layouts(
    config: Config, student: ModelSpec, teachers: Sequence[ModelSpec], world_size: int
) -> tuple[Layout, Layout]:
    """Returns (student layout, teacher layout) after all `LAYOUT_CHECKS`.

    Raises:
        ValueError: the parallel sizes do not fit the number of ranks, or one of the checks fails.
    """
    layouts = make_layouts(config, world_size)
    stop_at_first(refusals(LAYOUT_CHECKS, PlacedModels(config, student, teachers, *layouts)))
    return layouts


def check_parallel_sizes(placed: PlacedModels) -> None:
    """Raises ValueError unless the parallel sizes divide the heads, widths, experts and layers of all models."""
    served = placed.config.served_teachers
    held = [spec for number, spec in enumerate(placed.teachers) if number not in served]
    roles = [("student", placed.student, placed.student_layout)]
    for role, spec, layout in [*roles, *(("teacher", teacher, placed.teacher_layout) for teacher in held)]:
        spec.check_tensor_parallel(layout.tensor, f"{role}.parallel.tensor")
        spec.check_expert_parallel(layout.expert, layout.expert_tensor, f"{role}.parallel")
        spec.check_attention_parallel(layout.tensor, layout.context, f"{role}.parallel")
        layout.layers_per_stage(spec.num_layers)


def check_dispatcher(layout: Layout, key: str) -> None:
    """Raises ValueError, naming the configuration `key`, if the package of the dispatcher is not installed."""
    if layout.dispatcher == "deepep" and find_spec("deep_ep") is None:
        raise ValueError(
            f"{key}=deepep needs the package deep_ep, which is not installed here and runs on GPUs only; expected "
            f"alltoall or allgather without it: install DeepEP in this environment, or leave out {key}"
        )


def check_experts_train(student: ModelSpec, layout: Layout) -> None:
    """Raises ValueError for a student with experts that is tensor-parallel without sequence parallelism.

    Every tensor rank would send all tokens to their experts, and the experts' gradients would count them twice.
    """
    if student.experts is not None and layout.tensor > 1 and not layout.sequence:
        raise ValueError(
            f"student.parallel.tensor={layout.tensor} with student.parallel.sequence=false: a student with experts "
            "needs sequence parallelism, so that every token goes to its experts once; set "
            "student.parallel.sequence=true"
        )


def check_layers(
    config: Config, student: ModelSpec, teacher: ModelSpec, source: TeacherSource, *, fitting: bool = False
) -> dict[int, int]:
    """Returns supervised student layer -> teacher layer; without a bridge, checks that their states can be compared.

    Args:
        source: where the teacher comes from.
        fitting: for fit-bridge, whose models may differ in shape.

    Raises:
        ValueError: a configured layer does not exist, or states of a pair can't be compared.
    """
    loss = config.loss.representation
    layers = supervised_layers(loss.layers, student.num_layers)
    pairs = layer_pairs(layers, student.num_layers, teacher.num_layers, loss.layer_map)
    if layers and source.bridge is None and not fitting:
        check_same_width(student, teacher)
        if loss.final_norm:
            check_norms_match(pairs, student.num_layers, teacher.num_layers)
    return pairs


def check_router_settings(config: Config, student: ModelSpec) -> None:
    """Raises ValueError if the configuration has a setting for routers that the student's model does not support.

    Replay is refused with LongRoPE, because routers choose other experts after the switch of factors.
    """
    for name in ("router_aux_loss", "router_z_loss", "router_dtype", "router_replay"):
        value = getattr(config.student, name)
        if value and student.experts is None:
            raise ValueError(
                f"student.{name}={str(value).lower()}, but the {student.model_type} student has no experts; expected "
                f"a model with experts: leave student.{name} out, or choose another model"
            )
        if value and name != "router_dtype" and not student.family.own:
            raise ValueError(
                f"student.{name}={str(value).lower()} for a {student.model_type} student, which Megatron-Bridge "
                "builds: its routers' losses and replay were compared with no other program; expected a family of this "
                f"project's own: leave student.{name} out"
            )
    if config.student.router_replay and student.rope.switch is not None:
        raise ValueError(
            f"student.router_replay=true with RoPE of type {student.rope.kind}: a response that outgrows "
            f"{student.rope.switch} tokens is rotated by other factors from then on; experts that were recorded "
            "before do not belong to them; expected another RoPE type: set student.router_replay=false"
        )


def check_engine_sizes(config: Config, student: ModelSpec) -> None:
    """Raises ValueError unless the engine's tensor and expert sizes divide the student."""
    student.check_tensor_parallel(config.rollout.tensor, "rollout.tensor")
    student.check_expert_parallel(config.rollout.expert, 1, "rollout")


def check_rollout_ranks(config: Config, ranks: int) -> None:
    """Raises ValueError unless `rollout.tensor` divides the student's ranks."""
    if ranks % config.rollout.tensor:
        raise ValueError(
            f"rollout.tensor={config.rollout.tensor} does not divide the student's {ranks} rank(s); choose a divisor"
        )


def check_recompute(config: Config, num_layers: int) -> None:
    """Raises ValueError if `student.recompute_num_layers` exceeds the model's number of layers."""
    if config.student.recompute_num_layers > num_layers:
        raise ValueError(
            f"student.recompute_num_layers={config.student.recompute_num_layers}: expected at most the model's "
            f"{num_layers} layers; choose 1 to {num_layers}"
        )


LAYOUT_CHECKS: tuple[Check[PlacedModels], ...] = (
    Check("parallel-sizes", check_parallel_sizes),
    Check("experts-without-sequence", lambda placed: check_experts_train(placed.student, placed.student_layout)),
    Check("router-settings", lambda placed: check_router_settings(placed.config, placed.student)),
    Check("sampling-sizes", lambda placed: check_engine_sizes(placed.config, placed.student)),
    Check("sampling-ranks", lambda placed: check_rollout_ranks(placed.config, placed.student_layout.size)),
    Check("recomputed-layers", lambda placed: check_recompute(placed.config, placed.student.num_layers)),
)


def check_bridge_rank(config: Config, student: ModelSpec, teacher: ModelSpec) -> None:
    """Raises ValueError if `bridge.rank` exceeds the hidden size of one of the two models."""
    narrow = min(student.hidden_size, teacher.hidden_size)
    if config.bridge.rank != "auto" and config.bridge.rank > narrow:
        raise ValueError(
            f"bridge.rank={config.bridge.rank}: expected at most {narrow}, the narrower model's width; lower it"
        )


def check_same_architecture(student: ModelSpec, teacher: ModelSpec) -> None:
    """Raises ValueError unless the student's engine can sample the teacher, which needs equal architectures."""
    differing = [
        f"{f.name} {_shown(getattr(student, f.name))} and {_shown(getattr(teacher, f.name))}"
        for f in dataclasses.fields(ModelSpec)
        if f.compare and f.name != "dtype" and getattr(student, f.name) != getattr(teacher, f.name)
    ]
    if differing:
        raise ValueError(
            "evaluation.teacher=true samples the teacher in the student's engine, but student and teacher differ in "
            f"{', '.join(differing)}; expected equal architectures: correct a config.json that differs from its "
            "model's source; if both are right, set evaluation.teacher=false and evaluate the teacher with "
            "`nemo-oprd evaluate`"
        )


def _shown(value: object) -> str:
    """Formats a value of a model's architecture for a message."""
    if isinstance(value, Rope):
        return (
            f"(theta {value.theta:g}, {value.kind}, {dict(value.settings)})" if value.settings else f"{value.theta:g}"
        )
    return f"{value:g}" if isinstance(value, float) else str(value)


def check_trains(config: Config) -> None:
    """Raises ValueError if no loss has a weight, because weight decay alone would change the student."""
    loss = config.loss
    layers = 0.0 if loss.representation.layers == "none" else largest(loss.representation.weight)
    if layers == largest(loss.output.weight) == 0:
        raise ValueError(
            "loss.representation.weight and loss.output.weight are both 0 (a representation loss without layers "
            "counts as 0): expected a loss to train on; set one of them above 0"
        )


def check_sources_stay(config: Config) -> None:
    """Raises ValueError if the export at the end would replace a model that the run reads."""
    models: list[tuple[str, ModelSource]] = [("student", config.student), ("teacher", config.teacher)]
    for role, model in [*models, *((f"teachers[{i}]", teacher) for i, teacher in enumerate(config.teachers))]:
        target = Path(config.output) / "hf"
        if config.train.export_hf and model.hf_path and Path(model.hf_path).resolve() == target.resolve():
            raise ValueError(
                f"{role}.hf_path={model.hf_path} is where output={config.output} exports the student at the end; "
                "expected different directories: choose another output"
            )


def check_logging(config: Config) -> None:
    """Raises ValueError if metrics are to go to a program that is not installed."""
    logging = config.logging
    if logging.tensorboard and not _is_installed("tensorboard"):
        raise ValueError(
            "logging.tensorboard=true needs the package tensorboard, which is not installed here; expected false "
            "without it: pip install tensorboard, or set logging.tensorboard=false"
        )
    if logging.wandb and not _is_installed("wandb"):
        raise ValueError(
            f"logging.wandb={logging.wandb} needs the package wandb, which is not installed here; expected null "
            "without it: pip install 'nemo-oprd[wandb]', or leave out logging.wandb"
        )


def _is_installed(package: str) -> bool:
    """Returns whether the package can be imported. A folder without code in the working directory does not count.

    Runs with W&B and TensorBoard leave folders `wandb` and `tensorboard`, which Python takes for namespace packages.
    """
    found = find_spec(package)
    return found is not None and found.origin is not None


def check_prompts_given(config: Config) -> None:
    """Raises ValueError if there are no training prompts."""
    if config.data.train is None:
        raise ValueError("data.train=null: expected a file of prompts; set data.train=FILE (or rollout.replay=FILE)")


def check_replays(config: Config, *, against_reference: bool = False) -> None:
    """Raises ValueError unless `verify` has recorded rollouts and, for the reference, models as `hf_path`."""
    if config.rollout.replay is None:
        raise ValueError(
            "verify works on recorded rollouts; set rollout.replay=FILE (a JSONL, as rollout.save writes it)"
        )
    if against_reference and any(model.checkpoint for model in (config.student, *config.teacher_sources)):
        raise ValueError("verify --against reference needs all models as hf_path: student.hf_path and teacher.hf_path")


def check_one_teacher(config: Config) -> None:
    """Raises ValueError unless fit-bridge has exactly one teacher with weights of its own."""
    if config.teachers or not TEACHER_KINDS[config.teacher.weights].own_model:
        given = f"{len(config.teachers)} teachers" if config.teachers else f"teacher.weights={config.teacher.weights}"
        raise ValueError(
            f"fit-bridge with {given}: a bridge belongs to one teacher; expected one: name it in teacher.hf_path"
        )


def check_graders(config: Config) -> None:
    """Raises ValueError unless the judge is installed and the graders exist; imports the user's own graders."""
    check_judge("evaluation.judge", config.evaluation.judge)
    GraderChoice(config.evaluation.graders, config.evaluation.judge)


def check_output_directory(config: Config, command: str) -> None:
    """Raises ValueError unless `command` can, and may, write into `config.output`; writes nothing."""
    check_output(config.output)
    check_directory(Path(config.output), command)


def check_evaluates(config: Config) -> None:
    """Raises ValueError unless `evaluate` has a validation set."""
    if not config.data.sets:
        raise ValueError("data.validation is empty; name at least one set, e.g. +data.validation.aime24=FILE")
