"""The table of bad inputs: what is wrong, how to make it, what the message must say. `docs/errors.md` is made of it.

    python tests/functional/bad_inputs.py --write

A case runs the command line in this process. Nothing expensive may have started when it ends: joining the process group
and building a model fail loudly here. `ranks` is what the job claims to have.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import os
import pickle
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from safetensors.torch import load_file, save_file

from nemo_oprd.cli import main
from nemo_oprd.config.loading import default_config_dir

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
DOCUMENT = ROOT / "docs" / "errors.md"
ROLLOUT = {"prompt_ids": [5, 6, 7], "response_ids": [8, 9]}
PROMPT = {"prompt": "1+1=", "answer": "2"}
STARTED = "something expensive had started"


class Place:
    """A directory of good inputs, made once; a case gets a copy in `root` and spoils it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.student, self.teacher = root / "student", root / "teacher"
        self.converted, self.output = root / "student-megatron", root / "run"
        self.prompts, self.rollouts = root / "prompts.jsonl", root / "rollouts.jsonl"

    def make(self) -> None:
        """Writes the good inputs."""
        from nemo_oprd.toy.task import write_tokenizer
        from nemo_oprd.weights.convert import hf_to_megatron

        for role in ("student", "teacher"):
            shutil.copytree(GOLDEN / role, self.root / role)
            write_tokenizer(self.root / role)
        hf_to_megatron(self.student, self.converted, progress=False)
        self.write(self.prompts, [PROMPT] * 3)
        self.write(self.rollouts, [ROLLOUT] * 2)

    @staticmethod
    def write(file: Path, rows: list[Any]) -> None:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def config(self, role: str = "student", **changes: Any) -> None:
        """Changes keys of a model's config.json; None removes one."""
        self.edit(self.root / role / "config.json", **changes)

    @staticmethod
    def edit(file: Path, **changes: Any) -> None:
        content = {**json.loads(file.read_text()), **changes}
        file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))

    def tensors(self, change: Callable[[dict], Any], role: str = "student") -> None:
        file = self.root / role / "model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file)

    def seal(self, directory: Path | None = None) -> None:
        """Writes state.json for the files that a checkpoint has now."""
        directory = directory or self.output / "checkpoints" / "iter_0000002"
        files = {str(f.relative_to(directory)): f.stat().st_size for f in directory.rglob("*") if f.is_file()}
        files.pop("state.json", None)
        state = {
            "step": 2,
            "seed": 0,
            "precision": "fp32",
            "train.distributed_optimizer": True,
            "deepest trained layer": 3,
            "final norm is trained": True,
            "head is trained": False,
            "files": files,
        }
        (directory / "state.json").write_text(json.dumps(state))

    def checkpoint(self, tracker: str = "2\n") -> Path:
        """A run directory with a checkpoint after two steps, made of the converted student."""
        directory = self.output / "checkpoints" / "iter_0000002"
        shutil.copytree(self.converted, directory)
        self.seal(directory)
        (directory.parent / "latest_checkpointed_iteration.txt").write_text(tracker)
        return directory


@dataclass(frozen=True)
class Case:
    """One bad input.

    Attributes:
        what: in words, for the document.
        says: texts that the message must hold: the value, the expectation, the fix.
        overrides: what is given on the command line besides good inputs; `{root}` is the case's directory.
        prepare: spoils the inputs.
        wrap: a context in which the command runs, for what can't be made of files.
        library: the part of the message that a library words, shortened in the document.
    """

    name: str
    category: str
    what: str
    says: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    prepare: Callable[[Place], Any] = lambda place: None
    command: str = "train"
    ranks: int = 1
    wrap: Callable[[], contextlib.AbstractContextManager] = field(default=contextlib.nullcontext)
    library: str = ""
    arguments: tuple[str, ...] = ()


CASES: list[Case] = []


def case(name: str, what: str, says: str, *overrides: str, **settings: Any) -> None:
    """Adds a case to the current category; `says` holds texts separated by " | "."""
    CASES.append(Case(name, _category, what, tuple(says.split(" | ")), overrides, **settings))


