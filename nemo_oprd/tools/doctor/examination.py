"""Runs all checks of `doctor` in their order, from cheap to expensive (docs/doctor.md).

The files are checked first, on the first rank. Then the run's engine samples a few responses, of the student first and
then of each teacher, and the models of the run are built as for training. Nothing is trained.
"""

from __future__ import annotations

import gc
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import TypeAlias, cast

import torch.distributed as dist

from nemo_oprd.batch.types import Rollout
from nemo_oprd.config.schema import Config
from nemo_oprd.config.teacher_kinds import TEACHER_KINDS
from nemo_oprd.config.weight_schedule import largest
from nemo_oprd.data.order import prompt_order
from nemo_oprd.data.prompts import Prompt
from nemo_oprd.data.token_ids import TokenIds
from nemo_oprd.data.tokenizer import Tokenizer
from nemo_oprd.distillation.distiller import Distiller
from nemo_oprd.evaluation.grading.graders import GraderChoice
from nemo_oprd.megatron.parallel import compute_dtype, device, init_distributed
from nemo_oprd.rollout.engine import EVALUATION_STREAM, Request, RolloutEngine, SamplingParams
from nemo_oprd.rollout.schedule import training_sampling
from nemo_oprd.rollout.teacher_inputs import add_teacher_inputs
from nemo_oprd.run.canary import Proof, prove_models
from nemo_oprd.run.checks import check_teacher_servers, refusals
from nemo_oprd.run.engine_kinds import ENGINES, make_engine
from nemo_oprd.run.inputs import RunInputs, input_checks
from nemo_oprd.run.likely_mistakes import as_read_by, prompts_alike
from nemo_oprd.run.models import ModelFiles, RunFiles, build_distiller
from nemo_oprd.run.prompt_files import training_prompts, validation_problems
from nemo_oprd.run.resolve import RunSpec
from nemo_oprd.runtime.messages import is_first_rank
from nemo_oprd.runtime.signals import agree
from nemo_oprd.tools.doctor import files as file_checks
from nemo_oprd.tools.doctor import models as model_checks
from nemo_oprd.tools.doctor import prompts as sample_checks
from nemo_oprd.tools.doctor.files import (
    Reads,
    damaged_weights,
    layer_origins,
    own_files,
    rendered,
    same_weights,
    survey,
)
from nemo_oprd.tools.doctor.findings import Finding, Report, SampleSizes, Verdict, evaluation_limit, not_sampled
from nemo_oprd.tools.doctor.layer_map import LayerMap
from nemo_oprd.tools.doctor.models import layer_similarity, massive_activations
from nemo_oprd.tools.doctor.prompts import instructions, prompt_files, tokenized
from nemo_oprd.tools.doctor.run_settings import config_values, settings
from nemo_oprd.train import accumulate_gradients
from nemo_oprd.vllm.server_lifecycle import ServerRefused

# The checks that need only the configuration and the files, hence no forward pass and no process group.


# prompts per file in which instructions are searched; rendering takes about 0.1 ms each
RENDERED_PROMPTS = 2000


def teacher_reads(config: Config, number: int = 0) -> Reads:
    """Returns what teacher `number` of a run reads: ids, prompt or text."""
    if config.teacher.reads == "text":
        return "text"
    return "prompt" if config.has_own_prompt(number) else "ids"


