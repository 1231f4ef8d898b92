"""`nemo-oprd plan` with teachers behind vLLM servers: their sizes, what does not fit, and what travels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from family_configs import QWEN_1P5B
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from nemo_oprd.cli import main
from nemo_oprd.config.loading import load_config
from nemo_oprd.models import parse_model_spec
from nemo_oprd.models.served import read_served_spec
from nemo_oprd.run.resolve import resolve
from nemo_oprd.tools.plan.estimate import Estimate, Lengths, estimate
from nemo_oprd.tools.plan.gpus import ASSUMED, GPUS, Cluster
from nemo_oprd.tools.plan.parameters import model_parameters
from nemo_oprd.tools.plan.served import CODE
from nemo_oprd.tools.plan.workload import served_model
from nemo_oprd.vllm.launch import teacher_arguments

SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"tie_word_embeddings": True},
    "gemma3_text": {"head_dim": 16, "sliding_window": 16},
    "glm4": {"head_dim": 8, "tie_word_embeddings": False},
    "qwen3_moe": {**EXPERTS, "tie_word_embeddings": False},
    "olmoe": {**EXPERTS, "tie_word_embeddings": False},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_are_those_of_the_model(tmp_path: Path, family: str) -> None:
    """Parameters, those that a token passes, and what it leaves in the caches, against transformers."""
    config = AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family]})
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path)
    found = served_model(tmp_path, read_served_spec(tmp_path))
    named = dict(model.named_parameters())  # a tied head once
    assert found.parameters == sum(p.numel() for p in named.values())
    experts = sum(p.numel() for name, p in named.items() if ".experts." in name)
    tied = model.lm_head.weight is model.get_input_embeddings().weight
    unused = 0 if tied else model.get_input_embeddings().weight.numel()
    assert found.active == found.parameters - experts + experts // 3 - unused
    assert (experts > 0) == (family in ("qwen3_moe", "olmoe"))
    cache = model(torch.arange(3, 10)[None], use_cache=True).past_key_values
    values = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    assert found.cached * 7 == values
    assert found.cache_bytes(2, 4) == found.cached * 2


def test_quantised_weights_are_counted_as_numbers_and_as_bytes(tmp_path: Path) -> None:
    sizes = {**SIZES, "num_local_experts": 2, "head_dim": 8, "quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_oss", **sizes}))
    experts, tensors = "model.layers.0.mlp.experts.", {"model.embed_tokens.weight": torch.zeros(96, 32)}
    blocks, scales = torch.zeros(2, 8, 1, 16, dtype=torch.uint8), torch.zeros(2, 8, 1, dtype=torch.uint8)
    tensors |= {f"{experts}down_proj_blocks": blocks, f"{experts}down_proj_scales": scales}
    save_file(tensors, tmp_path / "model.safetensors")
    found = served_model(tmp_path, read_served_spec(tmp_path))
    assert found.parameters == 96 * 32 + 2 * 8 * 32
    assert found.weight_bytes(2) == 2 * 96 * 32 + 2 * 8 * (16 + 1)


def test_without_weight_files_the_shape_of_a_known_family_counts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_1P5B))
    assert served_model(tmp_path, read_served_spec(tmp_path)).parameters == model_parameters(
        parse_model_spec(QWEN_1P5B)
    )
    (tmp_path / "config.json").write_text(json.dumps({**QWEN_1P5B, "model_type": "glm4"}))
    with pytest.raises(ValueError, match=r"there are no \*\.safetensors, and glm4 is none of .* expected weights"):
        served_model(tmp_path, read_served_spec(tmp_path))


@pytest.fixture
def pair(tmp_path: Path) -> list[str]:
    """Overrides that name two models of which only config.json is there."""
    for role in ("student", "teacher"):
        (tmp_path / role).mkdir()
        (tmp_path / role / "config.json").write_text(json.dumps(QWEN_1P5B))
    return [f"{role}.hf_path={tmp_path / role}" for role in ("student", "teacher")]


SERVED = "teacher.engine=vllm"


def planned(pair: list[str], ranks: int, *overrides: str, **lengths: int) -> Estimate:
    config = load_config("oprd_1p5b", [*pair, "student.recompute=full", *overrides])
    return estimate(resolve(config, ranks), Cluster(ranks, GPUS["h100"]), Lengths(**lengths))


def test_the_memory_of_servers_beside_the_student(pair: list[str]) -> None:
    """Their share is taken of every GPU, in place of the teacher's weights; alone they leave it to the student."""
    held, served = planned(pair, 8), planned(pair, 8, SERVED)
    (servers,) = served.servers
    assert (servers.count, servers.tensor, servers.placement) == (8, 1, "colocated")
    always = served.kinds[0].memory.always
    assert always["teachers' servers"] == pytest.approx(0.4 * GPUS["h100"].memory)
    assert "teacher weights" not in always and held.kinds[0].memory.always["teacher weights"] > 3e9
    assert servers.weights == 2 * 1_777_088_000
    length = served.work.prompt + served.work.config.rollout.max_new_tokens
    assert servers.longest == length and servers.cache == length * 28 * 2 * 2 * 128 * 2
    elsewhere = planned(pair, 8, SERVED, "teacher.vllm.endpoints=[http://a:1,http://b:1]")
    assert elsewhere.kinds[0].memory.always["teachers' servers"] == 0
    assert [(each.count, each.placement) for each in elsewhere.servers] == [(2, "elsewhere")]


def code_of(command: list[str]) -> Any:
    """The exit code of a command."""
    try:
        main(command)
    except SystemExit as ended:
        return ended.code
    return 0


