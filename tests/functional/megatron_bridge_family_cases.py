"""What test_megatron_bridge_families.py runs in Megatron-Bridge's environment: `python THIS_FILE CASE ARGUMENTS`.

The arguments are those of the function, as JSON. Models of families that only Megatron-Bridge has, in this project's
loop. Several ranks are started by torchrun.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# name -> (class of the config, its settings): tied embeddings and scaled ones, norms around zero, GELU; LayerNorm with
# biases, no gate, half of the channels rotated; an ordinary one
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("GemmaConfig", {"head_dim": 16, "hidden_activation": "gelu_pytorch_tanh"}),
    "nemotron": ("NemotronConfig", {"head_dim": 8, "partial_rotary_factor": 0.5}),
    "mistral": ("MistralConfig", {"head_dim": 16, "sliding_window": None, "rope_theta": 50000.0}),
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
_LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}  # fmt: skip
_SIGMOID = {
    "moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "tie_word_embeddings": False,
}  # fmt: skip
_GROUPS = {"n_group": 4, "topk_group": 2}
# Experts, and kinds of attention: norms over all heads; windows of four tokens, a term in the softmax, biases, YaRN;
# half of the channels rotated (which Megatron-Bridge 0.6.2 does not read), groups of experts and a bias for choosing;
# latent attention with YaRN, with another epsilon in its norms, and with queries that have no narrow state; norms over
# all heads of more queries than keys, sigmoids whose experts have no shared one beside them.
EXPERT_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "olmoe": (
        "OlmoeConfig",
        {"num_key_value_heads": 4, "intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2},
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            "head_dim": 16, "intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2,
            "sliding_window": 4, "rope_parameters": {**_YARN, "truncate": False}, "tie_word_embeddings": False,
        },
    ),
    "glm4_moe": ("Glm4MoeConfig", {**_SIGMOID, **_GROUPS, "head_dim": 16, "use_qk_norm": True, "attention_bias": True}),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            **_SIGMOID, **_GROUPS, **_LATENT,
            "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", {**_SIGMOID, **_LATENT, "rms_norm_eps": 1e-5}),
    "moonlight": ("DeepseekV3Config", {**_SIGMOID, **_LATENT, "q_lora_rank": None, "n_group": 1, "topk_group": 1}),
    "mimo_v2_flash": (
        "MiMoV2FlashConfig",
        {
            "num_attention_heads": 8, "head_dim": 24, "v_head_dim": 16, "sliding_window": 4, "layer_types": None,
            "moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 2, "tie_word_embeddings": False,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 50000.0, "partial_rotary_factor": 0.334},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.334},
            },
        },
    ),
    "minimax_m2": (
        "MiniMaxM2Config",
        {
            "head_dim": 16, "rotary_dim": 8, "intermediate_size": 24, "num_local_experts": 8, "num_experts_per_tok": 2,
            "tie_word_embeddings": False,
        },
    ),
}  # fmt: skip
_DELTA = {
    "head_dim": 16, "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4, "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}  # fmt: skip
_SHARED_EXPERT = {
    "moe_intermediate_size": 24, "shared_expert_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
# Gated delta nets, more values than keys; gated attention in layers that no single number describes; a quarter of the
# channels rotated, in one of them with the keys for several position axes; a shared expert with a gate; in the last one
# the delta net's projections in another order, and experts' weights that are not divided by their sum.
HYBRID_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5_text": (
        "Qwen3_5TextConfig",
        {
            **_DELTA,
            "rope_parameters": {**_DELTA["rope_parameters"], "mrope_section": [1, 1, 0], "mrope_interleaved": True},
        },
    ),
    "qwen3_5_moe_text": ("Qwen3_5MoeTextConfig", {**_DELTA, **_SHARED_EXPERT}),
    "qwen3_next": ("Qwen3NextConfig", {**_DELTA, **_SHARED_EXPERT, "norm_topk_prob": False}),
}
# windows of four tokens and a RoPE of their own in all layers but every sixth, whose RoPE is scaled; norms behind
# attention and feed-forward block; embeddings times a number that is not one of float32
# In Gemma 2, windows in every other layer; products of queries and keys, and logits, are bounded where they matter.
WINDOWED_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": (
        "Gemma2Config",
        {
            "head_dim": 16, "sliding_window": 4, "query_pre_attn_scalar": 24, "tie_word_embeddings": True,
            "attn_logit_softcapping": 1.5, "final_logit_softcapping": 3.0,
        },
    ),
    "gemma4_text": (
        "Gemma4TextConfig",
        {
            "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16, "global_head_dim": 32,
            "num_global_key_value_heads": 2, "attention_k_eq_v": True, "sliding_window": 4, "enable_moe_block": True,
            "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 24, "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": 3.0, "tie_word_embeddings": True,
        },
    ),
    "gemma3_text": (
        "Gemma3TextConfig",
        {
            "head_dim": 16, "sliding_window": 4, "query_pre_attn_scalar": 24, "tie_word_embeddings": True,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
            },
        },
    ),
}  # fmt: skip
# of this project: students of another family and width than their teachers
OWN_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {"qwen2": ("Qwen2Config", {"hidden_size": 48})}
# families with models of six and seven layers
DEEP_FAMILIES = ("gemma3_text",)
# the last layer of Gemma 4 has no window, and Megatron-Bridge repeats a pattern
TEACHER_LAYERS = {"gemma4_text": 6}
SPECIAL_FAMILIES = {**EXPERT_FAMILIES, **HYBRID_FAMILIES, **WINDOWED_FAMILIES}
# whose checkpoints Megatron-Bridge would read as another model, so that they do not say what they are
UNDESCRIBED = (*HYBRID_FAMILIES, "moonlight", "gemma4_text")
# whose in-process samples are compared: windows and sinks, narrow states, delta nets, norms behind blocks
SAMPLED_FAMILIES = (
    "gemma4_text",
    "gpt_oss",
    "mimo_v2_flash",
    "deepseek_v3",
    "moonlight",
    "qwen3_5_text",
    "gemma2",
    "gemma3_text",
)
LAYER_TYPES = {3: ["linear_attention", "full_attention", "linear_attention"]}
LAYER_TYPES[4] = ["linear_attention", *LAYER_TYPES[3]]
# ids 0 to 60, as in the golden rollouts; an odd number of layers
COMMON = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": None,
}


# Other draws of student and teacher, found by transformers alone: the student's gradients in float32 are within 1e-5 of
# those in float64, and so are the teacher's states. Where a query is nearly orthogonal to all keys, the norm behind a
# delta net enlarges rounding: in the teacher of the student's draw, weights that change by 6e-8 move a row by 6e-5.
SEEDS = {"qwen3_next": {"student": 220, "teacher": 22}}
# to the weights of their norms, but for that of a delta net
ADD_ONE = ("gemma", "nemotron", *HYBRID_FAMILIES, *WINDOWED_FAMILIES)


def make_models(directory: str, families: list[str]) -> None:
    """DIRECTORY/FAMILY/student of three layers, or six, and DIRECTORY/FAMILY/teacher of one more; random weights."""
    import transformers

    for family in families:
        config, settings = {**FAMILIES, **SPECIAL_FAMILIES, **OWN_FAMILIES}[family]
        depth = 6 if family in DEEP_FAMILIES else 3
        for role, layers in (("student", depth), ("teacher", TEACHER_LAYERS.get(family, depth + 1))):
            torch.manual_seed(layers + SEEDS.get(family, {}).get(role, 0))
            kinds = {"layer_types": LAYER_TYPES[layers]} if family in HYBRID_FAMILIES else {}
            if family == "gemma4_text":
                kinds = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * (layers // 3)}
            made = getattr(transformers, config)(**COMMON | settings | kinds, num_hidden_layers=layers)
            model = transformers.AutoModelForCausalLM.from_config(made)
            for name, parameter in model.named_parameters():
                # delta nets with larger weights make so much of rounding that float32 is no measure
                large = 0.2 if family in HYBRID_FAMILIES else 0.3
                torch.nn.init.normal_(parameter, std=large if parameter.dim() > 1 else 0.2)
                if family in WINDOWED_FAMILIES and name.endswith(("o_proj.weight", "down_proj.weight")):
                    parameter.data *= 0.03  # so that the epsilon of the norm behind it is not lost in rounding
                if "norm" in name and not (family in ADD_ONE and "linear_attn" not in name):
                    parameter.data += 1
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    torch.nn.init.normal_(buffer, std=0.2)
            model.save_pretrained(Path(directory) / family / role)
            if (family, role) == ("mimo_v2_flash", "student"):
                as_published(Path(directory) / family / role / "config.json")


def as_published(file: Path) -> None:
    """Adds the keys that the makers of MiMo-V2-Flash have in config.json, which transformers leaves out."""
    config = json.loads(file.read_text())
    ropes = config["rope_parameters"]
    keys = {
        "hybrid_layer_pattern": [int(kind == "sliding_attention") for kind in config["layer_types"]],
        "moe_layer_freq": [int(kind == "sparse") for kind in config["mlp_layer_types"]],
        "rope_theta": ropes["full_attention"]["rope_theta"], "partial_rotary_factor": 0.334,
        "swa_rope_theta": ropes["sliding_attention"]["rope_theta"], "swa_num_attention_heads": 8,
        "swa_num_key_value_heads": 4, "swa_head_dim": 24, "swa_v_head_dim": 16, "scoring_func": "sigmoid",
        "layernorm_epsilon": config["rms_norm_eps"], "sliding_window_size": config["sliding_window"] - 1,
    }  # fmt: skip
    file.write_text(json.dumps(config | keys))


def make_toy_models(directory: str, family: str, vocabulary: int, end: int) -> None:
    """DIRECTORY/student and DIRECTORY/teacher: small models with the toy's vocabulary, whose heads vLLM can run."""
    import transformers

    config, settings = {**FAMILIES, **SPECIAL_FAMILIES}[family]
    sizes = {**COMMON, "vocab_size": vocabulary, "eos_token_id": end, "hidden_size": 64, "intermediate_size": 96}
    depth = 6 if family in DEEP_FAMILIES else 2
    for role, layers in (("student", depth), ("teacher", depth + 1)):
        torch.manual_seed(layers)
        more: dict[str, Any] = {"head_dim": 32}
        if family == "gpt_oss":  # keys that a published config has and vLLM needs, experts that its CPU kernel runs
            more["intermediate_size"] = sizes["intermediate_size"]
            more["rope_parameters"] = {**settings["rope_parameters"], "beta_fast": 32.0, "beta_slow": 1.0}
        made = getattr(transformers, config)(**sizes | settings | more, num_hidden_layers=layers)
        model = transformers.AutoModelForCausalLM.from_config(made)
        for name, parameter in model.named_parameters():
            torch.nn.init.normal_(parameter, std=0.05 if "norm" in name else 0.15)
        model.save_pretrained(Path(directory) / role)


