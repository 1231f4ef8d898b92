"""`nemo-oprd plan`: counts of parameters, what does not fit and what does instead, and the command."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from family_configs import LLAMA, MIXTRAL, PHI3, QWEN2, QWEN3, QWEN3_MOE, QWEN_1P5B
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from nemo_oprd.batch.layout import Layout
from nemo_oprd.cli import main
from nemo_oprd.config.loading import load_config
from nemo_oprd.config.memory_bounds import cache_bytes_per_token, state_bytes
from nemo_oprd.megatron.weights.megatron_checkpoint import mapped_shapes
from nemo_oprd.models import parse_model_spec
from nemo_oprd.models.architecture import DeltaNet, LatentAttention
from nemo_oprd.run.resolve import resolve, resolve_models
from nemo_oprd.tools.plan.alternatives import alternatives, changed
from nemo_oprd.tools.plan.estimate import Lengths, estimate
from nemo_oprd.tools.plan.gpus import GPUS, Cluster
from nemo_oprd.tools.plan.memory import feed_forward_values, forward_bytes, layer_bytes, microbatches_in_flight
from nemo_oprd.tools.plan.operations import step_bytes, step_flops
from nemo_oprd.tools.plan.parameters import (
    all_attention_flops,
    attention_weight_shapes,
    delta_net_values,
    model_parameters,
    stage_parameters,
)
from nemo_oprd.tools.plan.workload import make_workload
from nemo_oprd.tools.rehearse.stand_ins import longest_responses

FAMILY_CONFIGS = {"qwen2": QWEN2, "qwen3": QWEN3, "llama": LLAMA, "phi3": PHI3}


@pytest.fixture
def pair(tmp_path: Path) -> list[str]:
    """Overrides that name two models of which only config.json is there."""
    for role in ("student", "teacher"):
        (tmp_path / role).mkdir()
        (tmp_path / role / "config.json").write_text(json.dumps(QWEN_1P5B))
    return [f"{role}.hf_path={tmp_path / role}" for role in ("student", "teacher")]


def test_the_number_of_parameters_is_that_of_the_published_model() -> None:
    """DeepSeek-R1-Distill-Qwen-1.5B: 1,777,088,000 parameters, with a head of its own."""
    assert model_parameters(parse_model_spec(QWEN_1P5B)) == 1_777_088_000


@pytest.mark.parametrize(
    "hf_config", [*FAMILY_CONFIGS.values(), QWEN3_MOE, MIXTRAL], ids=lambda each: each["model_type"]
)
def test_formulas_count_the_parameters_of_the_weight_mappings(hf_config: dict[str, Any]) -> None:
    spec = parse_model_spec(hf_config)
    shapes = mapped_shapes(spec)
    assert model_parameters(spec) == sum(math.prod(shape) for _, _, shape in shapes)
    of_attention = {shape for _, name, shape in shapes if "self_attention.linear" in name and len(shape) == 2}
    assert attention_weight_shapes(spec) == (of_attention, set())


@pytest.mark.parametrize("name", FAMILY_CONFIGS)
def test_stages_hold_the_model_once(name: str) -> None:
    spec = parse_model_spec(FAMILY_CONFIGS[name])
    layout = Layout(pipeline=min(3, spec.num_layers))
    held = sum(stage_parameters(spec, layout, stage).held for stage in range(layout.pipeline))
    padding = (spec.padded_vocab(1) - spec.vocab_size) * spec.hidden_size
    copy = spec.padded_vocab(1) * spec.hidden_size if spec.tied_embeddings else padding
    assert held == model_parameters(spec) + padding + copy


def test_caches_and_attention_of_other_kinds_of_layers() -> None:
    """By hand: three layers of four with another kind of attention, in a model of 4 heads, 2 groups and 16 channels."""
    plain = replace(
        parse_model_spec(QWEN3),
        num_layers=4,
        hidden_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_positions=4096,
    )
    keys_and_values = 2 * 16 * 2 * 2
    assert (cache_bytes_per_token(plain, 1, 2), state_bytes(plain, 1, 2, 1000)) == (4 * keys_and_values, 0)
    assert all_attention_flops(plain, 4, 1000) == 4 * 4 * 4 * 16 * 500

    windows = replace(plain, window=100, windowed=(True, True, True, False))
    assert cache_bytes_per_token(windows, 1, 2) == keys_and_values
    assert state_bytes(windows, 1, 2, 1000) == 3 * 100 * keys_and_values
    assert state_bytes(windows, 2, 2, 40) == 3 * 40 * keys_and_values // 2
    # token t sees min(t, 100) tokens: 95 of 1,000 on average
    assert all_attention_flops(windows, 3, 1000) == 3 * 4 * 4 * 16 * 95
    assert all_attention_flops(windows, 3, 80) == all_attention_flops(plain, 3, 80)

    nets = replace(plain, delta=DeltaNet((True, True, True, False), 2, 4, 8, 10, 4), output_gate=True)
    assert cache_bytes_per_token(nets, 1, 2) == keys_and_values
    # the state in float32, and three tokens before the convolution
    assert state_bytes(nets, 1, 2, 5) == state_bytes(nets, 1, 2, 5000) == 3 * (4 * 8 * 10 * 4 + 3 * (2 * 16 + 40) * 2)
    assert all_attention_flops(nets, 3, 100) == all_attention_flops(nets, 3, 5000)
    # product 112 + 8 heads' two numbers, keys 32, again for 4 heads 64, values, rule, norm and gated 160, gate 160
    assert delta_net_values(nets) == (2 * 16 + 2 * 40 + 8) + 2 * 16 + 2 * 32 + 4 * 40 + 4 * 40 + 4 * 64 + 4 * 12
    of_nets = {(2 * 64 + 2 * 32, 64), (64, 64), (2 * 16 + 2 * 40 + 8, 64), (64, 40)}
    assert attention_weight_shapes(nets) == (of_nets, set())

    latent = replace(plain, latent=LatentAttention(24, 16, 12, 8, 20, 1e-6, 0.2))
    assert cache_bytes_per_token(latent, 1, 2) == cache_bytes_per_token(latent, 2, 2) == 4 * (16 + 8) * 2
    assert all_attention_flops(latent, 4, 1000) == 4 * 2 * 4 * (12 + 8 + 20) * 500
    keys_and_out = {(4 * (12 + 20), 16), (64, 4 * 20)}
    assert attention_weight_shapes(latent) == ({(4 * (12 + 8), 24)} | keys_and_out, {(24, 64), (16 + 8, 64)})
    direct = replace(latent, latent=replace(latent.latent, query_rank=0))
    assert attention_weight_shapes(direct) == ({(4 * (12 + 8), 64)} | keys_and_out, {(16 + 8, 64)})


def test_the_shared_expert_and_the_places_of_tokens() -> None:
    """Of a layer with experts, beside those that a router chooses; the places are of Megatron-Bridge's models only."""
    spec = parse_model_spec(QWEN3_MOE)
    assert spec.experts is not None
    plain, d = feed_forward_values(spec, Layout()), spec.hidden_size
    shared = replace(spec, experts=replace(spec.experts, shared_ffn_size=48))
    assert feed_forward_values(shared, Layout()) == plain + 5 * 48 + d
    assert feed_forward_values(shared, Layout(tensor=2)) == plain + 5 * 24 + d
    assert forward_bytes(shared, Layout(), 2) == forward_bytes(spec, Layout(), 2) + 2 * d
    provided = replace(spec, family=replace(spec.family, own=False))
    # two integers of four bytes per expert, and one
    assert 2 * (feed_forward_values(provided, Layout()) - plain) == 4 * (2 * spec.experts.count + 1)


