"""Layouts, models, weights and tokenizers that do not fit, are damaged, or are not supported."""

# One case per line, however long: a table.
# fmt: off
from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from bad_input_case import GOLDEN, TEXT, Category, Place, cut
from safetensors.torch import load_file

CATEGORIES: list[Category] = []

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 4.0} | {"original_max_position_embeddings": 16}


def pipe(file: Path) -> None:
    """Puts a named pipe, which nobody writes to, in the place of a file."""
    file.unlink(missing_ok=True)
    os.mkfifo(file)


def give_experts(place: Place, lost: str = "", **changes: Any) -> None:
    """Makes the student a Qwen3-MoE of 4 experts per layer, 2 per token; without the tensor `lost`."""

    def split(tensors: dict) -> None:
        for layer in range(3):
            mlp = f"model.layers.{layer}.mlp"
            tensors[f"{mlp}.gate.weight"] = tensors["lm_head.weight"][:4].clone()
            for name in ("gate_proj.weight", "up_proj.weight", "down_proj.weight"):
                matrix = tensors.pop(f"{mlp}.{name}")
                tensors.update({f"{mlp}.experts.{expert}.{name}": matrix.clone() for expert in range(4)})
        tensors.pop(lost, None)

    place.tensors(split)
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
    place.config(model_type="qwen3_moe", **{**sizes, **changes})


