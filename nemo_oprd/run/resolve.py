"""Derives a run from a configuration and a number of ranks: models, layer pairs, the teachers' routing and layouts.

`preflight` calls `derive` and makes the checks of a `RunSpec`; `resolve` is `derive` with the `LAYOUT_CHECKS` alone.
Later stages take architectures and layouts from here. No torch is imported and no weights are read: a mistake shows
within a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_oprd.batch.layout import Layout
from nemo_oprd.config.schema import Config, ModelSource, TeacherSource
from nemo_oprd.config.teacher_routing import Routing
from nemo_oprd.losses.layer_mapping import weights_of_layers
from nemo_oprd.models import Family, ModelSpec, read_hf_config, read_model_spec
from nemo_oprd.models.architecture import unused_code
from nemo_oprd.models.checkpoint_directory import hf_directory
from nemo_oprd.models.quantization import known_quantization
from nemo_oprd.models.served import read_served_spec
from nemo_oprd.run import checks
from nemo_oprd.run.engine_kinds import ENGINES
from nemo_oprd.run.provider import check_provider, find_family

if TYPE_CHECKING:
    from nemo_oprd.data.token_ids import TokenIds


@dataclass(frozen=True)
class ResolvedModel:
    """A model of the configuration.

    Attributes:
        key: its group in the configuration: student, teacher, teachers[0], ...
        directory: holds config.json and the tokenizer: the HF directory, or the copy inside a Megatron checkpoint, or
            the directory that `hf_directory` finds for a checkpoint of Megatron-Bridge.
        spec: the architecture.
        served: whether the model runs on vLLM servers, so that `spec` has only the fields of `read_served_spec`.
    """

    key: str
    source: ModelSource
    directory: Path
    spec: ModelSpec
    served: bool = False

    @property
    def notes(self) -> list[str]:
        """Returns lines about config.json's code, which is not run, and quantised weights, which are dequantised."""
        hf_config = read_hf_config(self.directory)
        code = unused_code(hf_config, str(self.directory / "config.json"))
        found = [] if code is None else [code]
        quantization = None if self.served else known_quantization(hf_config)
        if quantization is not None:
            found.append(
                f"{self.key}: the weights in {self.directory}, {quantization.label}, are dequantised to bfloat16"
            )
        return found


@dataclass(frozen=True)
class ResolvedTeacher:
    """A teacher: its model (the student's, if it starts from the student's weights), and its layer pairs.

    Attributes:
        pairs: supervised student layer -> teacher layer, both 1-based, before a bridge replaces any.
    """

    model: ResolvedModel
    source: TeacherSource
    pairs: dict[int, int]

    @property
    def spec(self) -> ModelSpec:
        """Returns the teacher's architecture."""
        return self.model.spec


@dataclass(frozen=True)
class RunModels:
    """The models of a run, independent of the number of ranks.

    Attributes:
        layer_weights: supervised student layer (1-based) -> its weight, ascending.
        routing: assigns each response to a teacher.
        vocab_limit: the number of ids for which the student and the teachers that read them have rows.
    """

    student: ResolvedModel
    teachers: tuple[ResolvedTeacher, ...]
    layer_weights: dict[int, float]
    routing: Routing
    vocab_limit: int

    @property
    def notes(self) -> list[str]:
        """Returns the notes of all models, once each."""
        models = self.student, *(teacher.model for teacher in self.teachers)
        return list(dict.fromkeys(note for model in models for note in model.notes))

    @property
    def teacher_specs(self) -> list[ModelSpec]:
        """Returns the teachers' architectures."""
        return [teacher.spec for teacher in self.teachers]


@dataclass(frozen=True)
class RunSpec:
    """A run with a student and teachers on their ranks, derived without torch and weights."""

    config: Config
    models: RunModels
    student_layout: Layout
    teacher_layout: Layout

    @property
    def reader_layout(self) -> Layout:
        """Returns the layout of teachers on servers."""
        return checks.reader_layout(self.student_layout)

    @property
    def placed(self) -> checks.PlacedModels:
        """Returns the models on their ranks, for the `LAYOUT_CHECKS`."""
        specs = self.models.student.spec, self.models.teacher_specs
        return checks.PlacedModels(self.config, *specs, self.student_layout, self.teacher_layout)


@dataclass(frozen=True)
class SamplingSpec:
    """A program that only samples from the student: `evaluate`.

    Attributes:
        ranks: the ranks that sample.
    """

    config: Config
    student: ResolvedModel
    ranks: Layout


def resolve(config: Config, world_size: int, *, fitting: bool = False) -> RunSpec:
    """Returns the run of `config` on `world_size` ranks, after its checks.

    Args:
        fitting: for fit-bridge, whose models may differ in shape.

    Raises:
        ValueError: a model, its layers or the parallel sizes do not fit the configuration.
    """
    run = derive(config, world_size, fitting=fitting)
    checks.stop_at_first(checks.refusals(checks.LAYOUT_CHECKS, run.placed))
    return run


