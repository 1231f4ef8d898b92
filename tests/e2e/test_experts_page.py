"""The commands of docs/experts.md that make and distil the toy pair with experts; a smaller pair, and fewer steps."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from nemo_oprd import cli
from nemo_oprd.tools.toy import pair

ROOT = Path(__file__).parent.parent.parent
LESS = "train.steps=2 train.prompts_per_step=8 evaluation.limit=4 rollout.max_new_tokens=16 train.export_hf=false"


@pytest.mark.slow
def test_the_toy_pair_with_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The routers' metrics are there, and the split over the ranks is that of the page."""
    (block,) = re.findall(r"```bash\n(nemo-oprd toy .*?)```", (ROOT / "docs" / "experts.md").read_text(), re.DOTALL)
    toy, train = block.strip().splitlines()
    monkeypatch.chdir(tmp_path)

    def make_tiny(output: Path, *, seed: int, experts: int, family: str) -> None:
        assert family == ""  # the default: `experts` makes a Qwen3-MoE
        pair.make_tiny_pair(output, seed=seed, experts=experts)

    monkeypatch.setattr(pair, "make_pair", make_tiny)
    cli.main(shlex.split(toy)[1:])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [*shlex.split(train), *LESS.split()]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-3000:]
    lines = (tmp_path / "runs" / "distil_experts" / "metrics.jsonl").read_text().splitlines()
    (last,) = [line for line in map(json.loads, lines) if line["step"] == 2 and "loss/total" in line]
    assert last["moe/load_max"] >= 1 >= last["moe/load_min"] >= 0
