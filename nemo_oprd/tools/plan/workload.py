"""The work of one step: the sizes of served models, the work of each model, and the number and length of responses."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_oprd.batch.layout import Layout
from nemo_oprd.config.schema import Config
from nemo_oprd.config.weight_schedule import largest
from nemo_oprd.models import FAMILIES, ModelSpec, read_model_spec
from nemo_oprd.models.quantization import known_quantization
from nemo_oprd.models.weight_files import weight_files
from nemo_oprd.run.idle_ranks import shares
from nemo_oprd.run.positions import longest_response, prompt_tokens
from nemo_oprd.run.resolve import ResolvedTeacher, RunModels
from nemo_oprd.runtime.files import read_json
from nemo_oprd.tools.plan.parameters import expert_parameters, model_parameters

# The sizes of a model that runs on vLLM servers, whose family need not be one of this project.
#
# Parameters are counted in the headers of the weight files, and where there are none, by the shape of one of this
# project's families. Caches and attention follow from names that families share.


_EXPERTS = re.compile(r"\.experts\.")
_LENGTH_BYTES = 8
# the names of one number in different families; the first one in a config counts
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "num_attention_heads", "n_head")
_HEADS = ("num_attention_heads", "n_head")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")
_ALL_EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts")


@dataclass(frozen=True)
class ServedModel:
    """The sizes of a model that runs on servers.

    Attributes:
        parameters: of the whole model.
        active: those that a token is multiplied with, the embedding left out.
        cached: numbers that a token leaves in the caches of all layers, sliding windows not taken into account.
        cached_per_worker: whether tensor-parallel workers divide these (latent attention is not divided).
        attention: heads times their size, of one layer.
        quantized: parameters that the files hold quantised, as the servers do.
        quantized_bytes: bytes of these with their scales.
    """

    parameters: int
    active: int
    cached: int
    cached_per_worker: bool
    attention: int
    quantized: int = 0
    quantized_bytes: int = 0

    def weight_bytes(self, value_bytes: float) -> float:
        """Returns the bytes of all weights on a server, those that are not quantised with `value_bytes` each."""
        return (self.parameters - self.quantized) * value_bytes + self.quantized_bytes

    def cache_bytes(self, tensor: int, value_bytes: int) -> float:
        """Returns the bytes of a token's cache on one of `tensor` GPUs."""
        return self.cached * value_bytes / (tensor if self.cached_per_worker else 1)


def served_model(directory: Path, spec: ModelSpec) -> ServedModel:
    """Returns the sizes of the model in `directory`, whose spec has only depth, width and vocabulary.

    Raises:
        ValueError: there are no weight files, and the family is none of this project's.
    """
    text = {**spec.hf_config, **(spec.hf_config.get("text_config") or {})}
    tensors = _tensors(directory)
    sizes = {name: count for name, (count, _) in tensors.items()}
    quantization = known_quantization(spec.hf_config)
    parts = {} if quantization is None else quantization.names(sizes, str(directory))
    for name, both in parts.items():
        assert quantization is not None
        numbers, *scales = both
        count = sizes.pop(numbers) * quantization.numbers_of_a_unit(both)
        for scale in scales:
            del sizes[scale]
        sizes[name] = count
    for name in () if quantization is None else quantization.unused(sizes):
        del sizes[name]
    if not sizes and spec.model_type not in FAMILIES:
        raise ValueError(
            f"{directory}: there are no *.safetensors, and {spec.model_type} is none of this project's families, whose "
            "parameters can be counted without; expected weights: plan where they are"
        )
    total = sum(sizes.values()) or model_parameters(read_model_spec(directory))
    experts = sum(size for name, size in sizes.items() if _EXPERTS.search(name))
    if not sizes:
        own = read_model_spec(directory)
        experts = sum(expert_parameters(own, layer) for layer in range(1, own.num_layers + 1))
    share = _number(text, _CHOSEN, 1) / max(1, _number(text, _ALL_EXPERTS, 1)) if experts else 1.0
    embedding = spec.vocab_size * spec.hidden_size
    active = total - experts + int(experts * share) - (0 if spec.tied_embeddings else embedding)
    heads = max(1, _number(text, _HEADS, 1))
    head_size = int(text.get("head_dim") or spec.hidden_size // heads)
    latent = text.get("kv_lora_rank")
    per_layer = 2 * _number(text, _KV_HEADS, heads) * head_size
    if latent:
        per_layer = int(latent) + int(text.get("qk_rope_head_dim") or 0)
    quantized = sum(sizes[name] for name in parts), sum(tensors[part][1] for both in parts.values() for part in both)
    return ServedModel(total, active, per_layer * spec.num_layers, not latent, heads * head_size, *quantized)


def _number(text: Mapping[str, Any], names: tuple[str, ...], default: int) -> int:
    return int(next((text[name] for name in names if text.get(name) is not None), default))


def _tensors(directory: Path) -> dict[str, tuple[int, int]]:
    """Returns name -> (items, bytes) of every tensor in the weight files, from their headers alone."""
    found: dict[str, tuple[int, int]] = {}
    for file in weight_files(directory) if any(directory.glob("*.safetensors")) else ():
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(_LENGTH_BYTES), "little")))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            start, stop = entry["data_offsets"]
            found[name] = math.prod(entry["shape"]), stop - start
    return found


