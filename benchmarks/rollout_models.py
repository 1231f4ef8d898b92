"""The models of `benchmarks.rollout`, and what samples from them."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from nemo_oprd.batch.layout import Layout
from nemo_oprd.config.loading import load_config
from nemo_oprd.config.schema import Config
from nemo_oprd.megatron.parallel import init_distributed
from nemo_oprd.megatron.weights.hf import HFCheckpoint
from nemo_oprd.models import read_model_spec
from nemo_oprd.rollout.engine import Request, SamplingParams
from nemo_oprd.run.engine_kinds import make_engine
from nemo_oprd.vllm.engine import VllmEngine
from nemo_oprd.vllm.server_lifecycle import LocalServer
from nemo_oprd.vllm.worker import nemo_oprd_guard as guard
from tests.support.random_pair import Shape, save_random_model

ENGINES = ("megatron", "vllm", "transformers")


@dataclass(frozen=True)
class Model:
    """A shape to measure; with `responses` of 0 for weight updates only."""

    shape: Shape
    model_type: str = "qwen2"
    tied: bool = True
    prompt: int = 16
    responses: int = 0
    tokens: int = 0


MODELS = {
    # the quickstart's pair
    "toy": Model(Shape(4, 128, 352, 4, 2, 24, 128), tied=False, responses=64, tokens=40),
    # SmolLM2-135M
    "smollm2": Model(Shape(30, 576, 1536, 9, 3, 49152, 8192), "llama", prompt=32, responses=16, tokens=64),
    # Qwen2-0.5B, for shorter texts
    "qwen2-0.5b": Model(Shape(24, 896, 4864, 14, 2, 151936, 2048)),
}


def directory_of(name: str, scratch: Path, smollm2: Path | None) -> Path:
    """Where the model is: the given SmolLM2, or a random one, which is written if it is not there yet."""
    if name == "smollm2" and smollm2 is not None:
        return smollm2
    path, model = scratch / name, MODELS[name]
    if not path.exists():
        save_random_model(
            path, model.shape, seed=0, std=0.02, dtype=torch.float32, model_type=model.model_type, tied=model.tied
        )
    return path


def configure(source: Path, scratch: Path, *settings: str) -> Config:
    """A configuration for engines that sample from the model at `source`."""
    paths = [f"{role}.hf_path={source}" for role in ("student", "teacher")]
    return load_config("verify", [*paths, "precision=fp32", f"output={scratch / 'output'}", *settings])


class Sampler(Protocol):
    """What is measured: samples as many tokens as asked for from each prompt, at temperature 1 from all ids."""

    def sample(self, prompts: list[list[int]], tokens: int, seed: int) -> list[list[int]]:
        """The ids of one response per prompt."""
        ...

    def cpu_seconds(self) -> float:
        """CPU time of all processes that take part, since their start."""
        ...

    def close(self) -> None:
        """Ends what was started."""
        ...


class Engine:
    """A rollout engine of this project, without ids that end a response."""

    def __init__(self, name: str, source: Path, scratch: Path) -> None:
        init_distributed()
        config = configure(source, scratch, f"rollout.engine={name}")
        self._engine = make_engine(config, read_model_spec(source), source, Layout(), eos_ids=())
        self._engine.load(HFCheckpoint(source).__getitem__, str(source))

    def sample(self, prompts: list[list[int]], tokens: int, seed: int) -> list[list[int]]:
        """See `Sampler`."""
        sampling = SamplingParams(1.0, 1.0, tokens, (seed,))
        return [r.response_ids.tolist() for r in self._engine.generate([Request(ids) for ids in prompts], sampling)]

    def cpu_seconds(self) -> float:
        """See `Sampler`."""
        return cpu_seconds(self._engine)

    def close(self) -> None:
        """See `Sampler`."""
        self._engine.close()


class Transformers:
    """`generate` of transformers, with its key-value cache and its default attention."""

    def __init__(self, source: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
        self._model.generation_config.eos_token_id = None

    def sample(self, prompts: list[list[int]], tokens: int, seed: int) -> list[list[int]]:
        """See `Sampler`; the prompts must be equally long."""
        ids_BS = torch.tensor(prompts)
        torch.manual_seed(seed)
        with torch.inference_mode():
            found = self._model.generate(
                ids_BS,
                attention_mask=torch.ones_like(ids_BS),
                max_new_tokens=tokens,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                pad_token_id=0,
            )
        return found[:, ids_BS.shape[1] :].tolist()

    def cpu_seconds(self) -> float:
        """See `Sampler`."""
        return time.process_time()

    def close(self) -> None:
        """See `Sampler`."""


def open_sampler(engine: str, source: Path, scratch: Path) -> Sampler:
    """One of `ENGINES`."""
    return Transformers(source) if engine == "transformers" else Engine(engine, source, scratch)


def cpu_seconds(engine: object) -> float:
    """CPU time of this process, and of every process of the servers that an engine started on this machine."""
    total = time.process_time()
    for server in engine._mine.servers.values() if isinstance(engine, VllmEngine) else ():
        if isinstance(server, LocalServer) and server._process is not None:
            for process in guard.group_members(server._process.pid):
                fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
                total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total
