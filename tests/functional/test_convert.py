"""HF <-> Megatron: bits survive the round trip, Megatron's own loader takes the checkpoint at any layout, and the
model that comes out computes what HF computes. Also the refusals, and what the commands print."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
import weakref
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pools
from safetensors.torch import load_file, save_file

from nemo_oprd.megatron import convert
from nemo_oprd.megatron.convert import MegatronCheckpoint, hf_to_megatron, megatron_to_hf
from nemo_oprd.megatron.torch_dist import open_torch_dist
from nemo_oprd.megatron.weights import HFCheckpoint

TOOLS = Path(__file__).parents[2] / "checkpoint_tools"
# 300 rows are padded to 384 at TP1 and to 512 at TP2
SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2_tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2_untied": {"model_type": "qwen2", "tie_word_embeddings": False},
    "qwen3_untied": {"model_type": "qwen3", "tie_word_embeddings": False, "head_dim": 16},
    "qwen3_tied_bias": {"model_type": "qwen3", "tie_word_embeddings": True, "head_dim": 16, "attention_bias": True},
}
# the spelling of transformers 4 in config.json
OLD_SPELLING = {"qwen2_untied", "qwen3_tied_bias"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """`models(name, dtype)` is the directory of a tiny random HF model."""
    root = tmp_path_factory.mktemp("models")

    def get(name: str, dtype: str = "float32") -> Path:
        path = root / f"{name}_{dtype}"
        if not path.exists():
            _save_random_model(path, name, getattr(torch, dtype))
        return path

    return get


def _save_random_model(path: Path, name: str, dtype: torch.dtype) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(len(name))
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODELS[name], **SIZES), dtype=torch.float32)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            # biases of 0 and norms of 1, as initialised, would hide a mix-up
            parameter.normal_(1.0 if "norm" in key else 0.0, 0.1)
    model.to(dtype).save_pretrained(path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (path / file).write_text(json.dumps({"stands for": file}))
    if name in OLD_SPELLING:
        config = json.loads((path / "config.json").read_text())
        config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
        config["torch_dtype"] = config.pop("dtype")
        (path / "config.json").write_text(json.dumps(config))


def _edit_config(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))


def _edit_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture
def broken(models: Callable[[str, str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """`broken(name)` is a copy of a model to spoil."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(models(name, "float32"), tmp_path / "source"))

    return copy


def assert_same_tensors(one: Path, other: Path) -> None:
    before, after = HFCheckpoint(one), HFCheckpoint(other)
    assert before.keys() == after.keys()
    for name in before.keys():  # noqa: SIM118 - not a dictionary
        assert before[name].dtype == after[name].dtype
        assert torch.equal(before[name], after[name]), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_round_trip_is_bit_exact(models: Callable[..., Path], tmp_path: Path, name: str, dtype: str) -> None:
    source = models(name, dtype)
    hf_to_megatron(source, tmp_path / "megatron", tensor=2, pipeline=2, progress=False)
    megatron_to_hf(tmp_path / "megatron", tmp_path / "hf", progress=False)
    assert_same_tensors(source, tmp_path / "hf")
    assert json.loads((tmp_path / "hf/config.json").read_text()) == json.loads((source / "config.json").read_text())
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "hf" / file).read_bytes() == (source / file).read_bytes()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["hf", "megatron"]  # no partial directory is left


def test_dtype_is_converted_and_config_follows(models: Callable[..., Path], tmp_path: Path) -> None:
    hf_to_megatron(models("qwen2_tied"), tmp_path / "megatron", progress=False)
    megatron_to_hf(tmp_path / "megatron", tmp_path / "hf", dtype="bfloat16", progress=False)
    before, after = HFCheckpoint(models("qwen2_tied")), HFCheckpoint(tmp_path / "hf")
    assert all(torch.equal(before[name].bfloat16(), after[name]) for name in before.keys())  # noqa: SIM118
    assert json.loads((tmp_path / "hf/config.json").read_text())["dtype"] == "bfloat16"


def test_dtype_is_the_stored_one_where_the_config_names_none(broken: Callable[[str], Path], tmp_path: Path) -> None:
    source = broken("qwen2_tied")
    config = json.loads((source / "config.json").read_text())
    del config["dtype"]
    (source / "config.json").write_text(json.dumps(config))
    _edit_tensors(source, lambda tensors: tensors.update({name: t.bfloat16() for name, t in tensors.items()}))
    hf_to_megatron(source, tmp_path / "megatron", progress=False)
    megatron_to_hf(tmp_path / "megatron", tmp_path / "hf", progress=False)
    assert_same_tensors(source, tmp_path / "hf")


