"""`doctor`: says in one line each what makes distillation fail silently, before the run. From cheap to dear.

The checks are in `nemo_oprd/commands/doctor/`, and docs/doctor.md lists them. The files are checked first, on the first rank.
Then the in-process engine samples a few responses, whatever engine the run has, and the models of the run are built as
for training. Nothing is trained or written, except for the findings in `--json`.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from nemo_oprd.batch.types import Rollout
from nemo_oprd.commands.doctor import models as model_checks
from nemo_oprd.commands.doctor import responses as sample_checks
from nemo_oprd.commands.doctor.findings import Finding, Report
from nemo_oprd.commands.doctor.hidden_errors import massive_activations
from nemo_oprd.commands.doctor.layer_states import layer_similarity
from nemo_oprd.commands.doctor.settings import Settings, evaluation_limit
from nemo_oprd.commands.doctor.static import static_findings, teacher_reads
from nemo_oprd.config.schema import Config
from nemo_oprd.config.weight_schedule import largest
from nemo_oprd.data.order import prompt_order
from nemo_oprd.data.prompts import Prompt
from nemo_oprd.data.tokenization.tokenizer import Tokenizer
from nemo_oprd.distillation.distiller import Distiller
from nemo_oprd.evaluation.grading.graders import GraderChoice
from nemo_oprd.models.megatron.parallel import device, init_distributed
from nemo_oprd.rollout.engine import EVALUATION_STREAM, Request, SamplingParams
from nemo_oprd.rollout.in_process.engine import MegatronEngine
from nemo_oprd.rollout.teacher_inputs import add_teacher_inputs
from nemo_oprd.rollout.training_rollouts import training_sampling
from nemo_oprd.runtime.messages import is_first_rank
from nemo_oprd.runtime.signals import agree
from nemo_oprd.setup.checks import check_same_architecture
from nemo_oprd.setup.data import check_bridge_tokenizers, read_prompts
from nemo_oprd.setup.models import RunFiles, RunPlan, build_distiller, make_plan
from nemo_oprd.setup.prompt_files import validation_problems
from nemo_oprd.setup.resolve import RunSpec
from nemo_oprd.train import accumulate_gradients


def doctor(run: Config, spec: RunSpec, settings: Settings, json_file: Path | None = None) -> bool:
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
    if examination.prepare():
        examination.check_samples()
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
    """The checks of one configuration in their order, with what they hand on to each other.

    Every rank of the world makes one and calls its methods alike.
    """

    def __init__(self, run: Config, spec: RunSpec, settings: Settings, report: Report) -> None:
        """Opens the models' files."""
        self.run, self.settings, self.report = run, settings, report
        self.spec, self.config, self.routing = spec, spec.config, spec.models.routing
        self.files = RunFiles(self.config, spec.models)
        self.labels = [source.label if run.teachers else None for source in self.config.teacher_sources]
        self.reads = teacher_reads(run)

    def check_files(self) -> None:
        """The checks of settings, tokenizers, templates, weights and prompt files; the first rank makes them."""
        if self.report.speaks:
            self.report.add(static_findings(self.run, self.files))

    def prepare(self) -> bool:
        """Makes the plan of the run and joins the process group; False if `train` would refuse the configuration."""
        try:
            prompts, self.inputs = read_prompts(self.config, self.files, self.routing)
            self.prompts = prompts.training
            self.plan: RunPlan = make_plan(self.spec, self.files)
            check_bridge_tokenizers(self.plan.objective, self.files, self.inputs)
            if self.run.evaluation.teacher and self.run.rollout.replay is None:
                check_same_architecture(self.files.student.spec, self.files.teachers[0].spec)
        except ValueError as error:
            known = self.report.is_wrong
            text = f"`train` refuses this run, so nothing can be sampled: {error}"
            skipped = Finding("start", "skipped", text)
            self.report.add(skipped if known else Finding("start", "wrong", text, code="train-refuses"))
            return False
        init_distributed()
        return True

    def check_samples(self) -> None:
        """The checks of sampled responses."""
        if self.run.rollout.engine != "megatron" or self.run.rollout.replay is not None:
            used = "recorded rollouts" if self.run.rollout.replay else f"rollout.engine={self.run.rollout.engine}"
            text = f"the in-process engine samples here, not {used}: what concerns that alone is not checked"
            self.report.add(Finding("engine", "skipped", text))
        student = self.files.student
        limit = self.spec.models.vocab_limit
        layout, eos_ids = self.spec.student_layout, student.tokenizer.eos_ids
        self.engine = MegatronEngine(self.config, student.spec, layout, eos_ids, limit)
        self.engine.load(student.read, str(student.directory))
        self.requests = self._requests()
        rollouts = self.engine.generate(self.requests, training_sampling(self.config, 0))
        limits = self.config.rollout.max_new_tokens, self.run.rollout.max_new_tokens
        self.report.add(sample_checks.truncation(rollouts, *limits))
        for number, label in enumerate(self.labels):
            self.report.add(self._compare_with(number).about(label))
        self.rollouts = rollouts

    def _requests(self) -> list[Request]:
        """The first training prompts in the order of the run, the same number for each teacher."""
        prompts = self.prompts.requests
        order = self.prompts.order.indices(self.config.seed, 0, len(prompts))
        taught_by = self.routing.teachers_of(prompts[i].data_source for i in order)
        each = -(-self.settings.prompts // len(self.labels))
        chosen: list[Request] = []
        for number in range(len(self.labels)):
            own = [i for i, teacher in zip(order, taught_by, strict=True) if teacher == number]
            chosen += [prompts[i] for i in own[:each]]
        return chosen

    def _compare_with(self, number: int) -> Finding:
        """Student and teacher `number` on validation problems."""
        check, teacher, student = "teacher is better", self.files.teachers[number], self.files.student
        if self.run.teacher.weights != "own" or self.run.teacher.prompt is not None:
            text = "the teacher knows more than a validation problem tells (teacher.prompt), so it can't be compared"
            return Finding(check, "skipped", text)
        # a teacher of the student's ids reads them in the student's template, as in the run
        reader = teacher if self.reads == "text" else student
        room = min(student.spec.max_positions, teacher.spec.max_positions)
        name, problems = self._problems(number, [student.tokenizer, reader.tokenizer], room)
        if not problems:
            of_teacher = "" if self.labels[number] is None else " of this teacher's data sources"
            return Finding(check, "skipped", f"data.validation has no problems with answers{of_teacher}; add a set")
        try:
            teacher.spec.check_tensor_parallel(self.config.rollout.tensor, "rollout.tensor")
        except ValueError as error:
            return Finding(check, "skipped", f"the teacher can't be sampled: {error}")
        by_student = self._solved(self.engine, student.tokenizer, name, problems)
        layout, eos_ids = self.spec.student_layout, teacher.tokenizer.eos_ids
        engine = MegatronEngine(self.config, teacher.spec, layout, eos_ids)
        engine.load(teacher.read, str(teacher.directory))
        by_teacher = self._solved(engine, reader.tokenizer, name, problems)
        del engine
        gc.collect()
        limits = int(self.config.evaluation.max_new_tokens or 0), evaluation_limit(self.run)
        return sample_checks.teacher_is_better(by_student, by_teacher, *limits)

    def _problems(self, number: int, tokenizers: list[Tokenizer], room: int) -> tuple[str, list[Prompt]]:
        """(Name, problems) of the first validation set with answers; of several teachers, those of its data sources.

        They are drawn with the run's seed, because the first ones of a file are often of one kind.

        Args:
            room: problems of as many tokens leave no room for a response, and are left out.
        """
        named = self.config.teacher_sources[number].data_sources
        for name, read in validation_problems(self.config).items():
            problems = [p for p in read if p.answer is not None]
            if named is not None:
                problems = [p for p in problems if p.data_source in named]
            fitting = [p for p in problems if all(len(t.encode_prompt(list(p.messages))) < room for t in tokenizers)]
            if fitting:
                drawn = prompt_order(len(fitting), self.config.seed, 0, min(self.settings.problems, len(fitting)))
                return name, [fitting[i] for i in sorted(drawn)]
        return "", []

    def _solved(
        self, engine: MegatronEngine, tokenizer: Tokenizer, name: str, problems: list[Prompt]
    ) -> sample_checks.Answers:
        """What one response to each problem of a set shows; grades count on the first rank only."""
        evaluation = self.config.evaluation
        requests = [Request(tokenizer.encode_prompt(list(p.messages)), answer=p.answer) for p in problems]
        key = (self.config.seed, EVALUATION_STREAM, 0)
        limit = int(evaluation.max_new_tokens or 0)
        rollouts = engine.generate(requests, SamplingParams(evaluation.temperature, evaluation.top_p, limit, key))
        texts = [tokenizer.decode(rollout.response_ids) for rollout in rollouts]
        solved, without_answer = [False] * len(problems), 0
        if dist.get_rank() == 0:
            choice = GraderChoice(evaluation.graders, evaluation.judge)
            graders = [choice.of(name, problem.data_source) for problem in problems]
            graded = zip(graders, texts, problems, strict=True)
            grades = [grader(text, problem.answer or "") for grader, text, problem in graded]
            solved = [grade.correct for grade in grades]
            without_answer = sum(grade.extracted is None for grade in grades)
        cut = sum(rollout.finish_reason == "length" for rollout in rollouts)
        return sample_checks.Answers(solved, without_answer, cut)

    def check_models(self) -> None:
        """The checks of forward passes, teacher by teacher."""
        config = self.config
        distiller = build_distiller(self.plan)
        limit = self.spec.models.vocab_limit
        self.report.add(model_checks.positions(self.engine, distiller.student, self.requests, config, limit))
        taught_by = distiller.taught_by(self.rollouts)
        try:
            rollouts = add_teacher_inputs(self.inputs, taught_by, self.rollouts, self.requests)
        except ValueError as error:
            text = f"`train` would end at its first step: {error}"
            self.report.add(Finding("start", "wrong", text, code="train-refuses"))
            return
        for number, label in enumerate(self.labels):
            own = [rollout for rollout, teacher in zip(rollouts, taught_by, strict=True) if teacher == number]
            for finding in self._check_teacher(distiller, number, own):
                self.report.add(finding.about(label))

    def _check_teacher(self, distiller: Distiller, number: int, rollouts: list[Rollout]) -> Iterator[Finding]:
        """The checks of one teacher on its own rollouts."""
        config, objective = self.config, distiller.objective
        batch = distiller.batch(rollouts, distiller.objective_of(0))
        loss = config.loss.representation
        compares_states = bool(objective.layers) and largest(loss.weight) > 0
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
            yield model_checks.distance(metrics, objective.vocab_limit, config.loss.output.k)
        if not compares_states:
            for check in ("similar layers", "massive activations"):
                yield Finding(check, "skipped", "the run compares no hidden states")
            return
        if self.run.teacher.weights == "own":
            yield layer_similarity(distiller, rollouts, number)
        else:
            yield Finding("similar layers", "ok", "the teacher has the student's layers")
        shares = {} if metrics is None else metrics.per_layer("gradient_share")
        yield massive_activations(distiller, batch, loss, shares)
