"""Checks for mistaken values that cause no error, in both models' config.json and in the run's configuration.

`settings` judges a value by its effect on the run, where that can be computed: the distance that a weight can move,
the part that weight decay removes, the visits of a prompt. The other limits are far outside what published recipes use.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from nemo_oprd.config.schema import Config
from nemo_oprd.config.teacher_kinds import TEACHER_KINDS
from nemo_oprd.config.weight_schedule import largest
from nemo_oprd.losses.layer_mapping import weights_of_layers
from nemo_oprd.models import ModelSpec
from nemo_oprd.run.likely_mistakes import layer_weights, smaller_teacher
from nemo_oprd.run.models import ModelFiles
from nemo_oprd.run.positions import too_few_positions
from nemo_oprd.tools.doctor.findings import Finding, Verdict, flag

# The check of values in both models' config.json that training does not change; a wrong one causes no error.
#
# Weights are made for one base of the rotation, one epsilon of the norms, one number of heads. With another value a
# model still loads, and computes something else. Which differences are a mistake depends on what the two models have in
# common:
#
# - one family, width and depth, or one family and width with fewer layers (a checkpoint, or a pruned copy, of the
#   other): any difference is a warning, because such models usually have one origin.
# - one family, another width: sizes of a family are often made with another base, so two bases are a warning only if
#   they differ by less than a factor of 2, which no family does on purpose.
# - other families have nothing to compare.


VALUES_CHECK = "config values"
EPS = (1e-12, 1e-3)
FACTOR = 2.0


def config_values(
    run: Config, student: ModelFiles, teacher: ModelFiles, *, number: int = 0, shares_ids: bool
) -> Iterator[Finding]:
    """Compares single values of both models; yields one `ok` finding if nothing is wrong.

    Args:
        run: whose longest sequences the models' positions must hold.
        number: the teacher's number in the run.
        shares_ids: whether both models read the same token ids.
    """
    found = [*_of_each(run, student, teacher, number), *_between(student.spec, teacher.spec)]
    found += _special_ids(student, teacher) if shares_ids else ()
    kin = "of one origin by their shape" if _is_kin(student.spec, teacher.spec) else "of different shapes"
    text = f"the two config.json ({kin}) have no value that is likely to be a mistake: rope_theta "
    text += f"{student.spec.rope.theta:g} and {teacher.spec.rope.theta:g}, rms_norm_eps {student.spec.norm_eps:g} "
    yield from found or [Finding(VALUES_CHECK, "ok", f"{text}and {teacher.spec.norm_eps:g}")]


def _is_kin(student: ModelSpec, teacher: ModelSpec) -> bool:
    """Returns whether two models look like checkpoints of one model, or one like a pruned copy of the other."""
    return student.model_type == teacher.model_type and student.hidden_size == teacher.hidden_size


def _differ(code: str, key: str, ours: Any, theirs: Any, why: str) -> Finding:
    shown = [f"{value:g}" if isinstance(value, float) else str(value) for value in (ours, theirs)]
    text = f"{key} is {shown[0]} in the student's config.json and {shown[1]} in the teacher's: {why}; expected the "
    text += "same for two models of one origin; fix: correct the one that differs from its model's source"
    return Finding(VALUES_CHECK, "warning", text, {"student": ours, "teacher": theirs}, code=code)


def _between(student: ModelSpec, teacher: ModelSpec) -> Iterator[Finding]:
    if student.model_type != teacher.model_type:
        return
    kin = _is_kin(student, teacher)
    bases = student.rope.theta, teacher.rope.theta
    if bases[0] != bases[1] and (kin or max(bases) < FACTOR * min(bases)):
        why = "all attention of one of them turns by other angles than it was trained with"
        yield _differ("rope-theta-differs", "rope_theta", *bases, why)
    with_experts = student.experts is not None and teacher.experts is not None
    for code, key, attribute, why in _OF_KIN if kin else ():
        if with_experts or not attribute.startswith("experts."):
            ours, theirs = (attrgetter(attribute)(spec) for spec in (student, teacher))
            if ours != theirs:
                yield _differ(code, key, ours, theirs, why)


_SCALED = "the norms of one of them scale its states otherwise than in training"
_HEADS, _WEIGHED = "the same weights are cut into other heads", "experts are weighed otherwise than in training"
# (code, key, attribute of the spec, what a difference does) of values that models of one origin share
_OF_KIN = (
    ("rope-theta-differs", "partial_rotary_factor", "rope.share", "other channels are rotated"),
    ("norm-eps-differs", "rms_norm_eps", "norm_eps", _SCALED),
    ("attention-differs", "num_attention_heads", "num_heads", _HEADS),
    ("attention-differs", "num_key_value_heads", "num_kv_heads", _HEADS),
    ("attention-differs", "head_dim", "head_dim", _HEADS),
    ("attention-differs", "the bias of q, k and v", "qkv_bias", _HEADS),
    ("attention-differs", "the norm of q and k", "qk_norm", _HEADS),
    ("experts-differ", "num_experts_per_tok", "experts.per_token", _WEIGHED),
    ("experts-differ", "norm_topk_prob", "experts.normalized", _WEIGHED),
)


def _of_each(run: Config, student: ModelFiles, teacher: ModelFiles, number: int) -> Iterator[Finding]:
    for role, spec in (("student", student.spec), ("teacher", teacher.spec)):
        if not EPS[0] <= spec.norm_eps <= EPS[1]:
            text = f"rms_norm_eps is {spec.norm_eps:g} in the {role}'s config.json; expected 1e-6 or 1e-5: the norms "
            text += "do not normalise; fix: the value of the model's source"
            yield Finding(VALUES_CHECK, "warning", text, {role: spec.norm_eps}, code="norm-eps-unusual")
    for each in too_few_positions(run, student.spec, {number: teacher.spec}):
        numbers = {"positions": each.positions, "tokens": each.tokens}
        yield Finding(VALUES_CHECK, "warning", each.text, numbers, code="positions-too-few")
    smaller = smaller_teacher(student.spec, teacher.spec)
    if smaller is not None:
        size = {"student": layer_weights(student.spec), "teacher": layer_weights(teacher.spec)}
        yield Finding(VALUES_CHECK, "warning", smaller, size, code="teacher-smaller")


def _special_ids(student: ModelFiles, teacher: ModelFiles) -> Iterator[Finding]:
    """Checks the special ids that config.json names, of two models with one vocabulary."""
    for role, files in (("student", student), ("teacher", teacher)):
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            ids = _ids(files.spec.hf_config.get(key))
            beyond = sorted(i for i in ids if i >= files.spec.vocab_size)
            if beyond:
                text = f"{key} of the {role}'s config.json names {beyond[0]}, and the model has ids below "
                text += f"{files.spec.vocab_size}; expected one of these; fix: correct it as in the model's source"
                yield Finding(VALUES_CHECK, "warning", text, {role: sorted(ids)}, code="special-id-beyond-model")
                return
    if _is_kin(student.spec, teacher.spec) and student.spec.num_layers == teacher.spec.num_layers:
        for key in ("bos_token_id", "eos_token_id"):
            ours, theirs = (files.spec.hf_config.get(key) for files in (student, teacher))
            if _ids(ours) and _ids(theirs) and not _ids(ours) & _ids(theirs):
                yield _differ("special-ids-differ", key, ours, theirs, "one of them may belong to another tokenizer")


def _ids(value: Any) -> set[int]:
    values = value if isinstance(value, list) else [value]
    return {i for i in values if isinstance(i, int) and not isinstance(i, bool)}


CHECK = "settings"
_say = partial(flag, CHECK)
# Adam moves a weight by at most about lr in a step, whatever the gradient. Matrices of language models have weights of
# about 0.02: a step of 0.01 replaces them. Published runs end at 1e-3, those of wide models at 2e-4.
RATE_WRONG, RATE_HIGH, RATE_HIGH_WIDE, WIDE = 1e-2, 2e-3, 2e-4, 1024
# a whole run that moves no weight by 0.05 % of its usual size, or by a twentieth of that
MOVES_LITTLE, MOVES_NOTHING = 1e-5, 5e-7
# Adam divides the clipped gradient by its own size, so that clipping alone changes little, until the elements of a
# clipped gradient come near adam_eps
CLIP_WARNING, CLIP_WRONG = 1e-3, 1e-6
DECAY_HIGH, DECAYED = 1.0, 0.2
WARMUP_WARNING, WARMUP_WRONG = 0.5, 0.999
TEMPERATURES, TOP_P = (0.3, 1.5), 0.7
RESPONSE_TOKENS, SUPERVISED_TOKENS, UPDATES = 16, 8, 5
OUTPUT_TEMPERATURES = (0.2, 5.0)
WEIGHTS = (1e-5, 1e5)
UNEVEN = 1e4
EMA_MOVES, EMA_LASTS = 0.1, 0.5


def settings(config: Config, num_layers: int, hidden_size: int) -> Iterator[Finding]:
    """Checks for values that are likely mistakes; yields one `ok` finding if none is. Sizes are the student's."""
    parts = (_optimizer(config, hidden_size), _updates(config), _sampling(config), _losses(config, num_layers))
    ok = Finding(CHECK, "ok", "no value of the configuration is outside what a run can use")
    yield from [finding for part in parts for finding in part] or [ok]


