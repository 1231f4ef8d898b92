"""Families with special parts that only Megatron-Bridge has, in this project's loop (`provider=bridge`), on CPUs.

OLMoE, gpt-oss, GLM 4.5, MiniMax M2, MiMo-V2-Flash, DeepSeek-V3, Moonlight and GLM 4.7 Flash (experts), Qwen3.5 and
Qwen3-Next (gated delta nets), Gemma 2, 3 and 4 (windows), tiny and random. As for the dense families
(test_megatron_bridge_families.py): losses and all gradients against plain Hugging Face models in float64, resuming at
another layout, conversion bit for bit, a student of another family behind a bridge; and what Megatron-Bridge would
build wrongly without an error is refused.

Routers choose between experts and softmaxes cancel, so float32 itself deviates more in some of these models: the limit
is 1.5 times what transformers in float32 deviates from transformers in float64, but at least that of dense families.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from golden_runs import GOLDEN
from megatron_bridge_checkpoint_cases import OWN_EXPERTS
from megatron_bridge_environment import PYTHON, run
from megatron_bridge_family_cases import (
    COMMON,
    DEEP_FAMILIES,
    LIMITS,
    OWN_FAMILIES,
    PROMPTS,
    SAMPLED_FAMILIES,
    SPECIAL_FAMILIES,
    UNDESCRIBED,
)
from safetensors.torch import load_file

from nemo_oprd.config.loading import load_config
from nemo_oprd.distillation.reference import agreement, reference
from nemo_oprd.models.megatron_bridge_config import RUN_CONFIG
from nemo_oprd.rollout.replay import read_rollouts

pytestmark = pytest.mark.nemo
TOLERANCE, OF_TRANSFORMERS = 1e-5, 1.5
# with MKL's kernels for AVX2 it is 1.2e-5 from float64, with those that are the same on every CPU 3.4e-6
SAME_ON_EVERY_CPU = ("glm4_moe", "TP2 SP")
CASES = "megatron_bridge_family_cases.py"
FULL_RECOMPUTE = ("student.recompute=full", "student.recompute_method=uniform", "student.recompute_num_layers=1")
TENSOR = ("student.parallel.tensor=2", "student.parallel.sequence=true")
PIPELINE = ("student.parallel.pipeline=2", "student.parallel.first_stage_layers=2")
# name -> settings, on two ranks
LAYOUTS: dict[str, tuple[str, ...]] = {
    "TP2 SP": (*TENSOR, "teacher.parallel.pipeline=2", "loss.output.kind=sampled_token", "loss.output.weight=0.5"),
    "PP2": (
        *PIPELINE, *FULL_RECOMPUTE, "teacher.parallel.expert=2", "loss.output.kind=full_vocab",
        "loss.output.weight=0.5", "loss.representation.kind=normalized_mse",
    ),
    "EP2": ("student.parallel.expert=2", *FULL_RECOMPUTE, "train.tokens_per_microbatch=16"),
    "EP2 gathered": (
        "student.parallel.expert=2", "student.parallel.dispatcher=allgather", "loss.representation.layers=[1,2]",
    ),
    "CP2": (
        "student.parallel.context=2", "teacher.parallel.tensor=2", "teacher.parallel.sequence=true", *FULL_RECOMPUTE,
    ),
    "TP2": ("student.parallel.tensor=2", "loss.representation.kind=cosine"),
    "DP2": ("train.tokens_per_microbatch=16", "loss.representation.layers=[1,3]"),
    "VPP": ("student.parallel.pipeline=2", "student.parallel.virtual_pipeline=2", "train.tokens_per_microbatch=32"),
}  # fmt: skip
# on four ranks: twice as many as key/value heads, which attention of every kind then gathers
WIDE = "TP4 SP"
WIDE_FAMILIES = ("gpt_oss", "glm4_moe", "minimax_m2", "qwen3_5_text", "qwen3_5_moe_text", "gemma2", "gemma3_text")
OF_WIDE = (
    "student.parallel.tensor=4", "student.parallel.sequence=true", "teacher.parallel.tensor=4",
    "teacher.parallel.sequence=true",
)  # fmt: skip
DENSE = ("qwen3_5_text", "gemma2", "gemma3_text")
# what a family refuses: see test_refusals
# the last one here only: Megatron makes YaRN's positions of a context rank in pinned memory, which needs CUDA
IMPOSSIBLE = {
    ("gpt_oss", "CP2"), ("deepseek_v3", "CP2"), ("gemma3_text", "CP2"), ("mimo_v2_flash", "CP2"),
    ("gemma4_text", "CP2"), ("gemma4_text", "VPP"),
    *((family, layout) for family in DENSE for layout in ("EP2", "EP2 gathered")),
}  # fmt: skip
# experts need sequence parallelism with tensor parallelism
IMPOSSIBLE |= {(family, "TP2") for family in SPECIAL_FAMILIES if family not in DENSE}
# with experts, data-parallel ranks are those of EP2
IMPOSSIBLE |= {(family, "DP2") for family in SPECIAL_FAMILIES if family not in DENSE}
RUNS = [(family, layout) for family in SPECIAL_FAMILIES for layout in LAYOUTS if (family, layout) not in IMPOSSIBLE]
# every family and every layout
QUICK = {
    ("olmoe", "PP2"), ("olmoe", "TP2 SP"), ("minimax_m2", "TP2 SP"), ("gpt_oss", "TP2 SP"), ("gpt_oss", "EP2 gathered"),
    ("mimo_v2_flash", "TP2 SP"), ("gemma4_text", "TP2 SP"), ("glm4_moe", "EP2"),
    ("deepseek_v3", "TP2 SP"), ("deepseek_v3", "PP2"), ("glm4_moe_lite", "CP2"), ("moonlight", "TP2 SP"),
    ("qwen3_5_text", "CP2"), ("qwen3_5_text", "VPP"), ("qwen3_5_moe_text", "TP2 SP"), ("qwen3_next", "EP2"),
    ("gemma2", "CP2"), ("gemma3_text", "PP2"),
}  # fmt: skip
TRAINED_QUICKLY = "deepseek_v3"


def parameters(cases: list[Any], quick: Any) -> list[Any]:
    return [pytest.param(case, marks=[] if case in quick else pytest.mark.slow) for case in cases]


@pytest.fixture(scope="module")
def models(megatron_bridge: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    if "version = 3.11" in (PYTHON.parent.parent / "pyvenv.cfg").read_text():
        pytest.skip("Megatron-Bridge 0.3 (Python 3.11): families with experts are refused")
    root = tmp_path_factory.mktemp("experts")
    families = [*SPECIAL_FAMILIES, *OWN_FAMILIES]
    run(megatron_bridge, 0, CASES, "make_models", directory=str(root), families=families)
    return root


def settings(models: Path, family: str, output: Path) -> list[str]:
    roles = [f"{role}.hf_path={models / family / role}" for role in ("student", "teacher")]
    providers = ["student.provider=bridge", "teacher.provider=bridge"]
    return [*roles, *providers, f"rollout.replay={GOLDEN}/rollouts.jsonl", f"output={output}"]


def settings_of(models: Path, case: tuple[str, str], output: Path) -> list[str]:
    """Of a family and a layout. Two chunks on each of two stages are of the model with more layers, a teacher's."""
    family, layout = case
    settings_of_layout = OF_WIDE if layout == WIDE else LAYOUTS[layout]
    splits = [
        each for each in settings_of_layout if family not in DENSE or not each.startswith("teacher.parallel.expert")
    ]
    found = [*settings(models, family, output), *splits]
    if layout == "VPP":
        more = 3 if family in DEEP_FAMILIES else 2
        deep = "student" if family in DEEP_FAMILIES else "teacher"
        other = {"student": "teacher", "teacher": "student"}[deep]
        found += [f"student.hf_path={models / family / deep}", f"teacher.hf_path={models / family / other}"]
        found.append(f"student.parallel.virtual_pipeline={more}")
    return found