def verify(runs: dict[str, list[str]]) -> None:
    """`nemo-oprd verify` with each list of settings."""
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    from nemo_oprd.config.loading import load_config
    from nemo_oprd.run.models import world_size
    from nemo_oprd.run.preflight import preflight
    from nemo_oprd.run.verify import verify as command
    from nemo_oprd.train import accumulate_gradients

    TEDotProductAttention.cp_stream = object()  # a CUDA stream, which the stand-in does not use
    for overrides in runs.values():
        command(preflight(load_config("verify", overrides), world_size(), "verify"), accumulate_gradients)


def fit_and_verify(fit: list[str], runs: dict[str, list[str]]) -> None:
    """`nemo-oprd fit-bridge`, then `verify` with the bridge."""
    from nemo_oprd.config.loading import load_config
    from nemo_oprd.run.fit_bridge import fit_bridge
    from nemo_oprd.run.models import world_size
    from nemo_oprd.run.preflight import preflight

    fit_bridge(preflight(load_config("verify", fit), world_size(), "fit-bridge"))
    verify(runs)


def across_families(cases: list[dict[str, Any]]) -> None:
    """`fit_and_verify` with each of several arguments."""
    for case in cases:
        fit_and_verify(**case)


def train(runs: list[list[str]], config: str = "verify") -> None:
    """`nemo-oprd train` with each list of settings of a configuration, one after the other."""
    from nemo_oprd.config.loading import load_config
    from nemo_oprd.train import train as command

    for overrides in runs:
        command(load_config(config, overrides))


