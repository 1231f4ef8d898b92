"""A student that only Megatron-Bridge builds is trained on responses that vLLM samples, all on a CPU.

Three environments take part: the trainer's is Megatron-Bridge's, the servers' is vLLM's, and the toy's tokenizer and
prompts come from this one.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
import vllm_environment
from megatron_bridge_environment import PYTHON, ROOT, make_environment, run
from safetensors.torch import load_file

from nemo_oprd.tools.toy import pair

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.nemo,
    pytest.mark.skipif(vllm_environment.missing() is not None, reason=str(vllm_environment.missing())),
]
# float32 on both sides, as in test_vllm.py
LOGPROB_TOLERANCE = 1e-4
STEPS = 3


SLOW = ("gemma", "gemma3_text", "gpt_oss MXFP4")
CASES = ["gpt_oss", *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)]


@pytest.mark.parametrize("case", CASES)
def test_family(tmp_path: Path, case: str) -> None:
    """Also of experts with biases, windows, sinks, two kinds of RoPE in one model, and files in MXFP4."""
    family, _, quantized = case.partition(" ")
    environment = make_environment()
    sizes = {"family": family, "vocabulary": pair.VOCAB_SIZE, "end": pair.EOS_ID}
    run(environment, 0, "megatron_bridge_family_cases.py", "make_toy_models", directory=str(tmp_path), **sizes)
    if quantized:
        run(environment, 0, "quantized_family_cases.py", "quantize_student", directory=str(tmp_path), family=family)
    for role in ("student", "teacher"):
        pair.write_tokenizer(tmp_path / role)
    problems = pair.disjoint_problems(np.random.default_rng(0), {"train": 32, "heldout": 4})
    for name, drawn in problems.items():
        pair.write_prompts(tmp_path / f"{name}.jsonl", drawn)
    models = [
        f"{role}.{key}" for role in ("student", "teacher") for key in (f"hf_path={tmp_path / role}", "provider=bridge")
    ]
    settings = [
        "student.parallel.tensor=1", "student.parallel.pipeline=2", f"data.train={tmp_path}/train.jsonl",
        f"data.validation.heldout={tmp_path}/heldout.jsonl", "evaluation.every=0", "evaluation.teacher=false",
        "rollout.engine=vllm", "rollout.max_new_tokens=12", "loss.representation.k=8", f"train.steps={STEPS}",
        "train.lr=1e-2", "train.schedule=constant", "train.prompts_per_step=8", f"output={tmp_path / 'run'}",
    ]  # fmt: skip
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [str(PYTHON), *torchrun, "-m", "nemo_oprd", "train", "--config-name", "quickstart", *models, *settings]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == STEPS
    for line in lines:  # after every update of the servers' weights
        assert line["rollout/logprob_gap_max"] < LOGPROB_TOLERANCE, line
    before = load_file(tmp_path / ("plain-student" if quantized else "student") / "model.safetensors")
    after = load_file(tmp_path / "run" / "hf" / "model.safetensors")
    assert set(after) == set(before)
    # updates that are far above the tolerance, so that stale weights would have been noticed
    assert max(float((after[name] - before[name]).abs().max()) for name in after) > 1e-2
    assert all(bool(torch.isfinite(tensor).all()) for tensor in after.values())
