"""The estimate of a run on some GPUs: memory per GPU, operations, bytes, seconds, and what does not fit."""

from __future__ import annotations

from dataclasses import dataclass, replace

from nemo_oprd.batch.layout import Layout
from nemo_oprd.config.memory_bounds import TARGET_SHARE
from nemo_oprd.config.schema import Config
from nemo_oprd.config.teacher_kinds import TEACHER_KINDS
from nemo_oprd.run.checks import check_layouts, reader_layout
from nemo_oprd.run.engine_kinds import ENGINES
from nemo_oprd.run.idle_ranks import IdleRanks, idle_ranks
from nemo_oprd.run.positions import TooFewPositions, known_prompt, too_few_positions
from nemo_oprd.run.resolve import RunModels, RunSpec
from nemo_oprd.tools.plan.gpus import ASSUMED, Cluster, Gpu, in_bytes
from nemo_oprd.tools.plan.memory import (
    ROLLOUT_COPY,
    TEACHER_HEAD,
    TEACHER_WEIGHTS,
    Memory,
    buffers,
    captured_bytes,
    engine_buffers,
    responses_of_wave,
    student_state,
    target_bytes,
    teacher_forward,
    teacher_heads,
    teacher_weights,
    transfer_bytes,
    update_memory,
)
from nemo_oprd.tools.plan.operations import StepBytes, StepFlops, bubble, step_bytes, step_flops, training_seconds
from nemo_oprd.tools.plan.rollout_cost import Demand, SamplingCost, rollout_copy, sample
from nemo_oprd.tools.plan.served import Servers, colocated_share, teacher_servers
from nemo_oprd.tools.plan.workload import Workload, make_workload


@dataclass(frozen=True)
class RankKind:
    """Ranks with the same memory: their pipeline stages in the two roles (None: not a member), and one of the ranks."""

    student: int | None
    teacher: int | None
    rank: int
    memory: Memory

    @property
    def name(self) -> str:
        """The stages as text, such as "student stage 0, teacher stage 1"."""
        parts = [("student", self.student), ("teacher", self.teacher)]
        return ", ".join(f"{role} stage {stage}" for role, stage in parts if stage is not None)


@dataclass(frozen=True)
class Estimate:
    """The estimate of a run on `ranks` GPUs.

    Attributes:
        kinds: the kinds of ranks, the fullest first.
        work: the work of a step with responses of average length.
        longest_work: the work of a step with the longest responses, which determine memory.
        rollout, evaluation: sampling in a step and in one evaluation (None: there is none).
        evaluation_seconds: seconds of one evaluation; None if the number of problems is unknown.
        seconds: phase -> seconds of a step.
        bubbles: role -> the share of its pipeline's time in which a rank waits.
        servers: the vLLM servers of teachers.
        idle: the ranks without a response; None: there are none.
        positions: models whose positions end before the longest sequences.
        problems: what does not fit, one line each.
    """

    work: Workload
    longest_work: Workload
    cluster: Cluster
    student: Layout
    teacher: Layout
    kinds: tuple[RankKind, ...]
    rollout: SamplingCost | None
    evaluation: SamplingCost | None
    evaluation_seconds: float | None
    flops: StepFlops
    bytes: StepBytes
    seconds: dict[str, float]
    bubbles: dict[str, float]
    servers: tuple[Servers, ...]
    idle: IdleRanks | None
    positions: tuple[TooFewPositions, ...]
    problems: tuple[str, ...]

    @property
    def gpu(self) -> Gpu:
        """The kind of GPU."""
        return self.cluster.gpu

    @property
    def ranks(self) -> int:
        """The ranks of the job."""
        return self.cluster.ranks

    @property
    def longest(self) -> int:
        """Tokens of the longest response."""
        return self.longest_work.response

    def stages(self, rank: int) -> tuple[int | None, int | None]:
        """Returns the pipeline stages of a rank in student and teacher; None: it has no part in that model."""
        return _stages(self.longest_work, self.student, self.teacher, rank)

    def of_rank(self, rank: int) -> RankKind:
        """Returns the kind of a rank with its own memory; `kinds` have that of the fullest tensor and context rank.

        The two differ by the rows of the representation loss, under sequence and context parallelism: `rows_on_rank`.
        """
        learns, teaches = self.stages(rank)
        memory = _without_sampling(self.longest_work, self.student, self.teacher, rank, self.cluster, exact=True)
        return _with_sampling(RankKind(learns, teaches, rank, memory), self.rollout, self.evaluation)

    @property
    def step_seconds(self) -> float:
        """Seconds of one step."""
        return sum(self.seconds.values()) - self.overlap_seconds

    @property
    def overlap_seconds(self) -> float:
        """The seconds of a step's sampling that servers on other GPUs spend while the ranks compute the step."""
        config, sampling = self.work.config, self.rollout
        if not config.rollout.max_lag or sampling is None or sampling.groups.placement == "colocated":
            return 0.0
        update = self.seconds["update"] / config.train.updates_per_rollout  # until the weights first change
        hidden = self.seconds["sampling"] * (1 - _awaited(config, self.longest))
        return min(hidden, self.seconds["teacher"] + self.seconds["targets"] + update)


