"""How long the sequences are for which a teacher's server is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nemo_oprd.config.loading import load_config
from nemo_oprd.models.served import read_served_spec
from nemo_oprd.teacher_servers.canary import Canary
from nemo_oprd.teacher_servers.launch import server_arguments
from nemo_oprd.teacher_servers.servers import longest_sequence

GOLDEN = Path(__file__).parents[2] / "golden"
# the canary's longest prompt of a server that computes 2048 tokens at a time
PROOF = 2048 + 37


@pytest.mark.parametrize(
    ("positions", "settings", "longest"),
    [
        (131072, ["data.max_prompt_tokens=4000", "rollout.max_new_tokens=5000"], 9000),
        (131072, ["data.max_prompt_tokens=40", "rollout.max_new_tokens=50"], PROOF),
        (8000, ["data.max_prompt_tokens=4000", "rollout.max_new_tokens=5000"], 8000),
        (64, ["data.max_prompt_tokens=4", "rollout.max_new_tokens=5"], 64),
        # what the teacher reads may be longer, or nothing limits it
        *(
            (131072, ["data.max_prompt_tokens=40", "rollout.max_new_tokens=50", setting], 131072)
            for setting in (
                "teacher.reads=text", "teacher.prompt='{prompt} {answer}'", "rollout.replay=recorded.jsonl",
                "data.max_prompt_tokens=null", "teacher.vllm.flags=[--max_num_batched_tokens,8192]",
            )
        ),
    ],
)  # fmt: skip
def test_longest_sequence(tmp_path: Path, positions: int, settings: list[str], longest: int) -> None:
    config = json.loads((GOLDEN / "teacher" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": positions}))
    models = [f"student.hf_path={GOLDEN / 'student'}", f"teacher.hf_path={tmp_path}", "teacher.engine=vllm", "output=o"]
    run = load_config("verify", [*models, *settings])
    canary = Canary(read_served_spec(tmp_path), tmp_path, "float32", None)
    assert longest_sequence(run, canary) == longest
    arguments = server_arguments(run, tmp_path, longest, cuda=False)
    assert arguments[arguments.index("--max-model-len") + 1] == str(longest + 1), "one more is sampled"
