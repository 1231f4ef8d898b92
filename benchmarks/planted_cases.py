"""The faults and the healthy pairs of `planted_faults.py` that need no forward pass: one line each.

A fault starts from a shipped configuration, whose models and files are replaced by those of `planted_models.py`, and
changes settings, or a copy of these files. It names the code that the doctor is expected to say.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.support.planted_models import (
    HIDDEN,
    SPECIAL,
    SUFFIX,
    TEMPLATE,
    Row,
    edit_json,
    edit_tensors,
    problems,
    pruned,
    write_rows,
    write_tokenizer,
)
from tests.support.recipe_models import OF_MEGATRON_BRIDGE

Plant = Callable[[Path], None]
ROPE = "rope_parameters"


@dataclass(frozen=True)
class Case:
    """A fault, or a healthy pair.

    Attributes:
        name: stable, for `--only`.
        code: what the doctor is expected to say; None: no warning and nothing wrong.
        overrides: settings; {root} stands for the files' directory.
        plant: changes the files in this directory.
        config: the shipped configuration from which the case starts.
    """

    name: str
    code: str | None
    overrides: tuple[str, ...] = ()
    plant: Plant | None = None
    config: str = "oprd_1p5b"


def base_overrides(config: str, root: Path) -> list[str]:
    """The settings that put the tiny models and files into a shipped configuration."""
    pairs = {
        "bridge_gpt_oss_20b_to_qwen3_4b": ("student", "wide"),
        "bridge_phi4mini_to_qwen3_1p7b": ("student", "wide"),
        "bridge_qwen3p5_35b_a3b_to_4b": ("student", "wide"),
        "bridge_qwen3_4b_to_1p7b": ("student", "wide"),
        "bridge_then_opd_qwen3_4b_to_1p7b": ("student", "wide"),
        "oprd_qwen3_30b_a3b": ("moe", "moe_teacher"),
        "real_model": ("pruned", "deep"),
    }
    student, teacher = pairs.get(config, ("student", "teacher"))
    settings = [f"student.hf_path={root / student}", f"output={root / 'run'}", f"data.train={root / 'train.jsonl'}"]
    settings += [f"data.validation={{heldout: {root / 'validation.jsonl'}}}"]
    if config == "merge_two_teachers_1p5b":
        names = {"math": "math_dapo", "code": "code_prompts"}
        teachers = (f"{{name: {k}, hf_path: {root / 'teacher'}, data_sources: [{v}]}}" for k, v in names.items())
        files = ",".join(str(root / f"{name}.jsonl") for name in names.values())
        settings += [f"teachers=[{', '.join(teachers)}]", f"data.train=[{files}]"]
    elif config != "self_distill_1p5b":
        settings += [f"teacher.hf_path={root / teacher}"]
    if config == "quickstart":
        settings += ["student.parallel.tensor=1", "student.checkpoint=null", "teacher.checkpoint=null"]
    if config in OF_MEGATRON_BRIDGE:
        settings += ["student.provider=own", "teacher.provider=own"]
    if config == "real_model":
        settings += ["loss.representation.layer_map={1:1,2:2,3:3,4:10}"]
    return settings


def _json(name: str, file: str, **changes: Any) -> Plant:
    return lambda root: edit_json(root / name / file, **changes)


def _both(*plants: Plant) -> Plant:
    def plant(root: Path) -> None:
        for each in plants:
            each(root)

    return plant


def _tensors(name: str, change: Callable[[dict[str, torch.Tensor]], Any]) -> Plant:
    return lambda root: edit_tensors(root / name, lambda tensors: void(change(tensors)))


def void(_: Any) -> None:
    """Nothing, from a function whose value is of no use."""


def _template(text: str, *names: str) -> Plant:
    return _both(*(_json(name, "tokenizer_config.json", chat_template=text) for name in names))


def _rows(file: str, change: Callable[[list[Row]], list[Row]]) -> Plant:
    def plant(root: Path) -> None:
        rows = [json.loads(line) for line in (root / file).read_text().splitlines()]
        write_rows(root / file, change(rows))

    return plant


def _prompts(file: str, change: Callable[[Row], str]) -> Plant:
    return _rows(file, lambda rows: [{**row, "prompt": change(row)} for row in rows])


def _swap(one: int, other: int) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(f"model.layers.{one}.")]:
            partner = name.replace(f".{one}.", f".{other}.", 1)
            tensors[name], tensors[partner] = tensors[partner].clone(), tensors[name].clone()

    return change


def _repeat(tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if name.startswith("model.layers.2.")]:
        tensors[name] = tensors[name.replace(".2.", ".1.", 1)].clone()


def _zero_layer(tensors: dict[str, torch.Tensor]) -> None:
    for name in tensors:
        if name.startswith("model.layers.3.") and "norm" not in name:
            tensors[name].zero_()


def _exchange_ids(root: Path) -> None:
    file = root / "teacher" / "tokenizer.json"
    content = json.loads(file.read_text())
    ids = content["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    file.write_text(json.dumps(content))


def _more_tokens(root: Path) -> None:
    file = root / "teacher" / "tokenizer.json"
    content = json.loads(file.read_text())
    added = dict(content["added_tokens"][-1], id=content["added_tokens"][-1]["id"] + 1, content="<|new|>")
    content["added_tokens"].append(added)
    file.write_text(json.dumps(content))


def _other_head(root: Path) -> None:
    shutil.rmtree(root / "teacher")
    shutil.copytree(root / "student", root / "teacher")
    edit_tensors(root / "teacher", lambda tensors: void(tensors["lm_head.weight"].mul_(1.5)))


def _copied(root: Path) -> None:
    shutil.rmtree(root / "teacher")
    shutil.copytree(root / "student", root / "teacher")


def _rope(theta: float, **more: Any) -> dict[str, Any]:
    """The two spellings of a base, of which transformers writes one."""
    scaling = {"rope_type": "default", **more}
    return {"rope_theta": theta, "rope_scaling": scaling if more else None, ROPE: None}


def _overlap(rows: list[Row]) -> list[Row]:
    return [*problems(10, 4), *rows]


def _answered(form: str) -> Callable[[Row], str]:
    return lambda row: f"{row['prompt']}\n{form.replace('#', row['answer'])}"


def _ends(*ids: int, names: tuple[str, ...] = ("teacher",)) -> Plant:
    """Stop ids, counted from the end of the vocabulary: 1 is <|im_end|>, 3 <|endoftext|>, 60 a letter."""

    def plant(root: Path) -> None:
        for name in names:
            rows = json.loads((root / name / "config.json").read_text())["vocab_size"]
            edit_json(root / name / "generation_config.json", eos_token_id=[rows - i for i in ids])

    return plant


EVEN = ("student.hf_path={root}/pruned", "teacher.hf_path={root}/deep")
MAP = "loss.representation.layer_map="
BOTH = ("student", "teacher")
SYSTEM = TEMPLATE.replace("{% for m", "<|im_start|>system\n" + SUFFIX + "<|im_end|>\n{% for m", 1)
HEALTHY = [
    *(Case(f"shipped: {name}", None, config=name) for name in (
        "bridge_gpt_oss_20b_to_qwen3_4b", "bridge_phi4mini_to_qwen3_1p7b", "bridge_qwen3_4b_to_1p7b",
        "bridge_qwen3p5_35b_a3b_to_4b", "bridge_then_opd_qwen3_4b_to_1p7b",
        "merge_two_teachers_1p5b", "opd_full_1p5b", "opd_top16_1p5b", "opd_top1_1p5b", "oprd_1p5b",
        "oprd_prefix_1p5b",
        "oprd_opd_mu10_1p5b", "oprd_opd_mu1_1p5b", "oprd_qwen3_30b_a3b", "quickstart", "real_model",
        "self_distill_1p5b",
    )),
    Case("pruned, kept layers", None, (*EVEN, MAP + "{1:1,2:2,3:3,4:10}")),
    Case("independent weights of one shape", None, ("teacher.hf_path={root}/other",)),
    Case("layers=last", None, ("loss.representation.layers=last",)),
    Case("chosen layers", None, ("loss.representation.layers=[2,4,6]", MAP + "{2:2,4:4,6:6}")),
    Case("settings at their usual ends", None, ("train.lr=1e-6", "train.weight_decay=0.1", "train.clip_grad=0",
         "rollout.temperature=0.6", "rollout.top_p=0.95", "evaluation.temperature=0", "train.betas=[0.9,0.95]")),
    Case("data.suffix that prompts have", None, (f"data.suffix='{SUFFIX}'",)),
    Case("another size with another base", None, ("teacher.hf_path={root}/wide", "bridge.path={root}/bridge"),
         _json("wide", "config.json", **_rope(1e6))),
]  # fmt: skip
SETTINGS = [
    *(Case(f"setting {key}={value}", code, (f"{key}={value}",)) for key, value, code in (
        ("train.lr", "10", "learning-rate-high"),
        ("train.lr", "0.01", "learning-rate-high"),
        ("train.lr", "1e-15", "learning-rate-low"),
        ("train.lr", "1e-9", "learning-rate-low"),
        ("train.clip_grad", "1e-9", "clip-too-small"),
        ("train.clip_grad", "1e-5", "clip-too-small"),
        ("train.weight_decay", "10", "weight-decay-high"),
        ("train.warmup_fraction", "1", "warmup-whole-run"),
        ("train.warmup_fraction", "0.8", "warmup-whole-run"),
        ("train.betas", "[0.999,0.9]", "adam-unusual"),
        ("train.adam_eps", "1", "adam-unusual"),
        ("train.steps", "1", "few-updates"),
        ("rollout.temperature", "0", "greedy-training"),
        ("rollout.temperature", "5", "temperature-unusual"),
        ("rollout.temperature", "0.01", "temperature-unusual"),
        ("rollout.top_p", "0.1", "top-p-narrow"),
        ("rollout.max_new_tokens", "4", "response-limit-short"),
        ("evaluation.max_new_tokens", "4", "response-limit-short"),
        ("loss.representation.k", "1", "few-supervised-tokens"),
        ("loss.output.k", "1", "top-set-of-one"),
        ("loss.representation.weight", "1e-12", "vanishing-loss"),
        ("loss.representation.layer_weights", "{2:1e9}", "layer-weights-uneven"),
        ("output", "{root}/teacher/run", "output-in-input"),
        ("data.max_prompt_tokens", "40", "prompts-over-limit"),
    )),
    Case("batch of one", "batch-of-one", ("train.prompts_per_step=1", "rollout.per_prompt=1")),
    Case("output temperature", "output-temperature-unusual", ("loss.output.temperature=100",), None, "opd_full_1p5b"),
    Case("two weights", "vanishing-loss", ("loss.representation.weight=90000", "loss.output.weight=1e-4"), None,
         "oprd_opd_mu10_1p5b"),
    Case("still average", "ema-still", ("teacher.weights=ema", "teacher.ema_decay=0.9999999"), None,
         "self_distill_1p5b"),
    Case("last stage never comes", "stage-never-reached", ("train.steps=400",), None,
         "bridge_then_opd_qwen3_4b_to_1p7b"),
    Case("template variable", "template-variable-unused", ("data.chat_template_args.enable_thinkin=false",)),
]  # fmt: skip
TOKENIZERS = [
    Case("teacher ends elsewhere", "stop-id-not-sampled", (), _ends(3)),
    Case("teacher has one more end", "stop-ids-differ", (), _ends(1, 3)),
    Case("both end at a letter", "stop-id-ordinary", (), _ends(60, names=BOTH)),
    Case("both end at endoftext", "stop-ids-of-files-differ", (), _ends(3, names=BOTH)),
    Case("teacher's system prompt", "template-adds-system-prompt", (), _template(SYSTEM, "teacher")),
    Case("other marks", "templates-differ", (), _template(TEMPLATE.replace("im_start", "endoftext"), "teacher")),
    Case("no generation prompt", "template-without-generation-prompt", (),
         _template(TEMPLATE.partition("{% if add")[0], *BOTH)),
    Case("template drops messages", "template-changes-message", (),
         _template(TEMPLATE.replace("m['content']", "m['content'] | upper"), *BOTH)),
    Case("exchanged ids", "tokenizers-differ", (), _exchange_ids),
    Case("token without a row", "tokenizer-beyond-model", (), _more_tokens),
    Case("other merges", "tokenizers-split-differently", (),
         lambda root: void(write_tokenizer(root / "teacher", merges=False))),
]  # fmt: skip
CONFIGS = [
    Case("teacher's theta 12000", "rope-theta-differs", (), _json("teacher", "config.json", **_rope(12000.0))),
    Case("student's theta 1e6", "rope-theta-differs", (), _json("student", "config.json", **_rope(1e6))),
    Case("wide teacher's theta 12000", "rope-theta-differs", ("teacher.hf_path={root}/wide", "bridge.path=x"),
         _json("wide", "config.json", **_rope(12000.0))),
    Case("one scaled", "rope-scaling-differs", (),
         _json("teacher", "config.json", **_rope(10000.0, rope_type="linear", factor=4.0))),
    Case("YaRN's length", "yarn-length", (), _both(*(_json(name, "config.json", **_rope(
         10000.0, rope_type="yarn", factor=4.0, original_max_position_embeddings=4096)) for name in BOTH))),
    Case("teacher's eps", "norm-eps-differs", (), _json("teacher", "config.json", rms_norm_eps=1e-3)),
    Case("eps of both", "norm-eps-unusual", (), _both(*(_json(n, "config.json", rms_norm_eps=0.1) for n in BOTH))),
    Case("heads", "attention-differs", (),
         _json("teacher", "config.json", num_attention_heads=8, num_key_value_heads=4, head_dim=HIDDEN // 8)),
    Case("positions", "positions-too-few", (),
         _both(*(_json(n, "config.json", max_position_embeddings=512) for n in BOTH))),
    Case("end beyond the vocabulary", "special-id-beyond-model", (),
         _json("teacher", "config.json", eos_token_id=99999)),
    Case("other beginning", "special-ids-differ", (), _json("teacher", "config.json", bos_token_id=5)),
    Case("small teacher", "teacher-smaller", ("teacher.hf_path={root}/narrow", "bridge.path=x")),
    Case("experts per token", "experts-differ", (), _json("moe_teacher", "config.json", num_experts_per_tok=1),
         "oprd_qwen3_30b_a3b"),
]  # fmt: skip
WEIGHTS = [
    Case("one path twice", "same-weights", ("teacher.hf_path={root}/student",)),
    Case("a copy", "same-weights", (), _copied),
    Case("another head", "same-layers", (), _other_head),
    Case("NaN", "weights-not-finite", (), _tensors("teacher", lambda t: t["model.layers.2.mlp.up_proj.weight"][0].fill_(
         float("nan")))),
    Case("a layer of zeros", "weights-zero", (), _tensors("teacher", _zero_layer)),
    Case("a norm of zeros", "weights-zero", (), _tensors("student", lambda t: t["model.norm.weight"].zero_())),
    Case("a large matrix", "weights-scale", (),
         _tensors("teacher", lambda t: t["model.layers.2.mlp.up_proj.weight"].mul_(1000))),
    Case("exchanged layers", "layers-permuted", (), _tensors("student", _swap(1, 3))),
    Case("a repeated layer", "layers-repeated", (), _tensors("teacher", _repeat)),
]  # fmt: skip
MAPS = [
    Case("reversed map", "layer-map-reversed", (MAP + "{1:5,2:4,3:3,4:2,5:1,6:6}",)),
    Case("reversed map of all", "layer-map-reversed",
         (MAP + "{1:6,2:5,3:4,4:3,5:2,6:1}", "loss.representation.final_norm=false")),
    Case("map back and forth", "layer-map-crossed", (MAP + "{1:1,2:4,3:2,4:3,5:5,6:6}",)),
    Case("map to one layer", "layer-map-collapsed", (MAP + "{1:2,2:2,3:2,4:2,5:5,6:6}",)),
    Case("map shifted by one", "layer-map-shifted", (MAP + "{1:2,2:3,3:4,4:5,5:6,6:6}",
         "loss.representation.final_norm=false", "loss.representation.layers=[1,2,3,4,5,6]")),
    Case("even map of a pruned student", "layer-map-poor", EVEN),
    Case("shifted map of a pruned student", "layer-map-shifted", (*EVEN, MAP + "{1:2,2:3,3:4,4:10}")),
    Case("even map, other pruning", "layer-map-poor", ("student.hf_path={root}/late", "teacher.hf_path={root}/deep"),
         lambda root: pruned(root / "deep", root / "late", [6, 7, 8, 9, 10])),
]  # fmt: skip
DATA = [
    Case("validation is training", "validation-is-training", ("data.validation={heldout: '{root}/train.jsonl'}",)),
    Case("a copy of training", "validation-is-training", (),
         lambda root: write_rows(root / "validation.jsonl", problems(200, 1))),
    Case("contaminated", "contaminated", (), _rows("train.jsonl", _overlap)),
    Case("10 prompts 400 times", "duplicate-prompts", (), _rows("train.jsonl", lambda rows: rows[:10] * 400)),
    Case("a fifth twice", "duplicate-prompts", (), _rows("train.jsonl", lambda rows: [*rows, *rows[:250]])),
    Case("two answers", "contradicting-answers", (),
         _rows("train.jsonl", lambda rows: [*rows, *({**row, "answer": "7"} for row in rows[:40])])),
    Case("answer said", "answer-in-prompt", (), _prompts("train.jsonl", _answered("The answer is #."))),
    Case("answer at the end", "answer-in-prompt", (), _prompts("train.jsonl", _answered("(#)"))),
    Case("answer in validation", "answer-in-prompt", (), _prompts("validation.jsonl", _answered("Answer: #"))),
    Case("one answer for all", "answers-alike", (),
         _rows("train.jsonl", lambda rows: [{**row, "answer": "1"} for row in rows])),
    Case("no answers", "answers-missing", (),
         _rows("validation.jsonl", lambda rows: [{"prompt": row["prompt"]} for row in rows])),
    Case("answers of GSM8K", "answers-unlike-grader", ("evaluation.graders={heldout: exact}",),
         _rows("validation.jsonl", lambda rows: [{**row, "answer": f"So.\\n#### {row['answer']}"} for row in rows])),
    Case("validation repeats itself", "duplicate-problems", (), _rows("validation.jsonl", lambda rows: rows[:16] * 4)),
    Case("five prompts", "few-prompts", (), _rows("train.jsonl", lambda rows: rows[:5])),
    Case("three problems", "few-problems", (), _rows("validation.jsonl", lambda rows: rows[:3])),
    Case("marks in prompts", "template-marks-in-prompt", (),
         _prompts("train.jsonl", lambda row: f"{SPECIAL[1]}user\n{row['prompt']}{SPECIAL[2]}")),
    Case("response in the prompt", "role-unusual", (), _rows("train.jsonl", lambda rows: [{**r, "prompt": [
         {"role": "user", "content": r["prompt"]}, {"role": "assistant", "content": "I think so."}]} for r in rows])),
    Case("instruction twice", "instruction-repeated", (),
         _prompts("train.jsonl", lambda row: f"{row['prompt']}\n{SUFFIX}")),
    Case("instruction in the template, too", "instruction-repeated", (), _template(SYSTEM, *BOTH)),
    Case("box in other words", "instruction-in-other-words", (),
         _prompts("train.jsonl", lambda row: f"{row['prompt']} Give the final answer in a box.")),
    Case("steps in other words", "instruction-in-other-words", ("data.suffix='Think step-by-step.'",)),
    Case("answer only", "instruction-conflicts", (),
         _prompts("train.jsonl", lambda row: f"{row['prompt']}\nGive only the final answer.")),
    Case("two formats", "instruction-conflicts", (),
         _prompts("train.jsonl", lambda row: f"{row['prompt']}\nEnd with a line of the form Answer: x.")),
    Case("teacher reads it twice", "instruction-repeated", (f"teacher.prompt='{{prompt}} {SUFFIX}'",)),
]  # fmt: skip
FAULTS = [*SETTINGS, *TOKENIZERS, *CONFIGS, *WEIGHTS, *MAPS, *DATA]