def test_sharded_files_on_both_sides(models: Callable[..., Path], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(models("qwen3_untied"))
    model.save_pretrained(tmp_path / "source", max_shard_size="60KB")
    assert len(list((tmp_path / "source").glob("*.safetensors"))) > 2
    hf_to_megatron(tmp_path / "source", tmp_path / "megatron", progress=False)
    megatron_to_hf(tmp_path / "megatron", tmp_path / "hf", max_shard_bytes=50_000, progress=False)
    files = sorted(file.name for file in (tmp_path / "hf").glob("*.safetensors"))
    assert files == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    assert len(files) > 3
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(files)
    assert max((tmp_path / "hf" / file).stat().st_size for file in files) < 55_000
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))


class AliveBytes:
    """Counts the bytes of the tensors that a function returned and that are still referred to."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        self.function, self.now, self.peak, self.total, self.largest = function, 0, 0, 0, 0

    def __call__(self, *args: Any) -> torch.Tensor:
        tensor = self.function(*args)
        size = tensor.nbytes
        self.now += size
        self.peak, self.total, self.largest = max(self.peak, self.now), self.total + size, max(self.largest, size)
        weakref.finalize(tensor, self._gone, size)
        return tensor

    def _gone(self, size: int) -> None:
        self.now -= size


def test_few_tensors_are_held_and_each_is_read_once(
    models: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = models("qwen3_untied")
    weights = sum(tensor.nbytes for tensor in load_file(source / "model.safetensors").values())
    reads = AliveBytes(HFCheckpoint.__getitem__)
    monkeypatch.setattr(HFCheckpoint, "__getitem__", lambda self, name: reads(self, name))
    hf_to_megatron(source, tmp_path / "megatron", tensor=2, pipeline=2, progress=False)
    assert (reads.total, reads.now) == (weights, 0)
    assert reads.peak <= 2 * reads.largest
    back = AliveBytes(convert.read_megatron_tensor)
    monkeypatch.setattr(convert, "read_megatron_tensor", back)
    megatron_to_hf(tmp_path / "megatron", tmp_path / "hf", max_shard_bytes=20_000, progress=False)
    assert back.total == weights
    assert back.peak <= 2 * back.largest


# what Megatron's own saver writes at a layout, chunk for chunk
@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("name", ["qwen2_tied", "qwen3_untied"])
def test_chunks_are_those_of_megatron(
    models: Callable[..., Path], pools: Pools, tmp_path: Path, name: str, tensor: int, pipeline: int
) -> None:
    source = models(name)
    layout = {"tensor": tensor, "pipeline": pipeline}
    pools[tensor * pipeline].run(
        "convert_cases:save_with_megatron", checkpoint=str(tmp_path / "theirs"), hf_path=str(source), layout=layout
    )
    hf_to_megatron(source, tmp_path / "ours", **layout, progress=False)

    def contents(path: Path) -> dict[str, Any]:
        described: dict[str, Any] = {}
        for key, entry in open_torch_dist(path)[1].state_dict_metadata.items():
            if hasattr(entry, "chunks"):
                chunks = sorted((tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks)
                described[key] = (tuple(entry.size), entry.properties.dtype, chunks)
            elif "core_attention" not in key:  # only Transformer Engine's attention has it
                described[key] = None
        return described

    assert contents(tmp_path / "ours") == contents(tmp_path / "theirs")
    assert (tmp_path / "ours/metadata.json").read_text() == (tmp_path / "theirs/metadata.json").read_text()
    files = {file.name for file in (tmp_path / "ours").glob("*.distcp")}
    assert files == {f"__{rank}_0.distcp" for rank in range(tensor * pipeline)}


LAYOUTS: dict[str, dict[str, int]] = {
    "TP1": {},
    "TP2": {"tensor": 2},
    "PP2": {"pipeline": 2},
    "PP2xVPP2": {"pipeline": 2, "virtual_pipeline": 2},
    "DP2": {"data": 2},
}


def ranks(layout: str) -> int:
    """Processes that a layout takes; virtual stages take none."""
    return prod(size for axis, size in LAYOUTS[layout].items() if axis != "virtual_pipeline")


@pytest.mark.parametrize("written", [(1, 1), (2, 2)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_megatron_loads_it_at_any_layout(
    models: Callable[..., Path], pools: Pools, tmp_path: Path, layout: str, written: tuple[int, int]
) -> None:
    for name, dtype in (("qwen2_tied", "float32"), ("qwen3_untied", "bfloat16")):
        source, checkpoint = models(name, dtype), tmp_path / name
        hf_to_megatron(source, checkpoint, tensor=written[0], pipeline=written[1], progress=False)
        problems = pools[ranks(layout)].run(
            "convert_cases:differing_after_load",
            checkpoint=str(checkpoint),
            hf_path=str(source),
            layout=LAYOUTS[layout],
            dtype=dtype,
        )
        assert problems == []


def _hf_states(path: Path, file: Path) -> None:
    """What HF computes for two sequences of different lengths."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    states = {}
    for i, length in enumerate((23, 9)):
        ids = torch.randint(SIZES["vocab_size"], (length,), generator=generator)
        with torch.no_grad():
            out = model(ids[None], output_hidden_states=True)
        states |= {f"ids.{i}": ids, f"logits.{i}": out.logits[0]}
        states |= {f"hidden.{i}.{layer}": state[0] for layer, state in enumerate(out.hidden_states) if layer > 0}
    save_file(states, file)


