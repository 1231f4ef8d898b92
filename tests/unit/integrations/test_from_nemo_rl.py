"""`from-nemo-rl`: recipes are read as NeMo-RL reads them, and translated; what is left over is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from nemo_rl_recipes import put, write_recipes

from nemo_oprd.cli import main
from nemo_oprd.config.loading import from_composed, load_config
from nemo_oprd.integrations.from_nemo_rl.keys import translate
from nemo_oprd.integrations.from_nemo_rl.models import ranks
from nemo_oprd.integrations.from_nemo_rl.recipe import load_recipe


@pytest.fixture
def recipes(tmp_path: Path) -> Path:
    write_recipes(tmp_path)
    return tmp_path


def test_inheritance(tmp_path: Path) -> None:
    """Later files win, `_override_` replaces a group, and references see the values of the last file."""
    (tmp_path / "low").mkdir()
    (tmp_path / "low" / "a.yaml").write_text("n: 2\nm: ${mul:${n}, 3}\ng: {x: 1, y: 2}\nlist: [{a: 1}]")
    (tmp_path / "b.yaml").write_text("g: {y: 5}\nhalf: ${div:${n}, 2}\nmost: ${max:${n}, 3}\nmore: ${add:${n}, 1}")
    (tmp_path / "top.yaml").write_text("defaults: [low/a.yaml, b.yaml]\nn: 4\nlist: [{b: 2}]")
    (tmp_path / "over.yaml").write_text("defaults: top.yaml\ng: {_override_: true, z: 9}")
    values = {"n": 4, "m": 12, "g": {"x": 1, "y": 5}, "list": [{"b": 2}], "half": 2.0, "most": 4, "more": 5}
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
        ("a: ${sub:1, 2}", "Unsupported interpolation type sub"),  # NeMo-RL has none
        ("a: ${oc.env:NOT_SET_ANYWHERE}", "Environment variable 'NOT_SET_ANYWHERE' not found.*: set that variable"),
        ("a: " + "[" * 5000, "groups or lists inside each other without end; expected a recipe of NeMo-RL"),
        ("a: &a {b: *a}", "recipe.yaml: an alias stands inside its own anchor; expected values that end"),
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


def changed(recipes: Path, name: str = "base.yaml", /, **changes: Any) -> tuple[dict[str, Any], str]:
    """The configuration and the notes of a recipe with other values; `__` in a key stands for a dot."""
    values = load_recipe(recipes / name)
    for key, value in changes.items():
        put(values, key.replace("__", "."), value)
    made = translate(values, "r", "models")
    from_composed(made.config, "r")
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


def test_multi_teacher_recipe(recipes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """MOPD: teachers by the agents of NeMo Gym, on GPUs of their own, and the log ratio at the sampled tokens."""
    config = converted(recipes / "mopd.yaml", "--models", "m")
    assert config.student.hf_path == "m/Small" and config.teacher.hf_path is None
    assert [(each.name, each.hf_path, each.data_sources) for each in config.teachers] == [
        ("general", "m/general", None),
        ("org-a-math", "m/org-a-math", ["math_agent", "mcqa_agent"]),
        ("org-b-math", "m/org-b-math", ["proof_agent"]),
    ]
    assert (config.teacher.parallel.tensor, config.teacher.parallel.expert) == (2, 4)
    assert (config.teacher.placement, config.teacher.ranks, config.teacher.parallel.dispatcher) == (
        "dedicated",
        8,
        "allgather",
    )
    assert (config.train.steps, config.train.prompts_per_step, config.rollout.per_prompt, config.seed) == (40, 8, 2, 7)
    assert (config.rollout.max_lag, config.rollout.correction, config.rollout.correction_range) == (2, "mask", (0.2, 5))
    output = config.loss.output
    assert (output.kind, output.weight, output.aggregation, output.temperature) == (
        "sampled_token",
        1.0,
        "token_mean",
        0.8,
    )
    assert config.loss.representation.layers == "none"
    assert (config.data.train, config.data.validation, config.evaluation.every) == ("gym/train.jsonl", {}, 0)
    assert config.data.chat_template_args == {"truncate_history_thinking": False, "enable_thinking": True}
    assert config.data.chat_template == "m/Small/chat_template.jinja"
    said = capsys.readouterr().out
    for words in (
        "- on_policy_distillation.teacher_model_by_agent_name.math_agent=org/a/math: put this model into m/org-a-math",
        "the data source of a row chooses its teacher, and is the agent's name where the row has no other",
        "- env.nemo_gym.policy_model_reasoning_off has chat_template_kwargs={'enable_thinking': False}",
        "- data.validation: NeMo Gym's verifiers grade it",
        "- grpo.overlong_filtering (True): responses that are cut off at their limit are trained on, too",
        "- grpo (advantage_clip_low=-20): there is no reward",
        "every teacher has GPUs of its own in NeMo-RL; here all are on the same teacher.ranks=8",
        "- loss_fn (ratio_clip_max=0.28): the loss is the log ratio of the student to the teacher",
    ):
        assert words in said, words
    # 32 GPUs without the 4 of the servers and the 8 of the teachers; 20 are left, of which 4 * 2 divides 16
    assert said.rstrip().endswith("--ranks 28")
    assert converted(recipes / "mopd.yaml", "--oprd").rollout.correction == "off"


def test_one_teacher_of_agents(recipes: Path) -> None:
    agents, alias = (
        "on_policy_distillation__teacher_model_by_agent_name",
        "on_policy_distillation__default_teacher_alias",
    )
    mopd, one = "mopd.yaml", {agents: {"any": "org/Large", "other": "org/Large/"}, alias: "any"}
    config, notes = changed(recipes, mopd, **one, on_policy_distillation__strict_agent_name_match=True)
    assert config["teacher"]["hf_path"] == "models/Large" and "teachers" not in config
    assert "strict_agent_name_match=true: the one teacher has the rows of all agents" in notes
    config, notes = changed(recipes, mopd, **one, policy__model_name=None)
    assert config["student"]["hf_path"] == "models/student" and "policy.model_name=null: NeMo-RL's launcher" in notes
    _, notes = changed(recipes, mopd, **one, on_policy_distillation__deduplicate_shared_teacher_checkpoints=False)
    assert "deduplicate_shared_teacher_checkpoints=false: a model that teaches several agents is held once" in notes
    config, _ = changed(recipes, mopd, on_policy_distillation__strict_agent_name_match=True)
    assert config["teachers"][0]["data_sources"] == ["default_agent"]
    config, _ = changed(recipes, mopd, on_policy_distillation__non_colocated_teachers__enabled=False)
    assert "teacher" not in config
    for key, value, words in (
        (agents, {}, "teacher_model_by_agent_name={}: expected names of agents"),
        (agents, {"any": None}, "expected names of agents, each with the model of its teacher"),
        (alias, "nobody", "default_teacher_alias='nobody': expected one of default_agent, math_agent"),
    ):
        with pytest.raises(ValueError, match=words):
            changed(recipes, mopd, **{key: value})


def test_weights_of_sampled_tokens(recipes: Path) -> None:
    def correction(**keys: Any) -> tuple[str | None, Any, str]:
        config, notes = changed(recipes, "mopd.yaml", **keys)
        return config["rollout"].get("correction"), config["rollout"].get("correction_range"), notes

    key = "loss_fn__truncated_importance_sampling_"
    assert correction(**{f"{key}type": "tis", f"{key}ratio_min": None})[:2] == ("truncate", [0.0, 5.0])
    mode, _, notes = correction(**{f"{key}type": "seq-mask-tis"})
    assert mode == "truncate" and "truncated_importance_sampling_type=seq-mask-tis" in notes
    # a lag needs one
    off = {"loss_fn__use_importance_sampling_correction": False}
    mode, _, notes = correction(**off)
    assert mode == "truncate" and "use_importance_sampling_correction=false" in notes
    assert correction(**off, grpo__async_grpo__enabled=False)[0] is None
    assert changed(recipes, "mopd.yaml", loss_fn__token_level_loss=False)[0]["loss"]["output"]["aggregation"] == (
        "sequence_mean"
    )


def test_printed_without_a_file(recipes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["from-nemo-rl", str(recipes / "base.yaml")], alone=False)
    printed = capsys.readouterr().out
    assert printed.startswith("# Made of the recipe base.yaml of NeMo-RL.")
    assert yaml.safe_load(printed)["train"]["steps"] == 40


def test_temperature_of_the_loss(recipes: Path) -> None:
    """NeMo-RL divides the logits of each model by its own temperature; here one holds for both."""
    config, notes = changed(recipes)
    assert config["rollout"]["temperature"] == config["loss"]["output"]["temperature"] == 0.8
    assert "teacher.generation.temperature" not in notes
    config, notes = changed(recipes, teacher__generation__temperature=0.5)
    assert config["loss"]["output"]["temperature"] == 0.8
    assert "teacher.generation.temperature=0.5: NeMo-RL divides the teacher's logits by it" in notes
    config, notes = changed(recipes, teacher__generation=None)
    assert "teacher.generation.temperature=1.0: NeMo-RL" in notes
    config, notes = changed(recipes, policy__generation__temperature=0)
    assert config["rollout"]["temperature"] == 0 and "temperature" not in config["loss"]["output"]
    assert "policy.generation.temperature=0: NeMo-RL divides logits by it; the loss has temperature 1" in notes


def test_clipping_and_optimizers(recipes: Path) -> None:
    megatron, adam = "megatron.yaml", "policy__megatron_cfg__optimizer__"
    config, notes = changed(recipes, megatron, **{f"{adam}clip_grad": 0.25})
    assert config["train"]["clip_grad"] == 0.25
    assert "policy.max_grad_norm=0.5: Megatron clips at policy.megatron_cfg.optimizer.clip_grad" in notes
    config, notes = changed(recipes, megatron, policy__max_grad_norm=None, **{f"{adam}clip_grad": None})
    assert config["train"]["clip_grad"] == 0 and "max_grad_norm" not in notes
    assert changed(recipes, policy__max_grad_norm=None)[0]["train"]["clip_grad"] == 0
    assert "optimizer=sgd: AdamW is taken" in changed(recipes, megatron, **{f"{adam}optimizer": "sgd"})[1]
    assert "AdamW is taken" not in changed(recipes, megatron, **{f"{adam}optimizer": "adam"})[1]
    assert (
        "policy.optimizer.name=torch.optim.Adam: AdamW"
        in changed(recipes, policy__optimizer__name="torch.optim.Adam")[1]
    )
    config, _ = changed(recipes, megatron, **{f"{adam}use_distributed_optimizer": False})
    assert config["train"]["distributed_optimizer"] is False


def test_schedules(recipes: Path) -> None:
    def schedule(*stages: tuple[str, dict[str, Any]], milestones: Any = None) -> tuple[dict[str, Any], str]:
        given: list[Any] = [{"name": f"torch.{name}", "kwargs": kwargs} for name, kwargs in stages]
        config, notes = changed(recipes, policy__scheduler=[*given, {"milestones": milestones}])
        return config["train"], notes

    train, notes = schedule(("LinearLR", {"start_factor": 1.0, "end_factor": 0.1, "total_iters": 10}))
    assert (
        train["warmup_fraction"] == 0
        and "LinearLR from start_factor=1 to end_factor=0.1 in total_iters=10: not" in notes
    )
    train, notes = schedule(("LinearLR", {"start_factor": 0.1, "end_factor": 0.5, "total_iters": 10}))
    assert train["warmup_fraction"] == 0 and "end_factor=0.5" in notes
    train, notes = schedule(("LinearLR", {"start_factor": 0.1, "total_iters": 10}), milestones=[10])
    assert train["warmup_fraction"] == 0.25 and "the warm-up starts at 0 here" in notes and "milestones" not in notes
    train, notes = schedule(("LinearLR", {}), milestones=[7])  # torch's own values: from 1/3 in 5 steps
    assert train["warmup_fraction"] == 0.125 and "start_factor=0.333333" in notes and "milestones=[7]" in notes
    warm = ("LinearLR", {"start_factor": 0.0, "total_iters": 10})
    train, notes = schedule(warm, ("ConstantLR", {"factor": 1.0}), warm)
    assert train["warmup_fraction"] == 0.25 and "scheduler.2=LinearLR" in notes and "ConstantLR" not in notes
    train, notes = schedule(("ConstantLR", {"factor": 0.5}))
    assert "policy.scheduler.0=ConstantLR with factor=0.5: not taken" in notes
    train, notes = schedule(("ConstantLR", {}))
    assert "ConstantLR with factor=0.333333" in notes
    train, notes = schedule(("LinearLR", {"start_factor": 0.0, "total_iters": 80}))
    assert train["warmup_fraction"] == 1 and "the warm-up of 80 steps is longer than the run of 40" in notes
    alone = {"name": "torch.CosineAnnealingLR", "kwargs": {"eta_min": 1.0e-7}}
    assert changed(recipes, policy__scheduler=alone)[0]["train"]["min_lr"] == 1e-7


def test_dispatchers(recipes: Path) -> None:
    def dispatcher(**keys: Any) -> tuple[str | None, str]:
        given = {f"policy__megatron_cfg__moe_{key}": value for key, value in keys.items()}
        config, notes = changed(recipes, "megatron.yaml", **given)
        return config["student"]["parallel"].get("dispatcher"), notes

    assert dispatcher(token_dispatcher_type="flex", enable_deepep=True)[0] == "deepep"
    assert dispatcher(token_dispatcher_type="flex", flex_dispatcher_backend="deepep")[0] == "deepep"
    chosen, notes = dispatcher(token_dispatcher_type="flex", flex_dispatcher_backend="hybridep")
    assert chosen is None and "moe_token_dispatcher_type=flex (moe_flex_dispatcher_backend hybridep): alltoall" in notes
    assert dispatcher(token_dispatcher_type="flex")[0] is None
    assert dispatcher(token_dispatcher_type="allgather")[0] == "allgather"
    assert dispatcher(num_layers=1) == (
        None,
        changed(recipes, "megatron.yaml", policy__megatron_cfg__moe_num_layers=1)[1],
    )


def test_false_and_null(recipes: Path) -> None:
    """Values that only say no, and yet differ from what holds here."""
    assert "data.shuffle=false: the order of prompts is a permutation" in changed(recipes, data__shuffle=False)[1]
    assert "shuffle" not in changed(recipes, data__shuffle=True)[1]

    def evaluation(period: int, start: bool, end: bool) -> tuple[int, str]:
        keys = {"val_period": period, "val_at_start": start, "val_at_end": end}
        config, notes = changed(recipes, **{f"distillation__{key}": value for key, value in keys.items()})
        return config["evaluation"]["every"], notes

    every, notes = evaluation(5, start=False, end=True)
    assert every == 5 and "val_at_start=false, val_at_end=true: evaluation.every=5 also evaluates before" in notes
    every, notes = evaluation(5, start=True, end=True)
    assert every == 5 and "val_at" not in notes
    every, notes = evaluation(0, start=False, end=True)
    assert every == 40 and "evaluation.every=40 also evaluates before the first" in notes
    every, notes = evaluation(0, start=False, end=False)
    assert every == 0 and "evaluation.every=0, no evaluation" in notes and "also evaluates" not in notes
    config, notes = changed(recipes, checkpointing__keep_top_k=None)
    assert config["train"]["keep_checkpoints"] == 0 and "keep_top_k" not in notes
    config, notes = changed(recipes, checkpointing__metric_name="val:accuracy")
    assert config["train"]["keep_checkpoints"] == 3
    assert "keeps the best by metric_name=val:accuracy, higher_is_better=true; train.keep_checkpoints=3" in notes
    assert "train.keep_best" in notes and "e.g. val/sums_2024/avg@3" in notes
    config, _ = changed(recipes, train_keep_best=None)
    config["train"]["keep_best"] = "val/sums_2024/avg@3"
    assert from_composed(config, "r").train.keep_best is not None  # the example is a metric of this run
    stage = "policy__megatron_cfg__num_layers_in_first_pipeline_stage"
    assert changed(recipes, "megatron.yaml", **{stage: 1})[0]["student"]["parallel"]["first_stage_layers"] == 1


def test_what_the_notes_claim(recipes: Path) -> None:
    _, notes = changed(recipes, loss_fn__zero_outside_topk=True)
    assert "the teacher's over its top-k ids only, and adds a term for the ids outside; " in notes
    assert "takes both over the whole vocabulary and has no such term" in notes
    _, notes = changed(recipes, loss_fn__zero_outside_topk=True, loss_fn__kl_type="forward")
    assert "over its top-k ids only; loss.output.normalizer=full takes both over the whole vocabulary\n" in notes
    config, notes = changed(recipes, data__train__data_path="/data/src.jsonl")
    assert config["data"]["train"] == "/data/src.jsonl"
    assert "data.train.data_path=/data/src.jsonl (Sums): this file is read as it is" in notes
    assert "write its prompts to" not in notes.split("data.train", 1)[1].split("\n", 1)[0]
    _, notes = changed(recipes, logger__swanlab={"api_key": "abc123"}, logger__api_key="abc123")
    assert "abc123" not in notes and "api_key=(not shown)" in notes


def test_notes_stay_notes(recipes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A value with newlines and control characters does not become YAML."""
    prompt = 'data: {default: {system_prompt: "be kind\\nseed: 7\\nbroken: [\\a\\x85seed: 8"}}'
    (recipes / "hostile.yaml").write_text(f"defaults: base.yaml\ndistillation: {{seed: 3}}\n{prompt}\n")
    assert converted(recipes / "hostile.yaml").seed == 3
    capsys.readouterr()
    main(["from-nemo-rl", str(recipes / "hostile.yaml")], alone=False)
    printed = capsys.readouterr().out
    assert yaml.safe_load(printed)["seed"] == 3
    assert "system_prompt=be kind seed: 7 broken: [\\x07 seed: 8" in printed


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "distillation.max_num_steps",
            "abc",
            r"distillation.max_num_steps='abc': expected a whole number of at least 1",
        ),
        ("distillation.max_num_steps", 1.5, "max_num_steps=1.5: expected a whole number"),
        ("policy.generation.max_new_tokens", "12", "max_new_tokens='12': expected a whole number .* without quotes"),
        ("policy.generation.temperature", float("nan"), "temperature=nan: expected a number of at least 0"),
        ("policy.generation.vllm_cfg.tensor_parallel_size", 0, "tensor_parallel_size=0: expected a whole number of at"),
        ("policy.optimizer.kwargs.betas", 3, "betas=3: expected a list of two numbers"),
        ("policy.optimizer.kwargs.betas", [0.9, "x"], "betas.1='x': expected a number"),
        ("policy.precision", [1], r"policy.precision=\[1\]: expected a text"),
        ("policy.dtensor_cfg.enabled", "yes", "enabled='yes': expected true or false"),
        ("policy.dtensor_cfg.sequence_parallel", 1, "sequence_parallel=1: expected true or false"),
        ("loss_fn.kl_type", "jeffreys", "kl_type='jeffreys': expected forward, reverse or mixed"),
        ("checkpointing.keep_top_k", 0, "keep_top_k=0: expected a whole number of at least 1"),
        ("teachers", [{"model_name": "a/B"}, {"top": 1}], "teachers.1.model_name=None: expected the name of a model"),
        ("teachers", [{"model_name": "a/B"}, 3], "teachers.1.model_name=None: expected the name of a model"),
        ("policy.model_name", {"long": "x" * 500}, "expected a text: correct the recipe"),
    ],
)
def test_wrong_types(recipes: Path, key: str, value: Any, message: str) -> None:
    values = load_recipe(recipes / "base.yaml")
    values["policy"]["generation"]["colocated"] = {"enabled": False}
    if key == "teachers":
        values["teacher"] = None
    put(values, key, value)
    with pytest.raises(ValueError, match=message) as error:
        translate(values, "r", "models")
    assert "\n" not in str(error.value) and "correct the recipe" in str(error.value) and len(str(error.value)) < 250


def test_nothing_is_written_on_an_error(recipes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (recipes / "wrong.yaml").write_text("defaults: base.yaml\ncluster: {gpus_per_node: x}\n")
    before = {path: path.read_text() for path in recipes.iterdir()}
    (recipes / "link.yaml").symlink_to("base.yaml")
    for recipe, output, message in (
        ("wrong.yaml", "made.yaml", "cluster.gpus_per_node='x': expected a whole number of at least 1"),
        ("base.yaml", "base.yaml", "base.yaml: is the recipe itself, which would be lost; expected another file"),
        ("base.yaml", "link.yaml", "link.yaml: is the recipe itself"),
        ("base.yaml", "made.yml", "made.yml: expected a name that ends in .yaml"),
        ("base.yaml", "made", "made: expected a name that ends in .yaml"),
    ):
        with pytest.raises(SystemExit):
            main(["from-nemo-rl", str(recipes / recipe), "--output", str(recipes / output)], alone=False)
        assert message in capsys.readouterr().err
    (recipes / "link.yaml").unlink()
    assert {path: path.read_text() for path in recipes.iterdir()} == before
