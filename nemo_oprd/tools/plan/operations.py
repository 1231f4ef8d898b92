"""Floating-point operations of a step, the bytes that it moves between GPUs, by kind, and its seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nemo_oprd.batch.layout import Layout
from nemo_oprd.models import ModelSpec
from nemo_oprd.tools.plan.gpus import ASSUMED, Gpu
from nemo_oprd.tools.plan.memory import student_parameters
from nemo_oprd.tools.plan.parameters import all_attention_flops, attention_parameters, model_parameters
from nemo_oprd.tools.plan.served import Servers, served_flops
from nemo_oprd.tools.plan.workload import Workload


def layers_flops(spec: ModelSpec, depth: int) -> float:
    """Returns the operations per token of the matrix products with weights of layers 1 to `depth`, forward."""
    return sum(layer_flops(spec, layer) for layer in range(1, depth + 1))


def layer_flops(spec: ModelSpec, layer: int) -> float:
    """Returns the operations per token of the matrix products with weights of layer `layer` (1-based), forward."""
    d = spec.hidden_size
    block = (3 if spec.gated else 2) * d * spec.ffn_size
    if spec.is_sparse(layer):
        assert spec.experts is not None
        experts = spec.experts
        block = d * experts.count + 3 * d * (experts.ffn_size * experts.per_token + experts.shared_ffn_size)
    return 2.0 * (attention_parameters(spec, layer).products + block)


def head_flops(spec: ModelSpec) -> float:
    """Returns the operations per token of the product with the LM head."""
    return 2.0 * spec.hidden_size * spec.vocab_size


@dataclass(frozen=True)
class StepFlops:
    """Floating-point operations of one step, over all GPUs."""

    sampling: float
    teacher: float
    update: float


def step_flops(work: Workload, *, causal: bool = True) -> StepFlops:
    """Returns the operations of a step, full recomputation included."""
    spec, length = work.student, work.needed
    tokens = float(work.responses * length)

    def forward(model: ModelSpec, depth: int) -> float:
        return tokens * (layers_flops(model, depth) + all_attention_flops(model, depth, length, causal=causal))

    output = float(work.responses * work.output_rows)
    again = 1.0 if work.config.student.recompute == "full" else 0.0
    update = (3 + again + _counting_passes(work)) * forward(spec, max(work.trained_depth, 1))
    if work.trains_head:
        update += 3 * output * head_flops(spec)
    teacher = 0.0
    for each in work.teachers:
        share = 1 / len(work.teachers)
        if each.served is not None:
            teacher += served_flops(each, work)
        else:
            teacher += share * forward(each.spec, each.depth)
        if each.head and each.served is None:
            teacher += share * output * head_flops(each.spec)
        elif (
            each.sends_states and work.trains_head
        ):  # the student's rank multiplies these states with the teacher's head
            update += share * output * head_flops(each.spec)
    sampled = float(work.responses * (work.prompt + work.response))
    attention = all_attention_flops(spec, spec.num_layers, work.prompt + work.response)
    per_token = layers_flops(spec, spec.num_layers) + attention
    sampling = sampled * per_token + work.responses * work.response * head_flops(spec)
    if work.config.rollout.replay is not None:
        sampling = 0.0
    return StepFlops(sampling, teacher, update * work.config.train.updates_per_rollout)


def _counting_passes(work: Workload) -> int:
    """Returns the number of passes that count how often each expert is chosen (`distillation/router_losses.py`)."""
    return int(work.student.experts is not None and work.config.student.router_aux_loss > 0)


@dataclass(frozen=True)
class StepBytes:
    """Bytes that the busiest GPU receives in a step, by kind; `targets` and `weights` are upper bounds."""

    gradients: float
    tensor: float
    experts: float
    context: float
    pipeline: float
    targets: float
    weights: float

    def by_kind(self) -> dict[str, float]:
        """Returns kind -> bytes, in the words of the report."""
        return {
            "gradients and parameters (data parallel)": self.gradients,
            "activations (tensor parallel)": self.tensor,
            "tokens to experts (expert parallel)": self.experts,
            "keys and values (context parallel)": self.context,
            "hidden states (pipeline)": self.pipeline,
            "targets, at most": self.targets,
            "weights to the engine, at most": self.weights,
        }


def step_bytes(work: Workload, student: Layout) -> StepBytes:
    """Returns the bytes that the student's busiest rank receives, without those between the ranks of a teacher."""
    batches, spec, e = work.on(student), work.student, work.value_bytes
    tokens = float(batches.count * batches.tokens) / student.context
    stage = max((student_parameters(work, student, p) for p in range(student.pipeline)), key=lambda each: each.all_held)
    shards, copies = student.data * student.context, student.expert_copies
    away, experts_away = (shards - 1) / shards, (copies - 1) / copies
    gathered = e if work.config.distributes_optimizer(student) else 4  # parameters gathered, or the sum sent back
    layers = max(student.layers_per_stage(spec.num_layers))
    counting = _counting_passes(work)
    passes = 2 + (1 if work.config.student.recompute == "full" else 0) + counting
    t = student.tensor
    keys = 2 * spec.kv_heads_per_rank(t) * spec.head_dim * e
    # with fewer key/value heads than ranks, each rank gathers the queries, keys and values of all (`attention.py`)
    projected = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim if t > spec.num_kv_heads else 0
    experts = 0.0
    if spec.experts is not None:  # there and back again, for each of a token's experts
        most = max(
            sum(spec.is_sparse(i) for i in student.owned_layers(p, spec.num_layers)) for p in range(student.pipeline)
        )
        visits = passes * 2 * most * tokens / t * spec.experts.per_token
        # to other ranks; and where an expert is split, to all of its ranks
        sent = (student.expert - 1) / student.expert + student.expert_tensor - 1
        experts = visits * spec.hidden_size * e * sent
    rows = batches.responses * work.rows / student.context
    owned = -(-len(work.layers) // student.pipeline)
    return StepBytes(
        gradients=(stage.trained * away + stage.experts_trained * experts_away) * (4 + gathered),
        tensor=passes * layers * tokens * (4 * spec.hidden_size + projected) * e * (t - 1) / t,
        experts=experts,
        context=passes * layers * tokens * (student.context - 1) * keys,
        pipeline=(2.0 + counting) * tokens * spec.hidden_size * e if student.pipeline > 1 else 0.0,
        targets=rows * owned * work.teachers[0].width * work.teachers[0].value_bytes,
        weights=0.0 if work.config.rollout.replay is not None else float(model_parameters(spec) * e),
    )


# An estimate of a step's seconds from a GPU's published numbers and `gpus.Assumptions`.


def bubble(layout: Layout, microbatches: int) -> float:
    """Returns the share of a pipeline's time in which a rank waits: (P - 1) / (V m + P - 1)."""
    idle = layout.pipeline - 1
    return idle / (layout.virtual_pipeline * microbatches + idle)


def training_seconds(
    work: Workload,
    gpu: Gpu,
    student: Layout,
    teacher: Layout,
    *,
    gpus_per_node: int,
    servers: Sequence[Servers] = (),
) -> dict[str, float]:
    """Returns phase -> seconds of a step's teacher, update and communication, on the fullest data-parallel rank.

    Args:
        servers: the teachers' servers, which compute one after the other, before the teachers without servers.
    """
    flops, moved = step_flops(work), step_bytes(work, student)
    rate = gpu.flops * ASSUMED.compute
    link = gpu.link * ASSUMED.bandwidth
    crosses = student.size > gpus_per_node
    network = (gpu.network if crosses else gpu.link) * ASSUMED.bandwidth
    of_teacher, of_student = work.teacher_share(student, teacher), work.on(student).responses / work.responses
    # one data-parallel rank's responses, on the ranks that divide each of them
    own_flops = flops.teacher - sum(each.flops for each in servers)
    teacher_seconds = own_flops * of_teacher * teacher.data / teacher.size / rate
    teacher_seconds /= 1 - bubble(teacher, work.on(teacher).count)
    update = flops.update * of_student * student.data / student.size / rate
    update /= 1 - bubble(student, work.on(student).resident)
    between_experts = network if student.expert * student.expert_tensor > gpus_per_node else link
    exchange = (moved.tensor + moved.context) / link + moved.pipeline / network + moved.experts / between_experts
    updates = work.config.train.updates_per_rollout
    sent = {} if work.config.rollout.replay is not None else {"weights to the engine": moved.weights / network}
    return {
        "teacher": teacher_seconds * (1 + 0.25 * exchange / max(update, 1e-9)) + sum(s.seconds for s in servers),
        "targets": moved.targets / network,
        "update": update + exchange * updates,
        "gradients and optimizer": moved.gradients / network * updates,
        **sent,
    }
