"""Models of the shape of R1-Distill-Qwen-1.5B with random weights, which are drawn where the model is.

Time and memory do not depend on the values of weights, so no file of weights is written or read.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_parts.measure import is_cuda, place
from nemo_oprd.config.loading import load_config
from nemo_oprd.config.schema import Config
from nemo_oprd.data.token_ids import TokenIds
from nemo_oprd.distillation.distiller import Distiller
from nemo_oprd.megatron.model import layer_backend
from nemo_oprd.megatron.weights.megatron_checkpoint import checkpoint_parameters
from nemo_oprd.run.models import RunFiles, build_distiller, make_plan
from nemo_oprd.run.resolve import resolve
from nemo_oprd.tools.plan.estimate import Estimate, Lengths, estimate
from nemo_oprd.tools.plan.gpus import ASSUMED, GPUS, Cluster
from tests.support.random_pair import Shape, save_random_rollouts

# config.json of DeepSeek-R1-Distill-Qwen-1.5B; its head is not tied
R1_DISTILL_1P5B = Shape(28, 1536, 8960, 12, 2, 151936, 131072)
TINY = Shape(2, 64, 128, 4, 2, 512, 4096)
# the last tokens that the paper supervises
LAST_K, TINY_LAST_K = 2000, 20
STD = 0.02


@dataclass(frozen=True)
class Batch:
    """Two recorded responses of one length, each in a microbatch of its own."""

    shape: Shape
    prompt: int
    response: int
    last_k: int
    responses: int = 2

    @property
    def tokens(self) -> int:
        """Tokens of a sequence."""
        return self.prompt + self.response


# the paper's lengths
REAL = Batch(R1_DISTILL_1P5B, 1024, 16384, LAST_K)
QUICK = Batch(TINY, 8, 100, TINY_LAST_K)


def save_configs(folder: Path, shape: Shape) -> None:
    """Writes config.json of student and teacher, without weights."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(
        "qwen2", **asdict(shape), tie_word_embeddings=False, rope_parameters={"rope_type": "default", "rope_theta": 1e4}
    )
    config.dtype, config.architectures = torch.bfloat16, ["Qwen2ForCausalLM"]
    for role in ("student", "teacher"):
        config.save_pretrained(folder / role)


def configure(folder: Path, batch: Batch, *more: str) -> Config:
    """The configuration of an update on recorded responses; `plan` takes it, too."""
    return load_config(
        "verify",
        [
            *(f"{role}.hf_path={folder / role}" for role in ("student", "teacher")),
            f"rollout.replay={folder / 'rollouts.jsonl'}",
            f"rollout.max_new_tokens={batch.response}",
            f"train.prompts_per_step={batch.responses}",
            f"loss.representation.k={batch.last_k}",
            f"train.tokens_per_microbatch={batch.tokens}",
            "train.clip_grad=1000.0",
            "precision=bf16",
            "output=unused",
            *more,
        ],
    )


def prepare(folder: Path, batch: Batch) -> None:
    """Writes what `configure` names."""
    save_configs(folder, batch.shape)
    recorded = folder / "rollouts.jsonl"
    save_random_rollouts(recorded, batch.shape, prompt=batch.prompt, responses=[batch.response] * batch.responses)


def planned(config: Config, batch: Batch) -> Estimate:
    """What `plan` says of the update on one GPU, with the layers that are built here.

    The memory of a rank that samples nothing does not depend on the kind of GPU.
    """
    engine = layer_backend(torch.bfloat16) == "transformer_engine"
    cluster = Cluster(1, GPUS["h100"], layers="transformer_engine" if engine else "local")
    return estimate(resolve(config, 1), cluster, Lengths(batch.prompt, batch.response))


def that_fits(folder: Path, batch: Batch, overrides: list[str], layers: int | None) -> Batch:
    """The batch, with shorter responses or fewer layers if `plan` says that it does not fit on this GPU.

    Args:
        layers: the depth that the user asked for; None: all, or as many as fit.
    """
    if layers is not None:
        batch = replace(batch, shape=replace(batch.shape, num_hidden_layers=layers))
    if not is_cuda():
        return batch
    free = torch.cuda.mem_get_info()[0] - ASSUMED.reserve
    depths = [layers] if layers is not None else sorted({28, 24, 20, 16, 12, 8, 4, 2, 1}, reverse=True)
    tried = batch
    for depth in (depth for depth in depths if depth <= batch.shape.num_hidden_layers):
        for response in (batch.response, batch.response // 2, batch.response // 4):
            shape = replace(batch.shape, num_hidden_layers=depth)
            tried = replace(batch, shape=shape, response=response, last_k=min(batch.last_k, response))
            prepare(folder, tried)  # a plan counts the recorded responses
            if planned(configure(folder, tried, *overrides), tried).kinds[0].memory.peak <= free:
                return tried
    return tried


def reader(spec: Any, seed: int) -> Callable[[str], torch.Tensor]:
    """Random weights by Hugging Face name, drawn on the device; norms are 1. A rehearsal draws nothing."""
    shapes: dict[str, tuple[int, ...]] = {}
    for parameter in checkpoint_parameters(spec):
        whole = torch.empty(parameter.shape, device="meta")
        parts = parameter.mapping.form.split_to_hf(whole, spec)
        shapes |= {name: tuple(part.shape) for name, part in zip(parameter.mapping.hf, parts, strict=True)}
    generators: list[torch.Generator] = []

    def read(name: str) -> torch.Tensor:
        tensor = torch.empty(shapes[name], dtype=torch.bfloat16, device=place())
        if torch._subclasses.fake_tensor.FakeTensor in type(tensor).__mro__:
            return tensor
        if not generators:
            generators.append(torch.Generator(place()).manual_seed(seed))
        return tensor.fill_(1.0) if "norm" in name else tensor.normal_(0.0, STD, generator=generators[0])

    return read


def build(config: Config) -> Distiller:
    """Student and teacher with random weights, on this GPU."""
    run = resolve(config, 1)
    files = RunFiles(config, run.models)
    for seed, model in enumerate((files.student, *files.teachers)):
        model.__dict__["read"] = reader(model.spec, seed)
    # the two have the same ids and no tokenizer
    ids = TokenIds(run.models.student.spec.vocab_size)
    files.__dict__ |= {"sampled_ids": ids, "shared_ids": lambda number: ids}
    return build_distiller(make_plan(run, files))


def read_shape(folder: Path) -> Shape:
    """The shape in a model's config.json."""
    config = json.loads((folder / "config.json").read_text())
    return Shape(**{name: config[name] for name in Shape.__dataclass_fields__})
