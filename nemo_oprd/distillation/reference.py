"""The paper's equations on plain Hugging Face models in one process, for checking an installation.

Shares with the Megatron path only the configuration, the rollouts, the loaded weights and their names, the layer map,
the draw of full-width projectors and a user's own row loss: no packing, no layouts, no row table; sequences run one by
one. It defines the built-in losses and the routers' losses again. Slow on purpose, and to be read against the paper.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from nemo_oprd.batch.types import Rollout
from nemo_oprd.bridge.maps import FULL_WIDTH, draw_projector
from nemo_oprd.canary.delta_rule import exact_delta_rule
from nemo_oprd.config.schema import (
    Config,
    LossConfig,
    OutputLossConfig,
    RepresentationLossConfig,
    RolloutConfig,
    StudentConfig,
    TeacherSource,
)
from nemo_oprd.losses.layer_mapping import layer_map
from nemo_oprd.losses.registry import resolve_row_loss
from nemo_oprd.losses.representation import RowLoss
from nemo_oprd.megatron.weights.hf import HFCheckpoint, transformers_model
from nemo_oprd.models import FAMILIES, parse_model_spec
from nemo_oprd.models.families import fused_name

# The routers' losses of the plain Hugging Face computation, and the replay of recorded experts.
#
# Shapes: T tokens of a sequence, E experts, K experts per token.


class RouterReference:
    """Takes the place of the routers (`mlp.gate`) of a transformers model, in the model's precision.

    Args:
        layers: the layers (1-based) whose losses count, if they have experts.
        lengths: for each rollout, how many of its tokens count.

    Attributes:
        losses: "moe/aux_loss" and "moe/z_loss", those with a weight, summed over the responses so far.
    """

    def __init__(
        self, student: StudentConfig, model: Any, rollouts: list[Rollout], layers: range, lengths: list[int]
    ) -> None:
        self.student, self.model, self.rollouts, self.lengths = student, model, rollouts, lengths
        self.tokens = sum(lengths)
        self.logits: dict[int, torch.Tensor] = {}
        self.experts: dict[int, torch.Tensor] = {}
        self._forced: Any = None
        blocks = {i + 1: layer.mlp for i, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "gate")}
        for number, (layer, block) in enumerate(blocks.items()):
            block.gate.forward = lambda hidden, layer=layer, number=number, gate=block.gate: self._route(
                gate, layer, number, hidden
            )
        self.layers = [layer for layer in blocks if layer in layers]
        self._weights = {"moe/aux_loss": student.router_aux_loss, "moe/z_loss": student.router_z_loss}
        self.losses = {name: 0.0 for name, weight in self._weights.items() if weight}
        self.fractions = self._fractions() if student.router_aux_loss else {}

    def _route(self, gate: Any, layer: int, number: int, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = hidden.reshape(-1, hidden.shape[-1]) @ gate.weight.T
        p = logits.softmax(-1)
        experts = p.topk(gate.top_k, dim=-1).indices
        if self._forced is not None:
            experts[: len(self._forced)] = torch.from_numpy(self._forced[:, number].astype(np.int64))
        weights = p.gather(1, experts)
        if getattr(gate, "norm_topk_prob", True):  # Mixtral has no such setting, and does so
            weights = weights / weights.sum(-1, keepdim=True)
        self.logits[layer], self.experts[layer] = logits, experts
        return logits, weights, experts

    def before(self, rollout: Rollout) -> None:
        """Prepares the routers for a rollout; with `student.router_replay` its tokens visit its recorded experts."""
        self._forced = rollout.expert_routes if self.student.router_replay else None

    @torch.no_grad()
    def _fractions(self) -> dict[int, torch.Tensor]:
        """Returns layer -> how often each expert is chosen, per counted token of all rollouts."""
        counts: dict[int, Any] = dict.fromkeys(self.layers, 0)
        for rollout, length in zip(self.rollouts, self.lengths, strict=True):
            if length:
                self.before(rollout)
                self.model.model(torch.from_numpy(rollout.ids)[None].long(), use_cache=False)
                for layer in self.layers:
                    chosen = torch.nn.functional.one_hot(self.experts[layer][:length], self.logits[layer].shape[1])
                    counts[layer] = counts[layer] + chosen.sum((0, 1))
        return {layer: count / self.tokens for layer, count in counts.items()}

    def response_loss(self, number: int) -> torch.Tensor | float:
        """Returns the routers' part of the total loss for the response just computed; adds their losses to `losses`."""
        total: torch.Tensor | float = 0.0
        for layer in self.layers:
            logits = self.logits[layer][: self.lengths[number]]
            share = 1 / (len(self.layers) * self.tokens)
            if "moe/aux_loss" in self.losses:
                aux = share * logits.shape[1] * (logits.softmax(-1) * self.fractions[layer]).sum()
                self.losses["moe/aux_loss"] += float(aux.detach())
                total = total + self.student.router_aux_loss * aux
            if "moe/z_loss" in self.losses:
                z = share * (logits.logsumexp(-1) ** 2).sum()
                self.losses["moe/z_loss"] += float(z.detach())
                total = total + self.student.router_z_loss * z
        return total

    @property
    def total(self) -> float:
        """The weighted sum of `losses`, their part of the total loss."""
        return sum(self._weights[name] * loss for name, loss in self.losses.items())