def test_what_no_gradient_reaches_is_not_trained() -> None:
    spec = parse_model_spec(QWEN_1P5B)
    whole = stage_parameters(spec, Layout(), 0)
    part = stage_parameters(spec, Layout(), 0, trained_depth=14, trains_norm=False, trains_head=False)
    head = spec.padded_vocab(1) * spec.hidden_size
    layers = (whole.held - 2 * head - spec.hidden_size) / 28
    assert part.held == whole.held == whole.trained
    assert part.trained == head + 14 * layers


def test_counting_the_experts_choices_is_one_more_forward_pass(tmp_path: Path) -> None:
    """Which a load-balancing loss needs, of a student with experts; the z-loss does not."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_MOE))

    def found(*settings: str) -> tuple[float, float]:
        models = [f"{role}.hf_path={tmp_path}" for role in ("student", "teacher")]
        config = load_config("verify", [*models, "output=unused", *settings])
        work = make_workload(config, resolve_models(config), prompt=64)
        return step_flops(work).update, step_bytes(work, Layout(data=2, expert=2)).experts

    plain, balanced = found(), found("student.router_aux_loss=0.1")
    assert balanced == pytest.approx((4 / 3 * plain[0], 3 / 2 * plain[1])) and plain[1] > 0
    assert found("student.router_z_loss=0.1") == plain


@pytest.mark.parametrize("stage, expected", [(0, 4), (1, 3), (3, 1)])
def test_microbatches_in_flight_of_1f1b(stage: int, expected: int) -> None:
    assert microbatches_in_flight(Layout(pipeline=4), stage, 16) == expected
    assert microbatches_in_flight(Layout(pipeline=4), stage, 2) == min(2, expected)
    assert microbatches_in_flight(Layout(pipeline=4, virtual_pipeline=2), 0, 16) == 11 / 2


def test_activations_shrink_with_the_layout() -> None:
    spec = parse_model_spec(QWEN_1P5B)
    alone, split, sequence = (
        layer_bytes(spec, Layout(tensor=t, sequence=s), 2, "transformer_engine").kept
        for t, s in ((1, False), (2, False), (2, True))
    )
    assert sequence < split < alone < 2 * sequence + 4 * 2 * spec.head_dim


def test_what_transformer_engines_attention_keeps() -> None:
    """As rehearsed: no more per token with context parallelism, and with selective recomputation a layer's product."""
    spec = parse_model_spec(QWEN_1P5B)
    alone, context = (layer_bytes(spec, Layout(context=c), 2, "transformer_engine") for c in (1, 2))
    assert alone.kept == context.kept
    assert alone.core == 4 * 12 - 2 * (12 + 2) * 128


