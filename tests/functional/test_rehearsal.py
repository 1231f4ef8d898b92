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

from nemo_oprd.tools.rehearse import PARTS, disagreements, lines, unknown_waits, waits_of_a_step
from nemo_oprd.tools.rehearse import layers as te_package
from nemo_oprd.tools.rehearse.shim import COMPILERS

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
WITH_EXPERTS = {
    **MODEL,
    "model_type": "qwen3_moe",
    "head_dim": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
RANKS, RESPONSE, PROMPT = 2, 448, 64
# embedding and head; per layer attention with biases, MLP and norms; the final norm
PARAMETERS = 2 * 512 * 256 + 2 * (256 * (512 + 256) + 512 + 3 * 256 * 1024 + 2 * 256) + 256
# responses that a rank samples
BATCH = 2
PLANTS = Path(__file__).with_name("rehearsal_plants.py")

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, COMPILERS)), reason=f"no C++ compiler ({', '.join(COMPILERS)}) is on PATH"
)


@pytest.fixture(scope="module")
def overrides(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """See `settings`."""
    return settings(tmp_path_factory.mktemp("rehearsal"))


def settings(place: Path, model: dict[str, Any] = MODEL) -> list[str]:
    """A run of two ranks: TP2 with sequence parallelism, the output loss measured; in several groups of
    microbatches; its model is written to `place`."""
    (place / "config.json").write_text(json.dumps(model))
    layout = ("parallel.tensor=2", "parallel.sequence=true")
    roles = [f"{role}.{key}" for role in ("student", "teacher") for key in layout]
    return [
        f"student.hf_path={place}",
        f"teacher.hf_path={place}",
        *roles,
        "student.recompute=none",
        "train.prompts_per_step=2",
        "teacher.resident_microbatches=2",
        f"train.tokens_per_microbatch={PROMPT + RESPONSE}",
        f"rollout.max_new_tokens={RESPONSE}",
        "loss.representation.k=100",
        "loss.output.weight=1.0",
        "loss.output.kind=full_vocab",
    ]


def slow(*values: str) -> Any:
    """A case for --all: each one is a process of its own."""
    return pytest.param(*values, marks=pytest.mark.slow)


def rehearsed(
    overrides: list[str],
    folder: Path,
    mistake: str,
    rank: int = 0,
    layers: str = "local",
    phases: tuple[str, ...] = (),
    packages: Path | None = None,
) -> dict[str, Any]:
    """What a rank's process saw; `mistake`: names in rehearsal_plants.py, with commas; `packages`: a folder of them."""
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
        "phases": phases,
        "experts_load": "balanced",
        "result": str(result),
    }
    folders = [packages and str(packages), str(PLANTS.parents[2]), os.environ.get("PYTHONPATH")]
    path = os.pathsep.join(filter(None, folders))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, str(PLANTS), mistake], input=json.dumps(task), capture_output=True, text=True, env=environment
    )
    assert result.is_file(), done.stderr[-2000:]
    found: dict[str, Any] = json.loads(result.read_text())
    return found


@pytest.fixture(scope="module")
def with_servers(overrides: list[str]) -> list[str]:
    """The same run with servers that sample."""
    return [*overrides, "rollout.engine=vllm"]


