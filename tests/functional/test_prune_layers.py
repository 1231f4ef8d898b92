"""A pruned student: which layers it keeps, and that it computes what the model computes without the others."""

from __future__ import annotations

import itertools
import json
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import Models
from transformers import AutoModelForCausalLM

from checkpoint_tools._pruning import layer_influences, layers_to_keep, prune_layers
from checkpoint_tools._rounding import round_layers
from nemo_oprd.megatron.weights.hf import HFCheckpoint
from nemo_oprd.megatron.weights.megatron_checkpoint import check_source
from nemo_oprd.models import read_model_spec
from nemo_oprd.tools.toy.pair import write_tokenizer

ROOT = Path(__file__).parent.parent.parent
TEXTS = [[5, 17, 2, 44, 9, 120], [7], [33, 2, 8]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("name", ["qwen2_tied", "qwen3_untied", "llama_untied_bias"])
def test_influences_are_those_of_the_hidden_states(models: Models, name: str) -> None:
    """Against Hugging Face's own hidden states, in float64; the last layer's output is taken before the final norm."""
    model = AutoModelForCausalLM.from_pretrained(models(name), dtype=torch.float64)
    model.model.norm = torch.nn.Identity()
    rows = []
    for ids in TEXTS:
        with torch.no_grad():
            states = model.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        pairs = itertools.pairwise(states)
        rows.append(torch.stack([1 - torch.cosine_similarity(before, after, dim=-1)[0] for before, after in pairs]))
    expected = torch.cat(rows, dim=1).mean(1)
    found = torch.tensor(layer_influences(models(name), TEXTS, torch.float32), dtype=torch.float64)
    assert len(found) == 4
    assert torch.allclose(found, expected, atol=1e-6)


def test_the_layers_of_most_influence_are_kept() -> None:
    assert layers_to_keep([0.9, 0.1, 0.5, 0.3, 0.5], 3) == [1, 3, 5]
    assert layers_to_keep([0.5, 0.5, 0.5], 2) == [1, 2]
    with pytest.raises(ValueError, match="expected 1 to 3"):
        layers_to_keep([0.5, 0.5, 0.5], 4)


@pytest.mark.parametrize("name", ["qwen2_tied", "qwen3_untied", "llama_untied_bias"])
def test_a_pruned_model_is_the_model_without_these_layers(models: Models, tmp_path: Path, name: str) -> None:
    source = Path(models(name))
    spec = prune_layers(source, tmp_path / "pruned", [1, 2, 4])
    assert spec.num_layers == 3
    whole = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    whole.model.layers = torch.nn.ModuleList([whole.model.layers[i] for i in (0, 1, 3)])
    whole.config.num_hidden_layers = 3
    whole.config.layer_types = (getattr(whole.config, "layer_types", None) or [])[:3] or None
    pruned = AutoModelForCausalLM.from_pretrained(tmp_path / "pruned", dtype=torch.float32)
    ids = torch.tensor([TEXTS[0]])
    with torch.no_grad():
        assert torch.equal(pruned(ids, use_cache=False).logits, whole(ids, use_cache=False).logits)
    original, written = HFCheckpoint(source), HFCheckpoint(tmp_path / "pruned")
    assert torch.equal(written["model.layers.2.mlp.up_proj.weight"], original["model.layers.3.mlp.up_proj.weight"])
    assert read_model_spec(tmp_path / "pruned").torch_dtype == read_model_spec(source).torch_dtype


def test_what_the_project_leaves_out_of_a_model_is_left_out(models: Models, tmp_path: Path) -> None:
    """MiMo is a Qwen2 with layers for multi-token prediction, under a name that transformers does not know."""
    plain, mimo = Path(models("qwen2_tied")), tmp_path / "mimo"
    shutil.copytree(plain, mimo)
    config = json.loads((plain / "config.json").read_text())
    named = {"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (mimo / "config.json").write_text(json.dumps({**config, **named}))
    tensors = load_file(plain / "model.safetensors")
    more = {"model.mtp_layers.0.input_proj.weight": torch.ones(4, 8)}
    save_file({**tensors, **more}, mimo / "model.safetensors", metadata={"format": "pt"})
    assert layer_influences(mimo, TEXTS, torch.float32) == layer_influences(plain, TEXTS, torch.float32)
    for source in (mimo, plain):
        prune_layers(source, tmp_path / f"pruned-{source.name}", [1, 2, 4])
    written, expected = (HFCheckpoint(tmp_path / f"pruned-{source.name}") for source in (mimo, plain))
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], expected[name]) for name in written.keys())  # noqa: SIM118
    check_source(written, read_model_spec(tmp_path / "pruned-mimo"))
    spec = round_layers(mimo, tmp_path / "rounded", 2, 8)
    check_source(HFCheckpoint(tmp_path / "rounded"), spec)


def command(*arguments: str) -> subprocess.CompletedProcess:
    script = str(ROOT / "checkpoint_tools" / "prune_layers.py")
    return subprocess.run([sys.executable, "-W", "ignore", script, *arguments], capture_output=True, text=True)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the golden student, with the toy task's tokenizer."""
    golden = str(shutil.copytree(ROOT / "tests" / "golden" / "student", tmp_path / "model"))
    write_tokenizer(Path(golden))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text, "answer": "1"}) + "\n" for text in ("1 + 2", "3 + 40")))
    done = command("--hf-path", golden, "--output", str(tmp_path / "a"), "--keep", "2", "--prompts", str(prompts))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("influence") == 3
    assert done.stdout.count("left out") == 1
    *_, made, setting = done.stdout.strip().splitlines()
    kept = made.rsplit(" ", 1)[1]
    first = kept.split(",")[0]
    # the last layers are compared with each other, whichever layer was kept last
    assert setting == f"loss.representation.layer_map={{1:{first},2:3}}"
    script = ROOT / "checkpoint_tools" / "prune_layers.py"  # in this process, where torch is imported already
    monkeypatch.syspath_prepend(str(script.parent))
    words = ["--hf-path", golden, "--output", str(tmp_path / "b"), "--layers", kept]
    monkeypatch.setattr(sys, "argv", [str(script), *words])
    runpy.run_path(str(script), run_name="__main__")
    files = [(tmp_path / place / "model.safetensors").read_bytes() for place in ("a", "b")]
    assert files[0] == files[1]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--keep", "2"], "--keep needs --prompts"),
        (["--keep", "9", "--prompts", "x.jsonl"], "--keep 9: expected 1 to 3"),
        (["--layers", "1,x"], "expected numbers and commas"),
        (["--layers", ""], "--layers '': expected numbers and commas"),
        (["--layers", "2,1"], "expected ascending numbers in 1..3"),
        (["--layers", "1,4"], "expected ascending numbers in 1..3"),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    golden, script = str(ROOT / "tests" / "golden" / "student"), str(ROOT / "checkpoint_tools" / "prune_layers.py")
    monkeypatch.syspath_prepend(str(Path(script).parent))
    monkeypatch.setattr(sys, "argv", [script, "--hf-path", golden, "--output", str(tmp_path / "out"), *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(script, run_name="__main__")
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert said.startswith("error: ") and said.count("\n") == 1
    assert message in said
    assert not (tmp_path / "out").exists()
