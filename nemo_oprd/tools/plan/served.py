"""Teachers behind vLLM servers: a server's memory, the bytes that it sends, and the time to get a step's states."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from nemo_oprd.batch.layout import Layout
from nemo_oprd.config.schema import Config
from nemo_oprd.tools.plan.gpus import ASSUMED, Gpu, in_bytes
from nemo_oprd.tools.plan.workload import TeacherWork, Workload
from nemo_oprd.vllm.launch import TEACHER_KEY

# finding: a server's memory does not hold the weights and the cache of the longest sequence
CODE = "teacher_server_memory"


@dataclass(frozen=True)
class Servers:
    """The servers of one teacher in an estimate.

    Attributes:
        name: the teacher's, in messages.
        count, tensor: servers, and GPUs of each.
        placement: colocated, dedicated, or elsewhere for `endpoints`.
        memory: bytes of one GPU that a server takes; of servers elsewhere what it has by `gpu_memory_utilization`.
        weights: bytes of the weights on one GPU.
        longest: tokens of the longest sequence.
        cache: bytes of its cache on one GPU.
        row_bytes: bytes per token and layer that leave a server.
        answers: bytes of a step's answers, from all servers.
        ahead: the most bytes of a machine's shared memory that answers take before a batch is complete.
        flops: operations of a step.
        seconds: seconds of a step's states, transfers included.
    """

    name: str
    count: int
    tensor: int
    placement: str
    memory: float
    weights: float
    longest: int
    cache: float
    row_bytes: int
    answers: float
    ahead: float
    flops: float
    seconds: float

    @property
    def problem(self) -> str | None:
        """Why a server can't hold what it needs; None: it can."""
        needed = self.weights + self.cache + ASSUMED.reserve
        if needed <= self.memory:
            return None
        return (
            f"a server of the teacher {self.name} has {in_bytes(self.memory)} of each GPU, but needs "
            f"{in_bytes(needed)}: {in_bytes(self.weights)} of weights, {in_bytes(self.cache)} of cache for a "
            f"sequence of {self.longest:,} tokens, and {in_bytes(ASSUMED.reserve)} for CUDA: raise "
            f"{TEACHER_KEY}.tensor or {TEACHER_KEY}.gpu_memory_utilization, or set {TEACHER_KEY}.placement=dedicated"
        )

    def as_json(self) -> dict[str, Any]:
        """Returns all fields."""
        return asdict(self)

    def finding(self) -> dict[str, Any]:
        """Returns `problem` as JSON."""
        numbers = {name: getattr(self, name) for name in ("memory", "weights", "cache", "longest", "tensor")}
        return {"code": CODE, "text": self.problem, "numbers": numbers}


def teacher_servers(longest: Workload, mean: Workload, student: Layout, gpu: Gpu) -> tuple[Servers, ...]:
    """Returns the servers of all teachers that use servers.

    Args:
        longest, mean: the work of a step with the longest responses, for memory, and with average ones.
    """
    config = mean.config
    return tuple(
        _servers(number, each, longest, mean, student, gpu)
        for number, each in enumerate(mean.teachers)
        if number in config.served_teachers
    )


def _servers(
    number: int, teacher: TeacherWork, longest: Workload, mean: Workload, student: Layout, gpu: Gpu
) -> Servers:
    config, model = mean.config, teacher.served
    assert model is not None
    settings = config.teacher.vllm
    placement = "elsewhere" if config.teacher_endpoints(number) else settings.placement
    count = server_count(config, number, student.size)
    length = min(longest.prompt + longest.response, teacher.spec.max_positions)
    row_bytes, layers = sent_per_row(config, number, teacher, mean.value_bytes)
    share = mean.shares[0] if len(mean.teachers) == 1 else mean.responses / len(mean.teachers)
    answers = share * (mean.rows * layers * row_bytes + output_row_bytes(teacher, mean) * mean.output_rows)
    flops = served_flops(teacher, mean)
    rate = gpu.flops * ASSUMED.compute * count * settings.tensor
    # an answer leaves a server's GPU, and reaches that of a rank
    paths = student.size * (gpu.network * ASSUMED.bandwidth if placement == "elsewhere" else ASSUMED.host)
    return Servers(
        name=config.teacher_sources[number].label if config.teachers else str(config.teacher.hf_path),
        count=count,
        tensor=settings.tensor,
        placement=placement,
        memory=config.teacher_server_share * gpu.memory,
        weights=model.weight_bytes(mean.value_bytes) / settings.tensor,
        longest=length,
        cache=length * model.cache_bytes(settings.tensor, mean.value_bytes),
        row_bytes=row_bytes,
        answers=answers,
        # those of later steps wait there, too
        ahead=min(settings.ahead_gib * (1 << 30), answers * (config.rollout.max_lag + 1)),
        flops=flops,
        seconds=flops / rate + answers / min(paths, count * ASSUMED.host),
    )


def server_count(config: Config, number: int, students: int) -> int:
    """Returns the servers of teacher `number`, as `vllm/teacher_servers.py` places them on GPUs."""
    settings = config.teacher.vllm
    if endpoints := config.teacher_endpoints(number):
        return len(endpoints)
    if settings.placement == "dedicated":
        return settings.replicas or 1
    return settings.replicas or max(1, students // settings.tensor)


def sent_per_row(config: Config, number: int, teacher: TeacherWork, value_bytes: int) -> tuple[int, int]:
    """Returns (bytes per row and layer, layers) that leave a server; `endpoints` send rows that no bridge projected."""
    projects = config.teacher_sources[number].bridge not in (None, "full_width")
    if projects and not config.teacher_endpoints(number):
        return teacher.width * teacher.value_bytes, len(teacher.pairs)  # a map for each layer of the student
    return teacher.spec.hidden_size * value_bytes, len(set(teacher.pairs.values()))


def output_row_bytes(teacher: TeacherWork, work: Workload) -> int:
    """Returns the bytes per row of the output loss that leave a server."""
    if not work.output_rows:
        return 0
    return teacher.spec.hidden_size * work.value_bytes if teacher.sends_states else 8


def served_flops(teacher: TeacherWork, work: Workload) -> float:
    """Returns a served teacher's operations per step: all layers, and the head if it sends log-probabilities."""
    model, length = teacher.served, work.needed
    assert model is not None
    share = work.responses / len(work.teachers)
    head = 2.0 * teacher.spec.hidden_size * teacher.spec.vocab_size
    inner = 2.0 * (model.active - teacher.spec.vocab_size * teacher.spec.hidden_size)
    attention = 2.0 * teacher.spec.num_layers * model.attention * length
    return share * (length * (inner + attention) + (work.output_rows * head if teacher.head else 0.0))


def colocated_share(config: Config) -> float:
    """Returns the fraction of a GPU's memory that servers of teachers take beside the student."""
    shares = config.teacher_server_share * len(config.started_teachers)
    return shares if config.teacher.vllm.placement == "colocated" else 0.0
