"""`from-nemo-rl`: recipes are read as NeMo-RL reads them, and translated; what is left over is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo_oprd.cli import main
from nemo_oprd.config.loading import load_config
from nemo_oprd.config.nemo_rl_keys import ranks, translate
from nemo_oprd.config.nemo_rl_recipe import load_recipe

# a small recipe in the shape of NeMo-RL's
BASE = """
distillation: {num_prompts_per_step: 8, num_generations_per_prompt: 2, max_num_steps: 40, val_period: 5, seed: 7,
               topk_logits_k: 32, max_num_epochs: 1}
loss_fn: {kl_type: reverse, zero_outside_topk: false}
policy: &POLICY
  model_name: org/Small
  train_global_batch_size: 16
  max_total_sequence_length: 64
  precision: float32
  max_grad_norm: 0.5
  tokenizer: {name: "${..model_name}"}
  dtensor_cfg: {enabled: true, tensor_parallel_size: 2, context_parallel_size: 2, activation_checkpointing: true}
  megatron_cfg:
    enabled: false
    tensor_model_parallel_size: 4
    pipeline_model_parallel_size: 2
    context_parallel_size: 1
    sequence_parallel: true
    optimizer: {lr: 1.0e-5, min_lr: 1.0e-6, weight_decay: 0.1, adam_beta1: 0.9, adam_beta2: 0.95, adam_eps: 1.0e-6}
    scheduler: {lr_decay_style: cosine, lr_warmup_iters: 4}
    fp8_cfg: {enabled: false, fp8: e4m3}
  sequence_packing: {enabled: true, train_mb_tokens: "${mul:${..max_total_sequence_length}, 2}"}
  optimizer: {name: torch.optim.AdamW, kwargs: {lr: 2.0e-5, weight_decay: 0.01, betas: [0.9, 0.999], eps: 1.0e-8}}
  scheduler:
    - {name: torch.optim.lr_scheduler.LinearLR, kwargs: {total_iters: 10}}
    - {name: torch.optim.lr_scheduler.CosineAnnealingLR, kwargs: {T_max: 30, eta_min: 1.0e-6}}
    - milestones: [10]
  generation:
    backend: vllm
    max_new_tokens: 48
    temperature: 0.8
    top_p: 0.95
    vllm_cfg: {tensor_parallel_size: 2, gpu_memory_utilization: 0.5}
    colocated: {enabled: true, resources: {gpus_per_node: null, num_nodes: null}}
teacher:
  <<: *POLICY
  model_name: org/Large
data:
  max_input_seq_length: 16
  train: {dataset_name: Sums}
  validation: {dataset_name: Sums-2024, repeat: 3}
checkpointing: {enabled: true, save_period: 10, keep_top_k: 3}
logger: {wandb_enabled: true, tensorboard_enabled: false, wandb: {project: mine}, tensorboard: {log_dir: tb}}
cluster: {gpus_per_node: 8, num_nodes: 2}
"""
MEGATRON = """
defaults: base.yaml
policy:
  dtensor_cfg: {enabled: false}
  megatron_cfg: {enabled: true}
  made_up: 3
teacher:
  dtensor_cfg: {enabled: false}
  megatron_cfg: {enabled: true, tensor_model_parallel_size: 8}
