"""Memory per GPU, by part and by phase of a step: activations of a layer, model states, targets, and passes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from nemo_oprd.batch.layout import Coordinates, Layout
from nemo_oprd.config.memory_bounds import LAYERS_AT_A_TIME_BYTES
from nemo_oprd.config.teacher_kinds import TEACHER_KINDS
from nemo_oprd.losses.registry import DIVERGENCES, ROW_CHUNK, SLAB
from nemo_oprd.models import ModelSpec
from nemo_oprd.tools.plan.gpus import Layers
from nemo_oprd.tools.plan.parameters import (
    StageParameters,
    attention_weight_shapes,
    capped_score_bytes,
    delta_net_backward_values,
    delta_net_values,
    stage_parameters,
)
from nemo_oprd.tools.plan.workload import TeacherWork, Workload

# names of the parts that stay in memory between phases, which `rehearse` compares, too
WEIGHTS, GRADIENTS, OPTIMIZER, ROLLOUT_COPY = "weights", "gradients", "optimizer", "rollout copy"
TEACHER_HEAD, TEACHER_WEIGHTS = "teacher's head", "teacher weights"

# Bytes of activations: what one layer keeps for its backward pass, and what passes through memory besides.
#
# The terms of a layer are the tensors that autograd saves, counted for Megatron's local layers with saved-tensor hooks
# on a CPU, and for Transformer Engine's in rehearsals of its Python layer. They were not yet compared with a GPU.
#
# S tokens of this context rank, D hidden size, F feed-forward size, A heads, G key/value groups, C channels of a head,
# t tensor-parallel size.


@dataclass(frozen=True)
class LayerBytes:
    """Bytes per token of one layer.

    Attributes:
        kept: saved for the backward pass.
        core: what selective recomputation of attention saves of `kept`; negative where it keeps more than it drops.
        input: the layer's input, all that full recomputation keeps.
        backward: gradients alive when the layer's backward pass begins; later `kept` shrinks faster than they grow.
        norm: tensors of the backward pass of the final norm.
    """

    kept: float
    core: float
    input: float
    backward: float
    norm: float


def dense_values(spec: ModelSpec, layout: Layout, *, kept: bool = True) -> float:
    """Returns values per token that a block without experts keeps for backward, or has alive in its forward pass.

    With SwiGLU (`megatron/swiglu.py`) it keeps both products of the first matrix and the second matrix's input, 3 F;
    its forward pass also has the SiLU, 4 F. With another gate the activation's results are added, 5 F; without, 3 F.
    """
    products = (3 if kept else 4) if spec.swiglu else 5 if spec.gated else 3
    return products * spec.ffn_size / layout.tensor


def feed_forward_values(
    spec: ModelSpec, layout: Layout, kept_by: Layers = "transformer_engine", *, kept: bool = True
) -> float:
    """Returns values per token of a layer's feed-forward block on a rank, of the larger kind of layer.

    In a layer with experts each token visits K of them, spread evenly; a visit has 5 F + 4 D values with Transformer
    Engine, 6 F + D with Megatron's local experts, 7 F + 3 D for experts with biases.
    `kept`: the values that are kept for the backward pass; False: those that the forward pass has alive.
    """
    dense = dense_values(spec, layout, kept=kept)
    if spec.experts is None:
        return dense
    # without sequence parallelism every tensor rank sends all tokens to their experts
    shared_by = layout.tensor if layout.sequence else 1
    products, states = (5, 4) if kept_by == "transformer_engine" else (6, 1)
    if spec.experts.biases:  # as rehearsed: the sum with the biases is another tensor, and its halves are clamped
        products, states = 7, 3
    sparse = spec.experts.per_token * (products * spec.experts.ffn_size + states * spec.hidden_size) / shared_by
    sparse += shared_expert_values(spec, layout, kept=kept) + routed_values(spec) / shared_by
    return sparse if all(spec.experts.sparse) else max(dense, sparse)


def shared_expert_values(spec: ModelSpec, layout: Layout, *, kept: bool = True) -> float:
    """Returns values per token of the shared expert: its output and, if `kept`, those that its backward pass needs."""
    if spec.experts is None or not spec.experts.shared_ffn_size:
        return 0.0
    output = spec.hidden_size / (layout.tensor if layout.sequence else 1)
    return output + (5 * spec.experts.shared_ffn_size / layout.tensor if kept else 0.0)


def routed_values(spec: ModelSpec) -> float:
    """Returns the map from tokens to expert rows in two-byte values per token.

    Only models that Megatron-Bridge builds have one, for Transformer Engine's kernel: two integers of four bytes per
    expert, and one more.
    """
    return 0.0 if spec.experts is None or spec.family.own else 2.0 * (2 * spec.experts.count + 1)


def attention_widths(spec: ModelSpec, tensor: int) -> tuple[float, float]:
    """Returns channels of queries, and of keys or values (with latent attention: of all heads), on a tensor rank."""
    if spec.latent is not None:
        return (spec.num_heads * (spec.latent.plain + spec.latent.rotated) / tensor,) * 2
    if spec.layer_heads:  # of the layer that has most
        widest = max(spec.layer_heads, key=lambda heads: heads.kv * heads.channels)
        channels = max(heads.channels for heads in spec.layer_heads)
        return spec.num_heads * channels / tensor, widest.kv * widest.channels / tensor
    return spec.num_heads * spec.head_dim / tensor, float(spec.kv_heads_per_rank(tensor) * spec.head_dim)


def layer_bytes(spec: ModelSpec, layout: Layout, value_bytes: int, layers: Layers) -> LayerBytes:
    """Returns the bytes per token of a student's layer, if its loss is injected at its output."""
    t, e = layout.tensor, value_bytes
    d = spec.hidden_size / (t if layout.sequence else 1)
    q, kv = attention_widths(spec, t)
    block, heads = feed_forward_values(spec, layout, layers), spec.num_heads / t
    if layers == "transformer_engine":
        norms = 4 * d * e  # the inputs and the outputs of both norms
    elif layers == "local":
        # per norm: its input, the normed state and the linear layer's input, and a scale per token
        norms = 2 * (3 * e * d + 4)
    else:
        # the input in float32
        norms = 2 * (4 * d + 2 * e * d + 4)
        norms += e * d if e < 4 else 0  # the float32 copy is not the hidden state, which the injection keeps
    lse = 4 * heads  # a logarithm per head
    core = q * e + lse  # with the output of attention in its buckets
    qkv = (q + 2 * kv) * e
    if layout.context > 1 and layers != "transformer_engine":
        # keys and values of the whole sequence, for every query head
        qkv = q * e + (2 * layout.context + 1) * q * e
    attention = qkv + q * e  # and its output
    if spec.output_gate:
        attention += 3 * q * e  # the gate, what the sigmoid makes of it, and their product
    if spec.latent is not None:  # the narrow states before and after their norms
        attention += 2 * (spec.latent.query_rank + spec.latent.key_rank) * e
    if spec.qk_norm and spec.latent is None:
        attention += 4 * (heads + spec.kv_heads_per_rank(t))
        if layers == "transformer_engine":  # the inputs of both norms
            attention += (q + kv) * e
        else:
            attention += (q + kv) * ((4 if layers == "cpu" else e) + e)
            # in float32 the keys before their norm are a part of the whole product, which stays
            attention += (q + kv) * e if e == 4 or layers != "cpu" else 0
    # of the larger kind of layer; a delta net saves no logarithms, and its input is the norm's output
    attention = max(attention, delta_net_values(spec) / t * e)
    # selective: the inputs of attention stay, and the values among them keep the whole product they are a part of
    saved = (lse if layers == "transformer_engine" else core) - (q + kv) * e
    kept = norms + attention + (lse if layers == "transformer_engine" else core) + block * e
    norm = d * (16 if layers == "cpu" else 4 * e)
    # The MLP runs backward first: the gradient of its second matrix's input, and with SwiGLU that of both products when
    # that input is gone. Where attention is wide, its gradients come to more than what the MLP has freed.
    of_block = 2 * block / 3 if spec.swiglu and block == dense_values(spec, layout) else block / 5
    # flash attention on a GPU sums the queries' gradient in float32
    of_attention = max((2 if layers == "cpu" else 4) * q + 2 * kv, delta_net_backward_values(spec) / t)
    backward = max(spec.hidden_size + of_block, of_attention - block - 3 * d) * e + capped_score_bytes(
        spec, t, backward=True
    )
    return LayerBytes(kept, saved, d * e, backward, norm)