case = Category("Layout")
CATEGORIES.append(case)
case("world too small", "TP 4 on 2 ranks", "student.parallel | tensor=4 | does not divide the 2 rank(s) | start a multiple of 4", "student.parallel.tensor=4", ranks=2)
case("world that does not fit", "TP 2 on 3 ranks", "tensor=2 | does not divide the 3 rank(s)", "student.parallel.tensor=2", ranks=3)
case("teacher takes all", "a dedicated teacher on all ranks", "2 teacher rank(s) leaves none of the 2 rank(s) | start more ranks", "teacher.placement=dedicated", "teacher.ranks=2", ranks=2)
case("heads", "TP that does not divide the heads", "student.parallel.tensor=3 does not divide the model's 4 attention heads | choose a divisor", "student.parallel.tensor=3", ranks=3)
case("key/value heads", "TP that the key/value heads neither divide nor are divided by", "student.parallel.tensor=2 does not divide the model's 3 key/value heads | choose a divisor of 3", "student.parallel.tensor=2", ranks=2, prepare=lambda p: p.config(num_attention_heads=6, num_key_value_heads=3))
case("feed-forward width", "TP that does not divide the feed-forward width", "tensor=2 does not divide the model's 47 feed-forward size | choose a divisor", "student.parallel.tensor=2", ranks=2, prepare=lambda p: p.config(intermediate_size=47))
case("rollout ranks", "sampling TP that does not divide the ranks", "rollout.tensor=2 does not divide the student's 3 rank(s) | choose a divisor", "rollout.tensor=2", ranks=3)
case("evaluation ranks", "the same in `evaluate`", "rollout.tensor=2 does not divide | 1 rank(s)", "rollout.tensor=2", command="evaluate")
case("too deep", "more stages than layers", "pipeline=4 is more than the model's 3 layers | choose at most 3", "student.parallel.pipeline=4", ranks=4)
case("first stage", "a first stage that leaves nothing", "3 layers cannot be split over pipeline=2 | first_stage_layers=4 | choose", "student.parallel.pipeline=2", "student.parallel.first_stage_layers=4", ranks=2)
case("first and last stage", "first and last stage that don't add up", "first_stage_layers=1, last_stage_layers=1 | choose", "student.parallel.pipeline=2", "student.parallel.first_stage_layers=1", "student.parallel.last_stage_layers=1", ranks=2)
case("virtual stages", "virtual stages that don't divide", "virtual_pipeline=2 does not divide the [2, 1] layers | choose", "student.parallel.pipeline=2", "student.parallel.virtual_pipeline=2", ranks=2)
case("virtual without stages", "virtual stages without stages", "student.parallel.virtual_pipeline=2 needs student.parallel.pipeline > 1", "student.parallel.virtual_pipeline=2")
LONG_ROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
VLLM = ("rollout.engine=vllm", "rollout.vllm.python={root}/python")
SERVED = ("teacher.engine=vllm", "teacher.vllm.python={root}/python")
PYTHON = {"prepare": lambda p: (p.root / "python").touch()}
case("teacher's servers take all", "dedicated servers of the teacher on all ranks", "teacher.vllm.placement=dedicated with 2 rank(s) of servers leaves none of the 2 rank(s) for the student | use teacher.vllm.placement=colocated", *SERVED, "teacher.vllm.placement=dedicated", "teacher.vllm.replicas=2", ranks=2, **PYTHON)
case("teacher's servers without an interpreter", "servers of the teacher without vLLM's environment", "teacher.vllm.python={root}/python: {root}/python does not exist | expected the Python interpreter of an environment with vLLM | or set teacher.vllm.python", *SERVED)
case("layout of a served teacher", "a layout for a teacher that no rank holds", "with teacher.engine=vllm: no rank of this job holds the teacher | remove them, and lay out the servers by teacher.vllm.tensor", *SERVED, "teacher.parallel.tensor=2")
case("no teacher server's address", "an endpoint of a teacher that is no address", "teacher.vllm.endpoints: 'node7:8000' is not the address of a server | expected e.g. http://", "teacher.engine=vllm", "teacher.vllm.endpoints=['node7:8000']")
case("teacher's endpoint without a token", "an endpoint of a teacher without the file of its token", "teacher.vllm.endpoints=['http://127.0.0.1:8000'] without teacher.vllm.token_file | expected the file with the servers'", "teacher.engine=vllm", "teacher.vllm.endpoints=['http://127.0.0.1:8000']")
case("teacher's endpoint and replicas", "servers of a teacher that are there, and servers to start", "teacher.vllm.endpoints=['http://127.0.0.1:8000'] with replicas=2 | expected either servers that are there or servers", "teacher.engine=vllm", "teacher.vllm.endpoints=['http://127.0.0.1:8000']", "teacher.vllm.replicas=2")
case("endpoint of a teacher in the trainer", "servers for a teacher that is in the trainer", "teacher.vllm.endpoints=['http://127.0.0.1:8000'] with teacher.engine=megatron | set teacher.engine=vllm", "teacher.vllm.endpoints=['http://127.0.0.1:8000']")
case("checkpoint of a served teacher", "a Megatron checkpoint for servers", "teacher.checkpoint={root}/teacher and teacher.provider=own with teacher.engine=vllm: vLLM loads Hugging Face directories | name the model in teacher.hf_path", *SERVED, "teacher.checkpoint={root}/teacher")
case("early states of a prompt of its own", "states that are asked for before it is known what the teacher reads", "teacher.vllm.ahead_gib=1 with teacher.reads=ids, teacher.prompt or rollout.mode=exact | expected ids without a prompt, and exact | set teacher.vllm.ahead_gib=0", *SERVED, "teacher.vllm.ahead_gib=1", "teacher.prompt='{prompt} {answer}'")
case("early states of shared servers", "states that are asked for early of servers that somebody else runs", "teacher.vllm.ahead_gib=1 with servers at ['http://127.0.0.1:8000'], which somebody else runs | expected 0, or servers that this run starts | set teacher.vllm.ahead_gib=0", "teacher.engine=vllm", "teacher.vllm.ahead_gib=1", "teacher.vllm.endpoints=['http://127.0.0.1:8000']")
case("sampling a served teacher", "evaluating a teacher whose servers sample nothing", "evaluation.teacher=true with teacher.engine=vllm | expected false", *SERVED, "evaluation.teacher=true")
case("served teacher that is the student", "servers for a teacher that changes", "teacher.weights=ema with teacher.engine=vllm: the servers load the weights of a file once | expected own", *SERVED, "teacher.hf_path=null", "teacher.weights=ema", "teacher.prompt='{prompt} {answer}'")
case("served teacher without sizes", "a teacher's config.json that names no width", "teacher/config.json: key 'hidden_size' is missing", *SERVED, prepare=lambda p: p.config("teacher", hidden_size=None))
case("served teacher with LongRoPE", "a served teacher whose rotation depends on the length of a sequence", "teacher.engine=vllm with RoPE of type longrope, whose frequencies depend on the length of a sequence | set teacher.engine=megatron", *SERVED, prepare=lambda p: p.config("teacher", rope_parameters=None, rope_scaling=LONG_ROPE))
case("scale of a served teacher's logits", "a scale that makes all logits 0", "logits_scaling=0 | expected a number other than 0", *SERVED, "loss.output.kind=full_vocab", prepare=lambda p: (p.config("teacher", logits_scaling=0), (p.root / "python").touch()))
case("servers take all", "dedicated vLLM servers on all ranks", "rollout.vllm.placement=dedicated with 2 rank(s) of servers leaves none of the 2 rank(s) for the student | start more ranks", *VLLM, "rollout.vllm.placement=dedicated", "rollout.vllm.replicas=2", ranks=2, prepare=lambda p: (p.root / "python").touch())
case("tensor of vLLM", "workers of a vLLM server that do not divide the heads", "rollout.vllm.tensor=3 does not divide the model's 4 attention heads | choose a divisor", *VLLM, "rollout.vllm.tensor=3")
case("head size of vLLM", "heads that vLLM has no attention for on a CPU", "heads have size 16 | knows 32, 64 | use rollout.engine=megatron", *VLLM, prepare=lambda p: (p.root / "python").touch(), wrap=lambda: mock.patch("torch.cuda.is_available", return_value=False))
case("experts of a model without", "expert parallelism for a model that has no experts", "student.parallel.expert=2, but the qwen3 model has no experts | remove student.parallel.expert", "student.parallel.expert=2", ranks=2)
case("router loss of a model without", "a loss of routers for a student that has none", "student.router_aux_loss=0.1, but the qwen3 student has no experts | leave student.router_aux_loss out", "student.router_aux_loss=0.1")
case("replay for a model without", "replay of routes for a student that has none", "student.router_replay=true, but the qwen3 student has no experts", "student.router_replay=true")
case("expert ranks", "expert parallelism that does not divide the ranks", "expert=2 * expert_tensor=1 does not divide the 1 rank(s) | choose a divisor", "student.parallel.expert=2")
case("expert tensor and context", "experts split over tensor ranks beside context parallelism", "student.parallel.expert_tensor=2 with student.parallel.context=2 is not supported | expected one of them to be 1", "student.parallel.expert_tensor=2", "student.parallel.context=2", ranks=2)
case("experts of a sampler", "experts split over ranks that decode other responses", "rollout.expert=2 does not divide rollout.tensor=1 | expected a divisor", "rollout.expert=2", ranks=2)
case("experts over ranks", "expert parallelism that does not divide the experts", "student.parallel.expert=3 does not divide the model's 4 experts | choose a divisor of 4", "student.parallel.expert=3", ranks=3, prepare=give_experts)
case("width of an expert", "a tensor size that does not divide the width of an expert", "student.parallel.expert_tensor=3 does not divide the experts' feed-forward size 47 | choose a divisor", "student.parallel.expert_tensor=3", ranks=3, prepare=lambda p: give_experts(p, moe_intermediate_size=47))
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 32}
case("replay with LongRoPE", "replay of routes with two sets of position factors", "student.router_replay=true with RoPE of type longrope | outgrows 32 tokens | set student.router_replay=false", "student.router_replay=true", prepare=lambda p: give_experts(p, rope_scaling=LONG))
case("DeepEP", "tokens sent by a package that is not installed", "student.parallel.dispatcher=deepep needs the package deep_ep | install DeepEP", "student.parallel.dispatcher=deepep", "student.parallel.expert=2", ranks=2, prepare=give_experts)
case("size of zero", "a parallel size of 0", "student.parallel.tensor=0 | expected at least 1", "student.parallel.tensor=0")

