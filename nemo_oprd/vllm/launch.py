"""The start of a vLLM server, of a student or a teacher: interpreter, arguments, and the check that a server fits."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_oprd.config.schema import Config, ServerConfig
from nemo_oprd.models import ModelSpec
from nemo_oprd.models.complete_config import is_renamed, language_model_architecture
from nemo_oprd.models.quantization import KEY, known_quantization, with_modelopt_file
from nemo_oprd.models.rope import parse_ropes
from nemo_oprd.runtime.files import read_json

if TYPE_CHECKING:
    from nemo_oprd.data.token_ids import TokenIds

_OVERRIDES = "--hf-overrides"
# in the folder of the project, where scripts/setup_vllm.sh makes the environment
DEFAULT_PYTHON = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"
# head sizes of vLLM's attention on CPU; with another one a server passes health checks and dies at the first request
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
# prompt tokens that a server on CPU computes at a time, vLLM's own default
CPU_BATCHED_TOKENS = 4096
# values of `precision` -> vLLM's names
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
TEACHER_KEY = "teacher.vllm"
# sequences that a server computes at a time; vLLM queues further requests
TEACHER_SEQUENCES = 64
# tokens of a forward pass; vLLM computes longer prompts in chunks
TEACHER_BATCHED_TOKENS = 2048
# a server's environment: hooks need vLLM's first runner, and the token that a request samples takes one more position
TEACHER_VARIABLES = {"VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}


def find_python(settings: ServerConfig, key: str = "rollout.vllm") -> Path:
    """Finds the interpreter of vLLM's environment; ValueError if there is none. `key`: the group of the settings."""
    given = settings.python
    python = DEFAULT_PYTHON if given is None else Path(given)
    if not python.is_file():
        found = "is a directory" if python.is_dir() else "does not exist"
        raise ValueError(
            f"{key}.python={given}: {python} {found}; expected the Python interpreter of an environment with vLLM: run "
            f"`bash scripts/setup_vllm.sh`, or set {key}.python"
        )
    return python


def check_model(tensor: int, spec: ModelSpec) -> None:
    """Raises ValueError if servers of `tensor` workers (`rollout.vllm.tensor`) can't run the model."""
    spec.check_tensor_parallel(tensor, "rollout.vllm.tensor")
    if spec.experts is not None and spec.experts.ffn_size % tensor:
        raise ValueError(
            f"rollout.vllm.tensor={tensor} does not divide the experts' feed-forward size {spec.experts.ffn_size}, "
            f"which vLLM splits over its workers; choose a divisor of {spec.experts.ffn_size}"
        )
    rope = spec.rope
    if rope.kind == "longrope":
        raise ValueError(
            f"rollout.engine=vllm with RoPE of type longrope: vLLM rotates sequences of up to {rope.switch} tokens by "
            "the long factors, too, training by the short ones; expected another type: set rollout.engine=megatron"
        )
    if rope.kind == "yarn" and rope.reach is not None and spec.max_positions > rope.reach:
        raise ValueError(
            f"rollout.engine=vllm: max_position_embeddings={spec.max_positions} is more than factor times "
            f"original_max_position_embeddings={rope.reach:g}, where vLLM's YaRN ends; expected at most that: lower "
            "it in the model's config.json, or set rollout.engine=megatron"
        )


def check_head_size(spec: ModelSpec) -> None:
    """Raises ValueError if vLLM has no attention on CPU for the model's heads."""
    if spec.head_dim not in CPU_HEAD_SIZES:
        raise ValueError(
            f"rollout.engine=vllm without CUDA: the model's heads have size {spec.head_dim}, but vLLM's attention on "
            f"CPU knows {', '.join(map(str, CPU_HEAD_SIZES))} only; use rollout.engine=megatron or another model"
        )


def common_arguments(
    config: Config, directory: Path, role: str, *, longest: int, sequences: int, tensor: int, memory: float | None
) -> list[str]:
    """Returns the arguments that servers that sample and a teacher's servers have in common, without an address.

    Args:
        role: the served model's name.
        longest: the most tokens of a sequence.
        sequences: the most sequences at a time.
        tensor: tensor-parallel GPUs.
        memory: the fraction of a GPU's memory; None: without CUDA.
    """
    return [
        *("--model", str(directory), "--served-model-name", role, "--skip-tokenizer-init", "--tokens-only"),
        # no sampling parameters of a generation_config.json
        *("--generation-config", "vllm", "--dtype", DTYPES[config.precision]),
        *("--max-model-len", str(longest), "--max-num-seqs", str(sequences)),
        *("--tensor-parallel-size", str(tensor), "--seed", str(config.seed), "--disable-uvicorn-access-log"),
        *(["--gpu-memory-utilization", str(memory)] if memory is not None else []),
        *(["--distributed-executor-backend", "mp"] if tensor > 1 else []),
    ]


