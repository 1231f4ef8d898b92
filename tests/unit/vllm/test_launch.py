"""How long the sequences are for which a teacher's server is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nemo_oprd.cli import main
from nemo_oprd.config.loading import load_config
from nemo_oprd.models.served import read_served_spec
from nemo_oprd.vllm.launch import DTYPES, check_teacher_description, teacher_arguments
from nemo_oprd.vllm.teacher_canary import Canary
from nemo_oprd.vllm.teacher_servers import longest_sequence

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
    arguments = teacher_arguments(run, tmp_path, longest, cuda=False)
    assert arguments[arguments.index("--max-model-len") + 1] == str(longest + 1), "one more is sampled"


def test_a_server_for_shorter_sequences_is_refused(tmp_path: Path) -> None:
    """And one with other numbers of workers is not, where somebody else runs it."""
    config = json.loads((GOLDEN / "teacher" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    run = load_config("verify", [f"student.hf_path={tmp_path}", f"teacher.hf_path={tmp_path}", "teacher.engine=vllm"])
    spec = read_served_spec(tmp_path)
    found = {
        "num_hidden_layers": spec.num_layers, "hidden_size": spec.hidden_size, "vocab_size": spec.vocab_size,
        "dtype": DTYPES[run.precision], "eager": True, "runner_v1": True, "prefix_caching": False, "tensor": 4,
        "pipeline": 1, "lora": False, "speculative": False, "weights": "w", "longest": 99,
        "quantization": None, "kv_cache_dtype": "auto", "load_format": "auto", "float32_matmul": "highest",
    }  # fmt: skip
    check_teacher_description(found, "it", run, spec, "w", tensor=None, longest=99)
    with pytest.raises(ValueError, match=r"it computes sequences of at most 99 tokens; expected 100, the longest"):
        check_teacher_description(found, "it", run, spec, "w", tensor=None, longest=100)
    with pytest.raises(ValueError, match=r"tensor=4 instead of 1"):
        check_teacher_description(found, "it", run, spec, "w", tensor=1, longest=99)


@pytest.mark.parametrize(("more", "number"), [(["teacher.engine=vllm"], "1"), ([], "0")])
def test_serve_needs_a_teacher_of_servers(tmp_path: Path, capsys: Any, more: list[str], number: str) -> None:
    """Before anything is started, and before a file with a token is made."""
    (python := tmp_path / "python").touch()
    models = [f"{role}.hf_path={GOLDEN / role}" for role in ("student", "teacher")]
    command = ["serve", "--role", "teacher", "--teacher", number, "--token-file", str(tmp_path / "token")]
    command += ["--config-name", "verify", *models, f"teacher.vllm.python={python}", *more]
    with pytest.raises(SystemExit) as ended:
        main(command)
    assert ended.value.code == 2 and not (tmp_path / "token").exists()
    said = capsys.readouterr().err
    assert f"--teacher {number}: the teachers with engine=vllm are {'[0]' if more else 'none'}, counted from 0" in said


def test_infinity_in_a_config_as_transformers_writes_it(tmp_path: Path) -> None:
    """Falcon-H1's `time_step_limit` has one by default."""
    from transformers import AutoConfig

    AutoConfig.for_model("falcon_h1", num_hidden_layers=3, hidden_size=64).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["time_step_limit"][1] == {"__float__": "Infinity"}
    spec = read_served_spec(tmp_path)
    assert (spec.num_layers, spec.hidden_size) == (3, 64)
