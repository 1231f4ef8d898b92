"""`nemo-oprd rehearse`: what it reports of a sound step, and of deliberate mistakes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import rehearsal_golden

from nemo_oprd.commands.rehearse import te_package
from nemo_oprd.commands.rehearse.agreement import disagreements
from nemo_oprd.commands.rehearse.command import waits_of_a_step
from nemo_oprd.commands.rehearse.known_waits import unknown_waits
from nemo_oprd.commands.rehearse.shim import COMPILERS

MODEL = {
    "model_type": "qwen2",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}
RANKS, RESPONSE, PROMPT = 2, 448, 64
PLANTS = Path(__file__).with_name("rehearsal_plants.py")

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, COMPILERS)), reason=f"no C++ compiler ({', '.join(COMPILERS)}) is on PATH"
)


@pytest.fixture(scope="module")
def overrides(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """See `settings`."""
    return settings(tmp_path_factory.mktemp("rehearsal"))


def settings(place: Path) -> list[str]:
    """A run of two ranks: TP2 with sequence parallelism, the output loss measured; its model is written to `place`."""
    (place / "config.json").write_text(json.dumps(MODEL))
    layout = ("parallel.tensor=2", "parallel.sequence=true")
    roles = [f"{role}.{key}" for role in ("student", "teacher") for key in layout]
    return [
        f"student.hf_path={place}",
        f"teacher.hf_path={place}",
        *roles,
        "student.recompute=none",
        "train.prompts_per_step=2",
        f"train.tokens_per_microbatch={PROMPT + RESPONSE}",
        f"rollout.max_new_tokens={RESPONSE}",
        "loss.representation.k=100",
        "loss.output.weight=1.0",
        "loss.output.kind=full_vocab",
    ]


def slow(*values: str) -> Any:
    """A case for --all: each one is a process of its own."""
    return pytest.param(*values, marks=pytest.mark.slow)


def rehearsed(overrides: list[str], folder: Path, mistake: str, rank: int = 0, layers: str = "local") -> dict[str, Any]:
    """What a rank's process saw."""
    result = folder / "result.json"
    task = {
        "rank": rank,
        "ranks": RANKS,
        "gpu_bytes": 80_000_000_000,
        "gpus_per_node": 8,
        "layers": layers,
        "config_name": "oprd_1p5b",
        "config_dir": None,
        "overrides": overrides,
        "prompt_tokens": PROMPT,
        "response_tokens": RESPONSE,
        "result": str(result),
    }
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, str(PLANTS), mistake], input=json.dumps(task), capture_output=True, text=True, env=environment
    )
    assert result.is_file(), done.stderr[-2000:]
    found: dict[str, Any] = json.loads(result.read_text())
    return found


@pytest.fixture(scope="module")
def sound(overrides: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A step without a mistake."""
    return rehearsed(overrides, tmp_path_factory.mktemp("sound"), "nothing")


def peaks(found: dict[str, Any]) -> dict[str, int]:
    return {name: phase["bytes"] for name, phase in found["phases"].items()}


def test_a_sound_step_has_no_mistake_and_waits_where_it_did(sound: dict[str, Any], tmp_path: Path) -> None:
    """Nothing of this project waits but, where Megatron leaves that to it, for the gradient's norm."""
    assert (sound["mistakes"], sound["failure"]) == ([], None)
    assert unknown_waits(waits_of_a_step(sound)) == []
    rehearsal_golden.check("local", sound, tmp_path)


def test_transformer_engines_layers_wait_and_call_what_they_did(overrides: list[str], tmp_path: Path) -> None:
    try:
        te_package.version()
    except ValueError as error:
        pytest.skip(f"{error}, or bash scripts/setup_te_files.sh")
    found = rehearsed(overrides, tmp_path, "nothing", layers="te")
    assert (found["mistakes"], found["failure"]) == ([], None)
    assert unknown_waits(waits_of_a_step(found)) == []
    rehearsal_golden.check("te", found, tmp_path)


@pytest.mark.parametrize(
    ("mistake", "code", "file"),
    [
        slow("host_tokens", "failed", "nemo_oprd/models/megatron/model.py"),
        slow("host_sums", "host-tensor", "nemo_oprd/distillation/metrics/named_sums.py"),
        slow("host_budget", "host-tensor-in-collective", "nemo_oprd/distillation/target_budget.py"),
        ("float32_weight", "mixed-dtypes", "nemo_oprd/models/megatron/rotary.py"),
        slow("item_in_a_layer", "failed", "nemo_oprd/models/megatron/model.py"),
        slow("not_contiguous", "not-contiguous", "nemo_oprd/distillation/output_head.py"),
        slow("wait_in_a_layer", "unknown-wait", "nemo_oprd/models/megatron/observed_layer.py"),
    ],
)
def test_a_mistake_is_named_with_its_place(
    overrides: list[str], tmp_path: Path, mistake: str, code: str, file: str
) -> None:
    found = rehearsed(overrides, tmp_path, mistake)
    said = [*found["mistakes"], *unknown_waits(waits_of_a_step(found))]
    said += [found["failure"]] if found["failure"] else []
    assert (code, file) in [(one["code"], one["file"]) for one in said], said


@pytest.mark.parametrize(
    ("mistake", "phase"),
    [
        slow("teacher_with_gradients", "teacher"),
        slow("second_copy_of_weights", "build"),
    ],
)
def test_what_is_held_too_long_shows_in_the_peak(
    overrides: list[str], sound: dict[str, Any], tmp_path: Path, mistake: str, phase: str
) -> None:
    found = rehearsed(overrides, tmp_path, mistake)
    assert found["failure"] is None, found["failure"]
    assert peaks(found)[phase] > 1.05 * peaks(sound)[phase]


def test_ranks_that_do_not_meet(overrides: list[str], sound: dict[str, Any], tmp_path: Path) -> None:
    whole = rehearsed(overrides, tmp_path, "nothing", rank=1)
    assert disagreements({0: sound, 1: whole}) == []
    (line,) = disagreements({0: sound, 1: rehearsed(overrides, tmp_path, "missing_all_reduce", rank=1)})
    assert line.startswith("rank 0 and rank 1 do not meet at their message ")
    assert "allreduce_" in line
    assert "nemo_oprd/distillation/output_head.py" in line