def _optimizer(config: Config, hidden_size: int) -> Iterator[Finding]:
    train = config.train
    high = RATE_HIGH_WIDE if hidden_size >= WIDE else RATE_HIGH
    moved = train.lr * train.steps * train.updates_per_rollout
    if train.lr > high:
        text = f"train.lr={train.lr:g}: Adam moves every weight by about that in each step, and weights are about 0.02;"
        text += f" expected at most {high:g} for a width of {hidden_size}; fix: lower it (the paper has 1e-5)"
        yield _say("wrong" if train.lr >= RATE_WRONG else "warning", "learning-rate-high", text, lr=train.lr)
    elif moved < MOVES_LITTLE:
        text = f"train.lr={train.lr:g} moves no weight by more than {moved:.1e} in {train.steps} steps, and weights "
        text += f"are about 0.02; expected {MOVES_LITTLE:g} and more; fix: raise train.lr (the paper has 1e-5) or the "
        yield _say("wrong" if moved < MOVES_NOTHING else "warning", "learning-rate-low", f"{text}steps", moved=moved)
    if 0 < train.clip_grad < CLIP_WARNING:
        text = f"train.clip_grad={train.clip_grad:g} cuts every gradient to next to nothing, where train.adam_eps="
        text += f"{train.adam_eps:g} decides; expected 0 (no clipping) or about 1; fix: correct it"
        verdict: Verdict = "wrong" if train.clip_grad < CLIP_WRONG else "warning"
        yield _say(verdict, "clip-too-small", text, clip_grad=train.clip_grad)
    # a rate that is too high has its own line
    decayed = min(train.lr, high) * train.weight_decay * train.steps * train.updates_per_rollout
    if train.weight_decay >= DECAY_HIGH or decayed > DECAYED:
        text = f"train.weight_decay={train.weight_decay:g} at train.lr={min(train.lr, high):g} shrinks all weights by "
        text += f"{-math.expm1(-decayed):.1%} over the run; expected a weight decay of 0 to 0.1; fix: lower it"
        yield _say("warning", "weight-decay-high", text, decayed=decayed)
    first, second = train.betas
    if first > second or first > 0.99 or not 0.8 <= second < 0.99999 or train.adam_eps > 1e-4:
        text = f"train.betas=[{first:g}, {second:g}] and train.adam_eps={train.adam_eps:g}: Adam averages over "
        text += f"{1 / (1 - first):.3g} and {1 / (1 - second):.3g} steps; expected about [0.9, 0.95] to [0.9, 0.999] "
        yield _say("warning", "adam-unusual", f"{text}and 1e-8; fix: leave them out", first=first, second=second)