# One case per line, however long: a table.
# fmt: off
_category = "Configuration"
case("unknown key", "a key that does not exist", "'train.lrr' | did you mean 'train.lr'", "train.lrr=1")
case("unknown group", "a group that does not exist", "'studnet.hf_path' | did you mean 'student.hf_path'", "studnet.hf_path=x")
case("unlike any key", "a key like no other", "'zzz' | expected one of output, precision", "zzz=1")
case("no value", "an override without a value", "'train.lr' | expected | KEY=VALUE", "train.lr", library=r"verify: (.*); expected")
case("no such configuration", "a configuration that does not exist", "quikstart | expected one of | did you mean 'quickstart'", arguments=("--config-name", "quikstart"))
case("no such directory", "a configuration directory that does not exist", "{root}/nowhere | no such directory | expected one with verify.yaml", arguments=("--config-dir", "{root}/nowhere"))
case(
    "broken YAML", "a YAML file with a mistake", "configuration broken | expected YAML | correct it",
    prepare=lambda p: (p.root / "broken.yaml").write_text("train: {steps: 3\nseed: 1\n"),
    arguments=("--config-dir", "{root}", "--config-name", "broken"), library=r"broken: (.*); expected",
)
case(
    "unknown key in a file", "an unknown key in a YAML file", "'train.stepz' | did you mean 'train.steps'",
    prepare=lambda p: (p.root / "other.yaml").write_text("train: {stepz: 3}\n"),
    arguments=("--config-dir", "{root}", "--config-name", "other"),
)
case("text for a number", "text where a number belongs", "train.lr='fast' | expected a number", "train.lr=fast")
case("fraction of a step", "a fraction where an integer belongs", "train.steps=1.5 | expected an integer", "train.steps=1.5")
case("value for a group", "a value where a group belongs", "train=3 | expected a group of keys | train.steps", "train=3")
case("not an option", "a value that is no option", "train.schedule='linear' | expected constant | cosine", "train.schedule=linear")
case("precision", "a precision that is not there", "precision='fp16' | fp32", "precision=fp16")
case("no steps", "a run of no steps", "train.steps=0 | expected more than 0 | choose", "train.steps=0")
case("negative rate", "a negative learning rate", "train.lr=-1 | expected more than 0", "train.lr=-1")
case("rate that is no number", "a learning rate of NaN", "train.lr=nan | expected a finite number | choose", "train.lr=nan")
case("infinite rate", "an infinite learning rate", "train.lr=inf | expected a finite number", "train.lr=inf")
case("lowest above highest rate", "a final learning rate above the first", "train.min_lr=1.0 is above train.lr=1e-05 | lower it", "train.min_lr=1")
case("betas", "an Adam beta of more than 1", "[0.9, 1.5] | expected two numbers in [0, 1)", "train.betas=[0.9,1.5]")
case("top-p", "a sampling mass of 0", "rollout.top_p=0.0 | expected a number in (0, 1]", "rollout.top_p=0")
case("negative temperature", "a negative temperature", "rollout.temperature=-1.0 | expected 0 or more", "rollout.temperature=-1")
case("warm-up", "a warm-up longer than the run", "train.warmup_fraction=2.0 | expected a number in [0, 1]", "train.warmup_fraction=2")
case("zero response tokens", "evaluation with no response tokens", "evaluation.max_new_tokens=0 | expected more than 0", "evaluation.max_new_tokens=0")
case("two sources", "a model from two places", "student.checkpoint=x | expected exactly one of the two | set the other to null", "student.checkpoint=x")
case("no source", "a model from nowhere", "teacher.hf_path=None | expected exactly one of the two", "teacher.hf_path=null")
case("evaluation of nothing", "evaluation without a set", "evaluation.every=5 needs | data.validation", "evaluation.every=5")
case("ranks of a colocated teacher", "ranks for a teacher that shares them", "teacher.ranks=2 is for | set it to null", "teacher.ranks=2")
case("no teacher ranks", "a dedicated teacher without ranks", "teacher.ranks=0 | expected at least 1", "teacher.ranks=0", "teacher.placement=dedicated")
case("recompute settings without recompute", "layers to recompute where nothing is recomputed", "student.recompute_num_layers=2 | student.recompute=full, but it is none | leave them out", "student.recompute_num_layers=2")
case("recompute too much", "more layers to recompute than there are", "student.recompute_num_layers=9 | at most the model's 3 layers | choose 1 to 3", "student.recompute=full", "student.recompute_num_layers=9")
case("not there yet", "a setting of a later version", "rollout.engine=vllm | supports only rollout.engine=megatron", "rollout.engine=vllm")
case("weight without a kind", "a weight for an output-space term that there is none of", "loss.output.weight=1.0 with loss.output.kind=none | choose a kind, or weight 0", "loss.output.weight=1")
case("negative weight", "a negative weight of a term", "loss.representation.weight=-1.0 | expected 0 or more", "loss.representation.weight=-1")
case("negative weight in a stage", "a schedule with a negative weight", "loss.output.weight[1] has a weight below 0 | choose another", "loss.output.kind=full_vocab", "loss.output.weight=[{until:2,weight:0},{weight:-1}]")
case("empty schedule", "a schedule of no stages", "loss.output.weight=[] | expected a number, or at least one stage", "loss.output.weight=[]")
case("endless stage", "a schedule whose first stage has no end", "loss.representation.weight[0] has no end | give until", "loss.representation.weight=[{weight:1},{weight:2}]")
case("stages out of order", "a schedule whose stages go backwards", "loss.representation.weight[1].until=1 | expected more than 2", "loss.representation.weight=[{until:2,weight:1},{until:1,weight:2}]")
case("misspelt stage", "a schedule with an unknown key", "unknown key 'loss.representation.weight[0].untl'", "loss.representation.weight=[{untl:2,weight:1}]")
case("stage without a weight", "a schedule with a stage that has no weight", "loss.representation.weight[0]={{'until': 2}} | expected {{weight, until, start}} | give weight", "loss.representation.weight=[{until:2}]")
case("schedule that trains nothing", "schedules that leave an update without a loss", "are both 0 at update 2 | change their schedules", "loss.representation.weight=[{until:1,weight:1},{weight:0}]")
case("negative layer weight", "a layer's weight of 0", "loss.representation.layer_weights holds 0.0 | leave a layer", "loss.representation.layer_weights=[1,0,1]")
case("map of other layers", "a layer map that leaves a supervised layer out", "layer_map names the student layers [1, 3], expected the supervised ones, [1, 2, 3]", "loss.representation.layer_map={1:1,3:3}")
case("map beyond the teacher", "a layer map to a layer that the teacher hasn't", "layer_map names teacher layer 4, expected 1 to 3", "loss.representation.layer_map={1:1,2:2,3:4}")
case("too few layer weights", "fewer weights than layers", "layer_weights=[1.0, 2.0]: expected 3 weights | got 2", "loss.representation.layer_weights=[1,2]")
case("weight of another layer", "a weight for a layer that is not supervised", "a weight for layer 2 | supervised layers [1, 3]", "loss.representation.layers=[1,3]", "loss.representation.layer_weights={2:1}")
case("decay of the average", "a moving average that never moves", "loss.representation.adaptive.decay=1.0 | expected a number in [0, 1) | choose", "loss.representation.adaptive.decay=1")
case("adapting nothing", "adaptive weights of no layers", "adaptive.layers=true and positions=false with loss.representation.layers=none | expected false | choose layers", "loss.representation.adaptive.layers=true", "loss.representation.layers=none", "loss.output.kind=full_vocab", "loss.output.weight=1")
case("rows to watch", "metrics of no rows", "logging.output_metrics_rows=0 | expected more than 0", "logging.output_metrics_rows=0")
case("negative interval", "metrics in every minus second update", "logging.output_metrics_every=-2 | expected 0 or more", "logging.output_metrics_every=-2")
case("clip of one update", "a clipped ratio where there is only one update", "loss.output.clip=0.2 with loss.output.kind=sampled_token and train.updates_per_rollout=1 | set it to null", "loss.output.kind=sampled_token", "loss.output.clip=0.2")
case("clip range", "a clipping range that leaves nothing", "loss.output.clip=(0.2, 0.0) | expected a number in (0, 1], or [low, high]", "loss.output.kind=sampled_token", "loss.output.clip=[0.2,0]", "train.updates_per_rollout=2")
case("sampled token, other temperature", "the sampled token's loss at another temperature than was sampled at", "rollout.temperature=0.7 | but loss.output.temperature=1.0: expected one temperature and top_p=1 | set them", "rollout.replay=null", "loss.output.kind=sampled_token", "rollout.temperature=0.7")
case("sampled token, top-p", "the sampled token's loss where some tokens are never sampled", "rollout.top_p=0.9 | expected one temperature and top_p=1 | take another kind", "rollout.replay=null", "loss.output.kind=sampled_token", "rollout.top_p=0.9")
case("nothing to learn", "weights of 0 for both terms", "loss.representation.weight and loss.output.weight are both 0 | expected something to learn", "loss.representation.weight=0")
case("no layers, no weight", "a term without a weight, and no other", "loss.representation.weight and loss.output.weight are both 0 | expected something to learn", "loss.representation.layers=none", "loss.output.kind=full_vocab", "loss.output.weight=0")
case("no updates", "no update per rollout", "train.updates_per_rollout=0 | expected more than 0", "train.updates_per_rollout=0")
case("top-1", "a renormalised top-1", "k=1 | identically zero | kind=sampled_token", "loss.output.kind=top_k", "loss.output.k=1", "loss.output.weight=1")
case("unlikely best", "a best checkpoint by something that is not measured", "train.keep_best=val/x/avg@4 | expected null, or one of", "train.keep_best=val/x/avg@4")
case("no bridge there", "a bridge that does not exist", "nowhere/bridge.safetensors: no such file | expected a bridge made by nemo-oprd fit-bridge", "bridge.path={root}/nowhere")
case("full width that is frozen", "a full-width bridge that is not trained", "bridge.path=full_width with bridge.train=false | expected bridge.train=true | set it", "bridge.path=full_width")
case("projectors without a loss", "projectors to train and a schedule that leaves them without a loss", "bridge.train=true with a loss.representation.weight of 0 in some updates | change the schedule", "bridge.train=true", "bridge.path=full_width", "loss.output.kind=full_vocab", "loss.output.weight=1", "loss.representation.weight=[{until:1,weight:1},{weight:0}]")
case("no bridge to train", "a bridge to train where there is none", "bridge.train=true with bridge.path=none | expected a bridge to train | set bridge.path", "bridge.train=true")
case("a bridge without a loss", "a trained bridge that no loss reaches", "bridge.train=true with loss.representation.weight=0.0 | no loss reaches | expected a weight above 0", "bridge.train=true", "bridge.path=full_width", "loss.representation.weight=0")
case("trained bridge and bf16", "a trained bridge with Megatron's plain bf16 optimizer", "precision=bf16 and train.distributed_optimizer=false | expected the distributed optimizer | set train.distributed_optimizer=true", "bridge.train=true", "bridge.path=full_width", "precision=bf16", "train.distributed_optimizer=false")
case("deletion", "a deletion", "~train.lr | expected key=value | give one value", "~train.lr")
case("sweep", "a sweep over values", "train.lr=1,2 | expected key=value | not supported", "train.lr=1,2")
case("verify without rollouts", "`verify` without rollouts", "rollout.replay | set rollout.replay=FILE", command="verify", arguments=("no replay",))