def microbatches_in_flight(layout: Layout, pipeline: int, count: int) -> float:
    """Returns how many microbatches' activations a pipeline rank holds at a time, in 1F1B or its interleaved form.

    With virtual pipeline stages, a microbatch in one of the rank's model chunks counts as 1 / their number.
    """
    if layout.pipeline == 1:
        return 1.0
    if layout.virtual_pipeline == 1:
        return float(min(layout.pipeline - pipeline, count))
    chunks = layout.virtual_pipeline
    held = (layout.pipeline - pipeline - 1) * 2 + (chunks - 1) * layout.pipeline + 1
    return min(held, count * chunks) / chunks


def kept_bytes(layers: int, each: LayerBytes, recompute: str, method: str, group: int) -> float:
    """Returns the bytes per token that `layers` layers of a stage keep between forward and backward."""
    if recompute == "full":
        if method == "block":
            recomputed = min(group, layers)
            return recomputed * each.input + (layers - recomputed) * each.kept
        return -(-layers // max(1, group)) * each.input
    return layers * (each.kept - (each.core if recompute == "selective" else 0.0))


def transient_bytes(layers: int, each: LayerBytes, recompute: str, method: str, group: int) -> float:
    """Returns bytes per token that a layer, or a recomputed group of layers, adds to `kept_bytes` in its backward."""
    if not layers:
        return 0.0
    again = 0.0
    if recompute == "full" and method == "uniform":
        again = min(group, layers) * each.kept
    elif recompute == "full":  # the layers that are not recomputed run backward first, and free what they kept
        again = max(0.0, each.kept - max(0, layers - group) * each.kept)
    return again + each.backward


# tensors [rows, D] that are alive at a time in a chunk of rows in which the representation loss is computed in float32
ROW_TENSORS = 5
# `DivergenceEntry.live_tensors` of a divergence that is only measured
WATCHED_TENSORS = (2, 1, 1)
# bytes of a workspace for products on Hopper and later, and the streams for experts' products, with one each
CUBLAS_WORKSPACE = 32 * 2**20 + 1024
GROUPED_STREAMS = 4


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank.

    Attributes:
        always: part -> bytes that are there in every phase.
        phases: phase -> part -> bytes that are there in that phase only.
    """

    always: dict[str, float]
    phases: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def peak(self) -> float:
        """Bytes in the phase that needs most."""
        return sum(self.always.values()) + max((sum(parts.values()) for parts in self.phases.values()), default=0.0)

    @property
    def fullest(self) -> str:
        """The phase that needs most."""
        return max(self.phases, key=lambda phase: sum(self.phases[phase].values()), default="")


def student_parameters(work: Workload, layout: Layout, pipeline: int) -> StageParameters:
    """Returns the student's parameters on a rank of stage `pipeline`."""
    return stage_parameters(
        work.student,
        layout,
        pipeline,
        trained_depth=work.trained_depth,
        trains_norm=work.final_layer_after_norm or work.trains_head,
        trains_head=work.trains_head,
    )


def student_state(work: Workload, layout: Layout, pipeline: int) -> dict[str, float]:
    """Returns bytes by part on a rank of stage `pipeline`: the student's weights, float32 gradients and AdamW state."""
    count = student_parameters(work, layout, pipeline)
    # a float32 copy of the weights where they are bfloat16, and two moments
    state = 12 if work.value_bytes < 4 else 8
    is_sharded = work.config.distributes_optimizer(layout)
    shards, copies = (layout.data * layout.context, layout.expert_copies) if is_sharded else (1, 1)
    parts = {
        WEIGHTS: float(count.all_held * work.value_bytes),
        GRADIENTS: 4.0 * count.all_trained,
        OPTIMIZER: state * (count.trained / shards + count.experts_trained / copies),
    }
    projectors = projector_parameters(work, layout, pipeline)
    if projectors:  # float32, so that the optimizer has no copy of them
        parts["trained bridge"] = projectors * (4 + 4 + 8 / shards)
    return parts


def projector_parameters(work: Workload, layout: Layout, pipeline: int) -> int:
    """Returns the parameters of a bridge trained with the student, on every tensor rank of stage `pipeline`."""
    config = work.config
    if not config.bridge.train or all(source.bridge is None for source in config.teacher_sources):
        return 0
    owned = set(layout.owned_layers(pipeline, work.student.num_layers))
    return len(owned & set(work.layers)) * work.teachers[0].width * work.student.hidden_size


def buffers(work: Workload, layout: Layout, pipeline: int, *, layers: Layers) -> dict[str, float]:
    """Returns the buffers that Megatron keeps between steps on a rank of stage `pipeline`: name -> bytes.

    With sequence parallelism, Megatron's local layers gather states into one buffer for all layers; Transformer Engine
    makes a new tensor each time. A stage keeps the last state that it received from the stage before.
    """
    state = work.on(layout).tokens / layout.context * work.student.hidden_size * work.value_bytes
    split = layout.tensor if layout.sequence else 1
    return {
        "gather buffer": gathered_state(work, layout) if layers != "transformer_engine" else 0.0,
        "last input": state / split if pipeline else 0.0,
    }


def gathered_state(work: Workload, layout: Layout) -> float:
    """Returns the bytes of the states of a microbatch that sequence parallelism gathers from the tensor ranks."""
    if not layout.sequence or layout.tensor == 1:
        return 0.0
    return work.on(layout).tokens / layout.context * work.student.hidden_size * work.value_bytes


def engine_buffers(work: Workload, layout: Layout, *, trains: bool, teaches: bool) -> dict[str, float]:
    """Returns Transformer Engine's buffers on a rank: a cuBLAS workspace and, in training, a gradient per weight shape.

    Weights' gradients are added to Megatron's buffer inside the product; autograd gets tensors that no code reads.
    """
    specs = [*([work.student] if trains else []), *(teacher.spec for teacher in work.own_teachers if teaches)]
    streams = 1 + (GROUPED_STREAMS if any(spec.experts for spec in specs) else 0)
    spec, d = work.student, work.student.hidden_size
    sizes = [] if spec.experts is not None and all(spec.experts.sparse) else [spec.ffn_size]
    sizes += [spec.experts.ffn_size] if spec.experts is not None else []
    split, whole = attention_weight_shapes(spec)
    split |= {shape for size in sizes for shape in (((2 if spec.gated else 1) * size, d), (d, size))}
    values = sum(map(math.prod, split)) / layout.tensor + sum(map(math.prod, whole))
    return {
        "cuBLAS workspace": float(streams * CUBLAS_WORKSPACE),
        "unread gradients": values * work.value_bytes if trains else 0.0,
    }


def teacher_weights(work: Workload, layout: Layout, pipeline: int) -> float:
    """Returns bytes of the teachers' weights on a rank of stage `pipeline`; with offload, of the largest only."""
    each, averages = [], TEACHER_KINDS[work.config.teacher.weights].averages
    # beside weights in bfloat16 the average is held in float32
    value_bytes = work.value_bytes + (4 if averages and work.value_bytes < 4 else 0)
    for teacher in work.own_teachers:
        count = stage_parameters(teacher.spec, layout, pipeline, depth=teacher.depth, head=teacher.head or averages)
        each.append(float(count.all_held * value_bytes))
    return max(each, default=0.0) if work.config.teacher.offload else sum(each)


def teacher_heads(work: Workload, layout: Layout, pipeline: int) -> float:
    """Returns the bytes of the copies of the teachers' heads on the student's last stage."""
    if pipeline != layout.pipeline - 1 or TEACHER_KINDS[work.config.teacher.weights].moves:
        return 0.0
    rows = work.student.padded_vocab(layout.tensor) // layout.tensor
    return float(sum(rows * t.spec.hidden_size * work.value_bytes for t in work.teachers if t.sends_states))


def rows_on_rank(work: Workload, layout: Layout, rows: int, at: Coordinates | None = None) -> float:
    """Returns the number of a microbatch's supervised rows on the rank at `at`; None: on the rank with the most.

    Ranks that share a pack hold very different numbers of rows, because these are consecutive tokens of a response, not
    a sample of all. Under sequence parallelism a tensor rank holds consecutive tokens of the pack. Example, on four
    tensor ranks: if the pack is a sequence of 18,432 tokens, the last rank holds all of its last 2,000 rows, and the
    others hold no rows, targets or injected gradients (1.5 GB on Qwen3-4B's last stage); if it is two sequences, the
    second and the fourth rank hold half of the rows each. Without sequence parallelism every tensor rank holds all
    rows. A context rank c of C holds the chunks c and 2 C - 1 - c of every sequence (zig-zag).

    Args:
        rows: per response; its last ones, or its first ones with `loss.representation.positions=first_k`.
    """
    if at is None:
        tensors = range(layout.tensor if layout.sequence else 1)
        every = (Coordinates(tensor, context, 0, 0) for context in range(layout.context) for tensor in tensors)
        return max(rows_on_rank(work, layout, rows, each) for each in every)
    # in units of 1 / (2 C t) token, in which every border is an integer
    unit, chunk, per_pack = 2 * layout.context * layout.tensor, work.needed * layout.tensor, work.on(layout).per_pack
    is_first = work.config.loss.representation.positions == "first_k"
    begin = (work.prompt if is_first else work.needed - rows) * unit
    end = begin + rows * unit
    low, high = 0, per_pack * 2 * chunk
    if layout.sequence:
        width = high // layout.tensor
        low, high = at.tensor * width, (at.tensor + 1) * width
    held = 0
    for place, number in enumerate((at.context, 2 * layout.context - 1 - at.context)):
        for sequence in range(per_pack):
            # where the rows of this chunk are in the pack
            moved = (2 * sequence + place - number) * chunk
            first, last = max(begin, number * chunk) + moved, min(end, (number + 1) * chunk) + moved
            held += max(0, min(high, last) - max(low, first))
    return held / unit


def target_bytes(work: Workload, layout: Layout, pipeline: int, at: Coordinates | None = None) -> float:
    """Returns the bytes of the targets that a student's rank of stage `pipeline` holds for one wave of microbatches.

    `at` is as in `rows_on_rank`.
    """
    owned = set(layout.owned_layers(pipeline, work.student.num_layers))
    rows, batches, teacher = rows_on_rank(work, layout, work.rows, at), work.on(layout), work.teachers[0]
    held = rows * len(owned & set(work.layers)) * teacher.width * teacher.value_bytes
    if work.output_rows and pipeline == layout.pipeline - 1:
        output = batches.per_pack * work.output_rows / layout.context
        # a teacher sends its final state per row, or two numbers
        held += output * (teacher.spec.hidden_size * work.value_bytes if teacher.sends_states else 8)
    return held * batches.resident


def update_memory(
    work: Workload, layout: Layout, pipeline: int, at: Coordinates | None = None, *, layers: Layers
) -> dict[str, dict[str, float]]:
    """Returns moment ("update": backward pass of a layer; "output loss") -> part -> bytes, on a rank of `pipeline`.

    All activations are in memory when the backward pass begins. `at` is as in `rows_on_rank`.
    """
    student, spec, batches = work.config.student, work.student, work.on(layout)
    tokens = batches.tokens / layout.context
    each = layer_bytes(spec, layout, work.value_bytes, layers=layers)
    trained = [i for i in layout.owned_layers(pipeline, spec.num_layers) if i <= max(work.trained_depth, 1)]
    settings = student.recompute, student.recompute_method, student.recompute_num_layers
    last = pipeline == layout.pipeline - 1
    # the embedding, or the state that came from the stage before; and the final norm's
    ends = (1 + last) * each.input
    kept = tokens * (kept_bytes(len(trained), each, *settings) + ends)
    activations = kept * microbatches_in_flight(layout, pipeline, batches.resident)
    transient = tokens * max(transient_bytes(len(trained), each, *settings), each.norm if last else 0.0)
    if layers == "transformer_engine":
        transient += gathered_state(work, layout)
    rows = rows_on_rank(work, layout, work.rows, at)
    if rows:
        transient = max(transient, injection_bytes(work, rows, tokens * each.input))
    moments = {"update": {"activations": activations, "backward of a layer": transient}}
    if last and work.output_rows:
        moments["output loss"] = {"activations": activations, "logits chunk": logits_chunk(work, layout)}
    return moments


def injection_bytes(work: Workload, rows: float, state: float) -> float:
    """Returns bytes while a layer's loss gradient is added: the state's gradient twice, and a float32 chunk of rows.

    Args:
        rows: those of a microbatch on the rank.
        state: bytes of one hidden state of a microbatch.
    """
    widest = max(work.student.hidden_size, *(teacher.width for teacher in work.teachers))
    return 2 * state + 4.0 * ROW_TENSORS * min(ROW_CHUNK, rows) * widest


def logits_chunk(work: Workload, layout: Layout) -> float:
    """Returns bytes of the output loss: float32 [chunk, vocabulary / tensor] tensors, the rows, and their gradients."""
    rows = work.on(layout).per_pack * work.output_rows / layout.context
    columns = work.student.padded_vocab(layout.tensor) / layout.tensor
    chunk = min(work.config.loss.output.chunk_tokens, rows)
    watched = work.output_kind == "watched"
    whole, slabs, most = WATCHED_TENSORS if watched else DIVERGENCES[work.output_kind].live_tensors
    whole += not watched and work.student.output_cap is not None  # the derivative of the bound of the logits
    tensors = whole + min(most, slabs * SLAB / columns)
    return tensors * 4.0 * chunk * columns + rows * work.student.hidden_size * 2 * (4.0 + work.value_bytes)


def captured_bytes(
    work: Workload,
    student: Layout,
    teacher: Layout,
    at: Coordinates,
    teachers: Sequence[TeacherWork],
    *,
    exact: bool = False,
) -> float:
    """Returns bytes of a wave's rows that the rank at `at` keeps until it sends them, for the teacher with the most.

    Args:
        exact: count this rank's hidden-state rows, otherwise the fullest rank's; output rows are averaged.
    """
    # a rank keeps the rows that it sends: with sequence parallelism those that it holds, otherwise an equal part
    parts = 1 if teacher.sequence else teacher.tensor
    rows = rows_on_rank(work, teacher, work.rows, at if exact else None) / parts / work.on(teacher).per_pack
    responses, most = responses_of_wave(work, student, teacher, at.data), 0.0
    for each in teachers:
        owned = set(teacher.owned_layers(at.pipeline, each.spec.num_layers))
        layers = sum(1 for layer in each.pairs.values() if layer in owned)
        held = responses * rows * layers * each.width * each.value_bytes
        if work.output_rows and at.pipeline == teacher.pipeline - 1:
            # final states, of which only two numbers per row are sent for sampled_token
            final = work.output_rows / teacher.context / parts
            held += responses * final * each.spec.hidden_size * work.value_bytes
        most = max(most, held)
    return most


def responses_of_wave(work: Workload, student: Layout, teacher: Layout, data: int) -> int:
    """Returns the responses of a wave on the teacher's data-parallel rank `data`; the first ranks have the most."""
    return max(0, -((data - _wave(work, student)) // teacher.data))


def _wave(work: Workload, student: Layout) -> int:
    """Returns the number of responses, over all ranks, whose targets are in memory at the same time."""
    batches = work.on(student)
    return min(work.responses, batches.resident * batches.per_pack * student.data)


def transfer_bytes(work: Workload, student: Layout, teacher: Layout, captured: float, targets: float) -> float:
    """Returns the bytes on a rank while `captured` bytes are sent and `targets` bytes arrive, a few layers at a time.

    What was sent is freed. Layers under way have two copies more, or three if the two layouts differ.
    """
    each = work.teachers[0]
    rows = _wave(work, student) * work.rows
    layers = max(1, len(work.layers))
    at_a_time = max(1, LAYERS_AT_A_TIME_BYTES // max(1, rows * each.width * each.value_bytes))
    share = min(1.0, at_a_time / layers)
    received = 0.0 if student == teacher else targets
    return max(captured + share * (captured + targets + received), targets + share * (2 * captured + received))


def teacher_forward(work: Workload, teacher: Layout) -> float:
    """Returns the bytes that come and go in a teacher's forward pass over one microbatch."""
    per_token = max(
        (
            # a state on its way between two stages, too
            forward_bytes(each.spec, teacher, work.value_bytes)
            + (each.spec.hidden_size * work.value_bytes if teacher.pipeline > 1 else 0)
            for each in work.own_teachers
        ),
        default=0.0,
    )
    return work.on(teacher).tokens / teacher.context * per_token


def forward_bytes(spec: ModelSpec, layout: Layout, value_bytes: int) -> float:
    """Returns the most bytes per token alive in a forward pass without gradients, in a layer's MLP or attention."""
    d = spec.hidden_size / (layout.tensor if layout.sequence else 1)
    q, kv = attention_widths(spec, layout.tensor)
    attention = 2 * d + max((7 if spec.output_gate else 5) * q + 6 * kv, delta_net_values(spec) / layout.tensor)
    # what a backward pass would need of the shared expert is gone when the others compute
    widest = max(3 * d + feed_forward_values(spec, layout, kept=False), attention)
    return value_bytes * widest + capped_score_bytes(spec, layout.tensor, backward=False)