def verify_and_train(runs: dict[str, list[str]], trained: list[list[str]]) -> None:
    """`nemo-oprd verify` and then `nemo-oprd train`, each with lists of settings."""
    verify(runs)
    train(trained)


def one_process(models: str, directory: str, cases: dict[str, list[str]], trained: list[str]) -> None:
    """DIRECTORY/FAMILY/back, and the messages in DIRECTORY/wrong.json and DIRECTORY/refused.json."""
    from megatron_bridge_checkpoint_cases import own_experts_through_megatron_bridge, through_megatron_bridge

    convert_special(models, directory)
    convert_tower(models, directory)
    built_wrongly(models, f"{directory}/wrong.json")
    planted(models, directory)
    samples(models, f"{directory}/samples.json")
    counts(models, f"{directory}/counts.json")
    described = [family for family in SPECIAL_FAMILIES if family not in UNDESCRIBED]
    through_megatron_bridge(models, directory, described, (trained[0], trained[1]))
    own_experts_through_megatron_bridge(directory)
    refusals(cases, f"{directory}/refused.json", ranks=2)


def convert(models: str, directory: str) -> None:
    """Every family's student: to a Megatron checkpoint and back; Megatron-Bridge loads ours, and we read its own."""
    import nemo_bridge_cases as bridge_cases
    from megatron.bridge import AutoBridge
    from megatron.bridge.training.model_load_save import load_megatron_model, save_megatron_model
    from safetensors.torch import save_file
    from stock_models import megatron_groups

    from checkpoint_tools._convert import hf_to_megatron, megatron_to_hf
    from nemo_oprd.batch.layout import Layout
    from nemo_oprd.megatron.weights.megatron_checkpoint import MegatronCheckpoint
    from nemo_oprd.models import read_model_spec
    from nemo_oprd.run.provider import find_family

    bridge_cases.prepare()
    settings = bridge_cases.settings(Layout())
    for family in FAMILIES:
        source, root = Path(models) / family / "student", Path(directory) / family
        kind = find_family("bridge", hf_path=str(source))
        hf_to_megatron(source, root / "ours", tensor=2, family=kind, progress=False)
        megatron_to_hf(root / "ours", root / "back", family=kind, progress=False)
        with megatron_groups(Layout()), torch.no_grad():
            made = AutoBridge.from_hf_pretrained(str(source), dtype=torch.float32).to_megatron_provider()
            # Megatron-Bridge 0.6.2 does not read it from what transformers 5 writes
            made.rotary_percent = read_model_spec(source, kind).rope.share
            for field, value in settings.items():
                setattr(made, field, value)
            save_megatron_model(bridge_cases.provided(made, wrap_with_ddp=False), str(root / "theirs"))
        checkpoint = MegatronCheckpoint(root / "theirs", source, kind)
        save_file({name: checkpoint[name] for name in checkpoint.keys()}, root / "theirs.safetensors")  # noqa: SIM118
        with megatron_groups(Layout()), torch.no_grad():
            options = {"use_cpu_init": True, "skip_temp_dist_context": True, "mp_overrides": settings}
            loaded = load_megatron_model(str(root / "ours"), **options)
            logits = loaded[0](bridge_cases.TOKENS, None, None)[..., : COMMON["vocab_size"]]
            save_file({"logits": logits.contiguous()}, root / "loaded.safetensors")