def _updates(config: Config) -> Iterator[Finding]:
    train, rollout = config.train, config.rollout
    if train.warmup_fraction >= WARMUP_WARNING:
        text = f"train.warmup_fraction={train.warmup_fraction:g}: the learning rate rises for all of this part"
        text += "; expected 0 to 0.1; fix: lower it"
        verdict: Verdict = "wrong" if train.warmup_fraction >= WARMUP_WRONG else "warning"
        yield _say(verdict, "warmup-whole-run", text, warmup_fraction=train.warmup_fraction)
    if train.steps < UPDATES:
        text = f"train.steps={train.steps}: no schedule takes place; expected {UPDATES} and more; fix: raise it, "
        yield _say("warning", "few-updates", f"{text}unless this run is a trial", steps=train.steps)
    if train.prompts_per_step * rollout.per_prompt == 1 and rollout.replay is None:
        text = "train.prompts_per_step=1 with rollout.per_prompt=1: each update follows one response; expected 8 and "
        yield _say("warning", "batch-of-one", f"{text}more; fix: raise train.prompts_per_step")
    weights = {"representation": config.loss.representation.weight, "output": config.loss.output.weight}
    for key, weight in weights.items():
        begins = [0, *(stage.until or 0 for stage in weight[:-1])] if isinstance(weight, list) else []
        if begins and begins[-1] >= train.steps:
            text = f"loss.{key}.weight: its last stage begins after update {begins[-1]}, and train.steps={train.steps} "
            text += "ends before; expected all stages within the run; fix: correct until"
            yield _say("warning", "stage-never-reached", text)
    teacher = config.teacher
    if TEACHER_KINDS[teacher.weights].averages:
        decay = teacher.ema_decay
        moved = -math.expm1(train.steps * math.log(decay)) if decay else 1.0
        if moved < EMA_MOVES or decay < EMA_LASTS:
            text = f"teacher.ema_decay={decay:g}: over {train.steps} steps {moved:.0%} of the teacher become the "
            text += f"student's later weights, and of one step {1 - decay:.2g}; expected a decay between 0.5 and "
            yield _say("warning", "ema-still", f"{text}{1 - 0.1 / train.steps:.5g}; fix: correct it", moved=moved)
    yield from _output_directory(config)


