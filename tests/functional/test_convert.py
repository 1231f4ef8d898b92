"""HF <-> Megatron: bits survive the round trip, Megatron's own loader takes the checkpoint at any layout, and the
model that comes out computes what HF computes."""

from __future__ import annotations

import json
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from convert_layouts import LAYOUTS, ranks, save_hf_states
from pool import Pools
from safetensors.torch import load_file, save_file
from tiny_models import MODELS, SIZES, Models, assert_same_tensors, edit_tensors

from checkpoint_tools._convert import hf_to_megatron, megatron_to_hf
from nemo_oprd.megatron.weights import megatron_checkpoint
from nemo_oprd.megatron.weights.hf import HFCheckpoint
from nemo_oprd.megatron.weights.megatron_checkpoint import MegatronCheckpoint
from nemo_oprd.megatron.weights.torch_dist import open_torch_dist


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_round_trip_is_bit_exact(models: Models, tmp_path: Path, name: str, dtype: str) -> None:
    source = models(name, dtype)
    hf_to_megatron(source, tmp_path / "megatron", tensor=2, pipeline=2, progress=False)
    megatron_to_hf(tmp_path / "megatron", tmp_path / "hf", progress=False)
    assert_same_tensors(source, tmp_path / "hf")
    assert json.loads((tmp_path / "hf/config.json").read_text()) == json.loads((source / "config.json").read_text())
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "hf" / file).read_bytes() == (source / file).read_bytes()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["hf", "megatron"]  # no partial directory is left


def test_stages_describe_their_tensors_in_one_message(pools: Pools, tmp_path: Path) -> None:
    """However many tensors there are: a header for each one, pickled, would cost more than a small tensor."""
    counts = []
    for experts in (4, 64):
        config = {**SIZES, **MODELS["qwen3_moe"], "num_experts": experts, "dtype": "float32"}
        folder = tmp_path / str(experts)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        found = pools[2].run("convert_cases:object_messages", config=str(folder), layout={"pipeline": 2})
        print(experts, found)
        assert [rank["messages"] for rank in found] == [1, 1]
        counts.append(found[0]["tensors"])
    assert counts[1] > 5 * counts[0]


def test_dtype_is_converted_and_config_follows(models: Models, tmp_path: Path) -> None:
    hf_to_megatron(models("qwen2_tied"), tmp_path / "megatron", progress=False)
    megatron_to_hf(tmp_path / "megatron", tmp_path / "hf", dtype="bfloat16", progress=False)
    before, after = HFCheckpoint(models("qwen2_tied")), HFCheckpoint(tmp_path / "hf")
    assert all(torch.equal(before[name].bfloat16(), after[name]) for name in before.keys())  # noqa: SIM118
    assert json.loads((tmp_path / "hf/config.json").read_text())["dtype"] == "bfloat16"


def test_dtype_is_the_stored_one_where_the_config_names_none(models: Models, tmp_path: Path) -> None:
    source = Path(shutil.copytree(models("qwen2_tied"), tmp_path / "source"))
    config = json.loads((source / "config.json").read_text())
    del config["dtype"]
    (source / "config.json").write_text(json.dumps(config))
    edit_tensors(source, lambda tensors: tensors.update({name: t.bfloat16() for name, t in tensors.items()}))
    hf_to_megatron(source, tmp_path / "megatron", progress=False)
    megatron_to_hf(tmp_path / "megatron", tmp_path / "hf", progress=False)
    assert_same_tensors(source, tmp_path / "hf")


def test_sharded_files_on_both_sides(models: Models, tmp_path: Path) -> None:
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