def place(family: str, layout: str) -> str:
    return f"{family}-{layout}".replace(" ", "-")


def training(models: Path, family: str, root: Path) -> list[list[str]]:
    """Four updates at one layout (FAMILY-whole); two, and two more at PP2 (FAMILY-parts)."""
    first = ("student.parallel.expert=2",) if family in ("olmoe", "glm4_moe", "qwen3_next") else TENSOR

    def one(kind: str, layout: tuple[str, ...], steps: int) -> list[str]:
        train = [f"train.steps={steps}", "train.schedule=constant", "train.warmup_fraction=0", "train.save_every=2"]
        train += ["train.lr=1e-2", "train.adam_eps=1e-2", "loss.output.kind=full_vocab", "loss.output.weight=0.5"]
        return [*settings(models, family, root / f"{family}-{kind}"), *layout, *train, "logging.tensorboard=false"]

    return [one("whole", first, 4), one("parts", first, 2), one("parts", PIPELINE, 4)]


def start(
    environment: dict[str, str], models: Path, root: Path, runs: list[Any], families: list[str], ranks: int = 2
) -> Path:
    """Verifies and trains in one start of the ranks, because importing takes the longest."""
    verified = {place(*case): settings_of(models, case, root / place(*case)) for case in runs}
    trained = [each for family in families for each in training(models, family, root)]
    run(environment, ranks, CASES, "verify_and_train", runs=verified, trained=trained)
    return root