def student_arguments(config: Config, spec: ModelSpec, directory: Path, known: TokenIds, *, cuda: bool) -> list[str]:
    """Returns the arguments of a server that samples, without its address. Each response also has a seed of its own.

    Args:
        directory: where the model's config.json is; weights are not read from it.
        known: the ids that may be sampled.
    """
    rollout = config.rollout
    arguments = [
        *common_arguments(
            config,
            directory,
            "student",
            longest=spec.max_positions,
            sequences=rollout.max_batch,
            tensor=rollout.vllm.tensor,
            memory=rollout.vllm.memory_share if cuda else None,
        ),
        # no weights of a file: samples before the first update are noise, and cannot pass for the student's
        *("--load-format", "dummy", "--logprobs-mode", "processed_logprobs"),
        *("--worker-extension-cls", "nemo_oprd_worker.WorkerExtension"),
        *("--logits-processors", "nemo_oprd_worker:VocabularyMask"),
        *("--additional-config", json.dumps({"nemo_oprd_known_ids": known.limit, "nemo_oprd_gaps": known.gaps})),
        *("--weight-transfer-config", json.dumps({"backend": "nemo_oprd"})),
        *("--middleware", "nemo_oprd_answers.PackedAnswers"),
    ]
    if cuda:
        arguments += ["--enable-sleep-mode"] if rollout.vllm.placement == "colocated" else []
    else:
        arguments += ["--enforce-eager"]
        # on a CPU, a response with a seed of its own ends the engine if its prompt is computed in parts
        most = max(spec.max_positions, CPU_BATCHED_TOKENS)
        arguments += ["--no-enable-chunked-prefill", "--max-num-batched-tokens", str(most)]
    overrides = _config_overrides(directory)
    if overrides:
        names = [re.split(r"[=.+]", str(flag), maxsplit=1)[0].replace("_", "-") for flag in rollout.vllm.flags]
        if any(name.startswith("--hf-o") and _OVERRIDES.startswith(name) for name in names):
            raise ValueError(
                f"rollout.vllm.flags holds {_OVERRIDES}, but servers of the model in {directory} need "
                f"{json.dumps(overrides)} of this run; expected other flags: change config.json in a copy of the model"
            )
        arguments += [_OVERRIDES, json.dumps(overrides)]
    return [*arguments, *map(str, rollout.vllm.flags)]


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
            sequences=TEACHER_SEQUENCES,
            tensor=settings.tensor,
            memory=config.teacher_server_share if cuda else None,
        ),
        *("--load-format", "auto", "--max-num-batched-tokens", str(TEACHER_BATCHED_TOKENS)),
        # a compiled model calls no hooks, and vLLM does not compute a cached prefix again
        *("--enforce-eager", "--no-enable-prefix-caching"),
        *("--worker-extension-cls", "nemo_oprd_teacher.TeacherExtension"),
        *map(str, settings.flags),
    ]


def _config_overrides(directory: Path) -> dict[str, Any]:
    """Returns what servers must override in a student's config.json: they get a language model's plain weights."""
    overrides: dict[str, Any] = {}
    hf_config = with_modelopt_file(read_json(directory / "config.json", "a model's config", "copy it again"), directory)
    if is_renamed(hf_config):
        raise ValueError(
            f"rollout.engine=vllm for the model in {directory}, which is trained as another one by name; expected "
            "rollout.engine=megatron, or the model under its known name: convert it to Megatron and back "
            "(checkpoint_tools/hf_to_megatron.py, megatron_to_hf.py) and name that directory"
        )
    inner = language_model_architecture(hf_config)
    if inner is not None:  # the values of the language model alone, by their names there
        overrides["architectures"] = [inner]
    if known_quantization(hf_config) is not None:  # the trainer sends dequantised weights
        overrides[KEY] = None
    return overrides


def check_student_description(
    found: dict[str, Any], server: str, config: Config, spec: ModelSpec, known: TokenIds
) -> None:
    """Raises ValueError unless a server fits this run, by its answer to `nemo_oprd_describe`."""
    wanted: dict[str, Any] = {
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.ffn_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "tie_word_embeddings": spec.tied_embeddings,
        "rope": spec.rope if spec.local_rope is None else (spec.rope, spec.local_rope),
        "experts": _experts(spec),
        "model_type": spec.model_type,
        "vocab_size": spec.vocab_size,
        "known_ids": known.limit,
        "gaps": [list(gap) for gap in known.gaps],
        "dtype": DTYPES[config.precision],
        "logprobs_mode": "processed_logprobs",
        "workers": config.rollout.vllm.tensor,
    }
    found = {"gaps": [], **found, "rope": _served_rope(spec, found.get("rope_parameters"))}
    differing = [f"{key}={found.get(key)} instead of {want}" for key, want in wanted.items() if found.get(key) != want]
    if differing:
        raise ValueError(
            f"{server} serves another model or in another way: {'; '.join(differing)}; expected a server for the "
            "student: start it with `nemo-oprd serve` and this run's configuration"
        )


def _experts(spec: ModelSpec) -> list[int | bool] | None:
    """Returns the experts in the format of `experts_of` in the server's worker."""
    experts = spec.experts
    if experts is None:
        return None
    # a softmax of the chosen experts alone sums to 1, too, and its config has no key for that
    sums_to_one = experts.normalized or experts.score == "softmax_of_chosen"
    return [experts.count, experts.per_token, experts.ffn_size, sums_to_one]


def _served_rope(spec: ModelSpec, rope_parameters: Any) -> Any:
    """Parses the RoPE of a server's config, or both of a model with windows; returns unsupported values unchanged."""
    try:
        options = {"head_dim": spec.head_dim, "partial": True, "axes": spec.delta is not None}
        rope, local = parse_ropes({"rope_parameters": rope_parameters}, "server", **options)
    except ValueError:
        return rope_parameters
    return rope if local is None else (rope, local)


def check_teacher_description(
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
            f"and without caches: leave out of {TEACHER_KEY}.flags what changes that, and let `nemo-oprd serve --role "
            "teacher` start a server that others run with this run's configuration"
        )
    if found["longest"] < longest:
        raise ValueError(
            f"{server} computes sequences of at most {found['longest']} tokens; expected {longest}, the longest of "
            "this run or of the canary: start it with this run's data.max_prompt_tokens and rollout.max_new_tokens"
        )
