"""The start of a teacher's vLLM server, and the check that a running one computes the states of the right model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nemo_oprd.config.schema import Config
from nemo_oprd.models import ModelSpec
from nemo_oprd.vllm.launch import DTYPES, common_arguments

KEY = "teacher.vllm"
# sequences that a server computes at a time; vLLM queues further requests
MAX_SEQUENCES = 64
# tokens of a forward pass; vLLM computes longer prompts in chunks
BATCHED_TOKENS = 2048
# a server's environment: hooks need vLLM's first runner, and the token that a request samples takes one more position
VARIABLES = {"VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}


def teacher_arguments(config: Config, directory: Path, longest: int, *, cuda: bool) -> list[str]:
    """Returns the arguments of a server, without its address.

    Args:
        directory: holds the model, including its weights.
        longest: the most tokens of a sequence.
    """
    settings = config.teacher.vllm
    return [
        *common_arguments(
            config,
            directory,
            "teacher",
            longest=longest + 1,
            sequences=MAX_SEQUENCES,
            tensor=settings.tensor,
            memory=config.teacher_server_share if cuda else None,
        ),
        *("--load-format", "auto", "--max-num-batched-tokens", str(BATCHED_TOKENS)),
        # a compiled model calls no hooks, and vLLM does not compute a cached prefix again
        *("--enforce-eager", "--no-enable-prefix-caching"),
        *("--worker-extension-cls", "nemo_oprd_teacher.TeacherExtension"),
        *map(str, settings.flags),
    ]


def check_description(
    found: dict[str, Any],
    server: str,
    config: Config,
    spec: ModelSpec,
    weights: str,
    *,
    tensor: int | None,
    longest: int,
) -> None:
    """Raises ValueError unless a server, by its workers' description, computes this teacher in a supported way.

    Args:
        weights: the digest of the teacher's files on this machine.
        tensor: the number of its workers; None: its owner chooses.
        longest: the most tokens of a sequence that it has to compute.
    """
    wanted = {
        "num_hidden_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "vocab_size": spec.vocab_size,
        "dtype": DTYPES[config.precision],
        "eager": True,
        "runner_v1": True,
        "prefix_caching": False,
        "tensor": found.get("tensor") if tensor is None else tensor,
        "pipeline": 1,
        "lora": False,
        "speculative": False,
        "kv_cache_dtype": "auto",
        "load_format": "auto",
        "float32_matmul": "highest",
        "weights": weights,
    }
    differing = [f"{key}={found.get(key)} instead of {want}" for key, want in wanted.items() if found.get(key) != want]
    # vLLM has several ways to compute quantized weights, and names each after the method
    method = (spec.hf_config.get("quantization_config") or {}).get("quant_method")
    quantization = found.get("quantization")
    if quantization != method and (method is None or method not in str(quantization)):
        differing.append(f"quantization={quantization} instead of {method}, of the model's files")
    if differing:
        raise ValueError(
            f"{server} computes another model or in another way: {'; '.join(differing)}; expected the teacher, eager "
            f"and without caches: leave out of {KEY}.flags what changes that, and let `nemo-oprd serve --role teacher` "
            "start a server that others run with this run's configuration"
        )
    if found["longest"] < longest:
        raise ValueError(
            f"{server} computes sequences of at most {found['longest']} tokens; expected {longest}, the longest of "
            "this run or of the canary: start it with this run's data.max_prompt_tokens and rollout.max_new_tokens"
        )