@dataclass(frozen=True)
class TeacherWork:
    """The work of one teacher, and the numbers that it sends.

    Attributes:
        pairs: supervised student layer -> teacher layer.
        width: numbers per row and layer that it sends.
        value_bytes: bytes of each of them.
        depth: the deepest layer that it computes.
        head: whether it computes log-probabilities with its own head.
        sends_states: whether it sends final hidden states for the output loss.
        served: its sizes, if it runs on vLLM servers.
    """

    spec: ModelSpec
    pairs: dict[int, int]
    width: int
    value_bytes: int
    depth: int
    head: bool
    sends_states: bool
    served: ServedModel | None = None


@dataclass(frozen=True)
class Workload:
    """One step of a run. Lengths are in tokens; every response is taken to be equally long.

    Attributes:
        responses: responses of a step.
        prompt, response: tokens of a prompt and of a response.
        needed: tokens of a sequence that an update computes.
        rows, output_rows: rows per response of the representation loss and of the output loss.
        layers: the supervised student layers.
        value_bytes: bytes of a number in the run's precision.
        trained_depth: the deepest student layer that a gradient reaches.
        output_kind: kind of the output loss; `watched` where it is only measured, `none` without one.
    """

    config: Config
    student: ModelSpec
    teachers: tuple[TeacherWork, ...]
    responses: int
    prompt: int
    response: int
    needed: int
    rows: int
    output_rows: int
    layers: tuple[int, ...]
    value_bytes: int
    trained_depth: int
    output_kind: str

    @property
    def own_teachers(self) -> tuple[TeacherWork, ...]:
        """The teachers that run on ranks of the job."""
        return tuple(teacher for teacher in self.teachers if teacher.served is None)

    @property
    def served_teachers(self) -> tuple[TeacherWork, ...]:
        """The teachers that run on vLLM servers."""
        return tuple(teacher for teacher in self.teachers if teacher.served is not None)

    @property
    def trains_head(self) -> bool:
        """Whether the output loss trains the student's head."""
        return self.output_kind not in ("none", "watched")

    @property
    def final_layer_after_norm(self) -> bool:
        """Whether the last layer is supervised after the final norm."""
        return self.config.loss.representation.final_norm and self.student.num_layers in self.layers

    def on(self, layout: Layout) -> Microbatches:
        """Returns the microbatches of the data-parallel rank of `layout` with the most responses.

        A rank has whole responses; those of each teacher are divided over the ranks, and packed, separately.
        """
        per_rank = [-(-share // layout.data) for share in self.shares]
        per_pack = min(per_rank[0], max(1, self.config.train.tokens_per_microbatch // self.needed))
        count = sum(-(-each // per_pack) for each in per_rank)
        return Microbatches(per_pack, count, sum(per_rank), self.needed, self._resident(layout, count))

    def _resident(self, layout: Layout, count: int) -> int:
        """Returns how many of `count` microbatches have targets in memory at a time (`BatchPlan.group_numbers`).

        All of a step with `teacher.resident_microbatches=auto`, which `estimate._with_waves` replaces by a number.
        """
        setting = self.config.teacher.resident_microbatches
        if not isinstance(setting, int):
            return count
        if layout.virtual_pipeline > 1:
            setting = max(1, setting // layout.pipeline) * layout.pipeline
        return min(count, setting)

    @property
    def shares(self) -> list[int]:
        """The responses of each teacher, the largest number first."""
        return shares(self.responses, len(self.teachers))

    def teacher_share(self, student: Layout, teacher: Layout) -> float:
        """Returns the share of a step on the teachers' fullest data-parallel rank: whole responses in every wave.

        A wave is `teacher.resident_microbatches` microbatches of the student's ranks.
        """
        batches = self.on(student)
        fullest = 0
        for share in filter(None, self.shares):
            wave = min(share, batches.resident * batches.per_pack * student.data)
            waves, rest = divmod(share, wave)
            fullest += waves * -(-wave // teacher.data) + -(-rest // teacher.data)
        return fullest / self.responses


@dataclass(frozen=True)
class Microbatches:
    """Microbatches of one data-parallel rank: `per_pack` responses each, `responses` in all, `needed` tokens of each.

    `resident` of the `count` microbatches form a group, which passes through the pipeline with its targets in memory.
    """

    per_pack: int
    count: int
    responses: int
    needed: int
    resident: int

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch, over all context ranks."""
        return self.per_pack * self.needed


def make_workload(
    config: Config, models: RunModels, *, prompt: int | None = None, response: int | None = None
) -> Workload:
    """Returns the work of a step of `config`.

    Args:
        prompt: tokens of a prompt; None: as `prompt_tokens` says.
        response: tokens of a response; None: the most that the configuration and the student's positions allow.

    Raises:
        ValueError: the prompt leaves no room for a response, or `rollout.replay` holds none.
    """
    student = models.student.spec
    prompt = prompt_tokens(config, student, prompt)
    limit = longest_response(config, student, prompt)
    response = min(response or limit, limit)
    loss, output = config.loss.representation, config.loss.output
    layers = tuple(sorted(models.layer_weights))
    rows = 0 if not layers else response if loss.positions == "all" else min(loss.k, response)
    trained = largest(output.weight) > 0
    watched = output.is_off and config.logging.output_metrics_every > 0
    responses = step_responses(config)
    output_rows = response if trained else 0
    if watched:
        output_rows = min(response, -(-config.logging.output_metrics_rows // responses))
    only_first = loss.positions == "first_k" and not trained and not watched
    value_bytes = 2 if config.precision == "bf16" else 4
    teachers = tuple(
        _teacher(config, student, teacher, trained=trained, watched=watched, value_bytes=value_bytes)
        for teacher in models.teachers
    )
    return Workload(
        config,
        student,
        teachers=teachers,
        responses=responses,
        prompt=prompt,
        response=response,
        needed=prompt + (rows if only_first else response),
        rows=rows,
        output_rows=output_rows,
        layers=layers,
        value_bytes=value_bytes,
        trained_depth=student.num_layers if trained else max(layers, default=0),
        output_kind=output.kind if trained else "watched" if watched else "none",
    )


def step_responses(config: Config) -> int:
    """Counts the responses of a step: those that it samples, or all of `rollout.replay`, a line each.

    Raises:
        ValueError: the file is empty. `preflight` has refused a missing one.
    """
    replay = config.rollout.replay
    if replay is None:
        return config.train.prompts_per_step * config.rollout.per_prompt
    with Path(replay).open("rb") as lines:
        count = sum(1 for line in lines if line.strip())
    if not count:
        raise ValueError(f"rollout.replay={replay}: the file holds no rollouts; expected one JSON object per line")
    return count


def _teacher(
    config: Config, student: ModelSpec, teacher: ResolvedTeacher, *, trained: bool, watched: bool, value_bytes: int
) -> TeacherWork:
    source, spec, pairs, output = teacher.source, teacher.spec, teacher.pairs, config.loss.output
    from_samples = trained and output.from_samples
    measured = from_samples and config.logging.output_metrics_every > 0
    sends_states = (trained and output.needs_distribution) or watched or measured
    width, bytes_each = spec.hidden_size, value_bytes
    if source.bridge is not None and source.bridge != "full_width":
        width, bytes_each = bridge_rank(config, source.bridge, student.hidden_size, spec.hidden_size), 4
    depth = spec.num_layers if trained or watched else max(pairs.values(), default=0)
    served = served_model(teacher.model.directory, spec) if teacher.model.served else None
    return TeacherWork(
        spec,
        pairs,
        width=width,
        value_bytes=bytes_each,
        depth=depth,
        head=from_samples,
        sends_states=sends_states,
        served=served,
    )


def bridge_rank(config: Config, directory: str, *widths: int) -> int:
    """Returns the rank of a bridge; before fit-bridge has made it, `bridge.rank`, or for `auto` the smallest width."""
    manifest = Path(directory) / "bridge.json"
    if manifest.is_file():
        return int(read_json(manifest, "a manifest that fit-bridge wrote", "copy it again")["rank"])
    if config.bridge.rank != "auto":
        return int(config.bridge.rank)
    return min(widths)
