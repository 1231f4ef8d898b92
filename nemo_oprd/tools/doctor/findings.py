"""Findings: the result of a check, its verdict in one line, and the numbers behind it; and the size of a diagnosis."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from nemo_oprd.config.rollout_schema import RolloutConfig
from nemo_oprd.config.schema import Config
from nemo_oprd.run.engine_kinds import ENGINES
from nemo_oprd.runtime.files import write_atomically

# The codes of the findings: the one table of them. docs/doctor.md lists it, and a test compares the two.
#
# A released code keeps its meaning, because scripts select findings by it: a finding whose meaning changes gets another
# code.


# code -> what it means; the groups are in the order of the report's lines
CODES: dict[str, str] = {
    # settings of the run
    "learning-rate-high": "train.lr is so high that the student is destroyed",
    "learning-rate-low": "train.lr is so low that the student stays as it is",
    "clip-too-small": "train.clip_grad is below the size of any gradient, so every update is cut to nothing",
    "weight-decay-high": "train.weight_decay pulls the weights to zero faster than the loss can train them",
    "warmup-whole-run": "the warm-up takes the whole run, or most of it",
    "adam-unusual": "train.betas or train.adam_eps are such that Adam averages nothing, or never moves",
    "greedy-training": "the student samples with temperature 0 in training: all responses of a prompt are the same",
    "temperature-unusual": "the student samples in training at a temperature of which no readable text comes",
    "top-p-narrow": "the student samples in training from a few tokens only",
    "response-limit-short": "the longest response is too short for an answer",
    "few-supervised-tokens": "the hidden-state loss sees a few tokens of each response only",
    "top-set-of-one": "loss.output.k=1 compares, or measures, a single token",
    "output-temperature-unusual": "loss.output.temperature makes the distributions equal or one-hot",
    "few-updates": "the run has so few updates that its schedule never takes place",
    "stage-never-reached": "a stage of a loss's schedule begins after the last step",
    "batch-of-one": "each update sees one response",
    "ema-still": "the moving average of teacher.ema_decay does not move, or follows each step, within the run",
    "vanishing-loss": "a loss's weight is so small, or so large, that another one, or the clipping, decides alone",
    "layer-weights-uneven": "one layer's weight makes all the others meaningless",
    # the models' files
    "stop-id-not-sampled": "the teacher ends its turn with an id at which the student's sampling goes on",
    "stop-ids-differ": "student and teacher stop at different ids",
    "stop-id-ordinary": "a model stops at an ordinary token",
    "template-adds-system-prompt": "only one of the two chat templates adds a system prompt",
    "templates-differ": "the two chat templates render one conversation differently",
    "template-without-generation-prompt": "the chat template does not write the mark of the model's turn",
    "template-changes-message": "the chat template leaves out the user's message, or repeats it",
    "template-leaves-out": "the chat template leaves out fields of the prompts, such as tools",
    "template-writes-date": "the chat template writes today's date, so prompts change from day to day",
    "template-variable-unused": "data.chat_template_args names a variable that the template does not read",
    "tokenizer-beyond-model": "a tokenizer has ids for which its model has no rows",
    "tokenizers-differ": "ids of the student mean other tokens to the teacher",
    "tokenizers-split-differently": "the two tokenizers have the same tokens and cut the same text differently",
    "yarn-length": "YaRN's length is not the model's max_position_embeddings",
    "rope-scaling-differs": "one of two models of one family lacks the other's RoPE scaling",
    "rope-theta-differs": "two models of one family have other values of rope_theta",
    "norm-eps-differs": "two models of one family have other values of rms_norm_eps",
    "norm-eps-unusual": "rms_norm_eps is of the size of the states",
    "positions-too-few": "a model has fewer positions than the run's responses need",
    "attention-differs": "two models of one family and width have other heads, channels per head, or biases",
    "experts-differ": "two models of one family and width weigh their experts otherwise",
    "teacher-smaller": "the teacher is smaller than the student",
    "special-ids-differ": "two models of one vocabulary name other special tokens in config.json",
    "special-id-beyond-model": "config.json names a special token that the model does not have",
    "stop-ids-of-files-differ": "a model's config.json, generation_config.json and tokenizer name other ends",
    "same-weights": "student and teacher are the same model",
    "same-layers": "student and teacher differ in their embeddings or heads only",
    "weights-not-finite": "a tensor holds NaN or infinity",
    "weights-zero": "a matrix, or a norm, is zero, or rows of it are",
    "weights-scale": "a matrix is a hundred times larger, or smaller, than those of the other layers",
    "layers-permuted": "layers of the student have the weights of the teacher's layers, in another order",
    "layers-repeated": "two layers of one model have the same weights",
    "layer-map-reversed": "the layer map compares the student's first layers with the teacher's last ones",
    "layer-map-crossed": "the layer map goes back and forth",
    "layer-map-collapsed": "the layer map compares most layers of the student with one layer of the teacher",
    "layer-map-shifted": "the layer map is off by the same number of layers everywhere",
    "layer-map-poor": "another layer map compares layers that are much more alike",
    "output-in-input": "the run would write into the directory of a model or of its data",
    # the prompts
    "validation-is-training": "a validation file is a training file, or nearly",
    "contaminated": "problems of a validation set stand in the training data",
    "duplicate-prompts": "a large part of the training prompts repeat earlier ones",
    "contradicting-answers": "one problem stands in the training data with two answers",
    "duplicate-problems": "problems of a validation set stand in it twice",
    "answer-in-prompt": "prompts hold their own answer",
    "answers-alike": "nearly all problems of a file have the same answer",
    "answers-missing": "a validation set has problems without an answer, which are never graded as correct",
    "answers-unlike-grader": "a validation set has answers of another form than its grader reads",
    "few-prompts": "the run visits each training prompt very often",
    "few-problems": "a validation set is too small to show a difference",
    "prompts-over-limit": "many training prompts are longer than data.max_prompt_tokens, or than the models allow",
    "prompts-alike": "nearly all prompts are the same to a model, as its chat template renders them",
    "prompts-empty": "prompts are empty, or hold next to nothing",
    "unknown-characters": "the tokenizer has no tokens for characters of the prompts",
    "role-unusual": "prompts end with a message that is not the user's",
    "instruction-repeated": "the same instruction stands twice in the prompts as they are read",
    "instruction-in-other-words": "two instructions in the prompts ask for the same thing in other words",
    "instruction-conflicts": "two instructions in the prompts contradict each other, or the grader",
    "template-marks-in-prompt": "prompts hold marks of a chat template, which the template then adds again",
    # samples and forward passes
    "train-refuses": "`train` would refuse this run",
    "states-differ": "a model, as it was built, does not compute transformers' hidden states",
    "responses-loop": "responses repeat themselves until their limit",
    "responses-cut": "most responses reach the limit of the run",
    "teacher-worse": "the student solves more problems than the teacher",
    "teacher-not-better": "the teacher is not better than the student beyond chance",
    "teacher-solves-nothing": "the teacher solves no problem, or hardly any",
    "sampling-off-by-one": "sampling and scoring use states one position apart",
    "sampling-differs": "the engine and the trainer compute different models, or begin responses elsewhere",
    "teacher-positions-differ": "states of different tokens are compared",
    "targets-noisy": "the teacher gives other targets for the same input",
    "targets-not-bitwise": "the teacher's targets repeat up to rounding only",
    "not-finite": "a loss or a gradient is not finite",
    "distributions-unrelated": "the models' distributions have nothing in common",
    "distributions-far": "the models' distributions are far apart for models of one origin",
    "distributions-equal": "the models' distributions are equal",
    "massive-activations": "few dimensions hold most of the hidden-state loss",
}


Verdict = Literal["ok", "warning", "wrong", "skipped"]


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        check: the name of the check, as docs/doctor.md lists it.
        verdict: `wrong` fails the command; a `warning` does not; `skipped`: the check does not apply.
        text: one line: what was found, and for a warning or something wrong also what was expected and the fix.
        numbers: what was measured, by name; plain JSON values.
        code: of a warning or something wrong, its name in `CODES`; else None.
    """

    check: str
    verdict: Verdict
    text: str
    numbers: dict[str, Any] = field(default_factory=dict)
    code: str | None = None

    def __post_init__(self) -> None:
        """Asserts that a finding has a code exactly if the user must act on it."""
        assert self.code in CODES if self.verdict in ("warning", "wrong") else self.code is None, self

    @property
    def line(self) -> str:
        """The finding in one line, for the terminal."""
        named = "" if self.code is None else f"{self.code}: "
        return f"{self.verdict:<8} {self.check:<20} {named}{' '.join(self.text.split())}"

    def about(self, teacher: str | None) -> Finding:
        """Returns the finding with the name of one of several teachers; None (a single teacher): the finding itself."""
        if teacher is None:
            return self
        return replace(self, text=f"teacher {teacher}: {self.text}", numbers={"teacher": teacher, **self.numbers})


