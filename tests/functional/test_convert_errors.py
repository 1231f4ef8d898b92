"""HF <-> Megatron: what is refused, in which words, and that nothing is left behind; the commands."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pools, WorkerError
from safetensors.torch import load_file
from tiny_models import Models, assert_same_tensors, edit_config, edit_tensors

from checkpoint_tools._convert import TorchDistWriter, hf_to_megatron, megatron_to_hf
from nemo_oprd.megatron.weights.megatron_checkpoint import MegatronCheckpoint

TOOLS = Path(__file__).parents[2] / "checkpoint_tools"
GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def broken(models: Models, tmp_path: Path) -> Callable[[str], Path]:
    """`broken(name)` is a copy of a model to spoil."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(models(name, "float32"), tmp_path / "source"))

    return copy


REFUSED_CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported"),
    ({"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2, "layer_types": None}, "sliding-window"),
    ({"layer_types": ["full_attention"] * 3 + ["sliding_attention"]}, "sliding-window"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5000.0}}, "no 'original_max_position"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "RoPE type 'dynamic', whose frequencies change"),
    ({"intermediate_size": 40}, r"mlp.gate_proj.weight is \(48, 32\), but config.json asks for \(40, 32\)"),
    ({"num_hidden_layers": 5}, "'model.layers.4.*' is missing"),
    ({"num_hidden_layers": 3}, "12 tensor\\(s\\) that a qwen2 model.*'model.layers.3"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED_CONFIGS, ids=[str(list(case[0])) for case in REFUSED_CONFIGS])
def test_config_that_is_refused(
    broken: Callable[[str], Path], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    source = broken("qwen2_tied")
    edit_config(source, **changes)
    refused(message, source, tmp_path / "out")


def refused(message: str, source: Path, target: Path, **options: Any) -> None:
    """The conversion stops with `message` and leaves nothing behind."""
    before = sorted(target.parent.iterdir())
    with pytest.raises(ValueError, match=message):
        hf_to_megatron(source, target, **options, progress=False)
    assert sorted(target.parent.iterdir()) == before


NORM, FIRST_Q = "model.norm.weight", "model.layers.0.self_attn.q_proj.weight"
REFUSED_TENSORS: dict[str, tuple[str, Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "missing": ("qwen2_tied", lambda t: t.pop(NORM), "'model.norm.weight' is missing.*is a shard missing"),
    "wrong shape": (
        "qwen2_tied",
        lambda t: t.update({FIRST_Q: torch.zeros(16, 32)}),
        r"q_proj.weight is \(16, 32\), but config.json asks for \(32, 32\)",
    ),
    "one too many": ("qwen3_untied", lambda t: t.update({"a.bias": torch.zeros(1)}), "such as 'a.bias'; they would"),
    "another head": (
        "qwen2_tied",
        lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}),
        "lm_head.weight differs from model.embed_tokens.weight",
    ),
    "mixed dtypes": (
        "qwen2_tied",
        lambda t: t.update({"model.layers.2.input_layernorm.weight": torch.ones(32).half()}),
        "layer_norm_weight is torch.float16 at .2, 0. and torch.float32 before",
    ),
}


@pytest.mark.parametrize("case", REFUSED_TENSORS)
def test_tensors_that_are_refused(broken: Callable[[str], Path], tmp_path: Path, case: str) -> None:
    name, change, message = REFUSED_TENSORS[case]
    source = broken(name)
    edit_tensors(source, change)
    refused(message, source, tmp_path / "out")