@pytest.fixture(scope="module")
def sound(with_servers: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run without a mistake, with all of its phases."""
    return rehearsed(with_servers, tmp_path_factory.mktemp("sound"), "nothing", phases=tuple(PARTS))


# mistakes that do not end the rehearsal, all in one run -> code, file and a part of the line that reports each
NOT_FATAL = {
    "float32_weight": ("mixed-dtypes", "nemo_oprd/megatron/attention.py", "mm multiplies bfloat16, float32"),
    "host_shards": ("host-tensor-in-collective", "nemo_oprd/losses/vocab_parallel.py", "in host memory, over NCCL"),
    "not_contiguous": ("not-contiguous", "nemo_oprd/distillation/output_head.py", "not contiguous"),
    "wide_targets": ("target-dtype", "nemo_oprd/distillation/teacher.py", "float32, expected bfloat16"),
    "teacher_with_gradients": ("graph-without-backward", "nemo_oprd/megatron/model.py", "none follows"),
    "retained_graph": ("held-too-long", "nemo_oprd/megatron/observed_layer.py", "after the next step"),
    "targets_kept": ("held-too-long", "nemo_oprd/distillation/teacher.py", "when the next group"),
}


@pytest.fixture(scope="module")
def mistaken(overrides: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run with the mistakes `NOT_FATAL` and every weight twice, which samples in the trainer's processes."""
    mistakes = ",".join([*NOT_FATAL, "second_copy_of_weights"])
    return rehearsed(overrides, tmp_path_factory.mktemp("mistaken"), mistakes, phases=("generation",))


def test_a_sound_run_has_no_mistake_and_waits_where_it_did(sound: dict[str, Any], tmp_path: Path) -> None:
    """Nothing of this project waits but, where Megatron leaves that to it, for the gradient's norm."""
    assert (sound["mistakes"], sound["failure"]) == ([], None)
    assert unknown_waits(waits_of_a_step(sound)) == []
    rehearsal_golden.check("local", sound, tmp_path)


@pytest.mark.slow
def test_local_layers_beside_transformer_engine(with_servers: list[str], tmp_path: Path, sound: dict[str, Any]) -> None:
    """A login node has the packages of a GPU, and no driver, for which Transformer Engine's optimizer looks."""
    found = rehearsed(with_servers, tmp_path, "nothing", packages=PLANTS.with_name("te_stand_in"))
    assert (found["mistakes"], found["failure"]) == ([], None)
    assert found["phases"]["optimizer"]["bytes"] == sound["phases"]["optimizer"]["bytes"]


@pytest.mark.parametrize("model", ["", "experts"])
def test_transformer_engines_layers_wait_and_call_what_they_did(tmp_path: Path, model: str) -> None:
    try:
        te_package.version()
    except ValueError as error:
        pytest.skip(f"{error}, or bash scripts/setup_te_files.sh")
    split = ["student.parallel.expert=2", "teacher.parallel.expert=2"]
    overrides = [*settings(tmp_path, WITH_EXPERTS), *split] if model else settings(tmp_path)
    found = rehearsed(overrides, tmp_path, "nothing", layers="te")
    assert (found["mistakes"], found["failure"]) == ([], None)
    assert unknown_waits(waits_of_a_step(found)) == []
    rehearsal_golden.check("te", found, tmp_path, model)


def test_what_surrounds_the_steps_is_counted(sound: dict[str, Any], mistaken: dict[str, Any]) -> None:
    phases, weights = sound["phases"], 2 * PARAMETERS
    student = phases["build student"]["bytes"]
    assert weights / 2 <= student < 1.05 * weights / 2
    assert [name for name in phases if name.startswith("build ")] == [
        "build student",
        "build optimizer",
        "build teachers",
    ]
    assert phases["sampling check"]["messages"]
    # every rank gathers the tensors that are split, and hands a bucket of them to the server on its GPU
    assert phases["weights"]["leaves"] == {"handles of device memory": weights}
    assert len(phases["weights"]["messages"]) == 12
    # weights in bfloat16, and a copy and two moments in float32, which Megatron gathers in host memory
    written, read = phases["save"]["leaves"], phases["load"]["leaves"]
    assert written["checkpoint files"] == pytest.approx(student + 6 * student, rel=0.01)
    assert read["checkpoint files, read"] == pytest.approx(student + 6 * student, rel=0.01)
    assert phases["save"]["host_bytes"] >= 6 * student
    assert phases["save"]["bytes"] < 1.01 * phases["step"]["bytes"], "saving needs no memory of the device"
    tokens, per_token = PROMPT + RESPONSE, 2 * 2 * 2 * 2 * (256 // 4)
    held = mistaken["phases"]["generation"]["at_peak"]
    assert sum(size for place, size in held.items() if "kv_cache.py" in place) == BATCH * tokens * per_token


@pytest.mark.parametrize("mistake", NOT_FATAL)
def test_a_mistake_is_named_with_its_place(mistaken: dict[str, Any], mistake: str) -> None:
    assert mistaken["failure"] is None, mistaken["failure"]
    code, file, text = NOT_FATAL[mistake]
    alike = [one for one in mistaken["mistakes"] if (one["code"], one["file"]) == (code, file)]
    assert any(text in one["text"] for one in alike), mistaken["mistakes"]


@pytest.mark.parametrize(
    ("mistake", "code", "file", "text"),
    [
        slow("host_tokens", "failed", "nemo_oprd/megatron/model.py", "device"),
        slow("host_positions", "host-tensor", "nemo_oprd/megatron/attention.py", "cpu and cuda"),
        slow("host_sums", "host-tensor", "nemo_oprd/distillation/metrics/step_metrics.py", "cpu and cuda"),
        ("item_in_a_layer", "failed", "nemo_oprd/megatron/model.py", "reads a bfloat16 of the device"),
        slow("wait_in_a_layer", "unknown-wait", "nemo_oprd/megatron/observed_layer.py", "per step"),
    ],
)
def test_a_mistake_that_ends_the_rehearsal_is_named_with_its_place(
    overrides: list[str], tmp_path: Path, mistake: str, code: str, file: str, text: str
) -> None:
    found = rehearsed(overrides, tmp_path, mistake)
    said = [*found["mistakes"], *unknown_waits(waits_of_a_step(found))]
    said += [found["failure"]] if found["failure"] else []
    assert any((one["code"], one["file"]) == (code, file) and text in one["text"] for one in said), said


def test_a_second_copy_of_the_weights_shows_with_the_line_that_made_it(
    sound: dict[str, Any], mistaken: dict[str, Any]
) -> None:
    once, twice = (found["phases"]["build student"] for found in (sound, mistaken))
    engine = mistaken["phases"]["build engine"]["bytes"]
    assert twice["bytes"] - engine > 1.9 * once["bytes"]
    one = {
        "rank": 0,
        "role": "student",
        "seconds": 1.0,
        "waits": [],
        "mistakes": [],
        "collectives": {"build student": {}},
        "phases": {
            "build student": {
                "measured_bytes": twice["bytes"] - engine,
                "planned_bytes": once["bytes"],
                "kernels": 1,
                "waits": 0,
                "host_bytes": 0,
                "leaves": {},
                "lines_at_peak": twice["lines_at_peak"],
            }
        },
    }
    (finding,) = [line for line, _ in lines(one, usable=1e12) if line.startswith("finding: ")]
    assert finding.startswith("finding: build student holds +1")
    assert "nemo_oprd/tools/rehearse" not in finding
    assert "nemo_oprd/distillation/student.py:" in finding, "the line that builds the chunks"


@pytest.mark.slow
def test_ranks_that_do_not_meet(with_servers: list[str], sound: dict[str, Any], tmp_path: Path) -> None:
    whole = rehearsed(with_servers, tmp_path, "nothing", rank=1, phases=tuple(PARTS))
    assert disagreements({0: sound, 1: whole}) == []
    mistaken = rehearsed(with_servers, tmp_path, "missing_all_reduce", rank=1, phases=tuple(PARTS))
    (line,) = disagreements({0: sound, 1: mistaken})
    assert line.startswith("rank 0 and rank 1 do not meet at their message ")
    assert "allreduce_" in line
    assert "nemo_oprd/distillation/output_head.py" in line


@pytest.mark.slow
def test_stages_that_do_not_meet(overrides: list[str], tmp_path: Path) -> None:
    stages = [part.replace("parallel.tensor", "parallel.pipeline") for part in overrides if "sequence" not in part]
    first, last, swapped = (
        rehearsed(stages, tmp_path, mistake, rank=rank)
        for mistake, rank in (("not_contiguous_send", 0), ("nothing", 1), ("swapped_message", 1))
    )
    assert {(one["code"], one["file"]) for one in first["mistakes"]} == {
        ("not-contiguous", "nemo_oprd/megatron/pipeline_schedule.py")
    }
    assert last["mistakes"] == []
    assert disagreements({0: first, 1: last}) == []
    lines = disagreements({0: first, 1: swapped})
    assert lines
    assert all(line.startswith(("rank 0 and rank 1 do not meet", "rank 1 and rank 0 do not meet")) for line in lines)
    assert all("pipeline_schedule.py" in line for line in lines)
