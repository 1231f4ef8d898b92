"""The check of the values in both models' config.json that training does not touch, and that no error would show.

Weights are made for one base of the rotation, one epsilon of the norms, one number of heads. With another value a model
still loads, and computes something else. Which differences are a mistake depends on what the two models have in common:

- one family, width and depth, or one family and width with fewer layers (a checkpoint, or a pruned copy, of the other):
  any difference is a warning, because such models usually have one origin.
- one family, another width: sizes of a family are often made with another base, so two bases are a warning only if they
  differ by less than a factor of 2, which no family does on purpose.
- other families have nothing to compare.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Any

from nemo_oprd.commands.doctor.findings import Finding
from nemo_oprd.config.schema import Config
from nemo_oprd.models import ModelSpec
from nemo_oprd.setup.likely_mistakes import layer_weights, smaller_teacher
from nemo_oprd.setup.models import ModelFiles
from nemo_oprd.setup.positions import too_few_positions

CHECK = "config values"
EPS = (1e-12, 1e-3)
FACTOR = 2.0


def config_values(
    run: Config, student: ModelFiles, teacher: ModelFiles, *, number: int = 0, shares_ids: bool
) -> Iterator[Finding]:
    """Findings about single values, with those of both models; one that says that there are none.

    Args:
        run: whose longest sequences the models' positions must hold.
        number: of the teacher in the run.
        shares_ids: whether both models read the same token ids.
    """
    found = [*_of_each(run, student, teacher, number), *_between(student.spec, teacher.spec)]
    found += _special_ids(student, teacher) if shares_ids else ()
    kin = "of one origin by their shape" if _is_kin(student.spec, teacher.spec) else "of different shapes"
    text = f"the two config.json ({kin}) have no value that is likely to be a mistake: rope_theta "
    text += f"{student.spec.rope.theta:g} and {teacher.spec.rope.theta:g}, rms_norm_eps {student.spec.norm_eps:g} "
    yield from found or [Finding(CHECK, "ok", f"{text}and {teacher.spec.norm_eps:g}")]


def _is_kin(student: ModelSpec, teacher: ModelSpec) -> bool:
    """Whether two models look like checkpoints of one model, or one like a pruned copy of the other."""
    return student.model_type == teacher.model_type and student.hidden_size == teacher.hidden_size


def _differ(code: str, key: str, ours: Any, theirs: Any, why: str) -> Finding:
    shown = [f"{value:g}" if isinstance(value, float) else str(value) for value in (ours, theirs)]
    text = f"{key} is {shown[0]} in the student's config.json and {shown[1]} in the teacher's: {why}; expected the "
    text += "same for two models of one origin; fix: correct the one that differs from its model's source"
    return Finding(CHECK, "warning", text, {"student": ours, "teacher": theirs}, code=code)


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
            yield Finding(CHECK, "warning", text, {role: spec.norm_eps}, code="norm-eps-unusual")
    for each in too_few_positions(run, student.spec, {number: teacher.spec}):
        numbers = {"positions": each.positions, "tokens": each.tokens}
        yield Finding(CHECK, "warning", each.text, numbers, code="positions-too-few")
    smaller = smaller_teacher(student.spec, teacher.spec)
    if smaller is not None:
        size = {"student": layer_weights(student.spec), "teacher": layer_weights(teacher.spec)}
        yield Finding(CHECK, "warning", smaller, size, code="teacher-smaller")


def _special_ids(student: ModelFiles, teacher: ModelFiles) -> Iterator[Finding]:
    """The ids that config.json names, where both models have one vocabulary."""
    for role, files in (("student", student), ("teacher", teacher)):
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            ids = _ids(files.spec.hf_config.get(key))
            beyond = sorted(i for i in ids if i >= files.spec.vocab_size)
            if beyond:
                text = f"{key} of the {role}'s config.json names {beyond[0]}, and the model has ids below "
                text += f"{files.spec.vocab_size}; expected one of these; fix: correct it as in the model's source"
                yield Finding(CHECK, "warning", text, {role: sorted(ids)}, code="special-id-beyond-model")
                return
    if _is_kin(student.spec, teacher.spec) and student.spec.num_layers == teacher.spec.num_layers:
        for key in ("bos_token_id", "eos_token_id"):
            ours, theirs = (files.spec.hf_config.get(key) for files in (student, teacher))
            if _ids(ours) and _ids(theirs) and not _ids(ours) & _ids(theirs):
                yield _differ("special-ids-differ", key, ours, theirs, "one of them may belong to another tokenizer")


def _ids(value: Any) -> set[int]:
    values = value if isinstance(value, list) else [value]
    return {i for i in values if isinstance(i, int) and not isinstance(i, bool)}