@pytest.fixture(scope="module")
def quick(megatron_bridge: dict[str, str], models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("quick")
    return start(megatron_bridge, models, root, sorted(QUICK), [TRAINED_QUICKLY])


@pytest.fixture(scope="module")
def other_runs(megatron_bridge: dict[str, str], models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("others")
    same_kernels = {**megatron_bridge, "MKL_CBWR": "COMPATIBLE"}
    start(same_kernels, models, root, [SAME_ON_EVERY_CPU], [])
    return start(megatron_bridge, models, root, sorted(set(RUNS) - QUICK - {SAME_ON_EVERY_CPU}), [])


@pytest.mark.parametrize("case", parameters(RUNS, QUICK), ids=lambda case: ", ".join(case))
def test_gradients(request: pytest.FixtureRequest, models: Path, tmp_path: Path, case: tuple[str, str]) -> None:
    found = request.getfixturevalue("quick" if case in QUICK else "other_runs") / place(*case)
    check(found, settings_of(models, case, tmp_path), ", ".join(case))


@pytest.fixture(scope="module")
def wide_runs(megatron_bridge: dict[str, str], models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    cases = [(family, WIDE) for family in WIDE_FAMILIES]
    return start(megatron_bridge, models, tmp_path_factory.mktemp("wide"), cases, [], ranks=4)


@pytest.mark.slow
@pytest.mark.parametrize("family", WIDE_FAMILIES)
def test_gradients_with_more_ranks_than_heads(models: Path, tmp_path: Path, wide_runs: Path, family: str) -> None:
    check(wide_runs / place(family, WIDE), settings_of(models, (family, WIDE), tmp_path), f"{family}, {WIDE}")


def check(found: Path, overrides: list[str], name: str) -> None:
    """Compares what `verify` wrote with plain Hugging Face models in float64."""
    config = load_config("verify", overrides)
    rollouts = read_rollouts(GOLDEN / "rollouts.jsonl", COMMON["vocab_size"])
    expected = reference(config, rollouts)
    losses = json.loads((found / "losses.json").read_text())
    for key in ("rep/loss", "output/loss"):
        if key in expected:
            # the values of sampled tokens have both signs, and nearly cancel
            assert losses[key] == pytest.approx(expected[key], rel=TOLERANCE, abs=TOLERANCE), key
    deviations = agreement(load_file(found / "grads.safetensors"), expected["gradients"])
    worst = max(deviations, key=deviations.__getitem__)
    theirs = max(agreement(reference(config, rollouts, torch.float32)["gradients"], expected["gradients"]).values())
    print(f"{name}: {deviations[worst]:.1e} in {worst}; transformers in float32: {theirs:.1e}")
    assert deviations[worst] < max(TOLERANCE, OF_TRANSFORMERS * theirs), f"{worst}: {deviations[worst]:.1e}"


# teacher of a Qwen2 student -> settings, on two ranks
ACROSS: dict[str, tuple[str, ...]] = {
    "gpt_oss": (*TENSOR, "teacher.parallel.pipeline=2", "loss.output.kind=full_vocab", "loss.output.weight=0.5"),
    "deepseek_v3": (*PIPELINE, "teacher.parallel.expert=2", "loss.output.kind=sampled_token", "loss.output.weight=0.5"),
}


def across(models: Path, teacher: str, root: Path, output: str) -> list[str]:
    roles = [f"student.hf_path={models / 'qwen2' / 'student'}", f"teacher.hf_path={models / teacher / 'teacher'}"]
    common = [*roles, "teacher.provider=bridge", f"rollout.replay={GOLDEN}/rollouts.jsonl", *ACROSS[teacher]]
    return [*common, f"bridge.path={root / teacher / 'bridge'}", f"output={root / teacher / output}"]


@pytest.fixture(scope="module")
def behind_bridges(megatron_bridge: dict[str, str], models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TEACHER/bridge and TEACHER/verified, of a student that this project builds."""
    root = tmp_path_factory.mktemp("across")
    cases = [
        {
            "fit": [*across(models, teacher, root, "bridge"), "bridge.rank=4"],
            "runs": {teacher: across(models, teacher, root, "verified")},
        }
        for teacher in ACROSS
    ]
    run(megatron_bridge, 2, CASES, "across_families", cases=cases)
    return root


@pytest.mark.parametrize("teacher", ACROSS)
def test_gradients_of_a_student_of_another_family(models: Path, behind_bridges: Path, teacher: str) -> None:
    overrides = across(models, teacher, behind_bridges, "reference")
    check(behind_bridges / teacher / "verified", overrides, f"{teacher} to qwen2")


@pytest.mark.parametrize("family", parameters(list(SPECIAL_FAMILIES), {TRAINED_QUICKLY}))
def test_training_resumes_at_another_layout(
    request: pytest.FixtureRequest, megatron_bridge: dict[str, str], models: Path, tmp_path: Path, family: str
) -> None:
    if family == TRAINED_QUICKLY:
        trained = request.getfixturevalue("quick")
    else:
        trained = start(megatron_bridge, models, tmp_path, [], [family])
    whole, parts = (load_file(trained / f"{family}-{kind}" / "hf" / "model.safetensors") for kind in ("whole", "parts"))
    before = load_file(models / family / "student" / "model.safetensors")
    assert set(whole) == set(parts) == set(before)
    for name, tensor in whole.items():
        torch.testing.assert_close(parts[name], tensor, rtol=1e-4, atol=1e-5, msg=name)
        fixed = name.endswith(("e_score_correction_bias", "layer_scalar"))  # buffers, which are not trained
        assert torch.equal(tensor, before[name]) == fixed, name
    lines = [json.loads(line) for line in (trained / f"{family}-whole" / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 4 and lines[3]["rep/loss"] < lines[0]["rep/loss"]
    if family not in DENSE:
        assert lines[0]["moe/load_max"] >= 1, "the routers' loads are measured"


@pytest.fixture(scope="module")
def alone(megatron_bridge: dict[str, str], models: Path, quick: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What needs one process: conversions, models that are built wrongly, refusals."""
    root = tmp_path_factory.mktemp("alone")
    cases = {name: [*settings(models, family, root / "out"), *more] for name, (family, more, _) in REFUSED.items()}
    for name, (family, changes, _) in WRONG_CONFIGS.items():
        config = json.loads((models / family / "student" / "config.json").read_text())
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps({**config, **changes}))
        cases[name] = [*settings(models, family, root / "out"), f"student.hf_path={root / name}"]
    trained = [TRAINED_QUICKLY, str(quick / f"{TRAINED_QUICKLY}-whole" / "checkpoints" / "iter_0000004")]
    arguments = {"models": str(models), "directory": str(root), "cases": cases, "trained": trained}
    run(megatron_bridge, 1, CASES, "one_process", **arguments)
    return root


@pytest.mark.parametrize("family", SPECIAL_FAMILIES)
def test_conversion(models: Path, alone: Path, family: str) -> None:
    expected = load_file(models / family / "student" / "model.safetensors")
    found = load_file(alone / family / "back" / "model.safetensors")
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


# which it does not load into sequential experts
SEQUENTIAL = ("olmoe", "glm4_moe", "mimo_v2_flash", "minimax_m2")
DESCRIBED = [family for family in SPECIAL_FAMILIES if family not in UNDESCRIBED]


# settings that Megatron-Bridge 0.6.2 reads wrongly from what transformers 5 writes: (ours, its own)
MISREAD = {
    "gpt_oss": {
        "yarn_rotary_scaling_factor": [4.0, 32.0],
        "yarn_original_max_position_embeddings": [32, 4096],
        "window_attn_skip_freq": [[1, 0, 1], 2],
    },
    "gemma2": {"window_attn_skip_freq": [[1, 0, 1], "None"]},
    "glm4_moe": {"rotary_percent": [0.5, 1.0]},
    "mimo_v2_flash": {"window_size": [4, 3], "hidden_dropout": [0.0, 0.1]},
    "glm4_moe_lite": {"rope_type": ["rope", "yarn"]},
}


def same_tensors(found: Path, expected: Path) -> None:
    ours, theirs = (load_file(directory / "model.safetensors") for directory in (found, expected))
    assert set(ours) == set(theirs) and all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


@pytest.mark.parametrize("family", DESCRIBED)
def test_megatron_bridge_loads_our_checkpoint_and_saves_it(models: Path, alone: Path, family: str) -> None:
    """Bit for bit on the whole way, and with the fields and weights of its own of the HF model, but for its errors."""
    same_tensors(alone / family / "circle", models / family / "student")
    found = json.loads((alone / "loaded.json").read_text())[family]
    assert ("weights" in found) == (family in SEQUENTIAL), "it does not load these into sequential experts"
    found.pop("weights", None)
    # of a checkpoint that it makes itself, what it misreads is another model, and the rest another spelling
    refused = {"gpt_oss": "yarn_rotary_scaling_factor=32.0", "glm4_moe": "rotary_percent=1.0"}
    misread = (refused | {"mimo_v2_flash": "window_size=3"}).get(family, "")
    refusal = found.pop("refusal", "")
    assert (misread in refusal) and bool(misread) == bool(refusal), refusal
    assert found == MISREAD.get(family, {})


def test_megatron_bridge_loads_a_checkpoint_of_a_run(quick: Path, alone: Path) -> None:
    for way in ("circle", "direct"):
        same_tensors(alone / "trained" / way, quick / f"{TRAINED_QUICKLY}-whole" / "hf")


@pytest.mark.parametrize("name", OWN_EXPERTS)
def test_megatron_bridge_loads_experts_that_this_project_builds(alone: Path, name: str) -> None:
    """Its own model of Qwen3's experts has the same fields and weights; Mixtral it does not have."""
    same_tensors(alone / name / "circle", alone / name / "hf")
    assert json.loads((alone / "own.json").read_text()) == {}


def test_a_checkpoint_of_which_megatron_bridge_would_make_another_model_is_not_described(alone: Path) -> None:
    """It would multiply by 1 plus the stored weight of a delta net's norm, and norm queries once more."""
    assert not any((alone / family / "ours" / RUN_CONFIG).exists() for family in UNDESCRIBED)


def test_the_language_model_of_a_model_for_pictures(models: Path, alone: Path) -> None:
    from transformers import AutoModelForCausalLM

    expected = load_file(models / "qwen3_5_moe_text" / "student" / "model.safetensors")
    found = load_file(alone / "tower" / "back" / "model.safetensors")
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    AutoModelForCausalLM.from_pretrained(alone / "tower" / "back")


BUILT_WRONGLY = {
    "glm4_moe rotary_percent": "is not the RoPE of the HF config",
    "gpt_oss yarn_rotary_scaling_factor": "is not the RoPE of the HF config",
    "deepseek_v3 mscale_all_dim": "products of queries and keys by",
}


@pytest.mark.parametrize("name", BUILT_WRONGLY)
def test_what_would_be_another_model_is_refused(alone: Path, name: str) -> None:
    message = json.loads((alone / "wrong.json").read_text())[name]
    assert BUILT_WRONGLY[name] in message and "expected" in message and "\n" not in message, message


# what is planted -> the first wrong layer and row, and the hint
PLANTED = {
    "qwen3_5_text q and gate": (2, 0, "a weight of this layer is another one"),
    "qwen3_5_text one head permuted": (1, 0, "a weight of this layer is another one"),
    "qwen3_5_text w as if it were w - 1": (1, 0, "a weight of this layer is another one"),
    "qwen3_5_text rotary share": (2, 1, "rotation (base, share, scaling)"),
    "gpt_oss no sinks": (1, 0, "a weight of this layer is another one"),
    "gpt_oss window longer": (1, 4, "the sliding window is 4: the engine's is longer"),
    "gemma2 window longer": (1, 4, "the sliding window is 4: the engine's is longer"),
    "gemma2 no cap": (1, 1, "how tokens see earlier ones"),
    "gemma3_text window shorter": (1, 3, "the sliding window is 4: the engine's is shorter"),
    "gemma3_text epsilon": (1, 0, "a weight of this layer is another one"),
}


@pytest.mark.parametrize("plant", PLANTED)
def test_planted_errors_are_refused_at_the_start(alone: Path, plant: str) -> None:
    layer, row, hint = PLANTED[plant]
    found = json.loads((alone / "planted.json").read_text())
    family = plant.partition(" ")[0]
    assert "equal transformers' in" in found[f"{family} right"]
    depth = {"gemma3_text": 6}.get(family, 3)
    message = found[plant]
    assert message.startswith(f"canary of {family}: layer {layer} of {depth}, prompt ") and f", row {row} is" in message
    assert hint in message and "\n" not in message, message


def test_plan_counts_the_parameters(alone: Path) -> None:
    found = json.loads((alone / "counts.json").read_text())
    assert set(found) == set(SPECIAL_FAMILIES)
    assert {family: planned for family, (planned, _) in found.items()} == {f: held for f, (_, held) in found.items()}


@pytest.mark.parametrize("family", SAMPLED_FAMILIES)
def test_samples_without_a_cache(models: Path, alone: Path, family: str) -> None:
    from transformers import AutoModelForCausalLM

    greedy, drawn, again = json.loads((alone / "samples.json").read_text())[family]
    assert drawn == again != greedy
    model = AutoModelForCausalLM.from_pretrained(models / family / "student", dtype=torch.float32)
    for prompt, limit, found in zip(PROMPTS, LIMITS, greedy, strict=True):
        ids = list(prompt)
        while len(ids) < len(prompt) + limit and (len(ids) == len(prompt) or ids[-1] != 1):
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        assert found == ids[len(prompt) :]


# case -> (family, settings, what is said)
REFUSED: dict[str, tuple[str, list[str], str]] = {
    "windows of Gemma": ("gemma3_text", ["student.parallel.context=2"], "student.parallel.context=2, but the gemma3"),
    "windows": ("gpt_oss", ["student.parallel.context=2"], "student.parallel.context=2, but the gpt_oss model has"),
    "biases": (
        "gpt_oss", [*TENSOR, "student.parallel.expert_tensor=2"], "expert_tensor=2, but the experts of the gpt_oss",
    ),
    "loss of routers": ("glm4_moe", ["student.router_aux_loss=0.1"], "student.router_aux_loss=0.1 for a glm4_moe"),
    "in-process engine": (
        "gpt_oss", ["rollout.replay=null", "data.train=prompts.jsonl", "rollout.tensor=2", "rollout.expert=2"],
        "rollout.expert=2, but the in-process engine samples gpt_oss models",
    ),
}  # fmt: skip
# case -> (family, changes of the student's config.json, what is said)
WRONG_CONFIGS: dict[str, tuple[str, dict[str, Any], str]] = {
    "activation": ("gpt_oss", {"swiglu_alpha": 2.0}, "Megatron-Bridge's another one"),
    "order of layers": (
        "gemma3_text",
        {"layer_types": ["full_attention", *["sliding_attention"] * 5]},
        "a multiple of 6; expected",
    ),
    "no experts": ("gemma4_text", {"enable_moe_block": False}, "a Gemma 4 without experts, which Megatron-Bridge"),
    "bounded queries": ("olmoe", {"clip_qkv": 8.0}, "clip_qkv=8.0, which Megatron-Bridge leaves out"),
    "keys of its makers": (
        "mimo_v2_flash",
        {"swa_rope_theta": 3.0},
        "swa_rope_theta=3.0, which transformers does not read: it computes with 10000.0",
    ),
    "rope": ("glm4_moe", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}, "'linear'"),
}


@pytest.mark.parametrize("name", [*REFUSED, *WRONG_CONFIGS])
def test_refusals(alone: Path, name: str) -> None:
    message = json.loads((alone / "refused.json").read_text())[name]
    says = REFUSED[name][2] if name in REFUSED else WRONG_CONFIGS[name][2]
    assert says in message and "expected" in message and "\n" not in message, message