def test_layers_that_are_alike_and_stored_one_by_one(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Megatron stores them where its `moe_layer_freq` is a list of ones."""
    with monkeypatch.context() as patch:
        for user in ("checkpoint_tools._convert", "nemo_oprd.megatron.weights.megatron_checkpoint"):
            patch.setattr(f"{user}.stacks_layers", lambda spec: False)
        hf_to_megatron(models("mixtral"), tmp_path / "megatron", progress=False)
    keys = MegatronCheckpoint(tmp_path / "megatron")._tensors
    assert "decoder.layers.3.mlp.router.weight" in keys and "decoder.layers.mlp.router.weight" not in keys
    megatron_to_hf(tmp_path / "megatron", tmp_path / "hf", progress=False)
    assert_same_tensors(models("mixtral"), tmp_path / "hf")


def test_experts_that_are_stored_together(models: Models, tmp_path: Path) -> None:
    """Files as transformers holds experts in memory load as those with one tensor per matrix of an expert."""
    from transformers import AutoModelForCausalLM

    for name in ("qwen3_moe", "mixtral"):
        source = models(name)
        fused = Path(shutil.copytree(source, tmp_path / name))
        model = AutoModelForCausalLM.from_pretrained(source)
        save_file({key: value.contiguous() for key, value in model.state_dict().items()}, fused / "model.safetensors")
        assert any(key.endswith("gate_up_proj") for key in HFCheckpoint(fused).keys())  # noqa: SIM118
        hf_to_megatron(fused, tmp_path / f"{name}-megatron", progress=False)
        megatron_to_hf(tmp_path / f"{name}-megatron", tmp_path / f"{name}-hf", progress=False)
        assert_same_tensors(source, tmp_path / f"{name}-hf")


def test_few_tensors_are_held_and_each_is_read_once(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = models("qwen3_untied")
    weights = sum(tensor.nbytes for tensor in load_file(source / "model.safetensors").values())
    reads = AliveBytes(HFCheckpoint.__getitem__)
    monkeypatch.setattr(HFCheckpoint, "__getitem__", lambda self, name: reads(self, name))
    hf_to_megatron(source, tmp_path / "megatron", tensor=2, pipeline=2, progress=False)
    assert (reads.total, reads.now) == (weights, 0)
    assert reads.peak <= 2 * reads.largest
    back = AliveBytes(megatron_checkpoint.read_megatron_tensor)
    monkeypatch.setattr(megatron_checkpoint, "read_megatron_tensor", back)
    megatron_to_hf(tmp_path / "megatron", tmp_path / "hf", max_shard_bytes=20_000, progress=False)
    assert back.total == weights
    assert back.peak <= 2 * back.largest


CHUNKS = {"qwen3_untied": (1, 1), "qwen3_moe": (2, 1), "qwen2_tied": (1, 2)}


# what Megatron's own saver writes at a layout, chunk for chunk; the default run has every model and every layout
@pytest.mark.parametrize(
    ("name", "tensor", "pipeline"),
    [
        pytest.param(name, *layout, marks=[] if layout == CHUNKS[name] else pytest.mark.slow)
        for name in CHUNKS
        for layout in ((1, 1), (2, 1), (1, 2), (4, 1))
    ],
)
def test_chunks_are_those_of_megatron(
    models: Models, pools: Pools, tmp_path: Path, name: str, tensor: int, pipeline: int
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
            if key == "common_state/shard_0_1":  # from Megatron-core 0.19 on, the content of common.pt
                continue
            if hasattr(entry, "chunks"):
                chunks = sorted((tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks)
                described[key] = (tuple(entry.size), entry.properties.dtype, chunks)
            elif (
                "core_attention" not in key and "norm._extra" not in key
            ):  # only Transformer Engine's modules have these
                described[key] = None
        return described

    assert contents(tmp_path / "ours") == contents(tmp_path / "theirs")
    assert (tmp_path / "ours/metadata.json").read_text() == (tmp_path / "theirs/metadata.json").read_text()
    files = {file.name for file in (tmp_path / "ours").glob("*.distcp")}
    assert files == {f"__{rank}_0.distcp" for rank in range(tensor * pipeline)}


@pytest.mark.parametrize("written", [(1, 1), (2, 2)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_megatron_loads_it_at_any_layout(
    models: Models, pools: Pools, tmp_path: Path, layout: str, written: tuple[int, int]
) -> None:
    dense = (("qwen2_tied", "float32"), ("qwen3_untied", "bfloat16"))
    experts = (("qwen3_moe", "float32"), ("mixtral", "bfloat16"))
    for name, dtype in experts if "EP" in layout or "ETP" in layout else dense:
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


@pytest.mark.parametrize(
    ("name", "layout", "by_name"),
    [(name, "TP1", False) for name in MODELS]
    + [("qwen2_tied", "TP2", True), ("qwen2_tied", "PP2", False), ("qwen3_untied", "PP2", True)]
    + [("qwen3_tied_bias", "TP2", False)]
    + [("llama_tied", "PP2", False), ("llama_untied_bias", "TP2", False), ("llama2", "TP2", True)]
    + [("phi4_tied", "PP2", True), ("phi4_untied_old", "TP2", False)]
    + [("qwen3_moe", "EP2", False), ("qwen3_moe", "TP2xETP2", True), ("mixtral", "TP2xEP2", True)],
)
def test_hidden_states_and_logits_are_those_of_hf(
    models: Models, pools: Pools, tmp_path: Path, name: str, layout: str, by_name: bool
) -> None:
    source = models(name)
    save_hf_states(source, tmp_path / "expected.safetensors")
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
    models: Models, pools: Pools, tmp_path: Path, layout: str, prefix: str
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