case = Category("Models")
CATEGORIES.append(case)
case("no model", "a directory that does not exist", "{root}/nowhere | no such directory | download it first", "student.hf_path={root}/nowhere")
case("no config.json", "a directory without a model", "{root}: no config.json there | expected the directory of a Hugging Face model", "teacher.hf_path={root}", command="verify")
case("a checkpoint for a model", "a Megatron checkpoint as hf_path", "student-megatron: no config.json there | checkpoint=", "student.hf_path={root}/student-megatron")
case("a model for a checkpoint", "a Hugging Face model as checkpoint", "teacher: no metadata.json | expected a torch_dist checkpoint | hf_path=", "teacher.checkpoint={root}/teacher")
case("config.json cut off", "a config.json that is not JSON", "student/config.json: not valid JSON | copy the file", prepare=lambda p: (p.student / "config.json").write_text('{"model_type": '), library=r"JSON \((.*?)\);")
case("config.json a list", "a config.json that is a list", "holds a list, expected an object | copy the file", prepare=lambda p: (p.student / "config.json").write_text("[]"))
case("unknown model type", "a model of another family", "model_type 'gpt2' is not supported | expected one of ['llama', 'mixtral', 'phi3', 'qwen2', 'qwen3', 'qwen3_moe'] | provider=bridge", prepare=lambda p: p.config(model_type="gpt2"))
case("no Megatron-Bridge", "a model that Megatron-Bridge is to build, which is not installed", "provider=bridge needs Megatron-Bridge | expected provider=own | scripts/setup_nemo_bridge.sh", "student.provider=bridge")
case("another provider", "a provider that does not exist", "provider='nemo'; expected own, bridge, or MODULE:FUNCTION", "student.provider=nemo")
case("a provider of no model", "a provider for a teacher that is the student", "teacher.provider=bridge with teacher.weights=ema | expected own", "teacher.provider=bridge", "teacher.weights=ema", "teacher.hf_path=null", "teacher.checkpoint=null")
case("no model type", "a config.json without model_type", "model_type None is not supported | expected one of", prepare=lambda p: p.config(model_type=None))
case("a key is missing", "a config.json that lacks a key", "'hidden_size' is missing | expected the complete config.json", prepare=lambda p: p.config(hidden_size=None))
case("too many layers", "more layers than any model has", "student/config.json: num_hidden_layers=1000000000 | expected at most 10000: correct it", prepare=lambda p: p.config(num_hidden_layers=10**9))
case("text for a size", "a size that is text", "num_hidden_layers='3' | expected a positive integer", prepare=lambda p: p.config(num_hidden_layers="3"))
case("heads and groups", "heads that don't share key/value heads evenly", "4 attention heads are not a multiple of 3 | correct them", prepare=lambda p: p.config(num_key_value_heads=3))
case("activation", "another activation", "hidden_act='gelu' is not supported | expected 'silu'", prepare=lambda p: p.config(hidden_act="gelu"))
case("too many experts of a token", "more experts per token than experts", "num_experts_per_tok=5 is more than the model's 4 experts | expected at most 4: correct it", prepare=lambda p: give_experts(p, num_experts_per_tok=5))
case("scaled RoPE", "scaled positions", "RoPE type 'dynamic', whose frequencies change while a sequence grows | expected 'default' or 'linear' | remove it", prepare=lambda p: p.config(rope_scaling={"rope_type": "dynamic", "factor": 4.0}))
case("YaRN without its length", "YaRN that does not say for how many positions the model was trained", "no 'original_max_position_embeddings' | expected it as in", prepare=lambda p: p.config(rope_scaling={"rope_type": "yarn", "factor": 4.0}))
case("setting of another program", "a setting of scaled positions that transformers does not have", "have 'attn_factor', which transformers would ignore | expected factor, original_max_position_embeddings | remove", prepare=lambda p: p.config(rope_scaling={**YARN, "attn_factor": 1.2}))
case("vLLM's LongRoPE", "a model with LongRoPE for vLLM", "rollout.engine=vllm with RoPE of type longrope | sequences of up to 16 tokens | set rollout.engine=megatron", *VLLM, prepare=lambda p: p.config(rope_scaling=LONGROPE))
case("vLLM's YaRN", "a model with more positions than vLLM's YaRN has", "max_position_embeddings=64 is more than | original_max_position_embeddings=32 | lower it", *VLLM, prepare=lambda p: p.config(rope_scaling={**YARN, "factor": 2.0}))
case("RoPE base", "a position base that is no number", "rope_theta='big' | expected a positive number", prepare=lambda p: p.config(rope_theta="big"))
case("sliding window", "sliding-window attention", "sliding-window attention | ['sliding_attention'] | expected full attention", prepare=lambda p: p.config(layer_types=["full_attention"] * 2 + ["sliding_attention"]))
case("dtype", "weights of an unknown dtype", "dtype 'fp12' | expected that of the weights", prepare=lambda p: p.config(dtype="fp12"))
case("quantized", "quantized weights", "'gptq' | expected unquantized | original", prepare=lambda p: p.config(quantization_config={"quant_method": "gptq"}))
case("fp8 per tensor", "fp8 weights with one scale per tensor", "'fp8' weights, weight_block_size=None | fp8 with weight_block_size=[ROWS, COLUMNS] | original", prepare=lambda p: p.config(quantization_config={"quant_method": "fp8", "weight_block_size": None}))
case("another width", "a wider teacher", "width 32 | width 48 | the same width | fit a bridge", "teacher.hf_path=" + str(GOLDEN / "wide_teacher"), command="verify")
case("norms apart", "a last layer compared with an inner one", "student layer 3 with teacher layer 2 | after the final norm | final_norm=false", "loss.representation.layers=[2,3]", "loss.representation.layer_map={2: 1, 3: 2}")
case("another vocabulary", "a teacher with other ids", "vocabularies of 61 and 60 ids | set teacher.reads=text | choose a teacher with the student's tokenizer", command="verify", prepare=lambda p: [p.config("teacher", vocab_size=60), (p.teacher / "tokenizer.json").unlink(), (p.teacher / "tokenizer.model").unlink()])
case("layer out of range", "a layer that the model does not have", "layers=[1, 9] | expected distinct layers in 1..3 | [9]", "loss.representation.layers=[1,9]")
case("layer zero", "layer 0", "layers=[0] | in 1..3", "loss.representation.layers=[0]")
case("layer twice", "a layer named twice", "layers=[2, 2] | expected distinct layers", "loss.representation.layers=[2,2]")