def flag(check: str, verdict: Verdict, code: str, text: str, **numbers: Any) -> Finding:
    """Makes a finding with the verdict `warning` or `wrong`."""
    return Finding(check, verdict, text, numbers, code)


class Report:
    """Findings of one command: the first rank (`speaks`) keeps and prints them as they come, others ignore them."""

    def __init__(self, *, speaks: bool) -> None:
        self.speaks, self.findings = speaks, list[Finding]()

    def add(self, findings: Finding | Iterable[Finding]) -> None:
        """Keeps findings and prints a line for each."""
        for finding in [findings] if isinstance(findings, Finding) else findings:
            if self.speaks:
                self.findings.append(finding)
                print(finding.line, flush=True)

    @property
    def is_wrong(self) -> bool:
        """True if any check found something wrong."""
        return self._counts["wrong"] > 0

    def summary(self) -> str:
        """Returns the last line: findings per verdict. Example: "1 wrong, 2 warnings, 9 ok, 0 skipped"."""
        counts = self._counts
        return f"{counts['wrong']} wrong, {counts['warning']} warnings, {counts['ok']} ok, {counts['skipped']} skipped"

    def write(self, file: Path) -> None:
        """Writes all findings with their numbers as JSON."""
        content = {"summary": dict(self._counts), "findings": [asdict(finding) for finding in self.findings]}
        write_atomically(file, json.dumps(content, indent=1) + "\n")

    @property
    def _counts(self) -> Counter[str]:
        return Counter(finding.verdict for finding in self.findings)