@pytest.mark.parametrize(
    ("name", "layout", "by_name"),
    [(name, "TP1", False) for name in MODELS]
    + [("qwen2_tied", "TP2", True), ("qwen2_tied", "PP2", False), ("qwen3_untied", "PP2", True)]
    + [("qwen3_tied_bias", "TP2", False)],
)
def test_hidden_states_and_logits_are_those_of_hf(
    models: Callable[..., Path], pools: Pools, tmp_path: Path, name: str, layout: str, by_name: bool
) -> None:
    source = models(name)
    _hf_states(source, tmp_path / "expected.safetensors")
    hf_to_megatron(source, tmp_path / "megatron", progress=False)
    deviations = pools[ranks(layout)].run(
        "convert_cases:deviations",
        checkpoint=str(tmp_path / "megatron"),
        hf_path=str(source),
        expected=str(tmp_path / "expected.safetensors"),
        layout=LAYOUTS[layout],
        by_name=by_name,
    )
    assert set(deviations) == {"logits", *(f"hidden.{layer}" for layer in range(1, SIZES["num_hidden_layers"] + 1))}
    assert max(deviations.values()) < 1e-5, deviations


@pytest.mark.parametrize(("layout", "prefix"), [("TP1", "model."), ("TP2", "module."), ("PP2xVPP2", "model0.")])
def test_training_checkpoint_with_prefix_and_optimizer(
    models: Callable[..., Path], pools: Pools, tmp_path: Path, layout: str, prefix: str
) -> None:
    source, checkpoint = models("qwen3_untied"), tmp_path / "iter_0000050"
    pools[ranks(layout)].run(
        "convert_cases:save_with_megatron",
        checkpoint=str(checkpoint),
        hf_path=str(source),
        layout=LAYOUTS[layout],
        prefix=prefix,
        optimizer=True,
    )
    with pytest.raises(ValueError, match=r"no hf/config.json there; copy"):
        MegatronCheckpoint(checkpoint)
    (checkpoint / "hf").mkdir()
    shutil.copy(source / "config.json", checkpoint / "hf")
    megatron_to_hf(checkpoint, tmp_path / "hf", progress=False)
    assert_same_tensors(source, tmp_path / "hf")


REFUSED_CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported"),
    ({"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2, "layer_types": None}, "sliding-window"),
    ({"layer_types": ["full_attention"] * 3 + ["sliding_attention"]}, "sliding-window"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5000.0}}, "RoPE type 'yarn'"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "RoPE type 'linear'"),
    ({"intermediate_size": 40}, r"mlp.gate_proj.weight is \(48, 32\), but config.json asks for \(40, 32\)"),
    ({"num_hidden_layers": 5}, "'model.layers.4.*' is missing"),
    ({"num_hidden_layers": 3}, "12 tensor\\(s\\) that a qwen2 model.*'model.layers.3"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED_CONFIGS, ids=[str(list(case[0])) for case in REFUSED_CONFIGS])
