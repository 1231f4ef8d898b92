"""Megatron-Bridge's run_config.yaml: what is written for a model, and what is refused when it is read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml

from nemo_oprd.models import Family, ModelSpec, read_model_spec
from nemo_oprd.models.checkpoint_directory import LATEST, checkpoint_directory, hf_directory
from nemo_oprd.models.megatron_bridge_config import (
    RUN_CONFIG,
    check_run_config,
    read_run_config,
    run_config,
    write_run_config,
)
from nemo_oprd.models.rope import Rope

ORIGINAL = ("original_max_position_embeddings", 8192)
LLAMA3 = (("factor", 32.0), ("low_freq_factor", 1.0), ("high_freq_factor", 4.0))
YARN = (("factor", 4.0), ORIGINAL)
STUDENT = Path(__file__).parents[2] / "golden" / "student"


@pytest.fixture
def spec() -> ModelSpec:
    return read_model_spec(STUDENT)


def checkpoint(directory: Path, spec: ModelSpec | None = None, **fields: Any) -> Path:
    """A directory like a torch_dist checkpoint, with a run_config.yaml that differs in some fields of the model."""
    directory.mkdir(parents=True)
    (directory / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    (directory / ".metadata").write_bytes(b"not looked at")
    if spec is not None:
        content = run_config(spec, "float32")
        assert content is not None
        content["model"].update(fields)
        (directory / RUN_CONFIG).write_text(yaml.safe_dump(content))
    return directory


def test_written_and_read(tmp_path: Path, spec: ModelSpec) -> None:
    write_run_config(tmp_path, spec, "bfloat16")
    content = read_run_config(tmp_path)
    assert content is not None
    model = content["model"]
    assert (model["num_layers"], model["kv_channels"], model["num_query_groups"]) == (3, 16, 2)
    assert (model["layernorm_epsilon"], model["rotary_base"], model["vocab_size"]) == (1e-6, 50000.0, 61)
    assert model["bf16"] and model["params_dtype"] == {"_target_": "torch.bfloat16", "_call_": False}
    check_run_config(tmp_path, content, spec, STUDENT)


@pytest.mark.parametrize(
    ("change", "written"),
    [
        ({"rope": Rope(5e5, "llama3", settings=(*LLAMA3, ORIGINAL))}, True),
        ({"rope": Rope(5e5, "llama3", settings=(*LLAMA3, ("original_max_position_embeddings", 4096)))}, False),
        ({"rope": Rope(5e4, "linear", settings=(("factor", 4.0),))}, True),
        ({"rope": Rope(5e4, "yarn", settings=YARN)}, True),
        ({"rope": Rope(5e4, "yarn", settings=(*YARN, ("beta_fast", 16.0), ("truncate", False)))}, True),
        ({"rope": Rope(5e4, "yarn", settings=(*YARN, ("mscale", 0.7), ("mscale_all_dim", 1.3)))}, True),
        ({"rope": Rope(5e4, "yarn", settings=(*YARN, ("attention_factor", 1.2)))}, False),
        ({"rope": Rope(1e4, "longrope", settings=(ORIGINAL, ("short_factor", (1.0,) * 8)))}, False),
        ({"qkv_bias": True}, True),
        ({"qkv_bias": True, "proj_bias": True}, False),
    ],
)
def test_only_models_that_stock_megatron_computes(
    tmp_path: Path, spec: ModelSpec, change: dict[str, Any], written: bool
) -> None:
    changed = replace(spec, **change)
    write_run_config(tmp_path, changed, "float32")
    content = read_run_config(tmp_path)
    assert (content is not None) == written
    if content is None:
        content = run_config(spec, "float32")
        assert content is not None
        with pytest.raises(
            ValueError, match="which is not read from checkpoints of Megatron-Bridge; expected the config.json"
        ):
            check_run_config(tmp_path, content, changed, STUDENT)
    else:
        assert content["model"]["rope_scaling"] == (changed.rope.kind == "llama3")
        check_run_config(tmp_path, content, changed, STUDENT)
        with pytest.raises(ValueError, match="expected the same model"):
            check_run_config(tmp_path, content, spec, STUDENT)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rotary_base": 10000}, "rotary_base=10000, but .*config.json asks for 50000.0; expected the same model"),
        ({"layernorm_epsilon": 1e-5}, "layernorm_epsilon=1e-05, but"),
        ({"num_layers": 4}, "num_layers=4, but"),
        ({"num_query_groups": None}, "num_query_groups=4, but .* asks for 2"),
        ({"kv_channels": None}, "kv_channels=8, but .* asks for 16"),
        ({"share_embeddings_and_output_weights": True}, "share_embeddings_and_output_weights=True, but"),
        ({"num_moe_experts": 8}, "num_moe_experts=8, but .* asks for None"),
        ({"normalization": "LayerNorm"}, "normalization='LayerNorm', but .* asks for 'RMSNorm'"),
        ({"rotary_base": "many"}, "rotary_base='many', but"),
    ],
)
def test_another_model(tmp_path: Path, spec: ModelSpec, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hf_directory(checkpoint(tmp_path / "c", spec, **fields), STUDENT)


def test_defaults_of_fields_that_are_not_set(tmp_path: Path, spec: ModelSpec) -> None:
    alike = replace(spec, num_kv_heads=4, head_dim=8)
    content = run_config(alike, "float32")
    assert content is not None
    content["model"].update(num_query_groups=None, kv_channels=None)
    check_run_config(tmp_path, content, alike, STUDENT)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: [", "can't be read .*expected plain YAML"),
        ("model: !!python/object/apply:os.system ['touch ran']", "can't be read .*could not determine a constructor"),
        ("model: 3", "has no section 'model'"),
        ("a: 1", "has no section 'model'"),
        ("{model: {}, peft: {dim: 8}}", "peft is set, so the checkpoint holds adapters"),
    ],
)
def test_damaged(tmp_path: Path, text: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / RUN_CONFIG).write_text(text)
    with pytest.raises(ValueError, match=message):
        read_run_config(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_where_the_config_comes_from(tmp_path: Path, spec: ModelSpec) -> None:
    path = checkpoint(tmp_path / "c", spec, hf_model_id=str(STUDENT))
    assert hf_directory(path) == STUDENT
    other = checkpoint(tmp_path / "d", spec, hf_model_id="Qwen/Qwen3-1.7B")
    assert hf_directory(other, STUDENT) == STUDENT
    with pytest.raises(ValueError, match=r"no hf/config.json there; copy .*set hf_path= .*names Qwen/Qwen3-1.7B, no"):
        hf_directory(other)
    plain = checkpoint(tmp_path / "e")
    assert hf_directory(plain, STUDENT) == STUDENT
    (plain / "hf").mkdir()
    (plain / "hf" / "config.json").write_bytes((STUDENT / "config.json").read_bytes())
    assert hf_directory(plain) == plain / "hf"
    with pytest.raises(ValueError, match=r"config.json and a tokenizer of its own, in hf; expected one of the two"):
        hf_directory(plain, STUDENT)


def test_a_directory_of_checkpoints(tmp_path: Path) -> None:
    assert checkpoint_directory(tmp_path / "nowhere") == tmp_path / "nowhere"
    assert checkpoint_directory(tmp_path) == tmp_path
    first = checkpoint(tmp_path / "iter_0000002")
    assert checkpoint_directory(tmp_path) == first == checkpoint_directory(first)
    second = checkpoint(tmp_path / "iter_0000010")
    with pytest.raises(ValueError, match=r"2 checkpoints and no latest_.*name it, for example .*iter_0000010"):
        checkpoint_directory(tmp_path)
    for text, found in (("2\n", first), ("10", second), ("release", checkpoint(tmp_path / "release"))):
        (tmp_path / LATEST).write_text(text)
        assert checkpoint_directory(tmp_path) == found
    for text in ("3", "", "two", "../../x"):
        (tmp_path / LATEST).write_text(text)
        with pytest.raises(ValueError, match=r"expected one of those beside it \(iter_0000002, iter_0000010\)"):
            checkpoint_directory(tmp_path)


# field -> (ours, as Megatron-Bridge may write the same, other models)
SPELLINGS: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "window_attn_skip_freq": ([1, 0, 1, 0], [2, None], [3, [0, 1, 0, 1]]),
    "moe_layer_freq": (1, [[1, 1, 1, 1]], [[0, 1, 1, 1], 2]),
    "rope_type": ("rope", ["yarn"], ["llama3"]),
}


class Described(Family):
    """A family with these fields of a provider."""

    fields: ClassVar[dict[str, Any]] = {}

    def provider_fields(self, spec: ModelSpec) -> dict[str, Any]:
        return self.fields


@pytest.mark.parametrize("name", SPELLINGS)
def test_other_spellings_of_the_same_model(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    ours, same, others = SPELLINGS[name]
    monkeypatch.setattr(Described, "fields", {name: ours})
    described = replace(spec, family=Described("described", lambda *_: spec, (), own=False))
    common = {"num_layers": 4, "rotary_scaling_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    for found in (ours, *same):
        check_run_config(Path("a"), {"model": {**common, name: found}}, described, Path("b"))
    for found in others:
        with pytest.raises(ValueError, match=rf"{name}=.*asks for"):
            check_run_config(Path("a"), {"model": {**common, name: found}}, described, Path("b"))
    if name == "rope_type":
        with pytest.raises(ValueError, match="rope_type='yarn'"):
            check_run_config(Path("a"), {"model": {**common, "mscale": 0.7, name: "yarn"}}, described, Path("b"))