_category = "Layout"
case("world too small", "TP 4 on 2 ranks", "student.parallel | tensor=4 | does not divide the 2 rank(s) | start a multiple of 4", "student.parallel.tensor=4", ranks=2)
case("world that does not fit", "TP 2 on 3 ranks", "tensor=2 | does not divide the 3 rank(s)", "student.parallel.tensor=2", ranks=3)
case("teacher takes all", "a dedicated teacher on all ranks", "2 teacher rank(s) leaves none of the 2 rank(s) | start more ranks", "teacher.placement=dedicated", "teacher.ranks=2", ranks=2)
case("heads", "TP that does not divide the heads", "student.parallel.tensor=3 does not divide the model's 4 attention heads | choose a divisor", "student.parallel.tensor=3", ranks=3)
case("key/value heads", "TP that does not divide the key/value heads", "teacher.parallel.tensor=4 does not divide the model's 2 key/value heads | choose a divisor of 2", "teacher.parallel.tensor=4", ranks=4)
case("feed-forward width", "TP that does not divide the feed-forward width", "tensor=2 does not divide the model's 47 feed-forward size | choose a divisor", "student.parallel.tensor=2", ranks=2, prepare=lambda p: p.config(intermediate_size=47))
case("rollout ranks", "sampling TP that does not divide the ranks", "rollout.tensor=2 does not divide the student's 3 rank(s) | choose a divisor", "rollout.tensor=2", ranks=3)
case("evaluation ranks", "the same in `evaluate`", "rollout.tensor=2 does not divide | 1 rank(s)", "rollout.tensor=2", command="evaluate")
case("too deep", "more stages than layers", "pipeline=4 is deeper than the model's 3 layers | choose at most 3", "student.parallel.pipeline=4", ranks=4)
case("first stage", "a first stage that leaves nothing", "3 layers can't be split over pipeline=2 | first_stage_layers=4 | choose", "student.parallel.pipeline=2", "student.parallel.first_stage_layers=4", ranks=2)
case("first and last stage", "first and last stage that don't add up", "first_stage_layers=1, last_stage_layers=1 | choose", "student.parallel.pipeline=2", "student.parallel.first_stage_layers=1", "student.parallel.last_stage_layers=1", ranks=2)
case("virtual stages", "virtual stages that don't divide", "virtual_pipeline=2 does not divide the [2, 1] layers | choose", "student.parallel.pipeline=2", "student.parallel.virtual_pipeline=2", ranks=2)
case("virtual without stages", "virtual stages without stages", "student.parallel.virtual_pipeline=2 needs student.parallel.pipeline > 1", "student.parallel.virtual_pipeline=2")
case("size of zero", "a parallel size of 0", "student.parallel.tensor=0 | expected at least 1", "student.parallel.tensor=0")

_category = "Models"
case("no model", "a directory that does not exist", "{root}/nowhere | no such directory | download it first", "student.hf_path={root}/nowhere")
case("no config.json", "a directory without a model", "{root}: no config.json there | expected the directory of a Hugging Face model", "teacher.hf_path={root}", command="verify")
case("a checkpoint for a model", "a Megatron checkpoint as hf_path", "student-megatron: no config.json there | checkpoint=", "student.hf_path={root}/student-megatron")
case("a model for a checkpoint", "a Hugging Face model as checkpoint", "teacher: no metadata.json | expected a torch_dist checkpoint | hf_path=", "teacher.checkpoint={root}/teacher")
case("config.json cut off", "a config.json that is not JSON", "student/config.json: not valid JSON | copy the file", prepare=lambda p: (p.student / "config.json").write_text('{"model_type": '), library=r"JSON \((.*?)\);")
case("config.json a list", "a config.json that is a list", "holds a list, expected an object | copy the file", prepare=lambda p: (p.student / "config.json").write_text("[]"))
case("unknown model type", "a model of another family", "model_type 'gpt2' is not supported | expected one of ['llama', 'phi3', 'qwen2', 'qwen3'] | CONTRIBUTING", prepare=lambda p: p.config(model_type="gpt2"))
case("no model type", "a config.json without model_type", "model_type None is not supported | expected one of", prepare=lambda p: p.config(model_type=None))
case("a key is missing", "a config.json that lacks a key", "'hidden_size' is missing | expected the complete config.json", prepare=lambda p: p.config(hidden_size=None))
case("text for a size", "a size that is text", "num_hidden_layers='3' | expected a positive integer", prepare=lambda p: p.config(num_hidden_layers="3"))
case("heads and groups", "heads that don't share key/value heads evenly", "4 attention heads are not a multiple of 3 | correct them", prepare=lambda p: p.config(num_key_value_heads=3))
case("activation", "another activation", "hidden_act='gelu' is not supported | expected 'silu'", prepare=lambda p: p.config(hidden_act="gelu"))
case("scaled RoPE", "scaled positions", "RoPE type 'yarn' | expected 'default' | choose a model without it", prepare=lambda p: p.config(rope_scaling={"rope_type": "yarn", "factor": 4.0}))
case("RoPE base", "a position base that is no number", "rope_theta='big' | expected a positive number", prepare=lambda p: p.config(rope_theta="big"))
case("sliding window", "sliding-window attention", "sliding-window attention | ['sliding_attention'] | expected full attention", prepare=lambda p: p.config(layer_types=["full_attention"] * 2 + ["sliding_attention"]))
case("dtype", "weights of an unknown dtype", "dtype 'fp12' | expected that of the weights", prepare=lambda p: p.config(dtype="fp12"))
case("quantized", "quantized weights", "'gptq' | expected unquantized | original", prepare=lambda p: p.config(quantization_config={"quant_method": "gptq"}))
case("code in the model", "a model that brings its own code", "auto_map={{'AutoModel': 'm.M'}} | never run | remove auto_map", prepare=lambda p: p.config(auto_map={"AutoModel": "m.M"}))
case("another width", "a wider teacher", "width 32 | width 48 | same depth and width", "teacher.hf_path=" + str(GOLDEN / "wide_teacher"), command="verify")
case("another depth", "a deeper teacher", "student (3 layers | teacher (4 layers | choose a teacher of the student's shape", prepare=lambda p: p.config("teacher", num_hidden_layers=4, layer_types=None))
case("another vocabulary", "a teacher with other ids", "vocabularies of 61 and 60 ids | set teacher.reads=text | choose a teacher with the student's tokenizer", command="verify", prepare=lambda p: [p.config("teacher", vocab_size=60), (p.teacher / "tokenizer.json").unlink(), (p.teacher / "tokenizer.model").unlink()])
case("layer out of range", "a layer that the model does not have", "layers=[1, 9] | expected distinct layers in 1..3 | [9]", "loss.representation.layers=[1,9]")
case("layer zero", "layer 0", "layers=[0] | in 1..3", "loss.representation.layers=[0]")
case("layer twice", "a layer named twice", "layers=[2, 2] | expected distinct layers", "loss.representation.layers=[2,2]")

