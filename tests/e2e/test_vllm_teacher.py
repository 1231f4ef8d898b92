"""A real vLLM server on a CPU as a teacher: its states are transformers', in every layer and row, also after a kill."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import vllm_environment
from default_signals import default_signals
from tiny_models import save_random_bridge
from vllm_teacher import make_model

from nemo_oprd.batch.types import Rollout
from nemo_oprd.rollout.replay import write_rollouts

ROOT = Path(__file__).parent.parent.parent
PATIENCE_S = 900
# float32 on both sides; rows of layers of random models differed by 1.7e-6 at most
ROW_TOLERANCE = 1e-5
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(vllm_environment.missing() is not None, reason=str(vllm_environment.missing())),
]


def environment(directory: Path) -> dict[str, str]:
    """Of a command whose canaries are proven here."""
    cache = {"XDG_CACHE_HOME": str(directory / "cache")}
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", **cache}


def teach(directory: Path, family: str, tensor: int, *more: str) -> tuple[int, str, dict[str, Any]]:
    """(Exit code, stderr, results.json) of vllm_teacher.py."""
    command = [sys.executable, str(ROOT / "tests/e2e/vllm_teacher.py"), family, str(tensor), str(directory), *more]
    done = subprocess.run(
        command, env=environment(directory), capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    results = directory / "results.json"
    return done.returncode, done.stderr, json.loads(results.read_text()) if results.exists() else {}


@pytest.mark.parametrize(
    ("family", "tensor", "more"),
    [("qwen3", 1, ["kill"]), pytest.param("gemma3_text", 2, [], marks=pytest.mark.slow)],
)
def test_states_are_those_of_transformers(tmp_path: Path, family: str, tensor: int, more: list[str]) -> None:
    """Ragged prompts in chunks of 128 tokens; the second family has a sliding window and a cap on its logits."""
    code, said, found = teach(tmp_path, family, tensor, *more)
    assert code == 0, said[-3000:]
    assert len(found["worst"]) >= 6 and max(found["worst"].values()) < ROW_TOLERANCE, found["worst"]
    assert found["final_is_last"] and found["logprob_gap"] < 1e-4
    assert found["bad"]["answered"] == [1] * 9 and found["bad"]["healthy"]
    assert found["bad"]["same_files"] and not found["bad"]["outside"]
    if more:
        assert found["killed"]["equal"] and not found["killed"]["left"], found["killed"]
        assert (found["killed"]["deaths"], found["killed"]["generation"]) == (1, 2)


def test_a_family_that_vllm_computes_wrongly_is_refused(tmp_path: Path) -> None:
    """Cohere2's sliding window is one token longer in vLLM than in transformers."""
    code, said, found = teach(tmp_path, "cohere2", 1)
    assert code != 0 and "worst" not in found
    assert re.search(r"canary of cohere2.*: layer 1 of 5, prompt 1, row 64 is the first wrong one", said), said[-1500:]


# teachers that do more with logits than multiply states by a matrix: a bound, a scale, a bias
HEADS = {
    "gemma3_text": {"final_logit_softcapping": 2.0}, "granite": {"logits_scaling": 0.25}, "phi": {},
}  # fmt: skip


@pytest.mark.parametrize(
    "teacher", ["gemma3_text", *(pytest.param(each, marks=pytest.mark.slow) for each in ("granite", "phi"))]
)
def test_another_family_teaches_qwen2(tmp_path: Path, teacher: str) -> None:
    """Of another width and depth, through a bridge and in its distribution: gradients are float64 models'."""
    sizes = {
        "student": ("qwen2", {"hidden_size": 64, "num_hidden_layers": 4}),
        "teacher": (teacher, {"num_hidden_layers": 7, **HEADS[teacher]}),
    }
    for role, (family, changes) in sizes.items():
        make_model(family, tmp_path / role, **changes)
    configs = [json.loads((tmp_path / role / "config.json").read_text()) for role in sizes]
    save_random_bridge(tmp_path / "bridge", *configs, {1: 1, 2: 3, 3: 5, 4: 7}, 8, "token")
    draw = random.Random(0)
    lengths = ((5, 90), (30, 60), (7, 3), (100, 120))
    write_rollouts(
        tmp_path / "rollouts.jsonl",
        [Rollout(*([draw.randrange(3, 512) for _ in range(n)] for n in both)) for both in lengths],
    )
    settings = [
        f"student.hf_path={tmp_path}/student", f"teacher.hf_path={tmp_path}/teacher", f"bridge.path={tmp_path}/bridge",
        f"rollout.replay={tmp_path}/rollouts.jsonl", f"output={tmp_path}/out", "teacher.engine=vllm", "precision=fp32",
        "loss.representation.k=64", "loss.output.kind=full_vocab", "loss.output.weight=0.5",
        "student.parallel.tensor=2", "student.parallel.sequence=true",
    ]  # fmt: skip
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "nemo_oprd", "verify"]
    command += ["--against", "reference", "--config-name", "verify", *settings]
    done = subprocess.run(
        command, env=environment(tmp_path), capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.search(r"largest gradient deviation over 51 parameters: (\S+)", done.stdout)
    assert found is not None and float(found[1]) < ROW_TOLERANCE, done.stdout[-2000:]


def test_two_runs_share_a_server(tmp_path: Path) -> None:
    """`serve --role teacher` on a port: both runs at the same time, at other layouts, have float64 gradients."""
    for role, spread in (("student", 0.05), ("teacher", 0.07)):
        make_model("qwen3", tmp_path / role, num_hidden_layers=4, initializer_range=spread)
    draw = random.Random(1)
    lengths = ((5, 90), (30, 160), (7, 3), (100, 60))
    write_rollouts(
        tmp_path / "rollouts.jsonl",
        [Rollout(*([draw.randrange(3, 512) for _ in range(n)] for n in both)) for both in lengths],
    )
    models = [f"{role}.hf_path={tmp_path}/{role}" for role in ("student", "teacher")]
    common = [*models, f"rollout.replay={tmp_path}/rollouts.jsonl", "teacher.engine=vllm", "precision=fp32"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token, log = tmp_path / "token", tmp_path / "serve.log"
    serve = [sys.executable, "-m", "nemo_oprd", "serve", "--role", "teacher", "--port", str(port)]
    serve += ["--token-file", str(token), "--config-name", "verify", *common]
    layouts = {1: [], 2: ["student.parallel.tensor=2", "student.parallel.sequence=true"]}
    with log.open("wb") as out:
        piped = {"stdout": out, "stderr": out}
        server = subprocess.Popen(serve, env=environment(tmp_path), preexec_fn=default_signals, **piped)
    try:
        while not token.exists():
            assert server.poll() is None, log.read_text()
            time.sleep(0.2)
        runs = {}
        for ranks, layout in layouts.items():
            command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
            command += ["--master-port", str(29571 + ranks), "-m", "nemo_oprd", "verify", "--against", "reference"]
            command += ["--config-name", "verify", *common, *layout, f"output={tmp_path}/out_{ranks}"]
            command += [f"teacher.vllm.endpoints=[http://127.0.0.1:{port}]", f"teacher.vllm.token_file={token}"]
            piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            runs[ranks] = subprocess.Popen(command, env=environment(tmp_path), **piped)
        for run in runs.values():
            said, errors = run.communicate(timeout=PATIENCE_S)
            assert run.returncode == 0, errors[-3000:] + log.read_text()[-3000:]
            found = re.search(r"largest gradient deviation over \d+ parameters: (\S+)", said)
            assert found is not None and float(found[1]) < ROW_TOLERANCE, said[-2000:]
            print(found[0])
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)
    assert server.returncode == 0