def static_findings(run: Config, files: RunFiles) -> Iterator[Finding]:
    """Yields the findings that need no forward pass, in report order; with several teachers, they name their teacher.

    Args:
        run: the configuration of the run, whose settings are judged.

    Raises:
        ValueError: a file that every check needs is missing or malformed, or `train` would refuse the prompts.
    """
    prompts, student = training_prompts(run), files.student
    yield from settings(run, student.spec.num_layers, student.spec.hidden_size)
    yield from own_files("student", student.tokenizer, run.data.chat_template_args)
    yield from rendered("student", student.tokenizer, prompts)
    surveyed = survey(student)
    yield from damaged_weights("student", surveyed)
    routing = files.models.routing
    for number, source in enumerate(run.teacher_sources):
        taught = [p for p in prompts if routing.teachers_of([p.data_source]) == [number]] or prompts
        for finding in _of_teacher(run, files, number, taught):
            yield finding.about(source.label if run.teachers else None)
        if not TEACHER_KINDS[run.teacher.weights].own_model:
            for check in ("teacher's weights", "layer map"):
                yield Finding(check, "ok", "the teacher has the student's weights, layer for layer")
        else:
            other = survey(files.teachers[number])
            layers = _layer_map(run, files, number)
            skipped = Finding("layer map", "skipped", "the run compares no hidden states, or `train` refuses the map")
            of_map = skipped if layers is None else layer_origins(surveyed, other, layers)
            for finding in (*damaged_weights("teacher", other), of_map):
                yield finding.about(source.label if run.teachers else None)
    yield from prompt_files(run)
    some = prompts[:: -(-len(prompts) // RENDERED_PROMPTS)]
    shares_ids = teacher_reads(run) != "text"
    yield from tokenized(run, student.tokenizer, files.teachers[0].tokenizer if shares_ids else None, some)
    texts_of = _rendered(run, files, some)
    for alike in filter(None, (prompts_alike(source, texts) for source, texts in texts_of.items())):
        yield Finding("prompt tokens", "warning", alike, code="prompts-alike")
    yield from instructions(texts_of)


def _of_teacher(run: Config, files: RunFiles, number: int, taught: list[Prompt]) -> Iterator[Finding]:
    student, teacher, reads = files.student, files.teachers[number], teacher_reads(run, number)
    if teacher is not student:
        variables = {} if reads == "ids" else run.conversation_of(number).chat_template_args
        yield from own_files("teacher", teacher.tokenizer, variables)
    if reads != "ids":
        yield from rendered("teacher", teacher.tokenizer, _as_taught(run, taught))
    yield file_checks.stop_ids(student.tokenizer, teacher.tokenizer, reads)
    yield file_checks.templates(student.tokenizer, teacher.tokenizer, taught[0], reads)
    yield file_checks.vocabularies(student, teacher, reads)
    yield file_checks.rope(student.spec, teacher.spec)
    yield from config_values(run, student, teacher, number=number, shares_ids=reads != "text")
    if not TEACHER_KINDS[run.teacher.weights].own_model:
        text = f"teacher.weights={run.teacher.weights}: the teacher is the student, with a prompt of its own"
        yield Finding("same weights", "skipped", text)
        return
    yield same_weights(student, teacher, compute_dtype(run.precision), reads_more=run.has_own_prompt(number))


def _as_taught(run: Config, prompts: list[Prompt]) -> list[Prompt]:
    """Returns the prompts with the teacher's messages; [] if one cannot be rendered, which `train` refuses."""
    try:
        return [replace(prompt, messages=prompt.teacher_messages(run.teacher.prompt)) for prompt in prompts]
    except ValueError:
        return []


def _layer_map(run: Config, files: RunFiles, number: int) -> LayerMap | None:
    """Returns the layer map of a teacher; None if the run compares no states."""
    loss, student, teacher = run.loss.representation, files.student.spec, files.models.teachers[number]
    if not teacher.pairs or largest(loss.weight) == 0:
        return None
    depths = student.num_layers, teacher.spec.num_layers
    return LayerMap(teacher.pairs, depths, loss.final_norm, teacher.source.bridge is None)


def _rendered(run: Config, files: RunFiles, some: list[Prompt]) -> dict[str, list[str]]:
    """Returns source -> rendered prompts: `some` of training, and at most `RENDERED_PROMPTS` of each validation set.

    A teacher that reads other prompts than the student has those of `some` that it teaches as a source of its own.
    Empty if a prompt cannot be rendered; `train` names it.
    """
    student, template = files.student.tokenizer, run.teacher.prompt
    taught_by = files.models.routing.teachers_of([prompt.data_source for prompt in some])
    try:
        found = {"data.train": [student.render(p.messages, True, p.tools) for p in some]}
        for number, teacher in enumerate(files.teachers):
            if teacher_reads(run, number) == "ids":
                continue
            own = [prompt for prompt, chosen in zip(some, taught_by, strict=True) if chosen == number]
            texts = [teacher.tokenizer.render(p.teacher_messages(template), True, p.tools) for p in own]
            found[as_read_by(run, files.models, number)] = texts
        for name, problems in validation_problems(run).items():
            first = problems[:RENDERED_PROMPTS]
            found[f"data.validation.{name}"] = [student.render(p.messages, True, p.tools) for p in first]
    except ValueError:
        return {}
    return found


# name and problems of a validation set
Problems: TypeAlias = tuple[str, list[Prompt]]


def doctor(run: Config, spec: RunSpec, settings: SampleSizes, json_file: Path | None = None) -> bool:
    """Prints the findings, writes them to `json_file`, and returns whether anything is wrong, the same on every rank.

    Args:
        run: the configuration of the run.
        spec: the run of `for_diagnosis(run, settings)`.

    Raises:
        ValueError: a file that every check needs is missing, or the configuration contradicts itself.
    """
    report = Report(speaks=is_first_rank())
    examination = Examination(run, spec, settings, report)
    examination.check_files()
    if examination.prepare() and examination.check_samples():
        examination.check_models()
    wrong = report.is_wrong
    if dist.is_initialized():
        (wrong,) = agree(device(), wrong)
    if report.speaks:
        print(report.summary(), flush=True)
        if json_file is not None:
            report.write(json_file)
    return wrong


class Examination:
    """Runs the checks of one configuration in order, and keeps what later checks need from earlier ones.

    Every rank creates an `Examination` and calls the same methods in the same order.
    """

    def __init__(self, run: Config, spec: RunSpec, settings: SampleSizes, report: Report) -> None:
        self.run, self.settings, self.report = run, settings, report
        self.spec, self.config, self.routing = spec, spec.config, spec.models.routing
        self.inputs = RunInputs(spec, "doctor")
        self.files = self.inputs.files
        self.labels = [source.label if run.teachers else None for source in self.config.teacher_sources]
        self.reads = teacher_reads(run)

    def check_files(self) -> None:
        """Checks settings, tokenizers, templates, weights and prompt files, on the first rank."""
        if self.report.speaks:
            self.report.add(static_findings(self.run, self.files))

    def prepare(self) -> bool:
        """Makes `train`'s checks of its inputs, and joins the process group; returns False if one of them fails."""
        found_before, refused = self.report.is_wrong, False
        for refusal in refusals(input_checks("doctor", self.config), self.inputs):
            refused, verdict = True, cast(Verdict, "skipped" if found_before else "wrong")
            text = f"`train` refuses this run, so nothing can be sampled: {refusal.error}"
            code = None if found_before else "train-refuses"
            self.report.add(Finding("start", verdict, text, {"check": refusal.code}, code=code))
        if refused:
            return False
        init_distributed()
        return True

    def check_samples(self) -> bool:
        """Checks sampled responses; returns False if nothing could be sampled."""
        try:
            self._check_samples()
        except ValueError as error:  # the same on every rank
            text = f"`train` would end while it samples: {error}"
            self.report.add(Finding("start", "wrong", text, code="train-refuses"))
            return False
        return True

    def _check_samples(self) -> None:
        """Checks sampled responses. The student's engine is closed before those of the teachers start."""
        used = not_sampled(self.run)
        if used is not None:
            label = ENGINES[self.config.rollout.engine].label
            text = f"the {label} samples here, not {used}: what concerns that alone is not checked"
            self.report.add(Finding("engine", "skipped", text))
        self.requests = self._requests()
        compared = [self._compared_on(number) for number in range(len(self.labels))]
        student = self.files.student
        with self._engine(student, self.files.sampled_ids) as engine:
            self.rollouts = engine.generate(self.requests, training_sampling(self.config, 0))
            (_, limit), (key, run_limit) = self.config.response_limit, self.run.response_limit
            self.report.add(sample_checks.truncation(self.rollouts, limit, run_limit, limited_by=key))
            self.greedy = model_checks.greedy_responses(engine, self.requests, self.config)
            solved = [on if isinstance(on, str) else self._solved(engine, student.tokenizer, on) for on in compared]
        for number, (on, by_student) in enumerate(zip(compared, solved, strict=True)):
            if isinstance(on, str) or isinstance(by_student, str):
                found = Finding("teacher is better", "skipped", str(on))
            else:
                teacher = self.files.teachers[number]
                with self._engine(teacher, teacher.tokenizer.ids(teacher.spec.vocab_size)) as engine:
                    by_teacher = self._solved(engine, self._reader(number).tokenizer, on)
                limits = int(self.config.evaluation.max_new_tokens or 0), evaluation_limit(self.run)
                found = sample_checks.teacher_is_better(by_student, by_teacher, *limits)
            self.report.add(found.about(self.labels[number]))

    @contextmanager
    def _engine(self, model: ModelFiles, sampled: TokenIds) -> Iterator[RolloutEngine]:
        """Yields the run's engine with a model's weights; after an error the engine's files (server logs) are kept."""
        scratch = mkdtemp(prefix="nemo_oprd_doctor_")
        with ExitStack() as stack:
            config, eos_ids = replace(self.config, output=scratch), model.tokenizer.eos_ids
            engine = make_engine(config, model.spec, model.directory, self.spec.student_layout, eos_ids, sampled)
            stack.callback(gc.collect)
            stack.callback(engine.close)
            engine.load(model.read, str(model.directory))
            yield engine
        shutil.rmtree(scratch)

    def _requests(self) -> list[Request]:
        """Returns the first training prompts in the order of the run, up to the same number for each teacher."""
        prompts = self.inputs.data.prompts.requests
        order = self.inputs.data.prompts.order.indices(self.config.seed, 0, len(prompts))
        taught_by = self.routing.teachers_of([prompts[i].data_source for i in order])
        each = -(-self.settings.prompts // len(self.labels))
        chosen: list[Request] = []
        for number in range(len(self.labels)):
            own = [i for i, teacher in zip(order, taught_by, strict=True) if teacher == number]
            chosen += [prompts[i] for i in own[:each]]
        return chosen

    def _compared_on(self, number: int) -> Problems | str:
        """Returns the problems on which the student and teacher `number` are compared, or why they are not."""
        teacher, student = self.files.teachers[number], self.files.student
        if not TEACHER_KINDS[self.run.teacher.weights].own_model or self.run.own_prompts:
            return "the teacher knows more than a validation problem tells (teacher.prompt), so it can't be compared"
        room = min(student.spec.max_positions, teacher.spec.max_positions)
        problems = self._problems(number, [student.tokenizer, self._reader(number).tokenizer], room)
        if not problems[1]:
            of_teacher = "" if self.labels[number] is None else " of this teacher's data sources"
            return f"data.validation has no problems with answers{of_teacher}; add a set"
        rollout = self.config.rollout
        if number in self.config.served_teachers:
            return "the teacher can't be sampled: its servers compute states and sample nothing"
        try:
            teacher.spec.check_tensor_parallel(rollout.tensor, "rollout.tensor")
            ENGINES[rollout.engine].check_here(rollout, teacher.spec)
        except ValueError as error:
            return f"the teacher can't be sampled: {error}"
        return problems

    def _reader(self, number: int) -> ModelFiles:
        """Returns the files with the template for problems: the teacher's if it reads text, else the student's."""
        return self.files.teachers[number] if self.reads == "text" else self.files.student

    def _problems(self, number: int, tokenizers: list[Tokenizer], room: int) -> Problems:
        """Returns (name, problems) of the first validation set with answers for a teacher; ("", []) without one.

        They are drawn with the run's seed, because the first ones of a file are often of one kind. Problems of `room`
        tokens or more leave no room for a response, and are left out.
        """
        named = self.config.teacher_sources[number].data_sources
        for name, read in validation_problems(self.config).items():
            problems = [p for p in read if p.answer is not None and (named is None or p.data_source in named)]
            fitting = [p for p in problems if all(len(t.encode_prompt(p.messages, p.tools)) < room for t in tokenizers)]
            if fitting:
                drawn = prompt_order(len(fitting), self.config.seed, 0, min(self.settings.problems, len(fitting)))
                return name, [fitting[i] for i in sorted(drawn)]
        return "", []

    def _solved(self, engine: RolloutEngine, tokenizer: Tokenizer, of_set: Problems) -> sample_checks.Answers:
        """Samples one response to each problem of a set and grades it; grades are valid on the first rank only."""
        evaluation, (name, problems) = self.config.evaluation, of_set
        requests = [Request(tokenizer.encode_prompt(p.messages, p.tools), answer=p.answer) for p in problems]
        key = (self.config.seed, EVALUATION_STREAM, 0)
        limit = int(evaluation.max_new_tokens or 0)
        rollouts = engine.generate(requests, SamplingParams(evaluation.temperature, evaluation.top_p, limit, key))
        texts = [tokenizer.decode(rollout.response_ids) for rollout in rollouts]
        solved, without_answer = [False] * len(problems), 0
        if dist.get_rank() == 0:
            choice = GraderChoice(evaluation.graders, evaluation.judge)
            choice.read(name, ((problem.data_source, problem.answer or "") for problem in problems))
            pairs = zip(texts, problems, strict=True)
            grades = [choice.of(name, problem.data_source)(text, problem.answer or "") for text, problem in pairs]
            solved = [grade.correct for grade in grades]
            without_answer = sum(grade.extracted is None for grade in grades)
        cut = sum(rollout.finish_reason == "length" for rollout in rollouts)
        return sample_checks.Answers(solved, without_answer, cut)

    def check_models(self) -> None:
        """Runs the checks that need forward passes, teacher by teacher."""
        try:
            check_teacher_servers(self.config)
            distiller = build_distiller(self.inputs.plan)
        except ServerRefused as error:
            self.report.add(Finding("hidden states", "wrong", f"{error}; fix: docs/canary.md", code="states-differ"))
            return
        except ValueError as error:
            text = f"`train` refuses this run, so no model is built: {error}"
            self.report.add(Finding("start", "wrong", text, code="train-refuses"))
            return
        with closing(distiller):
            self._check_built(distiller)

    def _check_built(self, distiller: Distiller) -> None:
        self.report.add(map(_of_proof, prove_models(self.inputs.plan, distiller)))
        self.report.add(model_checks.positions(self.greedy, distiller.student, self.config, self.files.sampled_ids))
        taught_by = distiller.taught_by(self.rollouts)
        try:
            rollouts = add_teacher_inputs(self.inputs.data.teacher_inputs, taught_by, self.rollouts, self.requests)
        except ValueError as error:
            text = f"`train` would end at its first step: {error}"
            self.report.add(Finding("start", "wrong", text, code="train-refuses"))
            return
        for number, label in enumerate(self.labels):
            own = [rollout for rollout, teacher in zip(rollouts, taught_by, strict=True) if teacher == number]
            for finding in self._check_teacher(distiller, number, own):
                self.report.add(finding.about(label))

    def _check_teacher(self, distiller: Distiller, number: int, rollouts: list[Rollout]) -> Iterator[Finding]:
        """Runs the checks of one teacher on its own rollouts."""
        config, objective = self.config, distiller.objective
        batch = distiller.batch(rollouts, distiller.objective_of(0))
        loss = config.loss.representation
        if self.reads == "text":
            text = "the teacher reads other tokens; the alignment by bytes is checked for every batch (align/coverage)"
            yield Finding("teacher's positions", "skipped", text)
        else:
            yield model_checks.aligned_positions(rollouts, batch.plan.hidden.table)
        yield model_checks.repeatability(distiller, batch)
        metrics = accumulate_gradients(distiller, batch).metrics
        if self.reads == "text":
            text = "the teacher reads text: the two models have no distributions over the same tokens"
            yield Finding("KL and overlap", "skipped", text)
        elif metrics is not None:
            yield model_checks.distance(metrics, self.spec.models.vocab_limit, config.loss.output.k)
        if not objective.layers or largest(loss.weight) <= 0:
            for check in ("similar layers", "massive activations"):
                yield Finding(check, "skipped", "the run compares no hidden states")
            return
        if TEACHER_KINDS[self.run.teacher.weights].own_model:
            yield layer_similarity(distiller, rollouts, number)
        else:
            yield Finding("similar layers", "ok", "the teacher has the student's layers")
        shares = {} if metrics is None else metrics.per_layer("gradient_share")
        yield massive_activations(distiller, batch, loss, shares)


def _of_proof(proof: Proof) -> Finding:
    """Returns the finding of the check `hidden states` about one model."""
    check, text = "hidden states", f"{proof.key}: {proof.line}"
    if proof.refused:
        return Finding(check, "wrong", f"{text}; fix: docs/canary.md", code="states-differ")
    if proof.verdict is None:
        return Finding(check, "skipped", text)
    return Finding(check, "ok", text, proof.verdict.as_json())