_category = "Weights"


def shard(place: Place, **weight_map: str) -> None:
    """An index beside the one file."""
    names = dict.fromkeys(load_file(place.student / "model.safetensors"), "model.safetensors")
    index = {"weight_map": {**names, **weight_map}}
    (place.student / "model.safetensors.index.json").write_text(json.dumps(index))


def cut(file: Path, keep: int) -> None:
    file.write_bytes(file.read_bytes()[:keep])


def pickled(place: Place) -> None:
    (place.student / "model.safetensors").rename(place.student / "pytorch_model.bin")


Q = "model.layers.0.self_attn.q_proj.weight"
case("missing shard", "a shard that the index names and that is not there", "model-00002.safetensors: no such file | 1 of 2 shards | copy it", prepare=lambda p: shard(p, a="model-00002.safetensors"))
case("shard elsewhere", "an index that names a file elsewhere", "names '../teacher/model.safetensors' | expected a file in | correct the index", prepare=lambda p: shard(p, a="../teacher/model.safetensors"))
case("broken index", "an index that is not JSON", "index.json: not valid JSON | expected an object with weight_map: copy it", prepare=lambda p: (p.student / "model.safetensors.index.json").write_text("{"), library=r"JSON \((.*?)\);")
case("truncated", "a truncated shard", "model.safetensors: not a readable safetensors file | copy it from its source again", prepare=lambda p: cut(p.student / "model.safetensors", 5000), library=r"file \((.*?)\);")
case("corrupt", "a shard of other bytes", "teacher/model.safetensors: not a readable safetensors file | copy it", prepare=lambda p: (p.teacher / "model.safetensors").write_bytes(b"\x00" * 4000), library=r"file \((.*?)\);")
case("empty shard", "an empty shard", "model.safetensors: not a readable safetensors file | copy it", prepare=lambda p: cut(p.student / "model.safetensors", 0), library=r"file \((.*?)\);")
case("no weights", "a model without weights", "no *.safetensors files | expected a Hugging Face model saved as safetensors | copy its weights", prepare=lambda p: (p.student / "model.safetensors").unlink())
case("pickled weights", "weights as a pickle only", "pytorch_model.bin is a pickle, which is never opened | save_pretrained", prepare=pickled)
case("missing tensor", "a tensor that is missing", "'model.norm.weight' is missing | expected every weight | is a shard missing", prepare=lambda p: p.tensors(lambda t: t.pop("model.norm.weight")))
case("another shape", "a shape unlike the config's", "q_proj.weight is (16, 32) | config.json asks for (64, 32) | different models", prepare=lambda p: p.tensors(lambda t: t.update({Q: t[Q][:16].clone()})))
case("config of another size", "a config of another width", "is (48, 32), but config.json asks for (40, 32)", prepare=lambda p: p.config(intermediate_size=40))
case("more layers than the config", "weights of more layers than the config says", "tensor(s) that a qwen3 model with this config.json does not have | belong together", prepare=lambda p: [p.config(role, num_hidden_layers=2, layer_types=None) for role in ("student", "teacher")])

_category = "Tokenizers"
case("no tokenizer", "a model without a tokenizer", "no tokenizer.json | copy the tokenizer files", prepare=lambda p: [(p.student / n).unlink() for n in ("tokenizer.json", "tokenizer.model")])
case("broken tokenizer", "a tokenizer that can't be read", "student: the tokenizer can't be read | copy the tokenizer files", prepare=lambda p: (p.student / "tokenizer.json").write_text("{"), library=r"read \((.*?)\); copy")
case("code in the tokenizer", "a tokenizer that brings its own code", "auto_map={{'AutoTokenizer': ['t.T', None]}} | never run | remove auto_map", prepare=lambda p: p.edit(p.student / "tokenizer_config.json", auto_map={"AutoTokenizer": ["t.T", None]}))
case("no chat template", "no chat template", "no chat template, expected one | add chat_template.jinja", prepare=lambda p: p.edit(p.student / "tokenizer_config.json", chat_template=None))
case("template that refuses", "a conversation that the template refuses", "prompt 0 | refuses the conversation with roles ['user'] | no users | change the roles", prepare=lambda p: p.edit(p.student / "tokenizer_config.json", chat_template="{{ raise_exception('no users') }}"))
case("another tokenizer", "a teacher with another tokenizer", "differ: the teacher would read other text | expected the same tokenizer | set teacher.reads=text", prepare=lambda p: p.edit(p.teacher / "tokenizer_config.json", extra_special_tokens=None, added_tokens_decoder={}) or other_tokenizer(p))
case("ids beyond the model's vocabulary", "a tokenizer with more ids than the model", "ids up to 24 | vocab_size=20 | expected ids 0..19", prepare=lambda p: p.config(vocab_size=20))
case("stop id beyond the vocabulary", "a stop id that the model does not know", "stop ids [99] | expected ids 0..60", prepare=lambda p: p.edit(p.student / "generation_config.json", eos_token_id=99))
case("malformed stop id", "a stop id that is text", "eos_token_id is '<eos>' | expected a token id", prepare=lambda p: p.edit(p.student / "generation_config.json", eos_token_id="<eos>"))
case("broken generation_config.json", "a generation_config.json that is not JSON", "generation_config.json: not valid JSON | copy the file", prepare=lambda p: (p.student / "generation_config.json").write_text("{"), library=r"JSON \((.*?)\);")


def other_tokenizer(place: Place) -> None:
    file = place.teacher / "tokenizer.json"
    content = json.loads(file.read_text())
    content["added_tokens"].append({**content["added_tokens"][0], "id": 60, "content": "<more>"})
    file.write_text(json.dumps(content))


def teacher_tokenizer(**changes: Any) -> Callable[[Place], Any]:
    """Changes keys of the teacher's tokenizer.json; the models' type is one whose file is taken as it is."""

    def change(place: Place) -> None:
        place.config("teacher", model_type="llama")
        place.edit(place.teacher / "tokenizer.json", **changes)

    return change


