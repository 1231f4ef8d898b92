"""The work of one step: which models compute what, and how many tokens of which length."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from nemo_oprd.commands.plan.served_model import ServedModel, served_model
from nemo_oprd.config.schema import Config
from nemo_oprd.config.weight_schedule import largest
from nemo_oprd.layout import Layout
from nemo_oprd.models import ModelSpec
from nemo_oprd.runtime.files import read_json
from nemo_oprd.setup.idle_ranks import shares
from nemo_oprd.setup.positions import longest_response, prompt_tokens
from nemo_oprd.setup.resolve import ResolvedTeacher, RunModels


@dataclass(frozen=True)
class TeacherWork:
    """What one teacher computes and sends.

    Attributes:
        pairs: supervised student layer -> teacher layer.
        width: numbers per row and layer that it sends.
        value_bytes: bytes of each of them.
        depth: the deepest layer that it computes.
        head: whether it computes log-probabilities with its own head.
        sends_states: whether it sends final hidden states for the output loss.
        served: its numbers, if vLLM servers compute it.
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
        """The teachers that ranks of the job compute."""
        return tuple(teacher for teacher in self.teachers if teacher.served is None)

    @property
    def served_teachers(self) -> tuple[TeacherWork, ...]:
        """The teachers that vLLM servers compute."""
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
        """The microbatches of one data-parallel rank of `layout`, the one with the most responses.

        It has whole responses; those of each teacher are divided over the ranks, and packed, on their own.
        """
        per_rank = [-(-share // layout.data) for share in self.shares]
        per_pack = min(per_rank[0], max(1, self.config.train.tokens_per_microbatch // self.needed))
        count = sum(-(-each // per_pack) for each in per_rank)
        return Microbatches(per_pack, count, sum(per_rank), self.needed, self._resident(layout, count))

    def _resident(self, layout: Layout, count: int) -> int:
        """Of `count` microbatches, those whose targets are there at a time (`BatchPlan.group_numbers`).

        With `teacher.resident_microbatches=auto` all of a step, see `estimate.py`.
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
        """What the teachers' fullest data-parallel rank computes of a step: whole responses in every wave of targets.

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
    """Responses per microbatch, microbatches and responses of one data-parallel rank, and tokens of a sequence.

    `resident` microbatches pass through the pipeline at a time, a group with its targets.
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
    """The work of a step of `config`.

    Args:
        prompt: tokens of a prompt; None: as `prompt_tokens` says.
        response: tokens of a response; None: the most that the configuration and the student's positions allow.

    Raises:
        ValueError: the prompt leaves no room for a response.
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
    responses = config.train.prompts_per_step * config.rollout.per_prompt
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
        teachers,
        responses,
        prompt,
        response,
        prompt + (rows if only_first else response),
        rows,
        output_rows,
        layers,
        value_bytes,
        student.num_layers if trained else max(layers, default=0),
        output.kind if trained else "watched" if watched else "none",
    )


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
    return TeacherWork(spec, pairs, width, bytes_each, depth, from_samples, sends_states, served)


def bridge_rank(config: Config, directory: str, *widths: int) -> int:
    """The rank of a bridge between models of these widths; the configured one where the bridge is not made yet."""
    manifest = Path(directory) / "bridge.json"
    if manifest.is_file():
        return int(read_json(manifest, "a manifest that fit-bridge wrote", "copy it again")["rank"])
    if config.bridge.rank != "auto":
        return int(config.bridge.rank)
    return min(widths)
