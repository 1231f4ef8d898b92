"""Toy pairs of families that only Megatron-Bridge builds, distilled on CPUs: the student comes close to its teacher.

A short run of small models is measured by plain Hugging Face. The slow test runs the commands of docs/nemo.md.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron_bridge_environment import PYTHON, ROOT, run

from nemo_oprd.tools.toy import pair

pytestmark = pytest.mark.nemo
FAMILIES = ("qwen3_5", "gpt_oss")
COMMANDS = re.compile(r"```bash\n([^`]*nemo_oprd toy --family [^`]*)```")
SHORT = (
    "student.parallel.tensor=1", "evaluation.every=0", "evaluation.teacher=false", "train.steps=15",
    "train.prompts_per_step=16", "train.lr=2e-3", "train.warmup_fraction=0.2", "train.save_every=0",
    "rollout.max_new_tokens=30", "logging.tensorboard=false",
)  # fmt: skip
# of the distance that was there before; 0.36 (qwen3_5) and 0.50 were measured
LEFT = 0.7


@pytest.fixture(scope="module")
def environment(megatron_bridge: dict[str, str]) -> dict[str, str]:
    if "version = 3.11" in (PYTHON.parent.parent / "pyvenv.cfg").read_text():
        pytest.skip("Megatron-Bridge 0.3 (Python 3.11) refuses these families")
    return {name: value for name, value in megatron_bridge.items() if name != "TORCHDYNAMO_DISABLE"}


@pytest.fixture(scope="module")
def distilled(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FAMILY, a pair that has begun to learn, and FAMILY-run, a short run on it."""
    root, runs = tmp_path_factory.mktemp("toys"), []
    for family in FAMILIES:
        recipe = pair.Recipe(
            seed=0, steps=60, student_step=20, layers=2, hidden=32, batch=16, learning_rate=5e-3, warmup_steps=5,
            train_prompts=128, tune_prompts=16, heldout_prompts=32, family=family,
        )  # fmt: skip
        pair.build_pair(recipe, root / family, lambda _: None)
        runs.append([f"output={root / family}-run", f"data.train={root / family}/prompts/train.jsonl", *SHORT])
        runs[-1].append(f"data.validation.heldout={root / family}/prompts/heldout.jsonl")
        for role in ("student", "teacher"):
            runs[-1] += [f"{role}.checkpoint=null", f"{role}.hf_path={root / family / role}", f"{role}.provider=bridge"]
    run(environment, 2, "megatron_bridge_family_cases.py", "train", runs=runs, config="quickstart")
    return root


def last_states(directory: Path, inputs: torch.Tensor) -> torch.Tensor:
    """float32 [B, S, D], after the final norm, as transformers computes them."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        return model(inputs, use_cache=False, output_hidden_states=True).hidden_states[-1]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_short_run_brings_the_student_nearer_to_its_teacher(distilled: Path, family: str) -> None:
    """On the correct responses to held-out problems, which the student did not sample."""
    lines = (distilled / family / "prompts" / "heldout.jsonl").read_text().splitlines()
    texts = [json.loads(line)["prompt"][0]["content"] for line in lines]
    inputs, labels = pair.training_batch(np.array([re.findall(r"\d+", text) for text in texts], dtype=np.int64))
    teacher = last_states(distilled / family / "teacher", inputs)
    before, after = (
        float((last_states(directory, inputs) - teacher)[labels != pair.IGNORED].square().mean())
        for directory in (distilled / family / "student", distilled / f"{family}-run" / "hf")
    )
    assert after < LEFT * before, (before, after)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_commands_of_the_page_close_the_gap(environment: dict[str, str], tmp_path: Path, family: str) -> None:
    """At least nine tenths of the gap in exact match on held-out problems, as the run itself evaluates."""
    (block,) = COMMANDS.findall((ROOT / "docs" / "nemo.md").read_text())
    (shown,) = set(re.findall(r"--family (\w+)", block))
    launchers = {"python": [str(PYTHON)], "torchrun": [str(PYTHON), "-m", "torch.distributed.run"]}
    commands = [shlex.split(line) for line in block.replace("\\\n", " ").replace(shown, family).splitlines()]
    commands = [words for words in commands if words[0] in launchers]  # the others enter the environment
    assert len(commands) == 2, block
    for program, *words in commands:
        done = subprocess.run(
            [*launchers[program], *words], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=3600
        )
        assert done.returncode == 0, f"{words}: {done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    (metrics,) = (tmp_path / "runs").glob("*/metrics.jsonl")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    before, *_, after = (line["val/heldout/avg@2"] for line in lines if "val/heldout/avg@2" in line)
    (teacher,) = (line["val/heldout/teacher/avg@2"] for line in lines if "val/heldout/teacher/avg@2" in line)
    assert before < 0.8 < 0.95 < teacher, (before, teacher)
    assert (after - before) / (teacher - before) >= 0.9, (before, after, teacher)