TEXT = "teacher.reads=text"
case("distributions across vocabularies", "an output-space term where the teacher reads text", "loss.output.kind=top_k with teacher.reads=text | no counterpart | match hidden states", TEXT, "loss.output.kind=top_k")
case("sampling a teacher of other tokens", "evaluating the teacher in the student's engine where it reads text", "evaluation.teacher=true with teacher.reads=text | expected false", TEXT, "evaluation.teacher=true")
case("comparing distributions of other tokens", "output-space metrics where the teacher reads text", "logging.output_metrics_every=5 with teacher.reads=text | no two distributions | expected 0", TEXT, "logging.output_metrics_every=5")
case("coverage above 1", "a coverage that is no share", "alignment.min_coverage=2.0 | expected a share in [0, 1]", TEXT, "alignment.min_coverage=2.0")
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


_category = "Prompts"


def prompt_file(text: str | bytes) -> Callable[[Place], Any]:
    return lambda place: place.prompts.write_bytes(text if isinstance(text, bytes) else text.encode())


def parquet(place: Place, content: dict[str, list] | bytes) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = place.root / "prompts.parquet"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        pq.write_table(pa.table(content), file)


PARQUET = "data.train={root}/prompts.parquet"
case("no prompts set", "no prompt file at all", "data.train=null | expected a file of prompts | set data.train=FILE", "data.train=null")
case("no prompt file", "a prompt file that does not exist", "nowhere.jsonl: there is no such file | give the path", "data.train={root}/nowhere.jsonl")
case("ending", "a prompt file of another kind", "ending '.csv' | expected .parquet or .jsonl | convert", "data.train={root}/prompts.csv", prepare=lambda p: (p.root / "prompts.csv").write_text("a"))
case("empty prompt file", "an empty prompt file", "prompts.jsonl: holds no prompts | expected at least one row", prepare=prompt_file(""))
case("malformed JSONL", "a line that is not JSON", "prompts.jsonl, line 2: not valid JSON | write one UTF-8 JSON object per line", prepare=prompt_file('{"prompt": "1"}\n{"prompt": \n'), library=r"JSON \((.*?)\);")
case("not UTF-8", "a line that is not UTF-8", "prompts.jsonl, line 1: not valid JSON | UTF-8", prepare=prompt_file(b'{"prompt": "\xff"}\n'), library=r"JSON \((.*?)\);")
case("no prompt field", "a row without a prompt", "prompts.jsonl, line 1: none of the fields prompt, problem, question | write rows", prepare=prompt_file('{"text": "1"}\n'))
case("not a conversation", "a conversation without contents", "line 1: prompt, message 0 | expected {{role, content}}", prepare=prompt_file('{"prompt": [{"role": "user"}]}\n'))
case("blank prompt", "a blank prompt", "line 1: prompt, message 0 | not blank", prepare=prompt_file('{"prompt": " "}\n'))
case("corrupt parquet", "a parquet file of other bytes", "prompts.parquet: not a readable parquet file | download or write it again", PARQUET, prepare=lambda p: parquet(p, b"PAR1 and no more"), library=r"file \((.*?)\); download")
case("parquet without a column", "a parquet file without prompts", "prompts.parquet, row 0: none of the fields | write rows", PARQUET, prepare=lambda p: parquet(p, {"text": ["1"]}))
case("prompts too long", "prompts that are all too long", "data.max_prompt_tokens=1 | every prompt is longer | raise it", "data.max_prompt_tokens=1")
case("no room for a response", "a prompt as long as the model's positions", "prompt 0 has | 64 positions | data.max_prompt_tokens", prepare=prompt_file(json.dumps({"prompt": "1" * 80}) + "\n"))
case("no validation file", "a validation file that does not exist", "nowhere.jsonl: there is no such file", "data.validation.held={root}/nowhere.jsonl", command="evaluate")
case("no validation set", "`evaluate` without a set", "data.validation is empty | name at least one", command="evaluate", arguments=("no validation",))
case("problem without answer", "a problem without an answer", "problem 1 has no answer | add an answer", command="evaluate", prepare=lambda p: p.write(p.prompts, [PROMPT, {"prompt": "1"}]))
case("long problem", "a problem as long as the model's positions", "problem 0 leaves no room | 64 positions | remove it", command="evaluate", prepare=lambda p: p.write(p.prompts, [{"prompt": "1" * 80, "answer": "1"}]))

_category = "Recorded rollouts"


def rollouts(name: str, what: str, says: str, *rows: Any, overrides: tuple[str, ...] = (), **settings: Any) -> None:
    """A case of `verify` on a file of these rows; text is written as it is."""
    lines = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    case(name, what, says, *overrides, command="verify", prepare=lambda place: place.rollouts.write_text(lines), **settings)


case("no rollout file", "a rollout file that does not exist", "rollout.replay={root}/nowhere: no such file | expected a JSONL", "rollout.replay={root}/nowhere", command="verify")
rollouts("empty rollout file", "an empty rollout file", "the file holds no rollouts | expected one JSON object per line")
rollouts("malformed rollout", "a line that is not JSON", "rollouts.jsonl:2: not valid JSON | write one", ROLLOUT, "{", library=r"JSON \((.*?)\);")
rollouts("rollout a list", "a line that is no object", "rollouts.jsonl:1: found [1] | expected a JSON object", [1])
rollouts("no ids", "a rollout without ids", "rollouts.jsonl:1: response_ids=None | expected a list of integers", {"prompt_ids": [1]})
rollouts("ids as text", "ids that are text", "response_ids=['8', '9'] | expected a list of integers | not text", {**ROLLOUT, "response_ids": ["8", "9"]})
rollouts("id beyond the vocabulary", "an id beyond the vocabulary", "rollouts.jsonl:2: response_ids holds id 61 | 0..60 | another tokenizer", ROLLOUT, {**ROLLOUT, "response_ids": [61]})
rollouts("negative id", "a negative id", "prompt_ids holds id -1 | 0..60", {**ROLLOUT, "prompt_ids": [-1]})
rollouts("mask of another length", "a mask of another length", "response_mask has 1 entries for 2 response tokens | expected one 0 or 1", {**ROLLOUT, "response_mask": [1]})
rollouts("mask of other values", "a mask of other values", "response_mask=[1, 2] | expected a list of 0 and 1", {**ROLLOUT, "response_mask": [1, 2]})
rollouts("mask a number", "a mask that is no list", "response_mask=1 | expected a list of 0 and 1", {**ROLLOUT, "response_mask": 1})
rollouts("no tokens", "a rollout without tokens", "both empty | remove the line", {"prompt_ids": [], "response_ids": []})
rollouts("empty responses", "only empty responses", "none of the 2 responses has a supervised token | check response_ids", *[{**ROLLOUT, "response_ids": []}] * 2)
rollouts("longer than the model", "more tokens than the model has positions", "rollouts.jsonl:1: 70 tokens | 64 positions | remove the line", {"prompt_ids": [5] * 60, "response_ids": [6] * 10})
READ = {**ROLLOUT, "teacher_prompt_ids": [4], "teacher_response_ids": [5, 6, 7], "teacher_index": [0, 2]}
rollouts("nothing for the teacher to read", "rollouts without the teacher's ids where it reads text", "rollouts.jsonl:1: no teacher_prompt_ids | because of teacher.reads=text | rollout.save=true", ROLLOUT, overrides=(TEXT,))
rollouts("the teacher's own ids", "rollouts with the teacher's ids where it reads the student's", "rollouts.jsonl:1: teacher_prompt_ids is a sequence of the teacher's own | expected teacher.reads=text", READ)
rollouts("the teacher's id beyond the vocabulary", "an id beyond the teacher's vocabulary", "teacher_response_ids holds id 61 | 0..60", {**READ, "teacher_response_ids": [5, 6, 61]}, overrides=(TEXT,))
rollouts("partner beyond the teacher's response", "a partner beyond the teacher's response", "teacher_index holds 3, but the teacher's response has 3 tokens | expected -1 to 2", {**READ, "teacher_index": [0, 3]}, overrides=(TEXT,))
rollouts("partners of another length", "partners for other tokens than the response's", "teacher_index has 1 entries for 2 response tokens | expected one per response token", {**READ, "teacher_index": [0]}, overrides=(TEXT,))
rollouts("longer than the teacher", "more tokens than the teacher has positions", "70 tokens for the teacher, which has 64 positions | take the teacher that read it", {**READ, "teacher_prompt_ids": [5] * 67}, overrides=(TEXT,))