case = Category("Weights")
CATEGORIES.append(case)


def shard(place: Place, **weight_map: str) -> None:
    """An index of the one file, which gets a shard's name."""
    file = place.student / "model-00001.safetensors"
    (place.student / "model.safetensors").rename(file)
    names = dict.fromkeys(load_file(file), file.name)
    index = {"weight_map": {**names, **weight_map}}
    (place.student / "model.safetensors.index.json").write_text(json.dumps(index))




LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935\nsize 9844123\n"


def adapter(place: Place) -> None:
    """What peft saves while it trains: no model's file, and an optimizer's."""
    (place.student / "config.json").unlink()
    (place.student / "model.safetensors").rename(place.student / "adapter_model.safetensors")
    (place.student / "adapter_config.json").write_text('{"base_model_name_or_path": "some/base"}')
    (place.student / "optimizer.pt").touch()


def stale_shards(place: Place) -> None:
    """The teacher in one file, saved where it was in shards before."""
    shutil.copyfile(place.teacher / "model.safetensors", place.teacher / "model-00001.safetensors")
    index = {"weight_map": dict.fromkeys(load_file(place.teacher / "model.safetensors"), "model-00001.safetensors")}
    (place.teacher / "model.safetensors.index.json").write_text(json.dumps(index))


def pickled(place: Place) -> None:
    (place.student / "model.safetensors").rename(place.student / "pytorch_model.bin")