def _output_directory(config: Config) -> Iterator[Finding]:
    output = Path(config.output).resolve()
    inputs = [config.student.hf_path, config.student.checkpoint]
    inputs += [path for source in config.teacher_sources for path in (source.hf_path, source.checkpoint)]
    for path in filter(None, inputs):
        if Path(path).resolve() in (output, *output.parents):
            text = f"output={config.output} lies in the directory of the model {path}, which it would be mixed with; "
            yield _say("wrong", "output-in-input", f"{text}expected a directory of the run's own; fix: choose another")
            return


def _sampling(config: Config) -> Iterator[Finding]:
    rollout = config.rollout
    if rollout.replay is not None:
        return
    low, high = TEMPERATURES
    if rollout.temperature == 0:
        same = f"all {rollout.per_prompt} responses of a prompt are the same" if rollout.per_prompt > 1 else ""
        text = "rollout.temperature=0: the student does not sample in training"
        text += f", and {same}" if same else ", so it never meets what it may write"
        verdict: Verdict = "wrong" if same else "warning"
        yield _say(verdict, "greedy-training", f"{text}; expected 1; fix: remove it (evaluation has a key of its own)")
    elif not low <= rollout.temperature <= high:
        text = f"rollout.temperature={rollout.temperature:g}: the student learns on text that it would hardly write; "
        text += f"expected {low} to {high}; fix: 1.0"
        yield _say("warning", "temperature-unusual", text, temperature=rollout.temperature)
    if rollout.top_p < TOP_P:
        text = f"rollout.top_p={rollout.top_p:g}: training sees the few likeliest tokens only; expected 1, or {TOP_P} "
        yield _say("warning", "top-p-narrow", f"{text}at least; fix: remove it", top_p=rollout.top_p)
    limits = {"rollout.max_new_tokens": rollout.max_new_tokens}
    if config.evaluation.every and config.evaluation.max_new_tokens is not None:
        limits["evaluation.max_new_tokens"] = config.evaluation.max_new_tokens
    for key, limit in limits.items():
        if limit < RESPONSE_TOKENS:
            text = f"{key}={limit}: no answer is that short; expected {RESPONSE_TOKENS} and more; fix: raise it"
            yield _say("warning", "response-limit-short", text, limit=limit)
    evaluation = config.evaluation
    if evaluation.every and evaluation.temperature > high:
        text = f"evaluation.temperature={evaluation.temperature:g}: no model answers well; expected at most {high}; "
        yield _say("warning", "temperature-unusual", f"{text}fix: 0.7", temperature=evaluation.temperature)
    if evaluation.every and evaluation.top_p < 0.3:
        text = (
            f"evaluation.top_p={evaluation.top_p:g}: hardly more than greedy sampling; expected 0.9 to 1; fix: raise "
        )
        yield _say("warning", "top-p-narrow", f"{text}it, or set evaluation.temperature=0", top_p=evaluation.top_p)


