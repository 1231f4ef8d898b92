"""`rehearse` before a rank is started: whose layers, where their files are, and which waits are known."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement

from nemo_oprd.config.loading import load_config
from nemo_oprd.tools.rehearse import layers, unknown_waits
from nemo_oprd.tools.rehearse.te_functions import Functions, NotRehearsed

ROOT = Path(__file__).parents[3]


def test_versions_of_transformer_engine_are_those_of_the_extra() -> None:
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["te"]
    (wanted,) = [each for each in map(Requirement, extra) if each.marker is None or each.marker.evaluate()]
    specifier, tested = layers.accepted()
    assert specifier == wanted.specifier
    assert specifier.contains(tested)


@pytest.mark.parametrize("found", [None, "1.13.0"])
def test_files_that_are_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, found: str | None) -> None:
    monkeypatch.setenv(layers.FOLDER_VARIABLE, str(tmp_path))
    if found:
        metadata = tmp_path / f"transformer_engine-{found}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Name: transformer_engine\nVersion: {found}\n")
    with pytest.raises(ValueError, match="--layers te: ") as error:
        layers.check("te", load_config("oprd_1p5b", []))
    said = str(error.value)
    assert f"{tmp_path} holds {f'version {found}' if found else 'nothing'} of Transformer Engine" in said
    assert f"pip install --no-deps --upgrade --target {tmp_path} transformer-engine==" in said
    assert "\n" not in said


def test_float32_jobs_have_local_layers() -> None:
    with pytest.raises(ValueError, match="--layers te with precision=fp32: .*: rehearse with --layers local"):
        layers.check("te", load_config("oprd_1p5b", ["precision=fp32"]))
    layers.check("local", load_config("oprd_1p5b", ["precision=fp32"]))


def test_models_of_megatron_bridge_have_transformer_engines_layers() -> None:
    config = load_config("oprd_1p5b", ["teacher.provider=bridge"])
    with pytest.raises(ValueError, match="--layers local with teacher.provider=bridge: .*: rehearse with --layers te"):
        layers.check("local", config)
    assert layers.provided_models(load_config("oprd_1p5b", ["student.provider=mine:f"])) == ["student.provider=mine:f"]
    several = load_config("merge_two_teachers_1p5b", ["teachers.1.provider=bridge"])
    assert layers.provided_models(several) == ["teachers[1].provider=bridge"]


def test_the_attention_with_a_learned_term_returns_its_gradient(tmp_path: Path) -> None:
    """gpt-oss's softmax; other models' attention has none."""
    functions = Functions(tmp_path, lambda *_: None, lambda *_: None)
    q, k, v = torch.empty(6, 4, 8), torch.empty(6, 2, 8), torch.empty(6, 2, 8)
    learned = torch.empty(1, 4, 1, 1)
    out, logarithms, *kept = functions.fused_attn_fwd(6, 0.5, q, k, v, None, learned)
    assert out.shape == (6, 4, 8) and logarithms.shape == (6, 4, 1) and kept[-1] is learned
    *gradients, of_bias, of_learned = functions.fused_attn_bwd(6, 0.5, q, k, v, out, out, None, [logarithms, *kept])
    assert [each.shape for each in gradients] == [q.shape, k.shape, v.shape]
    assert of_bias is None and of_learned.shape == learned.shape
    assert len(functions.fused_attn_fwd(6, q, k, v, None)) == 3
    assert functions.fused_attn_bwd(q, k, v, out, out, [logarithms, kept[0]])[3:] == [None, None]


def test_a_wait_at_a_place_that_is_not_known_is_a_mistake() -> None:
    wait = {"file": "nemo_oprd/distillation/student.py", "line": 7, "what": "copy to the host", "count": 3}
    known = {**wait, "below": "", "innermost": ["nemo_oprd/distillation/student.py", "optimizer_step"]}
    below = "megatron/core/utils.py:9"
    other = {**wait, "below": below, "innermost": ["megatron/core/utils.py", "somewhere"]}
    assert unknown_waits([known, other]) == [
        {
            "code": "unknown-wait",
            "file": "nemo_oprd/distillation/student.py",
            "line": 7,
            "text": f"the host waits 3 times per step in {below}: copy to the host",
        }
    ]


@pytest.fixture
def functions(tmp_path: Path) -> tuple[Any, list[str]]:
    """The stand-ins for Transformer Engine's compiled functions, and the mistakes that they find."""
    mistakes: list[str] = []
    return Functions(tmp_path, lambda *_: None, lambda code, text: mistakes.append(f"{code}: {text}")), mistakes


def product(functions: Any, a: torch.Tensor, b: torch.Tensor, transa: bool, transb: bool, out: Any = None) -> Any:
    return functions.generic_gemm(a, transa, b, transb, out, None, None, None, None, False, None, False)[0]


def test_products_of_transformer_engine_have_their_shapes(functions: tuple[Any, list[str]]) -> None:
    tex, mistakes = functions
    weight, states, gradient = (torch.empty(shape, device="meta") for shape in ((8, 4), (5, 1, 4), (5, 1, 8)))
    assert product(tex, weight, states, True, False).shape == (5, 1, 8)
    assert product(tex, weight, gradient, False, False).shape == (5, 1, 4)
    assert product(tex, states, gradient, False, True).shape == (8, 4)
    with pytest.raises(RuntimeError, match=r"generic_gemm can't multiply \[5, 1, 8\] and \[8, 4\]"):
        product(tex, weight, gradient, True, False)
    with pytest.raises(RuntimeError, match=r"generic_gemm can't write \[8, 4\] to \[3\]"):
        product(tex, states, gradient, False, True, out=torch.empty(3))
    assert {line.partition(":")[0] for line in mistakes} == {"host-tensor"}


def test_mixed_dtypes_and_unknown_functions_of_transformer_engine(functions: tuple[Any, list[str]]) -> None:
    tex, mistakes = functions
    product(tex, torch.empty(8, 4), torch.empty(5, 4, dtype=torch.bfloat16), True, False)
    assert "mixed-dtypes: generic_gemm multiplies float32, bfloat16" in mistakes
    with pytest.raises(NotRehearsed, match="Transformer Engine's fp8_transpose was called"):
        tex.fp8_transpose()