Q = "model.layers.0.self_attn.q_proj.weight"


def in_fp8(place: Place, scales: tuple[int, int] | None) -> None:
    """Q in fp8 with scales of this shape, or without."""
    import torch

    place.config(quantization_config={"quant_method": "fp8", "weight_block_size": [16, 16]})
    place.tensors(lambda t: t.update({Q: t[Q].to(torch.float8_e4m3fn), **({} if scales is None else {f"{Q}_scale_inv": torch.ones(scales)})}))


case("file for a model", "a file where a model's directory belongs", "prompts.jsonl: is a file | expected the directory of a Hugging Face model | name the directory", "student.hf_path={root}/prompts.jsonl")
case("fp8 without scales", "a quantised tensor without its scales", "q_proj.weight' holds F8_E4M3 numbers without scales | or scales in the files | copy all files", prepare=lambda p: in_fp8(p, None))
case("other scales", "scales of another shape", "q_proj.weight' has fp8 numbers F8_E4M3 [64, 32] and scales F32 [3, 2] | expected numbers F8_E4M3 and scales F32/BF16/F16/F8_E8M0 [4, 2] | copy", prepare=lambda p: in_fp8(p, (3, 2)))
case("pipe for weights", "a named pipe where weights belong", "model.safetensors: is a named pipe (FIFO); expected a file of weights: copy it", prepare=lambda p: pipe(p.student / "model.safetensors"))
case("pipe beside weights", "a named pipe beside the teacher's weights", "more.safetensors: is a named pipe (FIFO); expected a file of weights: copy it", prepare=lambda p: pipe(p.teacher / "more.safetensors"))
case("missing shard", "a shard that the index names and that is not there", "model-00002.safetensors: no such file | 1 of 2 shards | copy it", prepare=lambda p: shard(p, a="model-00002.safetensors"))
case("shard elsewhere", "an index that names a file elsewhere", "names '../teacher/model.safetensors' | expected a file in | correct the index", prepare=lambda p: shard(p, a="../teacher/model.safetensors"))
case("broken index", "an index that is not JSON", "index.json: not valid JSON | expected an object with weight_map: copy it", prepare=lambda p: [shard(p), (p.student / "model.safetensors.index.json").write_text("{")], library=r"JSON \((.*?)\);")
case("truncated", "a truncated shard", "model.safetensors: not a readable safetensors file | copy it from its source again", prepare=lambda p: cut(p.student / "model.safetensors", 5000), library=r"file \((.*?)\);")
case("corrupt", "a shard of other bytes", "teacher/model.safetensors: not a readable safetensors file | copy it", prepare=lambda p: (p.teacher / "model.safetensors").write_bytes(b"\x00" * 4000), library=r"file \((.*?)\);")
case("empty shard", "an empty shard", "model.safetensors: not a readable safetensors file | copy it", prepare=lambda p: cut(p.student / "model.safetensors", 0), library=r"file \((.*?)\);")
case("no weights", "a model without weights", "no *.safetensors files | expected a Hugging Face model saved as safetensors | copy its weights", prepare=lambda p: (p.student / "model.safetensors").unlink())
case("adapter", "the directory of an adapter in place of a model's", "student: holds an adapter (peft, LoRA) of 'some/base' | expected the weights of a model | merge_and_unload()", prepare=adapter)
case("pointer for weights", "a repository whose weights Git LFS has not fetched", "model.safetensors: a pointer of Git LFS | expected the file itself | git lfs pull", prepare=lambda p: (p.student / "model.safetensors").write_text(LFS_POINTER))
case("pointer for config.json", "the same of config.json", "teacher/config.json: a pointer of Git LFS | git lfs pull", command="verify", prepare=lambda p: (p.teacher / "config.json").write_text(LFS_POINTER))
case("file that vLLM would not read", "one file of weights beside an index that names others, for servers", "teacher: vLLM loads model-00001.safetensors there, and transformers model.safetensors | expected a directory of which both load the same | model.safetensors.index.json among them", *SERVED, prepare=stale_shards)
case("pickled weights", "weights as a pickle only", "pytorch_model.bin is a pickle, which is never opened | save_pretrained", prepare=pickled)
case("missing tensor", "a tensor that is missing", "'model.norm.weight' is missing | expected every weight | is a shard missing", prepare=lambda p: p.tensors(lambda t: t.pop("model.norm.weight")))
case("missing expert", "an expert that is missing", "'model.layers.1.mlp.experts.2.down_proj.weight' is missing | expected every weight | is a shard missing", prepare=lambda p: give_experts(p, "model.layers.1.mlp.experts.2.down_proj.weight"))
case("another shape", "a shape unlike the config's", "q_proj.weight is (16, 32) | config.json asks for (64, 32) | different models", prepare=lambda p: p.tensors(lambda t: t.update({Q: t[Q][:16].clone()})))
case("config of another size", "a config of another width", "is (48, 32), but config.json asks for (40, 32)", prepare=lambda p: p.config(intermediate_size=40))
case("more layers than the config", "weights of more layers than the config says", "tensor(s) that a qwen3 model with this config.json does not have | belong together", prepare=lambda p: [p.config(role, num_hidden_layers=2, layer_types=None) for role in ("student", "teacher")])