_category = "Several teachers, and the student as its own"


def teachers(name: str, what: str, says: str, *entries: str, overrides: tuple[str, ...] = (), **settings: Any) -> None:
    """A case with a list of teachers of the good model; `entries` are their other keys."""
    listed = ", ".join(f"{{hf_path: {{root}}/teacher, {entry}}}" for entry in entries)
    case(name, what, says, "teacher.hf_path=null", f"teachers=[{listed}]", *overrides, **settings)


OTHERS = "data_sources: null"
teachers("teacher and teachers", "a teacher beside several", "with a list of teachers | expected neither: set both to null", OTHERS, overrides=("teacher.hf_path={root}/teacher",))
teachers("teacher from nowhere", "one of several teachers from nowhere", "teachers[0].hf_path=None | expected exactly one of the two", "data_sources: [prompts], hf_path: null")
teachers("unknown key of a teacher", "a misspelt key of one of several teachers", "unknown key 'teachers[0].data_source' | did you mean", "data_source: [prompts]")
teachers("two teachers of one source", "two teachers of one data source", "teachers[0] and teachers[1] both have the data source 'prompts' | expected one teacher for each", "data_sources: [prompts], name: a", "data_sources: [prompts, b]")
teachers("two teachers of the rest", "two teachers of all other data sources", "teachers[0] and teachers[1] both have the data source null", OTHERS, OTHERS + ", name: b")
teachers("two teachers of one name", "two teachers of one name", "both called 'x' in metrics | set teachers[i].name", "data_sources: [prompts], name: x", OTHERS + ", name: x")
teachers("teacher of nothing", "a teacher without data sources", "teachers[0].data_sources=[] | expected names, or null", "data_sources: []")
teachers("weightless teacher", "a teacher of weight 0", "teachers[0].weight=0.0 | expected more than 0", OTHERS + ", weight: 0")
teachers("idle teacher", "a data source that no prompt has", "teachers[1].data_sources=['promts']: nothing in data.train={root}/prompts.jsonl is of 'promts' | expected some of ['prompts'] | correct the name", OTHERS, "data_sources: [promts]")
teachers("one source misspelt", "a misspelt data source beside a right one", "nothing in data.train={root}/prompts.jsonl is of 'promts' | correct the name", "data_sources: [prompts, promts]", OTHERS, prepare=lambda p: p.write(p.prompts, [PROMPT, {**PROMPT, "data_source": "b"}]))
teachers("bridge to be learned", "a bridge to learn for one of several teachers", "teachers[0].bridge=full_width | expected the directory of a fitted bridge | run fit-bridge", OTHERS + ", bridge: full_width")
teachers("prompts without a teacher", "prompts of a data source without a teacher", "data_source='prompts' has no teacher | expected one of ['maths'] | add it", "data_sources: [maths]")
teachers("rollouts without a teacher", "recorded rollouts without a data source", "rollouts.jsonl: data_source=None has no teacher | expected one of ['maths']", "data_sources: [maths]", command="verify")
teachers("one bridge for all", "one bridge for several teachers", "bridge.path={root}/bridge | with several teachers | set teachers[i].bridge", OTHERS, overrides=("bridge.path={root}/bridge",))
teachers("sampling several teachers", "evaluating several teachers in one run", "evaluation.teacher=true with several teachers | nemo-oprd evaluate", OTHERS, overrides=("evaluation.teacher=true",))
teachers("a bridge to several", "fitting one bridge to several teachers", "fit-bridge with 1 teachers | expected one | teacher.hf_path", OTHERS, command="fit-bridge")
teachers("several, and itself", "several teachers where the student is its own", "teacher.weights=ema with a list of teachers | expected own", OTHERS, overrides=("teacher.weights=ema", "teacher.prompt='{prompt}!'"))
case("teacher without a number", "a key of several teachers without a number", "teachers.weight: the configuration has 0 teachers | expected one of them", "teachers.weight=2")
case("no teacher number", "a key of a teacher that is not there", "teachers.3.hf_path: the configuration has 0 teachers | expected one of them | list them", "teachers.3.hf_path=x")
SELF = ("teacher.hf_path=null", "teacher.weights=student", "teacher.prompt='{prompt} {answer}'")
case("itself and a teacher", "a teacher's model where the student is its own", "with teacher.weights=student | expected neither", *SELF[1:])
case("itself without more to read", "the student as its own teacher with nothing more to read", "teacher.weights=student with teacher.prompt=null | compared with itself | set e.g. teacher.prompt=", *SELF[:2])
case("template without a prompt", "a teacher's prompt without the student's", "teacher.prompt='Answer: {answer}' | expected a text with {prompt} | put it in", "teacher.prompt='Answer: {answer}'")
case("decay of the teacher", "a teacher that would never follow the student", "teacher.ema_decay=1.0 | expected a number in [0, 1)", "teacher.ema_decay=1")
case("layout of itself", "a layout for a teacher that is the student", "with teacher.weights=student: such a teacher has the student's ranks and layout | remove them", *SELF, "teacher.parallel.tensor=2")
case("itself in other tokens", "the student as its own teacher in other tokens", "teacher.weights=student with teacher.reads=text | expected ids", *SELF, TEXT)
case("bridge to itself", "a bridge from the student to itself", "bridge.path=x with teacher.weights=student | expected none", *SELF, "bridge.path=x")
case("sampling itself", "evaluating the student as its own teacher", "evaluation.teacher=true with teacher.weights=student | expected false", *SELF, "evaluation.teacher=true")
case("itself, moving under an update", "several updates on targets of the current weights", "train.updates_per_rollout=2 with teacher.weights=ema | expected 1 | use initial weights", *SELF[::2], "teacher.weights=ema", "train.updates_per_rollout=2")
case("fitting a bridge to itself", "fitting a bridge where the student is its own teacher", "fit-bridge with teacher.weights=student | expected one", *SELF, command="fit-bridge")
case("no answer to tell", "a prompt without the answer that the teacher is told", "prompt 1: no answer, but teacher.prompt tells the teacher {{answer}} | add it, leave the prompt out", *SELF, prepare=lambda p: p.write(p.prompts, [PROMPT, {"prompt": "1+2="}]))
case("no hint to tell", "a blank hint where the teacher is told one", "prompt 0: no hint, but teacher.prompt tells the teacher {{hint}} | add it, leave the prompt out", *SELF[:2], "teacher.prompt='{prompt} {hint}'", prepare=lambda p: p.write(p.prompts, [{**PROMPT, "hint": " "}]))
case("told too much", "a teacher's prompt that fills its positions", "the teacher reads 68 tokens for the prompt '1+1=' | its 64 positions | shorten teacher.prompt or the hint", *SELF[:2], "teacher.prompt='{prompt}" + "1" * 64 + "'")
case("hint a number", "a hint that is no text", "line 1: hint is 3, expected text", prepare=lambda p: p.write(p.prompts, [{**PROMPT, "hint": 3}]))
case("no prompt files", "an empty list of prompt files", "data.train=[] | expected a file of prompts, or several | name one", "data.train=[]")
rollouts("no prompt of the teacher's", "rollouts without the teacher's prompt where it has one", "rollouts.jsonl:1: no teacher_prompt_ids | because of teacher.prompt | rollout.save=true", ROLLOUT, overrides=SELF)