# The number of samples of the doctor, and the configuration from which it builds its models. No torch.


@dataclass(frozen=True)
class SampleSizes:
    """The size of the samples."""

    prompts: int = 16  # training prompts of which one response each is sampled
    problems: int = 32  # validation problems that student and teacher answer once each
    max_new_tokens: int = 512  # the longest response, where the run's own limit is not shorter

    def __post_init__(self) -> None:
        """Raises ValueError for a size below 1."""
        for name in ("prompts", "problems", "max_new_tokens"):
            if getattr(self, name) < 1:
                option = "--" + name.replace("_", "-")
                raise ValueError(f"{option}={getattr(self, name)}: expected at least 1; choose a larger number")


def for_diagnosis(config: Config, settings: SampleSizes) -> Config:
    """Returns `config` with a small sample and, unless the teacher reads text, both models' distributions measured.

    The default engine, which needs no installation, replaces recorded rollouts, because the current student is to be
    checked, and servers that others run (`rollout.vllm.endpoints`), because a run may be sampling from them. Dedicated
    servers run on the student's GPUs here, so that no others are needed; they end before the models are built. There is
    no correction, which needs log-probabilities of another engine. Whether the run's evaluations can sample the teacher
    is checked after the files, whose findings say why not.
    """
    rollout = replace(
        config.rollout,
        engine=RolloutConfig().engine if not_sampled(config) else config.rollout.engine,
        vllm=replace(config.rollout.vllm, placement="colocated"),
        per_prompt=1,
        max_new_tokens=min(config.rollout.max_new_tokens, settings.max_new_tokens),
        replay=None,
        save=False,
        correction="off",
    )
    limit = min(evaluation_limit(config), settings.max_new_tokens)
    evaluates_teacher = config.evaluation.teacher and config.rollout.replay is None
    watch = 0 if config.teacher.reads == "text" else 1
    return replace(
        config,
        rollout=rollout,
        evaluation=replace(config.evaluation, max_new_tokens=limit, teacher=evaluates_teacher),
        logging=replace(config.logging, output_metrics_every=watch),
    )


def not_sampled(config: Config) -> str | None:
    """Returns the source of the run's responses, if the doctor samples from another one; else None."""
    if config.rollout.replay is not None:
        return "recorded rollouts"
    kind = ENGINES[config.rollout.engine]
    return f"the servers of {kind.key}.endpoints" if kind.groups(config.rollout, 1).placement == "elsewhere" else None


def evaluation_limit(config: Config) -> int:
    """Returns the most tokens of a response in the run's evaluations."""
    return config.evaluation.max_new_tokens or config.rollout.max_new_tokens