def reference(config: Config, rollouts: list[Rollout], dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """Returns the losses and gradients of the objective, with the loss weights of the first update.

    Returns:
        {"loss/total": float, "rep/loss": float, "rep/loss_per_layer": {layer: float}, "output/loss": float if there is
         an output-space loss, "moe/aux_loss" and "moe/z_loss" if they have a weight, "gradients": {HF name: tensor}};
         parameters that no loss reaches are absent.
    """
    student = _load(str(config.student.hf_path), dtype)
    # in the first update, a teacher that is the student has the weights that the student loads
    teachers = [_load(str(source.hf_path), dtype) for source in config.teacher_sources]
    with exact_delta_rule(student, *teachers, dtype=dtype):
        return _objective(config, rollouts, student, teachers, dtype)


def _objective(
    config: Config, rollouts: list[Rollout], student: Any, teachers: list[Any], dtype: torch.dtype
) -> dict[str, Any]:
    """Returns the result of `reference`, from transformers' models."""
    loss = config.loss.representation
    distance = row_loss(loss)
    layers = _layers(loss.layers, student.config.num_hidden_layers)
    supervised = [_tokens(rollout, loss) for rollout in rollouts]
    weight_of_layers, weight_of_output = _first_weight(loss.weight), _first_weight(config.loss.output.weight)
    active = sum(1 for tokens in supervised if tokens)
    rows = sum(map(len, supervised))
    per_layer = dict.fromkeys(layers, 0.0)
    layer_shares = _layer_shares(layers, loss)
    trained: dict[str, torch.Tensor] = {}
    projections = [
        _projections(config, source, layers, student.config, teacher.config, dtype, trained)
        for source, teacher in zip(config.teacher_sources, teachers, strict=True)
    ]
    output = _OutputLoss(config.loss.output, config.rollout, rollouts)
    routers = _routers(
        config.student, config.loss, student, rollouts, range(1, 1 + (max(layers, default=0))), weight_of_output
    )
    shift = 1 if loss.position == "predicting" else 0
    for number_of_rollout, (rollout, tokens) in enumerate(zip(rollouts, supervised, strict=True)):
        if not tokens:
            continue
        student_positions = torch.tensor([len(rollout.prompt_ids) + t - shift for t in tokens])
        teacher_positions = torch.tensor([_teacher_position(rollout, t - shift) for t in tokens])
        number = _teacher_number(config.teacher_sources, rollout)
        teacher, teacher_weight = teachers[number], config.teacher_sources[number].weight
        row_weight = teacher_weight * (1 / rows if loss.aggregation == "token_mean" else 1 / (active * len(tokens)))
        if routers is not None:
            routers.before(rollout)
        student_states = _hidden_states(student, rollout, final_norm=loss.final_norm)
        with torch.no_grad():
            teacher_states = _hidden_states(teacher, _teacher_sequence(rollout), final_norm=loss.final_norm)
        total = torch.zeros((), dtype=dtype)
        if routers is not None:
            total = total + routers.response_loss(number_of_rollout)
        for layer in layers:
            teacher_layer, project_student, project_teacher = projections[number][layer]
            student_rows = project_student(student_states[layer][student_positions])
            teacher_rows = project_teacher(teacher_states[teacher_layer][teacher_positions])
            layer_loss = row_weight * distance(student_rows, teacher_rows, loss.dim_reduction).sum()
            per_layer[layer] += float(layer_loss.detach())
            total = total + weight_of_layers * layer_shares[layer] * layer_loss
        total = total + weight_of_output * output.response_loss(student, teacher, rollout, teacher_weight)
        total.backward()
    gradients = {
        **_gradients(student, str(config.student.hf_path)),
        **{name: p.grad for name, p in trained.items() if p.grad is not None},
    }
    rep_loss = sum(layer_shares[layer] * per_layer[layer] for layer in layers)
    return {
        **({} if output.loss is None else {"output/loss": output.loss}),
        **({} if routers is None else routers.losses),
        "loss/total": weight_of_layers * rep_loss
        + weight_of_output * (output.loss or 0.0)
        + (0.0 if routers is None else routers.total),
        "rep/loss": rep_loss,
        "rep/loss_per_layer": per_layer,
        "gradients": gradients,
    }


def _routers(
    student: StudentConfig,
    losses: LossConfig,
    model: Any,
    rollouts: list[Rollout],
    supervised: range,
    weight_of_output: float,
) -> RouterReference | None:
    """Returns the routers that replace the student's; None if the settings need only transformers' own routers."""
    loss = losses.representation
    if not (student.router_aux_loss or student.router_z_loss or student.router_replay):
        return None
    shift = 1 if loss.position == "predicting" else 0
    lengths = []
    for rollout in rollouts:
        last = [t - shift for t in _tokens(rollout, loss)]
        last += [t - 1 for t in _predicted_tokens(rollout) if not losses.output.is_off]
        lengths.append(len(rollout.prompt_ids) + max(last) + 1 if last else 0)
    layers = range(1, 1 + model.config.num_hidden_layers) if weight_of_output else supervised
    return RouterReference(student, model, rollouts, layers, lengths)


def _gradients(model: Any, path: str) -> dict[str, torch.Tensor]:
    """Returns the gradients of a transformers model by the names in its files, one for each expert."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    if model.config.model_type in FAMILIES:
        spec = parse_model_spec(model.config.to_dict())
        names = [name for mapping in spec.family.param_mappings(spec) for name in mapping.hf]
    else:  # of Megatron-Bridge, which need not be installed here
        names = HFCheckpoint(path).keys()
    gradients = {}
    for name in names:
        held, expert, half = (name, None, None) if name in found else fused_name(name)
        if held in found:
            gradient = found[held] if expert is None else found[held][expert]
            gradients[name] = gradient if half is None else gradient.chunk(2)[half]
    return gradients


def _first_weight(weight: Any) -> float:
    """Returns the weight of a loss in the first update."""
    if not isinstance(weight, list):
        return float(weight)
    first = weight[0]
    return first.weight if first.start is None else first.start + (first.weight - first.start) / first.until


Projection = Callable[[torch.Tensor], torch.Tensor]


def _teacher_number(sources: Sequence[TeacherSource], rollout: Rollout) -> int:
    """Returns the index of the teacher that lists the response's data source, or of the one that lists none."""
    named = [source.data_sources or [] for source in sources]
    found = [i for i, names in enumerate(named) if rollout.data_source in names]
    return found[0] if found else named.index([])


def _projections(
    config: Config,
    source: TeacherSource,
    layers: list[int],
    student: Any,
    teacher: Any,
    dtype: torch.dtype,
    trained: dict[str, torch.Tensor],
) -> dict[int, tuple[int, Projection, Projection]]:
    """Returns student layer -> (teacher layer, projection of the student's states, projection of the teacher's states).

    Without a bridge both projections are the identity. A bridge compares P_S h + b with P_T (h - mu), a full-width
    bridge W h with h. Projectors that are trained with the student are added to `trained`.
    """
    chosen = config.loss.representation.layer_map
    if chosen is None:
        matched = layer_map(layers, student.num_hidden_layers, teacher.num_hidden_layers)
    else:
        matched = {layer: chosen[str(layer)] for layer in layers}
    if source.bridge is None:
        return {s: (t, lambda h: h, lambda h: h) for s, t in matched.items()}
    if source.bridge == FULL_WIDTH:
        widths = teacher.hidden_size, student.hidden_size
        tensors = {f"s{s}.t{t}.student_projector": draw_projector(config.seed, s, *widths) for s, t in matched.items()}
    else:
        tensors = load_file(Path(source.bridge) / "bridge.safetensors")
    found = {}
    for key in {name.rpartition(".")[0] for name in tensors}:
        student_layer, teacher_layer = (int(part[1:]) for part in key.split("."))
        mean, basis, projector, bias = (
            tensors[f"{key}.{name}"].to(dtype) if f"{key}.{name}" in tensors else torch.zeros((), dtype=dtype)
            for name in ("teacher_mean", "teacher_basis", "student_projector", "student_bias")
        )
        if config.bridge.train and student_layer in layers:
            trained[f"bridge.{key}.student_projector"] = projector.requires_grad_()
            if f"{key}.student_bias" in tensors:
                trained[f"bridge.{key}.student_bias"] = bias.requires_grad_()
        found[student_layer] = (
            teacher_layer,
            lambda h, p=projector, b=bias: h @ p.T + b,
            lambda h, p=basis, m=mean: (h - m) @ p.T if p.dim() else h,
        )
    return {layer: found[layer] for layer in layers}


class _OutputLoss:
    """The output-space loss on whole distributions, differentiated by autograd."""

    def __init__(self, config: OutputLossConfig, rollout: RolloutConfig, rollouts: list[Rollout]) -> None:
        self.config, self.rollout = config, rollout
        self.loss: float | None = None if self.config.is_off else 0.0  # the sum over the responses so far
        counts = [len(_predicted_tokens(rollout)) for rollout in rollouts]
        self.active, self.tokens = sum(count > 0 for count in counts), sum(counts)

    def response_loss(
        self, student: Any, teacher: Any, rollout: Rollout, teacher_weight: float
    ) -> torch.Tensor | float:
        """Returns an expression with the gradient of one response's part of `output/loss`; adds that part to `loss`."""
        if self.loss is None:
            return 0.0
        vocab_size = min(student.config.vocab_size, teacher.config.vocab_size)
        masked_in = _predicted_tokens(rollout)
        student_positions = torch.tensor([len(rollout.prompt_ids) + t - 1 for t in masked_in])
        ids = torch.from_numpy(rollout.ids)[None].long()
        log_p = self._log_probabilities(student, ids, student_positions, vocab_size)
        sequence = _teacher_sequence(rollout)
        teacher_ids = torch.from_numpy(sequence.ids)[None].long()
        teacher_positions = student_positions + len(sequence.prompt_ids) - len(rollout.prompt_ids)
        with torch.no_grad():
            log_q = self._log_probabilities(teacher, teacher_ids, teacher_positions, vocab_size)
        tokens = torch.tensor(rollout.response_ids).long()[masked_in]
        weights = self._corrections(log_p[torch.arange(len(tokens)), tokens].detach(), rollout, masked_in)
        value, differentiable = self._divergence(log_p, log_q, tokens, weights)
        share = 1 / self.tokens if self.config.aggregation == "token_mean" else 1 / (self.active * len(masked_in))
        weight = teacher_weight * share
        self.loss += weight * float(value.sum().detach())
        return weight * differentiable.sum()

    def _log_probabilities(
        self, model: Any, ids: torch.Tensor, positions: torch.Tensor, vocab_size: int
    ) -> torch.Tensor:
        logits = model(input_ids=ids, use_cache=False).logits[0, positions, :vocab_size]
        return (logits / self.config.temperature).log_softmax(-1)

    def _corrections(self, log_p: torch.Tensor, rollout: Rollout, masked_in: list[int]) -> torch.Tensor:
        """Returns the weights [n] of `rollout.correction` for tokens with log-probabilities `log_p` in the student."""
        if self.rollout.correction == "off":
            return torch.ones_like(log_p)
        assert rollout.logprobs is not None
        engine = torch.tensor([math.exp(rollout.logprobs[t]) for t in masked_in], dtype=log_p.dtype)
        ratio = log_p.exp() / engine
        low, high = self.rollout.correction_range
        if self.rollout.correction == "mask":
            return torch.where((low <= ratio) & (ratio <= high), ratio, 0.0)
        return ratio.maximum(ratio.new_tensor(low)).minimum(ratio.new_tensor(high))

    def _divergence(
        self, log_p: torch.Tensor, log_q: torch.Tensor, tokens: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (values [n], expressions [n] whose derivative is the gradient), different for sampled tokens only."""
        if self.config.kind == "sampled_token":
            at = torch.arange(len(tokens)), tokens
            value = weights * (log_p[at] - log_q[at])
            return value, value.detach() * log_p[at]
        if self.config.kind == "top_k":
            log_p, log_q, inside = self._on_support(log_p, log_q)
            reverse = self.config.support_weight == "student"
            a, b = (log_p, log_q) if reverse else (log_q, log_p)
            value = (a.exp() * (a - b) * inside).sum(-1)
        else:
            value = WHOLE_VOCABULARY[self.config.kind](log_p, log_q, self.config)
        return value, value

    def _on_support(self, log_p: torch.Tensor, log_q: torch.Tensor) -> tuple[torch.Tensor, ...]:
        k = min(self.config.k, log_p.shape[-1])
        tops = [torch.zeros_like(x).scatter(1, x.detach().topk(k).indices, 1.0) > 0 for x in (log_p, log_q)]
        p, q = tops
        inside = {"student": p, "teacher": q, "union": p | q, "intersection": p & q}[self.config.support]
        if self.config.normalizer == "renormalized":
            log_p, log_q = (x - x.masked_fill(~inside, -1e300).logsumexp(-1, keepdim=True) for x in (log_p, log_q))
        return log_p, log_q, inside


def agreement(gradients: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, float]:
    """Returns the relative error of each parameter's gradient: ||g - g_ref|| / max(||g_ref||, 1e-3 ||all g_ref||).

    Raises ValueError if the two arguments have gradients of different parameters.
    """
    if set(gradients) != set(expected):
        raise ValueError(f"gradients exist on one side only for {sorted(set(gradients) ^ set(expected))}")
    total_norm = torch.stack([g.double().norm() for g in expected.values()]).norm()
    errors = {}
    for name, g in expected.items():
        norm = torch.maximum(g.double().norm(), 1e-3 * total_norm)
        errors[name] = float((gradients[name].double() - g.double()).norm() / norm)
    return errors


def _load(path: str, dtype: torch.dtype) -> Any:
    model = transformers_model(path, dtype, attn_implementation="eager")
    if hasattr(model, "set_experts_implementation"):  # transformers 4 has no other one
        model.set_experts_implementation("eager")  # one expert after the other, in the model's precision
    # rollouts contain no padding; with a padding id, the embedding would drop the gradient of that id
    model.get_input_embeddings().padding_idx = None
    return model.eval()


def _hidden_states(model: Any, rollout: Rollout, *, final_norm: bool) -> dict[int, torch.Tensor]:
    """Returns layer (1-based) -> [prompt + response, D]."""
    before_norm: list[torch.Tensor] = []

    def after_last_block(_module: Any, _inputs: Any, output: Any) -> None:
        before_norm.append(output[0] if isinstance(output, tuple) else output)

    base = model.base_model  # families call its blocks and its final norm by different names
    depth = model.config.get_text_config().num_hidden_layers
    (blocks,) = (each for each in base.children() if isinstance(each, torch.nn.ModuleList) and len(each) == depth)
    hook = blocks[-1].register_forward_hook(after_last_block)
    ids = torch.from_numpy(rollout.ids)[None].long()
    out = base(input_ids=ids, output_hidden_states=True, use_cache=False)
    hook.remove()
    states = {layer: state[0] for layer, state in enumerate(out.hidden_states) if layer > 0}
    if not final_norm:
        states[len(states)] = before_norm[0][0]
    return states


def _teacher_sequence(rollout: Rollout) -> Rollout:
    """Returns the prompt and the response that the teacher reads."""
    response = rollout.response_ids if rollout.teacher_response_ids is None else rollout.teacher_response_ids
    return Rollout(rollout.prompt_ids if rollout.teacher_prompt_ids is None else rollout.teacher_prompt_ids, response)


def _teacher_position(rollout: Rollout, t: int) -> int | None:
    """Returns the position of the teacher's state for response token t (-1: the prompt's last); None without any."""
    prompt = len(_teacher_sequence(rollout).prompt_ids)
    if rollout.teacher_index is None or t == -1:
        return prompt + t
    partner = int(rollout.teacher_index[t])
    return prompt + partner if partner >= 0 else None


def _predicted_tokens(rollout: Rollout) -> list[int]:
    """Returns the response tokens whose distributions are compared."""
    return [t for t, m in enumerate(rollout.mask) if m and _teacher_position(rollout, t - 1) is not None]


def _tokens(rollout: Rollout, loss: RepresentationLossConfig) -> list[int]:
    shift = 1 if loss.position == "predicting" else 0
    masked_in = [t for t, m in enumerate(rollout.mask) if m and _teacher_position(rollout, t - shift) is not None]
    return {"all": masked_in, "last_k": masked_in[-loss.k :], "first_k": masked_in[: loss.k]}[loss.positions]


def _layers(layers: Any, depth: int) -> list[int]:
    if isinstance(layers, list):
        return sorted(layers)
    every = list(range(1, depth + 1))
    return {"none": [], "all": every, "last": [depth], "even": every[1::2], "odd": every[::2]}[layers]


def _layer_shares(layers: list[int], loss: RepresentationLossConfig) -> dict[int, float]:
    """Returns layer -> w_l / sum w."""
    given = loss.layer_weights
    if isinstance(given, list):
        order = loss.layers if isinstance(loss.layers, list) else layers
        given = {str(layer): w for layer, w in zip(order, given, strict=True)}
    weights = {layer: (given or {}).get(str(layer), 1.0) for layer in layers}
    return {layer: w / sum(weights.values()) for layer, w in weights.items()}


def row_loss(loss: RepresentationLossConfig) -> RowLoss:
    """Returns the distance [n, D] x 2 -> [n]: this module's definition of a built-in kind, or the user's function."""
    if loss.kind in DISTANCES:
        return partial(DISTANCES[loss.kind], **loss.kind_args)
    return resolve_row_loss(loss.kind, loss.kind_args)


def _mse(ours: torch.Tensor, theirs: torch.Tensor, dim_reduction: str) -> torch.Tensor:
    squares = (ours - theirs) ** 2
    return squares.sum(-1) if dim_reduction == "sum" else squares.mean(-1)


def _normalized_mse(ours: torch.Tensor, theirs: torch.Tensor, dim_reduction: str) -> torch.Tensor:
    return _mse(ours / ours.norm(dim=-1, keepdim=True), theirs / theirs.norm(dim=-1, keepdim=True), dim_reduction)


def _cosine(ours: torch.Tensor, theirs: torch.Tensor, dim_reduction: str) -> torch.Tensor:
    return 1 - (ours * theirs).sum(-1) / (ours.norm(dim=-1) * theirs.norm(dim=-1))


def _kl(log_a: torch.Tensor, log_b: torch.Tensor) -> torch.Tensor:
    return (log_a.exp() * (log_a - log_b)).sum(-1)


def _jsd(log_p: torch.Tensor, log_q: torch.Tensor, loss: OutputLossConfig) -> torch.Tensor:
    beta = loss.jsd_beta
    log_m = (beta * log_q.exp() + (1 - beta) * log_p.exp()).log()
    return beta * _kl(log_q, log_m) + (1 - beta) * _kl(log_p, log_m)


# the built-in kinds of loss.representation, and those of loss.output that compare whole distributions [n, V] -> [n]
DISTANCES: dict[str, Callable[..., torch.Tensor]] = {"mse": _mse, "normalized_mse": _normalized_mse, "cosine": _cosine}
WHOLE_VOCABULARY: dict[str, Callable[[torch.Tensor, torch.Tensor, OutputLossConfig], torch.Tensor]] = {
    "full_vocab": lambda log_p, log_q, loss: _kl(log_p, log_q),
    "forward_kl": lambda log_p, log_q, loss: _kl(log_q, log_p),
    "jsd": _jsd,
}