_category = "Output"


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """Temporary files go to the device that is always full."""
    with mock.patch("tempfile.TemporaryFile", return_value=open("/dev/full", "r+b", buffering=0)):
        yield


@contextlib.contextmanager
def no_permission() -> Iterator[None]:
    """Root may write everywhere, so permissions alone would not show anything."""

    def refuse(dir: Path, **_: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(dir))

    with mock.patch("tempfile.TemporaryFile", refuse):
        yield


def earlier_result(place: Place) -> None:
    place.output.mkdir()
    (place.output / "precious").write_text("kept")


case("output a file", "an output that is a file", "output={root}/prompts.jsonl | is a file, expected a directory | choose another output", "output={root}/prompts.jsonl")
case("output below a file", "an output below a file", "prompts.jsonl is a file, expected a directory", "output={root}/prompts.jsonl/run", command="verify")
case("no output", "an empty output", "output='' | expected a directory | name one", "output=''")
case("unwritable", "an output that may not be written", "output={root}/run | Permission denied | change its permissions", wrap=no_permission)
case("full disk", "a disk that is full", "output={root}/run | No space left on device | free some space", wrap=full_disk, command="evaluate")
case("output of something else", "`verify` into a directory of something else", "output={root}/run exists and is not a verify result | choose another", prepare=earlier_result, command="verify")
case("output over a source", "an export that would replace its source", "student.hf_path={root}/run/hf | choose another output", "student.hf_path={root}/run/hf", prepare=lambda p: shutil.copytree(p.student, p.output / "hf"))

_category = "Checkpoints"