def derive(config: Config, world_size: int, *, fitting: bool = False) -> RunSpec:
    """Returns the run of `resolve`, without the `LAYOUT_CHECKS`.

    Raises:
        ValueError: a model's family, provider or layers, or the number of ranks, do not fit the configuration.
    """
    models = resolve_models(config, fitting=fitting)
    return RunSpec(config, models, *checks.make_layouts(config, world_size))


def resolve_models(config: Config, *, fitting: bool = False) -> RunModels:
    """Returns the models of `config`; raises ValueError if a model or its layers do not fit the configuration."""
    student, loss = resolve_model(config.student, "student"), config.loss.representation
    keys = [f"teachers[{i}]" for i in range(len(config.teachers))] or ["teacher"]
    teachers = []
    for source, key in zip(config.teacher_sources, keys, strict=True):
        if config.is_served(source):
            model = _served_model(source, key)
        # a teacher that starts from the student's files (teacher.weights other than own) is the same model
        elif _same_files(source, config.student):
            model = student
        else:
            model = resolve_model(source, key, beside=student)
        teachers.append(
            ResolvedTeacher(
                model, source, checks.check_layers(config, student.spec, model.spec, source, fitting=fitting)
            )
        )
    return RunModels(
        student,
        tuple(teachers),
        weights_of_layers(loss.layer_weights, loss.layers, student.spec.num_layers),
        Routing(tuple(config.teacher_sources)),
        _known_rows(config, student, [teacher.model for teacher in teachers]),
    )


def resolve_sampling(config: Config, world_size: int) -> SamplingSpec:
    """Returns the student and the ranks that sample with `config` on `world_size` ranks.

    Raises:
        ValueError: a model or the engine's sizes do not fit the configuration or the ranks.
    """
    student = resolve_model(config.student, "student")
    checks.check_engine_sizes(config, student.spec)
    ranks = ENGINES[config.rollout.engine].trainer_ranks(config.rollout, world_size)  # no teacher has servers here
    checks.check_rollout_ranks(config, ranks)
    return SamplingSpec(config, student, Layout(data=ranks))


def servers_ids(config: Config, student: ResolvedModel) -> TokenIds:
    """Returns `RunFiles.sampled_ids` for servers that outlive a run; leaves out teachers without a path.

    Raises:
        ValueError: a teacher's config.json can't be read, its family is not supported, or there is no tokenizer.
    """
    from nemo_oprd.data.tokenizer import Tokenizer  # numpy, which other commands need not import

    sources = [source for source in config.teacher_sources if source.hf_path or source.checkpoint]
    if config.teacher.reads != "ids":
        sources = []
    teachers = [
        _served_model(source, "teacher")
        if config.is_served(source)
        else resolve_model(source, "teacher", beside=student)
        for source in sources
    ]
    return Tokenizer.load(student.directory).ids(_known_rows(config, student, teachers))


def resolve_model(source: ModelSource, key: str, *, beside: ResolvedModel | None = None) -> ResolvedModel:
    """Reads a model's config.json.

    Args:
        beside: another model of the run. If Megatron-Bridge builds it, its family reads this config.json, too, so that
            the error of a model without `provider=bridge` names that key.

    Raises:
        ValueError: there is no such model, or its family is not supported.
    """
    directory, family = model_directory(source), _family(source)
    if family is None and beside is not None:
        family = beside.spec.family
    spec = read_model_spec(directory, family)
    check_provider(source.provider, spec, directory)
    return ResolvedModel(key, source, directory, spec)


def resolve_served(config: Config, number: int) -> ResolvedModel:
    """Returns teacher `number` of `config`, for servers; raises ValueError if config.json lacks the model's sizes."""
    return _served_model(config.teacher_sources[number], f"teachers[{number}]" if config.teachers else "teacher")


def _served_model(source: ModelSource, key: str) -> ResolvedModel:
    """Reads config.json of a teacher on vLLM servers; raises ValueError if it lacks the model's sizes."""
    directory = Path(str(source.hf_path))
    return ResolvedModel(key, source, directory, read_served_spec(directory), served=True)


def model_directory(source: ModelSource) -> Path:
    """Returns `ResolvedModel.directory` of a model.

    Raises:
        ValueError: `checkpoint` is not a torch_dist checkpoint of a model whose config.json is known.
    """
    family, hf_path = _family(source), Path(source.hf_path) if source.hf_path else None
    return hf_directory(Path(source.checkpoint), hf_path, family) if source.checkpoint else Path(str(hf_path))


def _family(source: ModelSource) -> Family | None:
    return find_family(source.provider, hf_path=source.hf_path, checkpoint=source.checkpoint)


def _same_files(one: ModelSource, other: ModelSource) -> bool:
    return (one.hf_path, one.checkpoint, one.provider) == (other.hf_path, other.checkpoint, other.provider)


def _known_rows(config: Config, student: ResolvedModel, teachers: Sequence[ResolvedModel]) -> int:
    reading = teachers if config.teacher.reads == "ids" else ()
    return min(model.spec.vocab_size for model in (student, *reading))