def plan(pair: list[str], ranks: int, *settings: str, gpu: str = "h100") -> Any:
    return estimate(resolve(load_config("oprd_1p5b", [*pair, *settings]), ranks), Cluster(ranks, GPUS[gpu]))


def test_memory_of_the_recipe(pair: list[str]) -> None:
    """By hand: 2 bytes of weight, 4 of gradient and 12 / 4 of optimizer for the trained half of a tensor rank.

    The head is not trained, and is padded to 152,064 rows like the embedding (a multiple of 128 per tensor rank).
    """
    found = plan(pair, 8, "student.parallel.tensor=2")
    embedding = 152_064 * 1536 // 2
    per_layer = (1536 * (1536 + 512) + 1536 * 1536 + 3 * 1536 * 8960 + 2048) // 2 + 2 * 1536
    held = 2 * embedding + 28 * per_layer + 1536
    always = found.kinds[0].memory.always
    assert always["weights"] == 2 * held
    assert always["gradients"] == 4 * (held - embedding)
    assert always["optimizer"] == 12 * (held - embedding) / 4
    assert not found.problems
    assert len(found.kinds) == 1


def test_a_group_of_microbatches_passes_through_the_pipeline_alone(pair: list[str]) -> None:
    """1F1B keeps no more activations than of a group, and every group fills the pipeline anew."""

    def found(resident: str, *settings: str) -> tuple[float, float]:
        pipeline = ["student.parallel.pipeline=2", f"teacher.resident_microbatches={resident}", *settings]
        result = plan(pair, 4, *pipeline)
        (first,) = [kind for kind in result.kinds if kind.student == 0]
        return first.memory.phases["update"]["activations"], result.bubbles["student"]

    one, two, whole = (found(resident) for resident in ("1", "2", "null"))
    assert 2 * one[0] == two[0] == whole[0]
    assert one[1] == 1 / 2 and two[1] == 1 / 3 > whole[1]
    # an interleaved schedule takes as many microbatches at a time as there are stages
    chunks = "student.parallel.virtual_pipeline=2"
    assert found("1", chunks) == found("2", chunks) == found("3", chunks)


def test_a_teachers_rank_without_a_response_of_a_group_computes_nothing(pair: list[str]) -> None:
    """Two microbatches at a time for four data-parallel ranks of the teacher: those of the second stage wait."""
    found = plan(pair, 4, "student.parallel.pipeline=2", "teacher.resident_microbatches=1")
    first, second = sorted(found.kinds, key=lambda kind: kind.rank)
    assert (first.rank, second.rank) == (0, 2)
    assert all(first.memory.phases["teacher"].values())
    assert not any(second.memory.phases["teacher"].values())
    assert first.memory.phases["transfer"]["targets"] > 0 < second.memory.phases["transfer"]["targets"]