"""


@pytest.fixture
def recipes(tmp_path: Path) -> Path:
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "megatron.yaml").write_text(MEGATRON)
    return tmp_path


def test_inheritance(tmp_path: Path) -> None:
    """Later files win, `_override_` replaces a group, and references see the values of the last file."""
    (tmp_path / "low").mkdir()
    (tmp_path / "low" / "a.yaml").write_text("n: 2\nm: ${mul:${n}, 3}\ng: {x: 1, y: 2}\nlist: [{a: 1}]")
    (tmp_path / "b.yaml").write_text("g: {y: 5}\nhalf: ${div:${n}, 2}\nmost: ${max:${n}, 3}\nsum: ${add:${n}, 1}")
    (tmp_path / "top.yaml").write_text("defaults: [low/a.yaml, b.yaml]\nn: 4\nlist: [{b: 2}]")
    (tmp_path / "over.yaml").write_text("defaults: top.yaml\ng: {_override_: true, z: 9}")
    values = {"n": 4, "m": 12, "g": {"x": 1, "y": 5}, "list": [{"b": 2}], "half": 2.0, "most": 4, "sum": 5}
    assert load_recipe(tmp_path / "top.yaml") == values
    assert load_recipe(tmp_path / "over.yaml") == {**values, "g": {"z": 9}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "defaults: none.yaml",
            r"none.yaml: no such file, which .*recipe.yaml names in its defaults; .*correct the path",
        ),
        ("defaults: recipe.yaml", "inherits from itself by way of recipe.yaml; expected no circle"),
        ("a: ${b}", "Interpolation key 'b' not found.*expected a recipe of NeMo-RL"),
        ("- a", "holds a ListConfig; expected a mapping of keys"),
        ("a: [", "expected a recipe of NeMo-RL: correct the file"),
        ("policy: {model_name: x}", "policy.model_name and teacher.model_name .*expected a distillation recipe"),
    ],
)
def test_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "recipe.yaml").write_text(content)
    with pytest.raises(ValueError, match=message) as error:
        translate(load_recipe(tmp_path / "recipe.yaml"), "recipe", "models")
    assert "\n" not in str(error.value)


def converted(recipe: Path, *arguments: str) -> Any:
    """The loaded configuration that the command writes."""
    main(["from-nemo-rl", str(recipe), "--output", str(recipe.parent / "out" / "made.yaml"), *arguments], alone=False)
    return load_config("made", [], recipe.parent / "out")


def test_dtensor_recipe(recipes: Path) -> None:
    config = converted(recipes / "base.yaml", "--models", "m/")
    assert (config.student.hf_path, config.teacher.hf_path, config.precision) == ("m/Small", "m/Large", "fp32")
    assert (config.student.parallel.tensor, config.student.parallel.context, config.student.recompute) == (2, 2, "full")
    assert config.student.parallel.pipeline == 1
    assert (config.train.steps, config.train.prompts_per_step, config.rollout.per_prompt) == (40, 8, 2)
    assert (config.train.lr, config.train.min_lr, config.train.weight_decay) == (2e-5, 1e-6, 0.01)
    assert (config.train.schedule, config.train.warmup_fraction, config.train.clip_grad) == ("cosine", 0.25, 0.5)
    assert (config.train.betas, config.train.adam_eps) == ((0.9, 0.999), 1e-8)
    assert (config.rollout.temperature, config.rollout.top_p, config.rollout.max_new_tokens) == (0.8, 0.95, 48)
    assert (config.rollout.engine, config.rollout.vllm.tensor) == ("vllm", 2)
    assert (config.data.train, config.data.validation) == ("data/sums.jsonl", {"sums_2024": "data/sums-2024.jsonl"})
    assert (config.data.max_prompt_tokens, config.train.tokens_per_microbatch) == (16, 64)
    assert (config.evaluation.every, config.evaluation.samples, config.seed) == (5, 3, 7)
    assert (config.train.save_every, config.train.keep_checkpoints) == (10, 3)
    assert (config.logging.wandb, config.logging.tensorboard) == ("mine", False)
    output = config.loss.output
    assert (output.kind, output.k, output.weight, output.support, output.aggregation) == (
        "top_k", 32, 1.0, "teacher", "token_mean",
    )  # fmt: skip
    assert (output.normalizer, output.support_weight) == ("renormalized", "student")
    assert config.loss.representation.layers == "none"


def test_megatron_recipe(recipes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = converted(recipes / "megatron.yaml")
    student, teacher = config.student.parallel, config.teacher.parallel
    assert (student.tensor, student.pipeline, student.context, student.sequence) == (4, 2, 1, True)
    assert (teacher.tensor, teacher.pipeline) == (8, 2)
    assert (config.train.lr, config.train.betas, config.train.adam_eps) == (1e-5, (0.9, 0.95), 1e-6)
    assert (config.train.schedule, config.train.warmup_fraction, config.train.min_lr) == ("cosine", 0.1, 1e-6)
    printed = capsys.readouterr().out
    assert "- policy.made_up=3: unknown here" in printed
    assert "- policy.sequence_packing (enabled=True, train_mb_tokens=128): microbatches are packs" in printed
    assert "fp8" not in printed  # switched off
    assert "next: nemo-oprd plan --config-dir" in printed and printed.rstrip().endswith("--config-name made --ranks 16")


def test_hidden_states_in_place_of_the_divergence(recipes: Path) -> None:
    config = converted(recipes / "base.yaml", "--oprd")
    assert (config.loss.representation.kind, config.loss.representation.weight) == ("mse", 1.0)
    assert config.loss.output.kind == "none"


def changed(recipes: Path, **changes: Any) -> tuple[dict[str, Any], str]:
    """The configuration and the notes of the base recipe with other values."""
    values = load_recipe(recipes / "base.yaml")
    for key, value in changes.items():
        *groups, last = key.split("__")
        place = values
        for group in groups:
            place = place[group]
        place[last] = value
    made = translate(values, "r", "models")
    return made.config, "\n".join(made.notes)


def test_what_is_not_the_same_is_said(recipes: Path) -> None:
    config, notes = changed(recipes, loss_fn__kl_type="mixed")
    assert config["loss"]["output"]["support_weight"] == "student" and "loss_fn.kl_type=mixed (forward KL" in notes
    config, notes = changed(recipes, loss_fn__kl_type="forward", loss_fn__zero_outside_topk=True)
    assert config["loss"]["output"]["support_weight"] == "teacher"
    assert config["loss"]["output"]["normalizer"] == "full" and "loss_fn.zero_outside_topk=true" in notes
    config, notes = changed(recipes, policy__train_global_batch_size=4)
    assert "policy.train_global_batch_size=4: NeMo-RL makes an update of every 4 of the 16" in notes
    config, notes = changed(recipes, data__max_input_seq_length=64)
    assert config["train"]["tokens_per_microbatch"] == 112 and "max_total_sequence_length=64: limits" in notes
    resources = {"enabled": False, "resources": {"gpus_per_node": 4, "num_nodes": 1}}
    config, notes = changed(recipes, policy__generation__colocated=resources)
    assert config["rollout"]["vllm"]["placement"] == "dedicated" and config["rollout"]["vllm"]["replicas"] == 2
    config, notes = changed(recipes, teacher=None, teachers=[{"model_name": "a/B"}, {"model_name": "c/D"}])
    assert config["teacher"] == {"hf_path": "models/B", "reads": "text"} and "output" not in config["loss"]
    assert "teachers.1=c/D: left out" in notes
    assert ranks({"cluster": {"gpus_per_node": 4, "num_nodes": 3}}) == 12


def test_printed_without_a_file(recipes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["from-nemo-rl", str(recipes / "base.yaml")], alone=False)
    printed = capsys.readouterr().out
    assert printed.startswith("# Made of the recipe base.yaml of NeMo-RL.")
    assert yaml.safe_load(printed)["train"]["steps"] == 40