def test_what_does_not_fit_is_a_finding(pair: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Weights and the longest sequence's cache in a server's share; and with servers too large the student."""
    found = planned(pair, 8, SERVED, "teacher.vllm.gpu_memory_utilization=0.08")
    (servers,) = found.servers
    assert servers.problem in found.problems and "raise teacher.vllm.tensor or" in servers.problem
    assert servers.weights + servers.cache + ASSUMED.reserve > servers.memory
    halved = planned(pair, 8, SERVED, "teacher.vllm.gpu_memory_utilization=0.08", "teacher.vllm.tensor=2")
    assert (halved.servers[0].count, halved.servers[0].cache) == (4, servers.cache / 2)
    assert halved.servers[0].problem is None
    crowded = planned(pair, 8, SERVED, "teacher.vllm.gpu_memory_utilization=0.9")
    assert any("student stage 0" in problem for problem in crowded.problems)
    file = tmp_path / "plan.json"
    command = ["plan", "--config-name", "oprd_1p5b", "--ranks", "8", "--json", str(file), *pair, SERVED]
    assert code_of([*command, "teacher.vllm.gpu_memory_utilization=0.08"]) == 1
    assert [each["code"] for each in json.loads(file.read_text())["findings"]] == [CODE]
    assert "does not fit: a server of the teacher" in capsys.readouterr().out
    command[4] = "12"
    assert code_of([*command, "teacher.vllm.placement=dedicated", "teacher.vllm.replicas=4"]) == 0
    said = capsys.readouterr().out
    assert "4 vLLM server(s) of 1 GPU(s), dedicated" in said and "3,072 bytes per token and layer" in said
    written = json.loads(file.read_text())
    assert written["findings"] == [] and written["teacher_servers"][0]["count"] == 4
    assert [*written["teacher_servers"][0]] == [
        *("name", "count", "tensor", "placement", "memory", "weights", "longest", "cache", "row_bytes", "answers"),
        *("ahead", "flops", "seconds"),
    ]


def test_bytes_and_seconds(pair: list[str]) -> None:
    """Rows times layers times width, in the run's precision; twice the servers compute in half the time."""
    settings = (SERVED, "teacher.vllm.placement=dedicated", "loss.representation.layers=[7,14,28]")
    one, two = (planned(pair, 9 + n, *settings, f"teacher.vllm.replicas={n + 1}", response=3000) for n in range(2))
    work, (servers,) = one.work, one.servers
    assert servers.row_bytes == 2 * 1536
    rows = work.responses * min(work.config.loss.representation.k, 3000)
    watched = work.responses * work.output_rows * servers.row_bytes
    assert servers.answers == rows * 3 * servers.row_bytes + watched
    computed = servers.flops / (GPUS["h100"].flops * ASSUMED.compute)
    assert servers.seconds == pytest.approx(computed + servers.answers / ASSUMED.host)
    assert one.seconds["teacher"] == pytest.approx(servers.seconds)
    assert two.servers[0].seconds == pytest.approx(servers.seconds / 2)
    held = planned(pair, 8, "loss.representation.layers=[7,14,28]", response=3000)
    assert servers.flops == pytest.approx(held.flops.teacher, rel=0.02), "as for the same teacher in the trainer"
    assert servers.ahead == 0
    for gib, early in ((0.01, 0.01 * (1 << 30)), (900, servers.answers)):
        (found,) = planned(pair, 9, *settings, f"teacher.vllm.ahead_gib={gib}", response=3000).servers
        assert found.ahead == pytest.approx(early)


def test_a_run_of_its_own_servers_sends_what_a_bridge_leaves(pair: list[str], tmp_path: Path) -> None:
    """Its rank of float32 numbers per row and map; servers that several runs share send the width of each layer."""
    settings = (SERVED, f"bridge.path={tmp_path / 'bridge'}", "bridge.rank=96", "loss.representation.layers=[7,14,28]")
    settings += ("logging.output_metrics_every=0",)
    own = planned(pair, 8, *settings)
    shared = planned(pair, 8, *settings, "teacher.vllm.endpoints=[http://a:1]")
    (projected,), (whole,) = own.servers, shared.servers
    assert (projected.row_bytes, whole.row_bytes) == (4 * 96, 2 * 1536)
    assert whole.answers / projected.answers == pytest.approx(2 * 1536 / (4 * 96))


def test_several_teachers_divide_the_share(pair: list[str], tmp_path: Path) -> None:
    """In the plan and in what a server is started with; a number that is given is that of each."""
    student, teacher = pair
    path = teacher.removeprefix("teacher.hf_path=")
    teachers = (
        f"teachers=[{{hf_path: {path}, data_sources: [a]}}, {{hf_path: {path}, data_sources: [b], engine: megatron}}, "
        f"{{hf_path: {path}}}]"
    )
    settings = [student, "teacher.hf_path=null", teachers, SERVED, "student.recompute=full"]
    found = estimate(resolve(load_config("oprd_1p5b", settings), 8), Cluster(8, GPUS["h100"]), Lengths())
    assert [each.memory for each in found.servers] == [pytest.approx(0.2 * GPUS["h100"].memory)] * 2
    always = found.kinds[0].memory.always
    assert always["teachers' servers"] == pytest.approx(0.4 * GPUS["h100"].memory)
    assert always["teacher weights"] == pytest.approx(2 * 1_777_088_000, rel=0.15), "of the one in the trainer"
    for more, share in ([], "0.2"), (["teacher.vllm.gpu_memory_utilization=0.3"], "0.3"):
        config = load_config("oprd_1p5b", [*settings, *more])
        arguments = teacher_arguments(config, Path(path), 100, cuda=True)
        assert arguments[arguments.index("--gpu-memory-utilization") + 1] == share
