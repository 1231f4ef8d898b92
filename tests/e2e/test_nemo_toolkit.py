"""`examples/nemo/oprd.py`: hydra_runner, exp_manager and NeMo's tokenizers around the real loop."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import nemo_environment as nemo
import psutil
import pytest
from nemo_tokenizers import EQUAL, REFUSED, train_model

from tests.support.forked_run import differences

PROGRAM = "examples/nemo/oprd.py"
pytestmark = [
    pytest.mark.nemo,
    pytest.mark.skipif(nemo.missing(nemo.TOOLKIT) is not None, reason=str(nemo.missing(nemo.TOOLKIT))),
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nemo.make_pair(tmp_path_factory.mktemp("pair") / "toy")


def start(*arguments: str, ranks: int = 2) -> subprocess.Popen[str]:
    """The command of docs/nemo.md, on this number of ranks; later arguments replace earlier ones."""
    command = nemo.documented("torchrun --nproc-per-node 2 --standalone examples/nemo/oprd.py")
    if ranks == 1:
        command = ["python", *command[command.index(PROGRAM) :]]
    return subprocess.Popen(
        [*command, *arguments], cwd=nemo.ROOT, env=nemo.environment(nemo.TOOLKIT),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def kill(process: subprocess.Popen[str]) -> None:
    """SIGKILL to the launcher and its ranks, at the same moment as far as possible."""
    ranks = psutil.Process(process.pid).children(recursive=True)
    for each in (*ranks, psutil.Process(process.pid)):
        each.kill()
    psutil.wait_procs(ranks, timeout=30)


@pytest.mark.slow
def test_killed_at_tp2_and_resumed(pair: Path, tmp_path: Path) -> None:
    """As if it had never been killed, and bit for bit what `nemo-oprd train` gives; then there is nothing left to do.

    The student's tokenizer comes from NeMo's AutoTokenizer.
    """
    directory = tmp_path / "experiments" / "toy"
    arguments = [
        *nemo.settings(pair), *nemo.models(pair), "tokenizer.library=huggingface",
        f"tokenizer.type={pair / 'student'}", f"exp_manager.exp_dir={directory.parent}", "exp_manager.name=toy",
        "exp_manager.seconds_to_sleep=1",
    ]  # fmt: skip
    first = start(*arguments)
    deadline = time.monotonic() + nemo.PATIENCE_S
    while len(nemo.updates(directory / "oprd")) < 5:
        assert first.poll() is None and time.monotonic() < deadline, first.communicate(timeout=30)[0][-4000:]
        time.sleep(0.02)
    kill(first)
    assert 5 <= len(nemo.updates(directory / "oprd")) < nemo.STEPS

    second = start(*arguments)
    said = second.communicate(timeout=nemo.PATIENCE_S)[0]
    assert second.returncode == 0, said[-4000:]
    assert "resumed from" in said and nemo.updates(directory / "oprd") == list(range(1, nemo.STEPS + 1))
    # exp_manager's own files of the first start have moved, and those of the run have not
    assert (directory / "run_0" / "cmd-args.log").is_file()
    assert "tokenizer.library=huggingface" in (directory / "cmd-args.log").read_text()
    assert differences(directory / "oprd", nemo.plain_run(pair, tmp_path / "plain")) == []

    third = start(*arguments, ranks=1)
    said = third.communicate(timeout=nemo.PATIENCE_S)[0]
    assert third.returncode == 2 and f"all {nemo.STEPS} steps are done" in said, said[-4000:]
    assert "Traceback" not in said


def test_a_student_with_a_sentencepiece_tokenizer(pair: Path, tmp_path: Path) -> None:
    """The student's directory has no tokenizer of its own; the exported student has NeMo's."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = train_model(tmp_path / "spm.model", "bpe", pad_id=3)
    for role in ("student", "teacher"):
        config = LlamaConfig(
            vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=False,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(tmp_path / role)
        (tmp_path / role / "generation_config.json").unlink(missing_ok=True)
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    process = start(
        *nemo.settings(pair), *nemo.models(tmp_path), "student.parallel.tensor=1",
        "train.steps=1", f"exp_manager.explicit_log_dir={tmp_path / 'log'}", "exp_manager.name=null",
        "tokenizer.library=sentencepiece", f"tokenizer.model={model}",
        "tokenizer.chat_template='" + template.replace("'", "\\'") + "'", ranks=1,
    )  # fmt: skip
    said = process.communicate(timeout=nemo.PATIENCE_S)[0]
    assert process.returncode == 0, said[-4000:]
    output = tmp_path / "log" / "oprd"
    assert nemo.updates(output) == [1]
    ends = json.loads((output / "hf" / "generation_config.json").read_text())["eos_token_id"]
    assert ends == 2 and (output / "hf" / "chat_template.jinja").read_text() == template


def test_the_tokenizers_are_those_of_nemo(pair: Path, tmp_path: Path) -> None:
    """The cases of tests/unit/integrations/test_nemo_tokenizers.py, with NeMo's own classes instead of stand-ins."""
    command = ["python", "tests/e2e/nemo_tokenizer_cases.py", str(tmp_path), str(pair / "student")]
    ended = subprocess.run(
        command, cwd=nemo.ROOT, env=nemo.environment(nemo.TOOLKIT), capture_output=True, text=True, timeout=600
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found == {
        "equal": sorted([*EQUAL, "legacy special tokens", "AutoTokenizer"]),
        "refused": dict.fromkeys(REFUSED, True),
    }