def convert_special(models: str, directory: str) -> None:
    """Students with special parts: to a Megatron checkpoint and back."""
    from checkpoint_tools._convert import hf_to_megatron, megatron_to_hf
    from nemo_oprd.run.provider import find_family

    for family in SPECIAL_FAMILIES:
        source, root = Path(models) / family / "student", Path(directory) / family
        kind = find_family("bridge", hf_path=str(source))
        hf_to_megatron(source, root / "ours", tensor=2, family=kind, progress=False)
        megatron_to_hf(root / "ours", root / "back", family=kind, progress=False)


def convert_tower(models: str, directory: str) -> None:
    """DIRECTORY/tower/back, of the Qwen3.5 student as the language model of a model for text and pictures."""
    from safetensors.torch import load_file, save_file

    from checkpoint_tools._convert import hf_to_megatron, megatron_to_hf
    from nemo_oprd.run.provider import find_family

    student, root = Path(models) / "qwen3_5_moe_text" / "student", Path(directory) / "tower"
    (root / "whole").mkdir(parents=True)
    text = json.loads((student / "config.json").read_text())
    whole = {"model_type": "qwen3_5_moe", "architectures": ["Qwen3_5MoeForConditionalGeneration"], "text_config": text}
    (root / "whole" / "config.json").write_text(json.dumps(whole))
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(student / "model.safetensors").items()
    }
    tensors |= {"model.visual.pos_embed.weight": torch.ones(2), "mtp.fc.weight": torch.ones(2)}
    save_file(tensors, root / "whole" / "model.safetensors")
    kind = find_family("bridge", hf_path=str(root / "whole"))
    hf_to_megatron(root / "whole", root / "ours", tensor=2, family=kind, progress=False)
    megatron_to_hf(root / "ours", root / "back", family=kind, progress=False)


