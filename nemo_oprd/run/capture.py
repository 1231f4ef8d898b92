"""`nemo-oprd capture`: checks the states of a vLLM server, then writes the states of all tokens of many sequences.

    DIR/hidden_states/hs_N.safetensors    one sequence: token_ids int64 [T], hidden_states [T, layers, D]
    DIR/manifest.json                     written last: the tensors' meaning, their model, and the result of the check
    DIR/vllm/                             the server's log

Names and shapes in a file are those that vLLM's example connector writes and the speculators project caches.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import uuid
from contextlib import closing
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from nemo_oprd.batch.layout import Layout
from nemo_oprd.config.loading import load_config
from nemo_oprd.config.schema import Config
from nemo_oprd.data.prompts import load_prompts
from nemo_oprd.data.tokenizer import Tokenizer
from nemo_oprd.megatron.parallel import init_distributed
from nemo_oprd.models import ModelSpec
from nemo_oprd.models.fingerprint import fingerprint
from nemo_oprd.models.served import read_served_spec
from nemo_oprd.rollout.replay import read_rollouts
from nemo_oprd.run.models import world_size
from nemo_oprd.runtime.disk import check_output
from nemo_oprd.runtime.files import replacing, write_atomically
from nemo_oprd.runtime.output_directories import check_directory, mark
from nemo_oprd.vllm.launch import TEACHER_KEY, find_python
from nemo_oprd.vllm.teacher_canary import Canary
from nemo_oprd.vllm.teacher_requests import TeacherAnswer, TeacherRequest
from nemo_oprd.vllm.teacher_servers import TeacherServers
from nemo_oprd.vllm.worker.nemo_oprd_requests import StateRequest

logger = logging.getLogger(__name__)

FORMAT = 1
FINAL = "final"
CONVENTION = (
    "hidden_states[t, i] belongs to token_ids[t] and layers[i]: l is the residual stream after l blocks (before the "
    "final norm, for the last one too), 'final' the state after the final norm, which the LM head reads"
)
_PRECISION = {"float32": "fp32", "bfloat16": "bf16"}


@dataclass(frozen=True)
class CaptureOptions:
    """The command's options."""

    model: Path
    prompts: Path
    layers: str
    output: Path
    dtype: str = "bfloat16"
    tensor: int = 1
    python: str | None = None


def capture(options: CaptureOptions) -> None:
    """Writes the states of all tokens of all sequences, and a manifest.

    Raises:
        ValueError: the model, the prompts, the layers or vLLM's environment is wrong, or the server's states are not
            the model's.
    """
    if world_size() > 1:
        raise ValueError(f"capture on {world_size()} ranks: expected one, which starts the server: leave out torchrun")
    try:
        _capture(options)
    except ValueError as error:
        raise ValueError(_with_options(str(error))) from error


# a key in a message of training -> the command's option; the first match counts
_OWN_WORDS = (
    ("teacher.vllm.python=None: ", "--python is not given: "),
    ("teacher.vllm.python=", "--python "),
    ("teacher.vllm.", "--"),
    ("set teacher.engine=megatron, or choose another teacher", "choose another model"),
    ("teacher.engine=vllm", "capture"),
    ("rollout.replay=", "--prompts "),
)


def _with_options(message: str) -> str:
    """Returns a message of code shared with training, with this command's options in place of the keys."""
    for key, own in _OWN_WORDS:
        message = message.replace(key, own)
    return message