def _losses(config: Config, num_layers: int) -> Iterator[Finding]:
    states, output = config.loss.representation, config.loss.output
    compares = states.layers != "none" and largest(states.weight) > 0
    if compares and states.positions != "all" and states.k < SUPERVISED_TOKENS:
        text = f"loss.representation.k={states.k}: the loss sees the {states.positions.removesuffix('_k')} {states.k} "
        text += f"token(s) of each response; expected {SUPERVISED_TOKENS} and more; fix: raise it, or positions=all"
        yield _say("warning", "few-supervised-tokens", text, k=states.k)
    if output.k == 1:
        what = "the loss compares" if output.kind == "top_k" else "the overlap is that of"
        text = f"loss.output.k=1: {what} a single token; expected 2 and more, usually 16; fix: raise it"
        yield _say("warning", "top-set-of-one", f"{text}, or loss.output.kind=sampled_token (the paper's top-1)")
    low, high = OUTPUT_TEMPERATURES
    if not low <= output.temperature <= high:
        text = f"loss.output.temperature={output.temperature:g} makes all distributions "
        text += f"{'equal' if output.temperature > high else 'one-hot'}; expected {low:g} to {high:g}; fix: 1.0"
        yield _say("warning", "output-temperature-unusual", text, temperature=output.temperature)
    weights = {"loss.representation.weight": states.weight} if states.layers != "none" else {}
    weights |= {"loss.output.weight": output.weight} if not output.is_off else {}
    positive = {key: largest(weight) for key, weight in weights.items() if largest(weight) > 0}
    least, most = WEIGHTS
    for key, value in positive.items():
        if not least <= value <= most:
            text = f"{key}={value:g}: clipping and adam_eps decide, not the loss; expected {least:g} to {most:g}; fix: "
            yield _say("warning", "vanishing-loss", f"{text}correct it (the paper has 1 to 10)", weight=value)
            return
    if len(positive) == 2 and max(positive.values()) > most * min(positive.values()):
        text = f"the weights of the two losses are {positive}; expected both to count; fix: correct one of them"
        yield _say("warning", "vanishing-loss", text, **positive)
    if compares and states.layer_weights is not None:
        shares = weights_of_layers(states.layer_weights, states.layers, num_layers)
        if max(shares.values()) > UNEVEN * min(shares.values()):
            text = f"loss.representation.layer_weights: from {min(shares.values()):g} to {max(shares.values()):g}, so "
            text += f"some layers count for nothing; expected a ratio below {UNEVEN:g}; fix: leave these layers out of "
            yield _say("warning", "layer-weights-uneven", f"{text}loss.representation.layers")