def test_longer_responses_are_in_the_seconds_and_not_in_the_memory(pair: list[str]) -> None:
    config = load_config("oprd_1p5b", pair)
    short, long = (
        estimate(resolve(config, 8), Cluster(8, GPUS["h100"]), Lengths(response=tokens)) for tokens in (1000, 16384)
    )
    assert short.kinds[0].memory == long.kinds[0].memory
    assert short.seconds["update"] < long.seconds["update"] / 4


def test_what_does_not_fit_has_alternatives_that_do(pair: list[str]) -> None:
    """All activations of a pack of 18,432 tokens are above 80 GB at TP1; recomputation or a layout makes room."""
    settings = ["student.recompute=none", "train.tokens_per_microbatch=36864"]
    found = plan(pair, 8, *settings)
    assert len(found.problems) == 1
    assert "phase 'update'" in found.problems[0]
    assert "H100" in found.problems[0]
    config = load_config("oprd_1p5b", [*pair, *settings])
    cluster = Cluster(8, GPUS["h100"])
    near = alternatives(resolve(config, cluster.ranks), cluster, Lengths())
    assert near
    assert {"student.recompute": "full"} in [each.changes for each in near]
    for each in near:
        assert not estimate(resolve(changed(config, each.changes), cluster.ranks), cluster).problems
        written = load_config("oprd_1p5b", [*pair, *settings, *each.arguments.split()])
        assert written == changed(config, each.changes)