def built_wrongly(models: str, output: str) -> None:
    """Family -> the message for a model as Megatron-Bridge builds it, with one of its fields as it sets them."""
    from nemo_oprd.megatron.megatron_bridge import build

    found = {}
    for family, field, value in (
        ("glm4_moe", "rotary_percent", 1.0),
        ("gpt_oss", "yarn_rotary_scaling_factor", 32.0),
        ("deepseek_v3", "mscale_all_dim", 0.0),
    ):
        found[f"{family} {field}"] = _message_with(models, family, field, value, build)
    Path(output).write_text(json.dumps(found))


def _message_with(models: str, family: str, field: str, value: Any, build: Any) -> str:
    from nemo_oprd.batch.layout import Layout
    from nemo_oprd.megatron.parallel import init_distributed, make_role
    from nemo_oprd.models import read_model_spec
    from nemo_oprd.run.provider import find_family

    directory = Path(models) / family / "student"
    init_distributed()
    spec = read_model_spec(directory, find_family("bridge", hf_path=str(directory)))
    provider = copy.copy(build.make_provider("student.provider", "bridge", directory))  # it is kept
    setattr(provider, field, value)
    try:
        build.build_from_provider(provider, spec, make_role("student", Layout()), torch.float32)
    except ValueError as error:
        return str(error)
    return "no error"


def planted(models: str, directory: str) -> None:
    """DIRECTORY/planted.json: "FAMILY FAULT" -> the canary's line of the student with the fault; "FAMILY right"."""
    from nemo_oprd.canary.layer_by_layer import layered_states
    from nemo_oprd.config.loading import load_config
    from nemo_oprd.run import canary
    from nemo_oprd.run.models import build_distiller, make_plan
    from nemo_oprd.run.resolve import resolve

    os.environ["XDG_CACHE_HOME"] = f"{directory}/cache"
    # in this process, which has imported what takes the longest
    canary.reference_states = functools.cache(
        lambda where, prompts, dtype: layered_states(Path(where), [list(ids) for ids in prompts], dtype)
    )
    theirs = canary.canary_prompts
    canary.canary_prompts = lambda *sizes: tuple(map(tuple, theirs(*sizes)))
    found = {}
    for family in FAULTS:
        roles = [f"{role}.hf_path={models}/{family}/{role}" for role in ("student", "teacher")]
        providers = ["student.provider=bridge", "teacher.provider=bridge"]
        replay = f"rollout.replay={Path(__file__).parent.parent}/golden/rollouts.jsonl"
        plan = make_plan(resolve(load_config("verify", [*roles, *providers, replay, "output=out"]), 1))
        distiller = build_distiller(plan)
        for fault, plant in [*FAULTS[family].items(), ("right", lambda _: nullcontext())]:  # which is kept
            with torch.no_grad(), plant(distiller.student.chunks[0].decoder.layers):
                found[f"{family} {fault}"] = next(iter(canary.prove_models(plan, distiller))).line
    Path(directory, "planted.json").write_text(json.dumps(found))


@contextmanager
def _weight(weight: torch.Tensor, changed: torch.Tensor) -> Iterator[None]:
    kept = weight.clone()
    weight.copy_(changed)
    yield
    weight.copy_(kept)