def _awaited(config: Config, limit: int) -> float:
    """Returns the share of a step's sampling that needs the step's own student: the longest responses' last segment.

    `limit`: tokens of the longest responses. In other modes than segments, servers sample on during the step: 0.
    """
    rollout = config.rollout
    if rollout.mode != "segments" or -(-limit // rollout.tokens_per_segment) <= rollout.max_lag:
        return 0.0
    return 1 - rollout.max_lag * rollout.tokens_per_segment / limit


@dataclass(frozen=True)
class Lengths:
    """Lengths and numbers that the configuration does not give; None: see `make_workload`.

    Attributes:
        prompt: tokens of a prompt.
        response: tokens of a response on average, for operations and seconds. Memory is that of the longest responses
            that the configuration allows.
        problems: problems of one evaluation; None: `evaluation.limit` of each set, or unknown.
    """

    prompt: int | None = None
    response: int | None = None
    problems: int | None = None


@dataclass(frozen=True)
class Works:
    """The work of a step with the longest responses, for memory, and with average ones, for operations and seconds."""

    longest: Workload
    mean: Workload


UNKNOWN = Lengths()


def estimate(run: RunSpec, cluster: Cluster, lengths: Lengths = UNKNOWN) -> Estimate:
    """Estimates a training run on `cluster`, for whose ranks it was resolved.

    Raises:
        ValueError: the parameters of a served teacher can't be counted, or a prompt leaves no room for a response.
    """
    return estimate_works(make_works(run.config, run.models, lengths), cluster, lengths)


def make_works(config: Config, models: RunModels, lengths: Lengths) -> Works:
    """Returns the work of a step of `config`."""
    longest = make_workload(config, models, prompt=lengths.prompt)
    return Works(longest, make_workload(config, models, prompt=lengths.prompt, response=lengths.response))


def estimate_works(works: Works, cluster: Cluster, lengths: Lengths) -> Estimate:
    """Estimates a training run with this work on `cluster`; see `estimate`.

    Raises:
        ValueError: the layouts of the works' configuration do not fit the ranks or the models.
    """
    gpu, config = cluster.gpu, _with_waves(works.longest, cluster)
    work, mean = replace(works.longest, config=config), replace(works.mean, config=config)
    student, teacher, kinds = _kinds(work, cluster)
    usable = gpu.memory - ASSUMED.reserve
    left = usable - max(sum(kind.memory.always.values()) for kind in kinds if kind.student is not None)
    rollout, replays = None, config.rollout.replay is not None
    if not replays:
        demand = Demand(work.responses, work.response, mean.response, config.response_limit[0])
        rollout = sample(work, demand, student.size, gpu, left, goes_on=True)
    evaluation, known = _evaluation(work, lengths, student.size)
    tested = None if evaluation is None else sample(work, evaluation, student.size, gpu, left)
    kinds = sorted((_with_sampling(kind, rollout, tested) for kind in kinds), key=lambda kind: -kind.memory.peak)
    servers = teacher_servers(work, mean, student, gpu)
    per_node = cluster.gpus_per_node
    seconds = training_seconds(mean, gpu, student, teacher, gpus_per_node=per_node, servers=servers)
    if rollout is not None:
        seconds = {"sampling": rollout.seconds, **seconds}
    problems = [
        f"{kind.name}: {in_bytes(kind.memory.peak)} in phase '{kind.memory.fullest}', but {in_bytes(usable)} of "
        f"a {gpu.name} can be used ({in_bytes(ASSUMED.reserve)} are for CUDA and NCCL)"
        for kind in kinds
        if kind.memory.peak > usable
    ]
    teachers = {number: each.spec for number, each in enumerate(work.teachers)}
    problems += [each.problem for each in servers if each.problem is not None]
    problems += [each.problem for each in (rollout, tested) if each is not None and each.problem is not None]
    return Estimate(
        mean,
        work,
        cluster=cluster,
        student=student,
        teacher=teacher,
        kinds=tuple(kinds),
        rollout=rollout,
        evaluation=tested,
        evaluation_seconds=tested.seconds if tested is not None and known else None,
        flops=step_flops(mean),
        bytes=step_bytes(mean, student),
        seconds=seconds,
        bubbles={
            "student": bubble(student, mean.on(student).resident),
            "teacher": bubble(teacher, mean.on(teacher).count),
        },
        servers=servers,
        idle=idle_ranks(config, student, teacher, recorded=work.responses if replays else None),
        positions=tuple(
            too_few_positions(config, work.student, teachers, known_prompt(config, work.student, lengths.prompt))
        ),
        problems=tuple(problems),
    )


def _with_waves(work: Workload, cluster: Cluster) -> Config:
    """Returns the configuration with a number in place of `teacher.resident_microbatches=auto`.

    Targets may take the share `TARGET_SHARE` of the memory that is left, as in `distillation/distiller.py`.
    """
    config = work.config
    if config.teacher.resident_microbatches != "auto":
        return config
    student, _, kinds = _kinds(work, cluster)
    left = cluster.gpu.memory - ASSUMED.reserve - max(sum(kind.memory.always.values()) for kind in kinds)
    count = work.on(student).count
    each = max(target_bytes(work, student, stage) for stage in range(student.pipeline)) / count
    allowed = max(1, min(count, int(TARGET_SHARE * left // max(1.0, each))))
    return replace(config, teacher=replace(config.teacher, resident_microbatches=allowed))


def _kinds(work: Workload, cluster: Cluster) -> tuple[Layout, Layout, list[RankKind]]:
    """Returns (the student's layout, the teacher's, every kind of rank without the phases of sampling)."""
    student, teacher = check_layouts(work.config, work.student, [each.spec for each in work.teachers], cluster.ranks)
    found: dict[tuple[int | None, ...], RankKind] = {}
    # of ranks that are alike the first ones have the most responses
    held = (student, teacher) if work.own_teachers else (student,)
    # a stage's ranks follow each other: the kind of a rank changes only where a stage or a layout begins or ends
    edges = {
        layout.first_rank + layout.size * stage // layout.pipeline
        for layout in held
        for stage in range(layout.pipeline + 1)
    }
    for rank in sorted(edge for edge in edges if any(edge in layout.ranks for layout in held)):
        learns, teaches = _stages(work, student, teacher, rank)
        if (learns, teaches) not in found:
            memory = _without_sampling(work, student, teacher, rank, cluster)
            found[learns, teaches] = RankKind(learns, teaches, rank, memory)
    return student, teacher, list(found.values())


def _stages(work: Workload, student: Layout, teacher: Layout, rank: int) -> tuple[int | None, int | None]:
    """Returns the pipeline stages of a rank in student and teacher; None: it has no part in that model."""
    learns = student.coordinates(rank).pipeline if rank in student.ranks else None
    teaches = teacher.coordinates(rank).pipeline if work.own_teachers and rank in teacher.ranks else None
    return learns, teaches


def _without_sampling(
    work: Workload, student: Layout, teacher: Layout, rank: int, cluster: Cluster, *, exact: bool = False
) -> Memory:
    """Returns the memory of a rank in all phases but those of sampling.

    Args:
        exact: count the rows of this rank; otherwise those of the tensor and context rank with the most rows.
    """
    config, learns = work.config, student.coordinates(rank).pipeline if rank in student.ranks else None
    layers, place = cluster.layers, student.coordinates(rank) if exact and learns is not None else None
    always: dict[str, float] = {}
    phases: dict[str, dict[str, float]] = {}
    captured = targets = 0.0
    if work.own_teachers and rank in teacher.ranks:
        at, copied = teacher.coordinates(rank), TEACHER_KINDS[config.teacher.weights].copied
        weights = teacher_weights(work, teacher, at.pipeline) if copied else 0.0
        captured = captured_bytes(work, student, teacher, at, work.own_teachers, exact=exact)
        forward = teacher_forward(work, teacher) if responses_of_wave(work, student, teacher, at.data) else 0.0
        phases["teacher"] = {"forward pass": forward, "captured rows": captured}
        (phases["teacher"] if config.teacher.offload else always)[TEACHER_WEIGHTS] = weights
    if learns is not None and work.served_teachers:
        readers = reader_layout(student)
        own = captured_bytes(work, student, readers, readers.coordinates(rank), work.served_teachers)
        captured = max(captured, own)  # of one teacher after the other
        phases["teacher"] = {"forward pass": 0.0, **phases.get("teacher", {}), "captured rows": captured}
        always["teachers' servers"] = colocated_share(config) * cluster.gpu.memory
    if learns is not None:
        always |= student_state(work, student, learns)
        always[TEACHER_HEAD] = teacher_heads(work, student, learns)
        always |= buffers(work, student, learns, layers=layers)
        if ENGINES[config.rollout.engine].in_process and config.rollout.replay is None:
            always[ROLLOUT_COPY] = rollout_copy(work)
        targets = target_bytes(work, student, learns, place)
    if layers == "transformer_engine":
        always |= engine_buffers(work, student, trains=learns is not None, teaches=rank in teacher.ranks)
    phases["transfer"] = {"targets": transfer_bytes(work, student, teacher, captured, targets)}
    if learns is not None:
        moments = update_memory(work, student, learns, place, layers=layers)
        phases |= {name: {"targets": targets, **parts} for name, parts in moments.items()}
        phases["optimizer"] = {"temporary": 0.0}  # a fused AdamW makes no tensors
    return Memory(always, phases)


def _with_sampling(kind: RankKind, rollout: SamplingCost | None, evaluation: SamplingCost | None) -> RankKind:
    """Returns `kind` with the phases of sampling added, if it is a rank of the student."""
    if kind.student is None:
        return kind
    found = {"rollout": rollout, "evaluation": evaluation}
    phases = {name: each.parts for name, each in found.items() if each is not None}
    return replace(kind, memory=Memory(kind.memory.always, phases | kind.memory.phases))


def _evaluation(work: Workload, lengths: Lengths, ranks: int) -> tuple[Demand | None, bool]:
    """Returns (one evaluation, or None without one; whether the number of its problems is known)."""
    config, room = work.config, work.student.max_positions - work.prompt
    sets, problems = len(config.data.sets), lengths.problems
    if not config.evaluation.every or not sets or config.rollout.replay is not None:
        return None, False
    if problems is None and config.evaluation.limit is not None:
        problems = config.evaluation.limit * sets
    longest = min(config.evaluation.max_new_tokens or config.rollout.max_new_tokens, room)
    # in proportion to whole responses of training
    limit = min(config.rollout.max_new_tokens, room)
    average = max(1, round(longest * min(lengths.response or limit, limit) / limit))
    responses = ranks * config.rollout.max_batch if problems is None else problems * config.evaluation.samples
    return Demand(responses, longest, average, "evaluation.max_new_tokens"), problems is not None