def test_copies_without_content_of_their_own_are_left_out(broken: Callable[[str], Path], tmp_path: Path) -> None:
    source = broken("qwen2_tied")
    embedding = load_file(source / "model.safetensors")["model.embed_tokens.weight"]
    extra = {"lm_head.weight": embedding, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    edit_tensors(source, lambda tensors: tensors.update(extra))
    hf_to_megatron(source, tmp_path / "megatron", progress=False)
    assert not set(MegatronCheckpoint(tmp_path / "megatron").keys()) & set(extra)


def test_truncated_safetensors(broken: Callable[[str], Path], tmp_path: Path) -> None:
    source = broken("qwen2_tied")
    file = source / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    refused("model.safetensors: not a readable safetensors file", source, tmp_path / "out")


def test_output_and_sizes_that_are_refused(models: Models, tmp_path: Path) -> None:
    source, used = models("qwen2_tied"), tmp_path / "used"
    used.mkdir()
    (used / "precious").touch()
    refused("exists and is not an empty directory; choose another", source, used)
    refused("not an empty directory", source, used / "precious")
    refused("tensor=8 does not divide the model's 4 attention heads", source, tmp_path / "out", tensor=8)
    refused("more than the model's 4 layers|cannot be split", source, tmp_path / "out", pipeline=5)
    refused("tensor=0, pipeline=1; expected", source, tmp_path / "out", tensor=0)
    (tmp_path / "empty").mkdir()
    hf_to_megatron(source, tmp_path / "empty", progress=False)
    with pytest.raises(ValueError, match="exists and is not an empty directory"):
        megatron_to_hf(tmp_path / "empty", used, progress=False)
    with pytest.raises(ValueError, match="dtype='int8'; expected one of float32, bfloat16, float16"):
        megatron_to_hf(tmp_path / "empty", tmp_path / "hf", dtype="int8", progress=False)


def test_megatron_checkpoints_that_are_refused(models: Models, tmp_path: Path) -> None:
    run, good = tmp_path / "checkpoints", tmp_path / "checkpoints/iter_0000050"
    hf_to_megatron(models("qwen2_untied"), good, progress=False)

    def refuses(message: str, path: Path = good) -> None:
        with pytest.raises(ValueError, match=message):
            megatron_to_hf(path, tmp_path / "hf", progress=False)

    (run / "latest_checkpointed_iteration.txt").write_text("7")
    refuses(r"names the checkpoint '7'; expected one of those beside it \(iter_0000050\)", run)
    good.rename(run / "other")
    (run / "latest_checkpointed_iteration.txt").unlink()
    refuses("expected a torch_dist checkpoint: did you mean .*other", run)
    (run / "other").rename(good)
    refuses("nowhere: no such directory; expected a torch_dist", tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"no tensor 'a.b'; expected an HF name such as 'model.embed_tokens.weight'"):
        MegatronCheckpoint(good)["a.b"]
    config = (good / "hf/config.json").read_text()
    edit_config(good / "hf", hidden_size=64)
    refuses(r"is \(384, 32\), but hf/config.json asks for \(300, 64\)")
    edit_config(good / "hf", hidden_size=32, vocab_size=400)
    refuses(r"is \(384, 32\), but hf/config.json asks for \(400, 32\)")
    (good / "hf/config.json").write_text(config)
    edit_config(good / "hf", model_type="qwen3", head_dim=8)
    refuses("q_layernorm.weight' is missing among .* is it another model's config")
    (good / "hf/config.json").write_text(config)
    (good / "__0_0.distcp").write_bytes((good / "__0_0.distcp").read_bytes()[:100_000])
    refuses(r"can't be read .* copy its \*.distcp files again")
    index = (good / ".metadata").read_bytes()
    (good / ".metadata").write_bytes(index[:100])
    refuses(".metadata can't be read .* copy the checkpoint again")
    (good / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    refuses("format 'zarr'; expected 'torch_dist'")


def test_a_checkpoint_with_unwritten_parts_is_refused(models: Models, tmp_path: Path) -> None:
    hf_to_megatron(models("qwen2_tied"), tmp_path / "megatron", progress=False)
    checkpoint = MegatronCheckpoint(tmp_path / "megatron")
    entries = checkpoint._metadata.state_dict_metadata
    entries["decoder.layers.mlp.linear_fc2.weight"].chunks.pop()
    assert checkpoint["model.layers.2.mlp.down_proj.weight"].shape == (32, 48)
    with pytest.raises(ValueError, match=r"linear_fc2.weight is incomplete at \(3, 0, 0\).*interrupted"):
        checkpoint["model.layers.3.mlp.down_proj.weight"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_local_experts": 8}, r"router.weight is \(4, 4, 32\), but hf/config.json asks for \(4, 8, 32\)"),
        ({"num_local_experts": 2}, r"router.weight is \(4, 4, 32\), but hf/config.json asks for \(4, 2, 32\)"),
        ({"num_hidden_layers": 3}, r"is \(4, .*, but hf/config.json asks for \(3, "),
    ],
)
def test_a_checkpoint_with_other_experts_is_refused(
    models: Models, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    hf_to_megatron(models("mixtral"), tmp_path / "megatron", progress=False)
    edit_config(tmp_path / "megatron" / "hf", **changes)
    with pytest.raises(ValueError, match=message):
        MegatronCheckpoint(tmp_path / "megatron")


@pytest.mark.parametrize(
    "key", ["decoder.layers.mlp.shared_experts.linear_fc2.weight", "model.decoder.layers.mlp.router.expert_bias"]
)
def test_a_checkpoint_with_a_tensor_that_would_be_lost_is_refused(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    complete = TorchDistWriter.complete

    def add(writer: TorchDistWriter) -> None:
        for added in (key, f"optimizer.state.exp_avg.{key}", "decoder.layers.mlp.linear_fc1._extra_state"):
            writer.add("__0_0.distcp", added, (4, 2), (0, 0), torch.ones(4, 2))
        complete(writer)

    monkeypatch.setattr(TorchDistWriter, "complete", add)
    hf_to_megatron(models("mixtral"), tmp_path / "megatron", progress=False)
    expected = (
        rf"1 tensor\(s\) that the mixtral model in hf/config.json does not have, such as '{re.escape(key)}'; they"
    )
    with pytest.raises(ValueError, match=expected):
        MegatronCheckpoint(tmp_path / "megatron")


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """`command(name, *arguments)` runs a command of checkpoint_tools in this process; its exit code."""
    monkeypatch.syspath_prepend(TOOLS)

    def run(name: str, *arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        try:
            importlib.import_module(name).main()
        except SystemExit as stop:
            return int(stop.code or 0)
        return 0

    return run


def test_commands(
    models: Models, command: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, megatron, hf = models("qwen3_tied_bias", "bfloat16"), tmp_path / "megatron", tmp_path / "hf"
    sizes = ["--tensor", 2, "--pipeline", 2]
    assert command("hf_to_megatron", "--hf-path", source, "--output", megatron, *sizes) == 0
    assert command("megatron_to_hf", "--megatron-path", megatron, "--output", hf) == 0
    assert "100%" in capsys.readouterr().err
    assert_same_tensors(source, hf)
    assert command("verify_roundtrip", "--hf-path", source) == 0
    assert "62 tensors compared bit for bit: all identical" in capsys.readouterr().out
    assert command("hf_to_megatron", "--hf-path", source, "--output", hf) == 2
    assert capsys.readouterr().err.startswith(f"error: {hf} exists and is not an empty directory")


def test_verify_roundtrip_says_what_differs(
    broken: Callable[[str], Path], command: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = broken("qwen2_tied")
    edit_config(source, dtype="bfloat16")  # the weights are float32: writing them in the config's dtype rounds
    assert command("verify_roundtrip", "--hf-path", source, "--work-dir", tmp_path / "work") == 1
    said = capsys.readouterr().out
    assert "model.norm.weight: torch.float32 (32,) became torch.bfloat16 (32,)" in said
    assert "50 differ" in said
    assert (tmp_path / "work/hf/model.safetensors").exists()


def test_bits_are_compared(command: Callable[..., int]) -> None:
    difference = importlib.import_module("verify_roundtrip").difference
    one = {"a": torch.tensor([0.0, torch.nan, 1.0])}
    assert difference(one, {"a": one["a"].clone()}, "a") is None
    assert difference(one, {"a": torch.tensor([-0.0, torch.nan, 1.0])}, "a") == "1 of 12 bytes differ"
    assert difference(one, {}, "a") == "missing"


def test_commands_run_from_a_checkout(tmp_path: Path) -> None:
    """Without an installation, from any directory; help before anything heavy is imported."""
    for name in ("hf_to_megatron", "megatron_to_hf", "verify_roundtrip"):
        help_text = subprocess.run(
            [sys.executable, "-X", "importtime", TOOLS / f"{name}.py", "--help"],
            cwd=tmp_path, env={}, capture_output=True, text=True,
        )  # fmt: skip
        assert help_text.stdout.startswith(f"usage: {name}.py")
        imported = {line.rsplit("|", 1)[1].strip() for line in help_text.stderr.splitlines() if "|" in line}
        assert "argparse" in imported and not imported & {"torch", "numpy", "megatron.core", "transformers"}
    failed = subprocess.run(
        [sys.executable, TOOLS / "hf_to_megatron.py", "--hf-path", "nowhere", "--output", "out"],
        cwd=tmp_path,
        env={"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert (failed.returncode, failed.stdout) == (2, "")
    # a torch with CUDA warns, in lines that begin with W, where there is a CUDA toolkit and no GPU
    (line,) = [line for line in failed.stderr.splitlines() if not re.match(r"W\d{4} .* No CUDA runtime is found", line)]
    assert line == "error: nowhere: no such directory; expected that of a Hugging Face model: download it first"


@pytest.mark.parametrize("role", ["student", "teacher"])
def test_an_error_in_a_megatron_checkpoint_names_it(pools: Pools, tmp_path: Path, role: str) -> None:
    """Also where weights and config disagree only once they are loaded."""
    paths = {name: GOLDEN / name for name in ("student", "teacher")}
    sources = [f"{name}.hf_path={path}" for name, path in paths.items() if name != role]
    checkpoint = tmp_path / "megatron"
    hf_to_megatron(paths[role], checkpoint, progress=False)
    settings = [*sources, f"{role}.checkpoint={checkpoint}", f"rollout.replay={GOLDEN / 'rollouts.jsonl'}"]
    with pytest.raises(WorkerError, match=r"ValueError: \S+megatron: model.layers.0.\S+ gives \(31,\)"):
        pools[1].run("cases:load_damaged_checkpoint", overrides=[*settings, f"output={tmp_path / 'out'}"])