@contextmanager
def _attribute(module: Any, name: str, value: Any) -> Iterator[None]:
    kept = getattr(module, name)
    setattr(module, name, value)
    yield
    setattr(module, name, kept)


def _q_and_gate(layers: Any) -> Any:
    """Queries and gates of each group of heads change places."""
    weight = layers[1].self_attention.linear_qkv.weight
    parts = weight.unflatten(0, (2, 6, 16))  # groups; two queries, two gates, key and value; channels
    return _weight(weight, parts[:, [2, 3, 0, 1, 4, 5]].flatten(0, 2))


def _head_permuted(layers: Any) -> Any:
    """The gates of the first two value heads of the delta net change places."""
    weight = layers[0].self_attention.in_proj.weight
    changed = weight.clone()  # 32 rows of queries, 32 of keys, 64 of values
    changed[128:136], changed[136:144] = weight[136:144], weight[128:136]
    return _weight(weight, changed)


def _rotary_share(layers: Any) -> Any:
    """Half of the channels are rotated."""
    attention = layers[1].self_attention
    theirs = attention.forward

    def forward(*args: Any, rotary_pos_emb: Any, **kwargs: Any) -> Any:
        both = rotary_pos_emb if isinstance(rotary_pos_emb, tuple) else (rotary_pos_emb,) * 2
        wider = tuple(torch.cat([part, part], -1) for part in both)
        return theirs(*args, rotary_pos_emb=wider, **kwargs)

    return _attribute(attention, "forward", forward)


def _window(change: int) -> Any:
    def plant(layers: Any) -> Any:
        attention = layers[0].self_attention.core_attention
        return _attribute(attention, "left", attention.left + change)

    return plant


def _no_sinks(layers: Any) -> Any:
    offset = layers[0].self_attention.core_attention.softmax_offset
    return _weight(offset, torch.full_like(offset, -1e4))


# family -> fault -> what plants it into the layers and takes it back
FAULTS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {
        "q and gate": _q_and_gate,
        "one head permuted": _head_permuted,
        "w as if it were w - 1": lambda layers: _attribute(
            layers[0].self_attention.out_norm, "zero_centered_gamma", True
        ),
        "rotary share": _rotary_share,
    },
    "gpt_oss": {"no sinks": _no_sinks, "window longer": _window(1)},
    "gemma2": {
        "window longer": _window(1),
        "no cap": lambda layers: _attribute(layers[0].self_attention.core_attention, "cap", None),
    },
    "gemma3_text": {
        "window shorter": _window(-1),
        # as Megatron-Bridge 0.6.2 builds it
        "epsilon": lambda layers: _attribute(layers[0].self_attention.linear_proj.post_layernorm, "eps", 1e-5),
    },
}


# short prompts of several lengths, and one response that may have fewer tokens
PROMPTS = ([5], [7, 8, 9, 10, 11], [20, 3])
LIMITS = (12, 12, 4)


def samples(models: str, output: str) -> None:
    """FAMILY -> the most likely tokens after `PROMPTS`, and one more sample that is not greedy, twice."""
    from nemo_oprd.batch.layout import Layout
    from nemo_oprd.config.rollout_schema import RolloutConfig
    from nemo_oprd.megatron.megatron_bridge.build import make_provider
    from nemo_oprd.megatron.parallel import init_distributed
    from nemo_oprd.megatron.weights.hf import HFCheckpoint
    from nemo_oprd.models import read_model_spec
    from nemo_oprd.rollout.engine import Request, SamplingParams
    from nemo_oprd.rollout.in_process_engine import MegatronEngine
    from nemo_oprd.run.provider import find_family

    init_distributed()
    found = {}
    for family in SAMPLED_FAMILIES:
        directory = Path(models) / family / "student"
        spec = read_model_spec(directory, find_family("bridge", hf_path=str(directory)))
        provider = make_provider("student.provider", "bridge", directory)
        rollout = RolloutConfig(max_batch=2)
        engine = MegatronEngine(rollout, spec, Layout(), (1,), precision="fp32", provider=provider)
        engine.load(HFCheckpoint(directory).__getitem__, str(directory))
        requests = [Request(list(ids), most=most) for ids, most in zip(PROMPTS, LIMITS, strict=True)]
        calls = [SamplingParams(temperature, 1.0, 12, (3,)) for temperature in (0.0, 1.0, 1.0)]
        found[family] = [[list(map(int, r.response_ids)) for r in engine.generate(requests, each)] for each in calls]
    Path(output).write_text(json.dumps(found))