class Malicious:
    """Unpickling this would write a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple:
        return (Path.write_text, (self.file, "run"))


def malicious_index(place: Place) -> None:
    (place.checkpoint() / ".metadata").write_bytes(pickle.dumps(Malicious(place.root / "pwned")))
    place.seal()


def malicious_common(place: Place) -> None:
    import torch

    torch.save(Malicious(place.root / "pwned"), place.checkpoint() / "common.pt")
    place.seal()


def outside_index(place: Place) -> None:
    """An index whose chunks lie outside the checkpoint."""
    file = place.checkpoint() / ".metadata"
    content = pickle.loads(file.read_bytes())
    info = next(iter(content.storage_data.values()))
    info.relative_path = "../../../rollouts.jsonl"
    file.write_bytes(pickle.dumps(content))
    place.seal()


MEGATRON = "student.checkpoint={root}/student-megatron"
case("no checkpoint", "a checkpoint that does not exist", "nowhere: no such directory | expected a torch_dist checkpoint", "student.checkpoint={root}/nowhere")
case("directory of checkpoints", "a directory of checkpoints", "checkpoints: no metadata.json | did you mean {root}/run/checkpoints/iter_0000002", "student.checkpoint={root}/run/checkpoints", "output={root}/other", prepare=lambda p: p.checkpoint())
case("checkpoint without a config", "a checkpoint without config.json", "no hf/config.json there | copy config.json", MEGATRON, prepare=lambda p: shutil.rmtree(p.converted / "hf"))
case("checkpoint format", "a checkpoint of another format", "format 'zarr' | expected 'torch_dist' | --ckpt-format torch_dist", MEGATRON, prepare=lambda p: p.edit(p.converted / "metadata.json", sharded_backend="zarr"))
case("checkpoint and config", "a checkpoint with another model's config", "but hf/config.json asks for | different models", MEGATRON, prepare=lambda p: [p.edit(f, intermediate_size=40) for f in (p.converted / "hf" / "config.json", p.teacher / "config.json")])
case("missing chunk file", "a checkpoint without one of its files", "__0_0.distcp can't be read (it is missing, expected | copy its *.distcp files again", MEGATRON, prepare=lambda p: (p.converted / "__0_0.distcp").unlink(), library=r"missing, expected (\d+)")
case("truncated chunk file", "a truncated checkpoint file", "__0_0.distcp can't be read (it has 5000 bytes, expected | copy", MEGATRON, prepare=lambda p: cut(p.converted / "__0_0.distcp", 5000), library=r"bytes, expected (\d+)")
case("tracker", "a tracker file that holds no number", "latest_checkpointed_iteration.txt holds 'garbage' | expected the number of a checkpoint | write the number of one of [2]", prepare=lambda p: p.checkpoint("garbage"))
case("half-written", "a checkpoint that is not complete", "iter_0000002 is incomplete (state.json is missing) | expected one to resume from | remove {root}/run/checkpoints to start over", prepare=lambda p: (p.checkpoint() / "state.json").unlink())
case("checkpoint of another model", "a run directory of another model", "iter_0000002 is a checkpoint of another model: ffn_size=40 there, and 48 | choose another output", prepare=lambda p: [p.edit(p.checkpoint() / "hf" / "config.json", intermediate_size=40), p.seal()])
case("damaged index", "a damaged index", ".metadata can't be read | expected the index | copy the checkpoint again", prepare=lambda p: [cut(p.checkpoint() / ".metadata", 100), p.seal()], library=r"read \((.*?)\); expected")
case("program in the index", "an index that would run a program", ".metadata can't be read (asks for pathlib.Path.write_text | expected the index of a torch_dist checkpoint and nothing else | a source that you trust", prepare=malicious_index)
case("program in common.pt", "a common.pt that would run a program", "common.pt can't be read | expected plain values and tensors | copy", prepare=malicious_common, library=r"read \((.*?)\); expected")
case("index that points outside", "an index that points outside its checkpoint", "names the file '../../../rollouts.jsonl' | expected one inside | don't use it", prepare=outside_index)

_category = "Secrets"


@contextlib.contextmanager
def secret() -> Iterator[None]:
    with mock.patch.dict(os.environ, {"HF_TOKEN": SECRET}):
        yield


SECRET = "not-for-your-eyes"
case("key as a setting", "an API key as a setting", "unknown key 'logging.wandb_api_key' | expected no secrets | set the environment variable", f"logging.wandb_api_key={SECRET}")
case("secret from the environment", "a secret of the environment in a setting", "logging.wandb holds the value of the environment variable HF_TOKEN | expected no secrets | remove it", "logging.wandb=${oc.env:HF_TOKEN}", wrap=secret)
case("what looks like a key", "a W&B key where a project name belongs", "logging.wandb holds what looks like an access key | expected no secrets | remove it", "logging.wandb=" + "0123456789" * 4)

_category = "Reports and toys"
case("report of nothing", "`report` of a directory that is no run", "config.yaml: there is no such file | give the `output` directory", command="report", arguments=("{root}/nowhere",))
case("report of broken metrics", "`report` of malformed metrics", "metrics.jsonl, line 1: not valid JSON | remove the line", command="report", arguments=("{root}",), prepare=lambda p: [(p.root / "config.yaml").write_text("a: 1"), (p.root / "metrics.jsonl").write_text("{\n{}\n")], library=r"JSON \((.*?)\);")
case("toy over a file", "`toy` into a file", "prompts.jsonl | expected", command="toy", arguments=("--output", "{root}/prompts.jsonl"))


# fmt: on
def arguments_of(case: Case, place: Place) -> list[str]:
    """The command line of a case."""
    own = [argument.replace("{root}", str(place.root)) for argument in case.arguments]
    if case.command in ("report", "toy"):
        return [case.command, *own]
    settings = {
        "student.hf_path": place.student,
        "teacher.hf_path": place.teacher,
        "output": place.output,
        "train.steps": 2,
    }
    if case.command == "verify" and "no replay" not in own:
        settings["rollout.replay"] = place.rollouts
    if case.command == "train":
        settings["data.train"] = place.prompts
    if case.command == "evaluate" and "no validation" not in own:
        settings["data.validation.held"] = place.prompts
    changed = [override.replace("{root}", str(place.root)) for override in case.overrides]
    given = {override.split("=")[0] for override in changed}
    for role in ("student", "teacher"):
        if f"{role}.checkpoint" in given and case.name != "two sources":
            given.add(f"{role}.hf_path")
    good = [f"{key}={value}" for key, value in settings.items() if key not in given]
    options = [argument for argument in own if argument not in ("no replay", "no validation")]
    if "--config-name" not in options:
        options += ["--config-name", "verify"]
    return [case.command, *options, *good, *changed]


def contents(root: Path) -> dict[str, int]:
    """Every file and directory below `root`, and when it was written."""
    return {str(path.relative_to(root)): path.stat().st_mtime_ns for path in root.rglob("*")}


def composing_once() -> contextlib.AbstractContextManager:
    """Hydra takes half a second to compose what is the same in most cases."""
    import hydra

    compose = hydra.compose

    def cached(name: str, overrides: list[str]) -> Any:
        key = (name, *overrides)
        if key not in _composed:
            _composed[key] = compose(name, overrides=overrides)
        return copy.deepcopy(_composed[key])

    return mock.patch("hydra.compose", cached)


_composed: dict[tuple[str, ...], Any] = {}


def run(case: Case, place: Place) -> tuple[int | None, str, str]:
    """Runs a case in this process: exit status, stdout, stderr."""

    def started(*_: Any, **__: Any) -> None:
        raise AssertionError(STARTED)

    out, err = io.StringIO(), io.StringIO()
    status: Any = None
    expensive = [
        "nemo_oprd.setup.models.init_distributed",
        "nemo_oprd.commands.evaluate.init_distributed",
        "nemo_oprd.setup.models.build_chunks",
        "nemo_oprd.distillation.student.build_chunks",
        "nemo_oprd.rollout.megatron_engine.build_chunks",
    ]
    with contextlib.ExitStack() as stack:
        for target in expensive:
            stack.enter_context(mock.patch(target, started))
        stack.enter_context(mock.patch("torch.distributed.is_initialized", return_value=False))
        stack.enter_context(mock.patch.dict(os.environ, {"WORLD_SIZE": str(case.ranks), "RANK": "0"}))
        stack.enter_context(case.wrap())
        if not case.arguments:
            stack.enter_context(composing_once())
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        try:
            main(arguments_of(case, place))
        except SystemExit as stop:
            status = stop.code
    return status, out.getvalue(), err.getvalue()


def readable(case: Case, message: str, place: Place) -> str:
    """A message without this machine's paths and without the words of libraries, whose versions differ."""
    message = message.replace(str(place.root), "DIR").replace(str(GOLDEN), "tests/golden")
    message = message.replace(str(default_config_dir()), "conf")
    if case.library:
        found = re.search(case.library, message)
        assert found, (case.name, message)
        message = message[: found.start(1)] + "..." + message[found.end(1) :]
    return message


def document(messages: dict[str, str]) -> str:
    """docs/errors.md from the messages of all cases."""
    lines = [
        "# What is wrong, and what the program says",
        "",
        "Every line was produced by its case (`python tests/functional/bad_inputs.py --write`), and a test compares.",
        "One rank prints one line `error: ...` on stderr and the program ends with status 2, before a process group is",
        "joined or a model is built, and without making or changing the output directory. `DIR` is where the inputs",
        "lie; `...` are words of a library. `NEMO_OPRD_TRACEBACK=1` shows the traceback instead.",
    ]
    for category in dict.fromkeys(case.category for case in CASES):
        lines += ["", f"## {category}", "", "| input | message |", "|---|---|"]
        for case in CASES:
            if case.category == category:
                text = messages[case.name].replace("|", "\\|")
                code = f"`` {text} ``" if "`" in text else f"`{text}`"
                lines.append(f"| {case.what} | {code} |")
    return "\n".join(lines) + "\n"


def fresh(good: Place, root: Path) -> Place:
    """A copy of the good inputs."""
    shutil.copytree(good.root, root)
    return Place(root)


def main_write() -> None:
    """Runs all cases and writes the document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write docs/errors.md instead of printing it")
    options = parser.parse_args()
    messages = {}
    with tempfile.TemporaryDirectory() as directory:
        good = Place(Path(directory) / "good")
        good.root.mkdir()
        good.make()
        for number, each in enumerate(CASES):
            place = fresh(good, Path(directory) / str(number))
            each.prepare(place)
            status, _, err = run(each, place)
            assert status == 2, (each.name, status, err)
            messages[each.name] = readable(each, err.strip().removeprefix("error: "), place)
    text = document(messages)
    if options.write:
        DOCUMENT.write_text(text)
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    main_write()