case = Category("Tokenizers")
CATEGORIES.append(case)
case("no tokenizer", "a model without a tokenizer", "no tokenizer.json | copy the tokenizer files", prepare=lambda p: [(p.student / n).unlink() for n in ("tokenizer.json", "tokenizer.model")])
case("broken tokenizer", "a tokenizer that can't be read", "student: the tokenizer can't be read | copy the tokenizer files", prepare=lambda p: (p.student / "tokenizer.json").write_text("{"), library=r"read \((.*?)\); copy")
case("pointer for a tokenizer", "a repository whose tokenizer Git LFS has not fetched", "student/tokenizer.json: a pointer of Git LFS | git lfs pull", prepare=lambda p: (p.student / "tokenizer.json").write_text(LFS_POINTER))
case("code in the tokenizer", "a tokenizer that brings its own code", "auto_map={{'AutoTokenizer': ['t.T', None]}} | never run | remove auto_map", prepare=lambda p: p.edit(p.student / "tokenizer_config.json", auto_map={"AutoTokenizer": ["t.T", None]}))
case("no chat template", "no chat template", "no chat template, expected one | add chat_template.jinja", prepare=lambda p: p.edit(p.student / "tokenizer_config.json", chat_template=None))
case("template that refuses", "a conversation that the template refuses", "prompt 0 | refuses the conversation with roles ['user'] | no users | change the roles", prepare=lambda p: p.edit(p.student / "tokenizer_config.json", chat_template="{{ raise_exception('no users') }}"))
case("another tokenizer", "a teacher with another tokenizer", "differ: the teacher would read other text | expected the same tokenizer | set teacher.reads=text", prepare=lambda p: p.edit(p.teacher / "tokenizer_config.json", extra_special_tokens=None, added_tokens_decoder={}) or other_tokenizer(p))
case("ids beyond the model's vocabulary", "a tokenizer with more ids than the model", "ids up to 24 | vocab_size=20 | expected ids 0..19", prepare=lambda p: p.config(vocab_size=20))
case("stop id beyond the vocabulary", "a stop id that the model does not know", "stop ids [99] | expected ids 0..60", prepare=lambda p: p.edit(p.student / "generation_config.json", eos_token_id=99))
case("stop id without a token", "stop ids that no token has", "no token has one of the stop ids [50], so that no response would end | expected one of the ids that have a token, 0..24: correct eos_token_id", prepare=lambda p: p.edit(p.student / "generation_config.json", eos_token_id=50))
case("malformed stop id", "a stop id that is text", "eos_token_id is '<eos>' | expected a token id", prepare=lambda p: p.edit(p.student / "generation_config.json", eos_token_id="<eos>"))
case("broken generation_config.json", "a generation_config.json that is not JSON", "generation_config.json: not valid JSON | copy the file", prepare=lambda p: (p.student / "generation_config.json").write_text("{"), library=r"JSON \((.*?)\);")