def counts(models: str, output: str) -> None:
    """FAMILY -> (the parameters that `plan` counts, those of the student's file)."""
    from nemo_oprd.megatron.weights.hf import HFCheckpoint
    from nemo_oprd.models import read_model_spec
    from nemo_oprd.run.provider import find_family
    from nemo_oprd.tools.plan.parameters import model_parameters

    found = {}
    for family in SPECIAL_FAMILIES:
        directory = Path(models) / family / "student"
        spec = read_model_spec(directory, find_family("bridge", hf_path=str(directory)))
        checkpoint = HFCheckpoint(directory)
        names = [name for name in checkpoint.keys() if not name.endswith("e_score_correction_bias")]  # noqa: SIM118
        found[family] = model_parameters(spec), sum(checkpoint[name].numel() for name in names)
    Path(output).write_text(json.dumps(found))


def refusals(cases: dict[str, list[str]], output: str, ranks: int = 1) -> None:
    """The messages of `preflight` and of building the models."""
    from nemo_oprd.config.loading import load_config
    from nemo_oprd.run.models import distiller_for
    from nemo_oprd.run.preflight import preflight

    found = {}
    for name, overrides in cases.items():
        try:
            config = load_config("verify", overrides)
            preflight(config, ranks, "train")
            distiller_for(config)
            found[name] = "no error"
        except ValueError as error:
            found[name] = str(error)
    Path(output).write_text(json.dumps(found))


def provider_fields(output: str) -> None:
    """Field -> the table that has it, of the installed Megatron-Bridge's provider."""
    from dataclasses import fields

    from megatron.bridge.models.gpt_provider import GPTModelProvider

    from nemo_oprd.megatron.megatron_bridge.provider_fields import kind_of

    Path(output).write_text(json.dumps({field.name: kind_of(field.name) for field in fields(GPTModelProvider)}))


def recipe(hf_path: str) -> Any:
    """A recipe in the style of Megatron-Bridge's: a configuration with the provider as `model`."""
    from types import SimpleNamespace

    from megatron.bridge import AutoBridge

    made = AutoBridge.from_hf_pretrained(hf_path).to_megatron_provider(load_weights=False)
    # what recipes set, and this project sets itself
    made.tensor_model_parallel_size, made.sequence_parallel, made.calculate_per_token_loss = 4, True, False
    made.recompute_granularity, made.recompute_method, made.recompute_num_layers = "full", "uniform", 1
    made.hidden_dropout = 0.1
    return SimpleNamespace(model=made)


def another_model(hf_path: str) -> Any:
    """A recipe of a model with another feed-forward size."""
    made = recipe(hf_path)
    made.model.ffn_hidden_size = 64
    return made


def another_rope(hf_path: str) -> Any:
    """A provider that rotates by another base."""
    made = recipe(hf_path).model
    made.rotary_base = 77.0
    return made


def another_rotation(hf_path: str) -> Any:
    """A provider that rotates neighbouring channels together; its frequencies are the same."""
    made = recipe(hf_path).model
    made.rotary_interleaved = True
    return made


def another_residual(hf_path: str) -> Any:
    """A provider whose residual is taken behind the norm."""
    made = recipe(hf_path).model
    made.apply_residual_connection_post_layernorm = True
    return made


def adapters(hf_path: str) -> Any:
    """A recipe that trains adapters only."""
    made = recipe(hf_path)
    made.peft = object()
    return made


def not_on_the_hub() -> Any:
    """A shipped recipe's model, which is not in the cache."""
    from megatron.bridge import AutoBridge

    return AutoBridge.from_hf_pretrained("nobody/nothing").to_megatron_provider(load_weights=False)


def nothing() -> None:
    """Returns no provider."""


if __name__ == "__main__":
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        from nemo_oprd.megatron.parallel import init_distributed

        init_distributed()
    globals()[sys.argv[1]](**json.loads(sys.argv[2]))
    if dist.is_initialized():
        dist.destroy_process_group()