def test_config_that_is_refused(
    broken: Callable[[str], Path], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    source = broken("qwen2_tied")
    _edit_config(source, **changes)
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
    _edit_tensors(source, change)
    refused(message, source, tmp_path / "out")


def test_copies_without_content_of_their_own_are_left_out(broken: Callable[[str], Path], tmp_path: Path) -> None:
    source = broken("qwen2_tied")
    embedding = load_file(source / "model.safetensors")["model.embed_tokens.weight"]
    extra = {"lm_head.weight": embedding, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    _edit_tensors(source, lambda tensors: tensors.update(extra))
    hf_to_megatron(source, tmp_path / "megatron", progress=False)
    assert not set(MegatronCheckpoint(tmp_path / "megatron").keys()) & set(extra)


def test_truncated_safetensors(broken: Callable[[str], Path], tmp_path: Path) -> None:
    source = broken("qwen2_tied")
    file = source / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    refused("model.safetensors: not a readable safetensors file", source, tmp_path / "out")


def test_output_and_sizes_that_are_refused(models: Callable[..., Path], tmp_path: Path) -> None:
    source, used = models("qwen2_tied"), tmp_path / "used"
    used.mkdir()
    (used / "precious").touch()
    refused("exists and is not an empty directory; choose another", source, used)
    refused("not an empty directory", source, used / "precious")
    refused("tensor=4 does not divide the model's 2 key/value heads", source, tmp_path / "out", tensor=4)
    refused("deeper than the model's 4 layers|can't be split", source, tmp_path / "out", pipeline=5)
    refused("tensor=0, pipeline=1; expected", source, tmp_path / "out", tensor=0)
    (tmp_path / "empty").mkdir()
    hf_to_megatron(source, tmp_path / "empty", progress=False)
    with pytest.raises(ValueError, match="exists and is not an empty directory"):
        megatron_to_hf(tmp_path / "empty", used, progress=False)
    with pytest.raises(ValueError, match="dtype='int8'; expected one of float32, bfloat16, float16"):
        megatron_to_hf(tmp_path / "empty", tmp_path / "hf", dtype="int8", progress=False)


def test_megatron_checkpoints_that_are_refused(models: Callable[..., Path], tmp_path: Path) -> None:
    run, good = tmp_path / "checkpoints", tmp_path / "checkpoints/iter_0000050"
    hf_to_megatron(models("qwen2_untied"), good, progress=False)

    def refuses(message: str, path: Path = good) -> None:
        with pytest.raises(ValueError, match=message):
            megatron_to_hf(path, tmp_path / "hf", progress=False)

    refuses("expected a torch_dist checkpoint: did you mean .*iter_0000050", run)
    refuses("no metadata.json and .metadata", tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"no tensor 'a.b'; expected an HF name such as 'model.embed_tokens.weight'"):
        MegatronCheckpoint(good)["a.b"]
    config = (good / "hf/config.json").read_text()
    _edit_config(good / "hf", hidden_size=64)
    refuses(r"is \(384, 32\), but hf/config.json asks for \(300, 64\)")
    _edit_config(good / "hf", hidden_size=32, vocab_size=400)
    refuses(r"is \(384, 32\), but hf/config.json asks for \(400, 32\)")
    (good / "hf/config.json").write_text(config)
    _edit_config(good / "hf", model_type="qwen3", head_dim=8)
    refuses("q_layernorm.weight' is missing among .* is it another model's config")
    (good / "hf/config.json").write_text(config)
    (good / "__0_0.distcp").write_bytes((good / "__0_0.distcp").read_bytes()[:100_000])
    refuses(r"can't be read .* copy its \*.distcp files again")
    index = (good / ".metadata").read_bytes()
    (good / ".metadata").write_bytes(index[:100])
    refuses(".metadata can't be read .* copy the checkpoint again")
    (good / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    refuses("format 'zarr'; expected 'torch_dist'")


def test_a_checkpoint_with_unwritten_parts_is_refused(models: Callable[..., Path], tmp_path: Path) -> None:
    hf_to_megatron(models("qwen2_tied"), tmp_path / "megatron", progress=False)
    checkpoint = MegatronCheckpoint(tmp_path / "megatron")
    entries = checkpoint._metadata.state_dict_metadata
    entries["decoder.layers.mlp.linear_fc2.weight"].chunks.pop()
    assert checkpoint["model.layers.2.mlp.down_proj.weight"].shape == (32, 48)
    with pytest.raises(ValueError, match=r"linear_fc2.weight is incomplete at \(3, 0, 0\).*interrupted"):
        checkpoint["model.layers.3.mlp.down_proj.weight"]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """`command(name, *arguments)` runs a command of checkpoint_tools in this process; its exit code."""
    monkeypatch.syspath_prepend(TOOLS)

    def run(name: str, *arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            importlib.import_module(name).main()
        return int(stop.value.code or 0)

    return run


def test_commands(
    models: Callable[..., Path], command: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
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
    _edit_config(source, dtype="bfloat16")  # the weights are float32: writing them in the config's dtype rounds
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
    import time

    start = time.monotonic()
    for name in ("hf_to_megatron", "megatron_to_hf", "verify_roundtrip"):
        help_text = subprocess.run(
            [sys.executable, TOOLS / f"{name}.py", "--help"], cwd=tmp_path, env={}, capture_output=True, text=True
        )
        assert help_text.stdout.startswith(f"usage: {name}.py")
    assert time.monotonic() - start < 5
    failed = subprocess.run(
        [sys.executable, TOOLS / "hf_to_megatron.py", "--hf-path", "nowhere", "--output", "out"],
        cwd=tmp_path,
        env={"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert (failed.returncode, failed.stdout) == (2, "")
    assert failed.stderr == "error: nowhere: no config.json there; expected the directory of a Hugging Face model\n"