def test_the_memory_of_a_gpu_can_be_named(pair: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It decides whether a run fits; nothing else changes."""
    from nemo_oprd.cli import main

    arguments = ["plan", "--config-name", "oprd_1p5b", "--ranks", "8", "--gpu", "a100", *pair]
    for number, more in enumerate(([], ["--gpu-memory", "84.9"], ["--gpu-memory", "24"])):
        try:
            main([*arguments, *more, "--json", str(tmp_path / f"{number}.json")], alone=False)
            code = 0
        except SystemExit as ended:
            code = int(str(ended.code))
        assert code == (1 if number == 2 else 0), capsys.readouterr().out
    whole, same, small = (json.loads((tmp_path / f"{number}.json").read_text()) for number in range(3))
    assert (whole["gpu"], same["gpu"], small["gpu"]) == (
        "A100 SXM 80 GB",
        "A100 SXM with 84.9 GB",
        "A100 SXM with 24 GB",
    )
    assert same["seconds"] == whole["seconds"]
    assert "A100 SXM with 24 GB" in capsys.readouterr().out


def test_nothing_fits_in_too_few_gpus(pair: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["rollout.max_new_tokens=131000", "data.max_prompt_tokens=8", "train.tokens_per_microbatch=1048576"]
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--config-name", "oprd_1p5b", "--ranks", "1", *pair, *settings, "student.recompute=none"])
    assert ended.value.code == 1
    assert "does not fit" in capsys.readouterr().out


def test_a_server_that_holds_no_response_is_named(pair: list[str]) -> None:
    found = plan(pair, 8, "rollout.engine=vllm", "rollout.vllm.gpu_memory_utilization=0.08")
    assert len(found.problems) == 2  # in training, and in the evaluation
    assert "rollout.vllm.gpu_memory_utilization=0.08" in found.problems[0]
    dedicated = plan(pair, 9, "rollout.engine=vllm", "rollout.vllm.placement=dedicated")
    assert dedicated.student.size == 8
    assert "vLLM server" not in dedicated.kinds[0].memory.phases["rollout"]


def test_what_is_sampled_while_an_update_is_computed(pair: list[str]) -> None:
    """All of it, unless the last segment of the longest responses is of the step's own student."""
    servers = ("rollout.engine=vllm", "rollout.vllm.placement=dedicated", "rollout.max_new_tokens=1000")
    assert plan(pair, 9, *servers).overlap_seconds == 0
    exact = plan(pair, 9, *servers, "rollout.max_lag=1")
    assert 0 < exact.overlap_seconds < exact.seconds["sampling"]
    for tokens, lag, share in ((500, 1, 0.5), (500, 2, 1.0), (400, 2, 0.8)):
        segments = ("rollout.mode=segments", f"rollout.segment_tokens={tokens}", f"rollout.max_lag={lag}")
        # a step whose update takes as long as you like
        found = replace(plan(pair, 9, *servers, *segments), seconds=exact.seconds | {"update": 1e6})
        assert found.overlap_seconds == pytest.approx(share * exact.seconds["sampling"])


def test_sampling_that_goes_on_over_updates(pair: list[str]) -> None:
    """Decoding steps: those of a segment, or as many as yield the step's tokens; at least the longest's share.

    16 responses of 1,000 tokens at most on one server, 250 on average.
    """
    servers = ("rollout.engine=vllm", "rollout.vllm.placement=dedicated", "rollout.max_new_tokens=1000")

    def steps(*settings: str) -> float:
        """Decoding steps, by the seconds of a token with as many responses at a time."""
        spec = resolve(load_config("oprd_1p5b", [*pair, *servers, *settings]), 9)
        sampling = estimate(spec, Cluster(9, GPUS["h100"]), Lengths(response=250)).rollout
        assert sampling is not None
        whole = [*pair, *servers, f"train.prompts_per_step={sampling.at_a_time}", "rollout.per_prompt=1"]
        alone = estimate(resolve(load_config("oprd_1p5b", whole), 9), Cluster(9, GPUS["h100"]), Lengths(response=250))
        assert alone.rollout is not None and alone.rollout.at_a_time == sampling.at_a_time
        return 1000 * sampling.seconds / alone.rollout.seconds

    assert steps("rollout.max_lag=1") == pytest.approx(1000)
    assert steps("rollout.max_lag=3", "rollout.mode=segments", "rollout.segment_tokens=250") == pytest.approx(250)
    # 16 of 48 responses are taken in a step; one of 1,000 tokens has 5 steps
    assert steps("rollout.max_lag=4", "rollout.mode=stream") == pytest.approx(200)
    assert steps("rollout.max_lag=16", "rollout.mode=stream") == pytest.approx(1000 / 17)
    assert steps("rollout.max_lag=16", "rollout.mode=stream", "rollout.max_batch=16") == pytest.approx(250)


def test_the_pipeline_waits(pair: list[str]) -> None:
    """(P - 1) / (m + P - 1) with 4 stages; 16 responses at 2 data-parallel ranks are 8 microbatches."""
    found = plan(pair, 8, "student.parallel.pipeline=4")
    assert found.bubbles["student"] == pytest.approx(3 / 11)
    assert len(found.kinds) == 4


def test_the_command(pair: list[str], tmp_path: Path) -> None:
    """Without torch, in a fresh process; the JSON has the numbers of the text."""
    file = tmp_path / "plan.json"
    arguments = ["plan", "--config-name", "oprd_1p5b", "--ranks", "16", "--json", str(file), *pair]
    script = f"import sys; from nemo_oprd.cli import main; main({arguments!r}); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert found["fits"]
    assert f"it fits: {found['memory'][0]['peak'] / 1e9:.1f} GB" in done.stdout
    assert found["parameters"]["student"] == 1_777_088_000
    assert sum(found["seconds"].values()) == pytest.approx(found["step_seconds"])


def test_a_replay_computes_all_recorded_responses(pair: list[str], tmp_path: Path) -> None:
    """A line is a response, blank ones are none; nothing is sampled, and no weights are sent. Without torch."""
    recorded, file = tmp_path / "recorded.jsonl", tmp_path / "plan.json"
    recorded.write_text("{}\n{}\n \n{}\n\n")
    sampled = plan(pair, 4, "evaluation.every=1")
    found = plan(pair, 4, "evaluation.every=1", f"rollout.replay={recorded}")
    assert (sampled.work.responses, found.work.responses) == (16, 3)
    assert found.flops.update == pytest.approx(sampled.flops.update * 3 / 16)
    assert found.flops.sampling == found.bytes.weights == 0 < min(sampled.flops.sampling, sampled.bytes.weights)
    assert found.evaluation is None and sampled.evaluation is not None
    replayed = load_config("oprd_1p5b", [*pair, f"rollout.replay={recorded}"])
    assert len(longest_responses(replayed, 2, 2)) == 3  # which `rehearse` computes
    assert sampled.idle is None and found.idle is not None
    assert found.idle.text.startswith("1 of 4 student ranks have no response in a step of 3")
    arguments = ["plan", "--config-name", "oprd_1p5b", "--ranks", "4", "--json", str(file), *pair]
    arguments += [f"rollout.replay={recorded}"]
    script = f"import sys; from nemo_oprd.cli import main; main({arguments!r}); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "a step     3 responses" in done.stdout and "weights to the engine" not in done.stdout
    assert json.loads(file.read_text())["flops"]["sampling"] == 0


@pytest.mark.parametrize("command", ["plan", "rehearse"])
def test_a_replay_of_nothing(pair: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    """The messages are those of `train`."""
    (tmp_path / "empty.jsonl").write_text("\n")
    for name, says in (("nowhere", "no such file; expected a JSONL of rollouts"), ("empty", "the file holds no roll")):
        with pytest.raises(SystemExit) as ended:
            main([command, "--config-name", "verify", "--ranks", "1", *pair, f"rollout.replay={tmp_path}/{name}.jsonl"])
        assert ended.value.code == 2
        assert f"error: rollout.replay={tmp_path}/{name}.jsonl: {says}" in capsys.readouterr().err


def test_the_time_of_a_plan_does_not_grow_with_the_ranks(pair: list[str]) -> None:
    """Kinds of ranks are looked up where stages begin; they are those that a look at every rank finds."""
    overlapping = ["student.parallel.pipeline=4", "teacher.placement=dedicated", "teacher.ranks=4"]
    for ranks, settings in ((8, []), (8, ["student.parallel.pipeline=2"]), (12, overlapping)):
        found = plan(pair, ranks, *settings, "teacher.parallel.pipeline=2")
        first = {found.stages(rank): rank for rank in reversed(range(ranks)) if found.stages(rank) != (None, None)}
        assert {(kind.student, kind.teacher): kind.rank for kind in found.kinds} == first
    with mock.patch.object(Layout, "coordinates", autospec=True, side_effect=Layout.coordinates) as asked:
        plan(pair, 2**20)
    assert asked.call_count < 100


def test_the_page_has_the_table_of_today() -> None:
    from benchmarks.plan_table import OWN, table

    page = (Path(__file__).parents[3] / "docs" / "plan.md").read_text()
    assert "\n".join(table(OWN)) in page, "run `python -m benchmarks.plan_table` and copy its table"


def test_the_table_has_the_sizes_of_the_scripts() -> None:
    from tests.support.recipe_models import RECIPES

    scripts = Path(__file__).parents[3] / "scripts"
    for recipe, (_, _, sizes) in RECIPES.items():
        script = scripts / f"{recipe}.sh"
        text = script.read_text().replace("\\\n", " ")
        if "exec bash scripts/bridge_qwen3_4b_to_1p7b.sh" in text and "PAIR_SIZES" not in text:
            text = (scripts / "bridge_qwen3_4b_to_1p7b.sh").read_text()
        assert re.search(r"(?<=[ \"-])" + r" +".join(map(re.escape, sizes)) + r"(?=[ \"}])", text), recipe


def test_the_recipe_with_experts_fits_two_to_eight_nodes(tmp_path: Path) -> None:
    """The number of parameters is that of transformers' model; the engine's responses fit beside the trainer."""
    from benchmarks.plan_table import planned
    from tests.support.recipe_models import SHAPES, write_models

    write_models(tmp_path / "models")
    shape = SHAPES["Qwen3-30B-A3B"]
    with torch.device("meta"):
        theirs = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{key: v for key, v in shape.items() if key != "model_type"}))
    count = sum(parameter.numel() for parameter in theirs.parameters())
    assert model_parameters(parse_model_spec({"rope_theta": 10000, **shape})) == count
    peaks = []
    for nodes in (2, 4, 8):
        found = planned("oprd_qwen3_30b_a3b", tmp_path / "models", nodes, "vllm")
        assert not found.problems, (nodes, found.problems)
        peaks.append(found.kinds[0].memory.peak)
    assert peaks == sorted(peaks, reverse=True)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--ranks", "0"], "expected a whole number of at least 1"),
        (["--ranks", "100000000"], "100000000: expected at most 1,000,000 ranks"),
        (
            ["--ranks", "8", "--gpu-memory", "3"],
            "'3': expected the GB of one GPU, such as 24; 3.2 of them are for CUDA",
        ),
        (["--ranks", "8", "--gpu-memory", "nan"], "'nan': expected the GB of one GPU"),
        (["--ranks", "8", "--gpu", "tpu"], "--gpu tpu: expected one of a100, b200, h100, h200"),
        ([], "--ranks"),
    ],
)
def test_wrong_arguments(pair: list[str], capsys: pytest.CaptureFixture[str], arguments: list, message: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--config-name", "oprd_1p5b", *arguments, *pair])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_layout_that_does_not_divide_the_ranks_is_said(pair: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--config-name", "oprd_1p5b", "--ranks", "6", *pair, "student.parallel.tensor=4"])
    assert ended.value.code == 2
    assert "does not divide the 6 rank(s)" in capsys.readouterr().err