def other_tokenizer(place: Place) -> None:
    file = place.teacher / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["b"], vocabulary["o"] = vocabulary["o"], vocabulary["b"]
    file.write_text(json.dumps(content))


def teacher_tokenizer(**changes: Any) -> Callable[[Place], Any]:
    """Changes keys of the teacher's tokenizer.json; the models' type is one whose file is taken as it is."""

    def change(place: Place) -> None:
        place.config("teacher", model_type="llama")
        place.edit(place.teacher / "tokenizer.json", **changes)

    return change


case("distributions across vocabularies", "an output-space term where the teacher reads text", "loss.output.kind=top_k with teacher.reads=text | no counterpart | match hidden states", TEXT, "loss.output.kind=top_k")
case("sampling a teacher of other tokens", "evaluating the teacher in the student's engine where it reads text", "evaluation.teacher=true with teacher.reads=text | expected false", TEXT, "evaluation.teacher=true")
case("comparing distributions of other tokens", "output-space metrics where the teacher reads text", "logging.output_metrics_every=5 with teacher.reads=text | no two distributions | expected 0", TEXT, "logging.output_metrics_every=5")
case("coverage above 1", "a coverage that is no share", "alignment.min_coverage=2.0 | expected a number in [0, 1]", TEXT, "alignment.min_coverage=2.0")
case("tokenizer without offsets", "a teacher's tokenizer whose tokens have no bytes", "can't be derived, so there are no byte offsets | expected byte-level or sentencepiece tokens | another tokenizer", TEXT, prepare=teacher_tokenizer(decoder=None))
case("template that changes text", "a teacher's chat template that changes a response", "the chat template changes the text of a response | expected it there unchanged | as it stands", TEXT, prepare=lambda p: p.edit(p.teacher / "tokenizer_config.json", chat_template="{% for m in messages %}{{ m['content'] | upper }}{% endfor %}"), library=r"response: (.*?); expected")
case("bridge of another tokenizer", "a bridge that was made with another tokenizer", "the bridge was made with another tokenizer than that of {root}/teacher | fit a bridge with these models", TEXT, "bridge.path={root}/bridge", prepare=lambda p: bridge_of_tokenizers(p, None, "0" * 64))