def _capture(options: CaptureOptions) -> None:
    check_output(str(options.output))
    check_directory(options.output, "capture", "--output")
    spec = read_served_spec(options.model)
    layers = parse_layers(options.layers, spec.num_layers)
    sequences = _sequences(options, spec)
    config = _config(options)
    find_python(config.teacher.vllm, TEACHER_KEY)
    manifest, folder = options.output / "manifest.json", options.output / "hidden_states"
    manifest.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    mark(options.output, "capture")
    folder.mkdir()
    init_distributed()
    canary = Canary(spec, options.model, options.dtype, None)
    servers = TeacherServers(config, 0, canary, Layout())
    with closing(servers):
        servers.wait()
        numbers = [layer if isinstance(layer, int) else spec.num_layers + 1 for layer in layers]
        requests = [
            TeacherRequest(ids, StateRequest(uuid.uuid4().hex, numbers, [*range(len(ids))], [])) for ids in sequences
        ]
        servers.gather(requests, lambda i, answer: _save(folder / f"hs_{i}.safetensors", sequences[i], answer))
    assert canary.verdict is not None, "servers that are ready have proven themselves"
    content = {
        "format": FORMAT,
        "convention": CONVENTION,
        "layers": layers,
        "dtype": options.dtype,
        "model": {"directory": str(options.model), "type": spec.model_type, "weights": fingerprint(options.model)},
        "versions": {name: metadata.version(name) for name in ("nemo-oprd", "torch", "transformers")},
        "canary": canary.verdict.as_json(),
        "prompts": {"file": str(options.prompts), "sha256": hashlib.sha256(options.prompts.read_bytes()).hexdigest()},
        "sequences": [
            {"file": f"hidden_states/hs_{i}.safetensors", "rows": len(ids), "ids_sha256": _digest(ids)}
            for i, ids in enumerate(sequences)
        ],
    }
    write_atomically(manifest, json.dumps(content, indent=1) + "\n")
    rows = sum(map(len, sequences))
    logger.info(f"{len(sequences)} sequences, {rows} tokens, {len(layers)} states of each: {manifest}")


def parse_layers(text: str, depth: int) -> list[int | str]:
    """Returns the layers that `--layers` names, ascending; the state after the final norm (`FINAL`) comes last.

    Raises:
        ValueError: there is no such layer, or one is named twice.
    """
    names = [*map(str, range(1, depth + 1)), FINAL]
    chosen = names if text == "all" else text.split(",")
    strange = [name for name in chosen if name not in names]
    if strange or len(set(chosen)) < len(chosen):
        raise ValueError(
            f"--layers {text}: {strange[0] if strange else 'a layer twice'!r}; expected all, or different ones of 1 to "
            f"{depth} and {FINAL}, with commas: correct it"
        )
    return [FINAL if name == FINAL else int(name) for name in names if name in chosen]


def _config(options: CaptureOptions) -> Config:
    """Returns a configuration whose teacher is the model."""
    overrides = ["teacher.engine=vllm", "student.hf_path=none", "teacher.hf_path=none", "output=none"]
    config = load_config("verify", [*overrides, f"precision={_PRECISION[options.dtype]}"])
    settings = replace(config.teacher.vllm, tensor=options.tensor, python=options.python, replicas=1)
    teacher = replace(config.teacher, hf_path=str(options.model), vllm=settings)
    return replace(config, teacher=teacher, output=str(options.output))


def _sequences(options: CaptureOptions, spec: ModelSpec) -> list[list[int]]:
    """Returns the ids of recorded rollouts, prompt and response, or of prompts in the model's chat template.

    Raises:
        ValueError: the file, the tokenizer or the length of a sequence is wrong.
    """
    path = options.prompts
    if path.suffix == ".jsonl" and path.is_file() and b'"prompt_ids"' in path.open("rb").readline():
        return [rollout.ids.tolist() for rollout in read_rollouts(path, spec.vocab_size, spec.max_positions)]
    prompts, tokenizer = load_prompts(path), Tokenizer.load(options.model)
    found = [tokenizer.encode_prompt(prompt.messages, prompt.tools) for prompt in prompts]
    for number, ids in enumerate(found, start=1):
        if len(ids) > spec.max_positions:
            raise ValueError(
                f"{path}: prompt {number} has {len(ids)} tokens, but the model has {spec.max_positions} positions; "
                "expected no more: shorten or remove it"
            )
    return found


def _digest(ids: list[int]) -> str:
    """Returns the SHA-256 (hex) of ids as int64, little endian, as in the file."""
    return hashlib.sha256(np.array(ids, "<i8").tobytes()).hexdigest()


def _save(file: Path, ids: list[int], answer: TeacherAnswer) -> None:
    """Writes one sequence."""
    tensors = {"token_ids": torch.tensor(ids), "hidden_states": answer.states.transpose(0, 1).contiguous()}
    with replacing(file, durable=False) as partial:
        save_file(tensors, partial)