def bridge_of_tokenizers(place: Place, student: str | None, teacher: str | None) -> None:
    """A bridge between the two models of the golden cases, by fingerprints of their tokenizers."""
    import torch

    from nemo_oprd.bridge.artifact import save_bridge
    from nemo_oprd.bridge.covariance import LayerPair
    from nemo_oprd.bridge.maps import Bridge, LayerBridge, ModelIdentity

    width, layers = 32, 3
    models = [ModelIdentity("qwen3", layers, width, tokenizer=hash_) for hash_ in (student, teacher)]
    pairs = {
        LayerPair(layer, layer): LayerBridge(torch.zeros(width), torch.eye(2, width), torch.eye(2, width))
        for layer in range(1, layers + 1)
    }
    save_bridge(Bridge(2, pairs, *models), place.root / "bridge")

CAPTURE = ("--model", "{root}/teacher", "--prompts", "{root}/prompts.jsonl", "--output", "{root}/states")
case("states that are not there", "`capture` of a layer that the model does not have", "--layers 2,99: '99' | expected all, or different ones of 1 to | correct it", command="capture", arguments=(*CAPTURE, "--layers", "2,99"))
case("capture on several ranks", "`capture` by torchrun", "capture on 2 ranks | expected one | leave out torchrun", command="capture", arguments=CAPTURE, ranks=2)
case("capture into a model", "`capture` into a model's directory", "{root}/teacher exists and is not captured states | choose another", command="capture", arguments=(*CAPTURE[:-1], "{root}/teacher"))
case("sequences that are too long to capture", "`capture` of prompts that are longer than the model's positions", "prompts.jsonl: prompt 1 has | but the model has | shorten or remove it", command="capture", arguments=CAPTURE, prepare=lambda p: p.write(p.prompts, [{"prompt": "1" * 999}]))
case("capture without vLLM", "`capture` with an interpreter that is not there", "--python {root}/nowhere: {root}/nowhere does not exist | expected the Python interpreter of an environment with vLLM | or set --python", command="capture", arguments=(*CAPTURE, "--python", "{root}/nowhere"))
case("capture of a RoPE type", "`capture` of a model whose rotation depends on the length", "capture with RoPE of type dynamic | choose another model", command="capture", arguments=CAPTURE, prepare=lambda p: p.config("teacher", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}))
