"""One real training step, and resuming, against a plain Hugging Face AdamW step on the same batch."""

from __future__ import annotations

import json
import shutil
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from golden_runs import BASE, GOLDEN, weights
from pairwise import mark_slow, of_settings
from pool import Pools, WorkerError
from reference_adamw import one_golden_step
from safetensors.torch import save_file
from tiny_models import MODELS, SIZES, save_random

from checkpoint_tools._convert import megatron_to_hf
from nemo_oprd.batch.types import Rollout
from nemo_oprd.rollout.replay import write_rollouts

LAYOUTS = {
    "TP1": (1, []),
    "TP2": (2, ["student.parallel.tensor=2"]),
    "TP2+SP": (2, ["student.parallel.tensor=2", "student.parallel.sequence=true"]),
    "PP2": (2, ["student.parallel.pipeline=2"]),
    "DP2": (2, []),
    "DP2 without the distributed optimizer": (2, ["train.distributed_optimizer=false"]),
}


@pytest.mark.parametrize(
    ("layout", "clip"),
    mark_slow(
        [(layout, clip) for layout in LAYOUTS for clip in (0.5, 1000.0)],
        lambda case: of_settings(*LAYOUTS[case[0]], clip=case[1]),
    ),
)
def test_one_step_is_one_adamw_step(pools: Pools, tmp_path: Path, layout: str, clip: float) -> None:
    """Gradients are clipped, matrices alone are decayed, and the head, which has no gradient, stays as it was."""
    ranks, sizes = LAYOUTS[layout]
    output = tmp_path / "run"
    pools[ranks].run(
        "cases:run_train", overrides=[*BASE, f"train.clip_grad={clip}", "train.steps=1", f"output={output}", *sizes]
    )
    expected, norm = one_golden_step(clip)
    got = weights(output / "hf")
    assert set(got) == set(expected)
    start = weights(GOLDEN / "student")
    for name, value in expected.items():
        # lr is 1e-2: 1e-6 is 1e-4 of a full update, and what gradients that agree to 1e-6 of their norm leave
        torch.testing.assert_close(got[name].double(), value, rtol=1e-6, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    assert torch.equal(got["lm_head.weight"], start["lm_head.weight"])
    assert not torch.equal(got["model.norm.weight"], start["model.norm.weight"])
    line = json.loads((output / "metrics.jsonl").read_text())
    assert line["actor/grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert line["lr"] == 1e-2


RESUMES = [
    (1, [], 1, []),
    (2, ["student.parallel.tensor=2"], 2, ["student.parallel.pipeline=2"]),
    (2, ["student.parallel.pipeline=2", "loss.representation.layers=even"], 2, ["loss.representation.layers=even"]),
]


@pytest.mark.parametrize(("ranks", "first", "then_ranks", "then"), RESUMES)
def test_resume_goes_on_where_it_stopped(
    pools: Pools, tmp_path: Path, ranks: int, first: list[str], then_ranks: int, then: list[str]
) -> None:
    """Two steps, a new start at another layout, two more: the same as four at once (bit by bit at the same layout)."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    shared = [*BASE, "train.save_every=2"]
    pools[ranks].run("cases:run_train", overrides=[*shared, *first, "train.steps=4", f"output={whole}"])
    pools[ranks].run("cases:run_train", overrides=[*shared, *first, "train.steps=2", f"output={parts}"])
    shutil.rmtree(parts / "hf")
    pools[then_ranks].run("cases:run_train", overrides=[*shared, *then, "train.steps=4", f"output={parts}"])
    expected, got = weights(whole / "hf"), weights(parts / "hf")
    for name, value in expected.items():
        if first == then:
            assert torch.equal(got[name], value), name
        else:
            torch.testing.assert_close(got[name], value, rtol=1e-5, atol=2e-5)
    curves = [[json.loads(line)["rep/loss"] for line in (run / "metrics.jsonl").open()] for run in (whole, parts)]
    assert curves[0] == pytest.approx(curves[1], rel=1e-5)
    assert len(curves[1]) == 4
    assert (parts / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "4\n"


def zero_two_pages(file: Path) -> None:
    """Two of those that are not zero already, as the rows of padding are."""
    data = bytearray(file.read_bytes())
    pages = [start for start in range(0, len(data) - 4095, 4096) if any(data[start : start + 4096])]
    for start in pages[1:3]:
        data[start : start + 4096] = bytes(4096)
    file.write_bytes(data)


def flip_pieces(file: Path) -> None:
    data = bytearray(file.read_bytes())
    for offset in (9000, 100_000):
        data[offset : offset + 64] = bytes(255 - byte for byte in data[offset : offset + 64])
    file.write_bytes(data)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


DAMAGE = {
    "two pages are zero": ("__1_0.distcp", zero_two_pages, "is damaged (__1_0.distcp has another sha256"),
    "pieces are flipped": ("__0_1.distcp", flip_pieces, "is damaged (__0_1.distcp has another sha256"),
    "a page of the index is zero": (".metadata", zero_two_pages, "is damaged (.metadata has another sha256"),
    "a byte is missing": ("__1_1.distcp", truncate, "is incomplete (__1_1.distcp has "),
}


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_resumed(pools: Pools, tmp_path: Path) -> None:
    """Bit by bit as if the damaged one had never been written. Files of weights are digested while they are written."""
    run = tmp_path / "run"
    shared = [*BASE, "student.parallel.tensor=2", "train.save_every=1", "train.steps=3", f"output={run}"]
    read = pools[2].run("cases:read_for_digests", overrides=shared)
    whole = weights(run / "hf")
    newest = run / "checkpoints" / "iter_0000003"
    digests = json.loads((newest / "state.json").read_text())["sha256"]
    files = {str(file.relative_to(newest)): file for file in newest.rglob("*") if file.is_file()}
    assert set(digests) == set(files) - {"state.json"}
    assert {name: sha256(files[name].read_bytes()).hexdigest() for name in digests} == digests
    # Megatron-core 0.16 writes two files of weights per rank, 0.19 one
    assert set(digests) - set(read) == {name for name in files if name.endswith(".distcp")} >= {"__0_0.distcp"}
    shutil.copytree(newest, tmp_path / "kept")
    for name, harm, says in DAMAGE.values():
        if name not in files:
            name, says = name.replace("_1.distcp", "_0.distcp"), says.replace("_1.distcp", "_0.distcp")
        shutil.rmtree(run / "hf")
        shutil.rmtree(newest)
        shutil.copytree(tmp_path / "kept", newest)
        harm(newest / name)
        first, _ = pools[2].run("cases:said_by_train", overrides=shared)
        assert f"{newest} {says}" in first and "was skipped" in first
        assert f"resumed from {run / 'checkpoints'} after 2 of 3 steps" in first
        assert all(torch.equal(value, whole[key]) for key, value in weights(run / "hf").items())

    zero_two_pages(newest / "__0_0.distcp")
    source = ["student.hf_path=null", f"student.checkpoint={newest}", f"output={tmp_path / 'other'}"]
    refusal = r"iter_0000003 is damaged \(__0_0.distcp has another sha256 .*expected the files of the training run"
    with pytest.raises(WorkerError, match=refusal):
        pools[2].run("cases:run_train", overrides=[*shared, *source])
    with pytest.raises(ValueError, match=refusal):
        megatron_to_hf(newest, tmp_path / "converted", progress=False)


def test_weights_that_are_not_finite_are_named(pools: Pools, tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "teacher", tmp_path / "teacher")
    tensors = weights(tmp_path / "teacher")
    tensors["model.layers.1.mlp.up_proj.weight"][2, 3] = float("nan")
    save_file(tensors, tmp_path / "teacher" / "model.safetensors")
    overrides = [*BASE, f"teacher.hf_path={tmp_path / 'teacher'}", "train.steps=1", f"output={tmp_path / 'run'}"]
    says = r"teacher: tensor 'model.layers.1.mlp.up_proj.weight' has 1 value\(s\) that are NaN .*nan at \[2, 3\]"
    with pytest.raises(WorkerError, match=says):
        pools[1].run("cases:run_train", overrides=overrides)
    assert not (tmp_path / "run").exists()


def test_resume_from_a_checkpoint_whose_state_has_format_1(pools: Pools, tmp_path: Path) -> None:
    """Checkpoints of earlier versions: with adaptive weights, whose averages are kept in state.json."""
    shared = [*BASE, "train.save_every=1", "loss.representation.adaptive.layers=true"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    pools[1].run("cases:run_train", overrides=[*shared, "train.steps=3", f"output={whole}"])
    pools[1].run("cases:run_train", overrides=[*shared, "train.steps=2", f"output={parts}"])
    shutil.rmtree(parts / "hf")
    file = parts / "checkpoints" / "iter_0000002" / "state.json"
    old_names = {"adaptive_gaps": "gaps", "distributed_optimizer": "train.distributed_optimizer"}
    old_names |= {"deepest_trained_layer": "deepest trained layer", "final_norm_trained": "final norm is trained"}
    old_names |= {"head_trained": "head is trained", "trained_projectors": "trained projectors"}
    old_names |= {"partially_trained": "trained in parts", "moving_average_layers": "layers of the moving average"}
    state = json.loads(file.read_text())
    assert state.pop("format") == 2 and set(old_names) < set(state)
    del state["sha256"], state["state_sha256"]
    file.write_text(json.dumps({old_names.get(name, name): value for name, value in state.items()}))
    (said,) = pools[1].run("cases:said_by_train", overrides=[*shared, "train.steps=3", f"output={parts}"])
    assert f"{file.parent} has no digests (an earlier version wrote it): only its files' sizes were checked" in said
    expected, got = weights(whole / "hf"), weights(parts / "hf")
    for name, value in expected.items():
        assert torch.equal(got[name], value), name
    lines = [(run / "metrics.jsonl").read_text().splitlines() for run in (whole, parts)]
    assert [len(each) for each in lines] == [3, 3]
    last = [{n: v for n, v in json.loads(each[-1]).items() if n.startswith("rep/layer_weight")} for each in lines]
    assert last[0] == last[1] and len(set(last[0].values())) > 1


def test_later_steps_do_not_depend_on_the_kind_of_optimizer(pools: Pools, tmp_path: Path) -> None:
    """Three updates over several microbatches: the fp32 optimizer must not add a step's gradients to the next one's."""
    norms = {}
    for distributed in ("true", "false"):
        output = tmp_path / distributed
        settings = ["train.steps=3", "train.tokens_per_microbatch=8", f"train.distributed_optimizer={distributed}"]
        pools[1].run("cases:run_train", overrides=[*BASE, *settings, f"output={output}"])
        norms[distributed] = [json.loads(line)["actor/grad_norm"] for line in (output / "metrics.jsonl").open()]
    assert norms["true"] == pytest.approx(norms["false"], rel=1e-5)
    ours, theirs = weights(tmp_path / "true" / "hf"), weights(tmp_path / "false" / "hf")
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=2e-5)


RESUMED = {
    # (ranks, settings) of the first two updates, and of the third; auto shards over two ranks and not over one
    "sharded, then not": (1, ["train.distributed_optimizer=true"], 1, ["train.distributed_optimizer=false"]),
    "not sharded, then sharded": (1, ["train.distributed_optimizer=false"], 1, ["train.distributed_optimizer=true"]),
    "DP1, then DP2": (1, [], 2, []),
    "DP2, then DP1": (2, [], 1, []),
    "PP2, then DP2": (2, ["student.parallel.pipeline=2"], 2, []),
    "DP2, then TP2": (2, [], 2, ["student.parallel.tensor=2"]),
}
ALWAYS_RESUMED = ("sharded, then not", "DP1, then DP2")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in ALWAYS_RESUMED else pytest.mark.slow) for case in RESUMED]
)
def test_checkpoints_of_one_kind_of_optimizer_resume_with_the_other(
    pools: Pools, tmp_path: Path, case: str, precision: str
) -> None:
    """The third update is that of a run whose optimizer stays as it is."""
    ranks, first, ranks_after, after = RESUMED[case]
    shared = [*BASE, f"precision={precision}", "train.save_every=1", "train.lr=1e-3"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    pools[ranks].run("cases:run_train", overrides=[*shared, *first, "train.steps=3", f"output={whole}"])
    pools[ranks].run("cases:run_train", overrides=[*shared, *first, "train.steps=2", f"output={parts}"])
    saved = json.loads((parts / "checkpoints" / "iter_0000002" / "state.json").read_text())["distributed_optimizer"]
    shutil.rmtree(parts / "hf")
    pools[ranks_after].run("cases:run_train", overrides=[*shared, *after, "train.steps=3", f"output={parts}"])
    now = json.loads((parts / "checkpoints" / "iter_0000003" / "state.json").read_text())["distributed_optimizer"]
    assert saved != now
    expected, got = weights(whole / "hf"), weights(parts / "hf")
    for name, value in expected.items():
        if ranks == ranks_after == 1:
            assert torch.equal(got[name], value), name
        # a lost moment or a lost float32 weight moves weights by tenths of the rate; two layouts differ by roundings
        atol = 5e-6 if precision == "fp32" else 1e-4
        torch.testing.assert_close(
            got[name].float(), value.float(), rtol=8e-3 if precision == "bf16" else 1e-5, atol=atol
        )


@pytest.mark.parametrize("layouts", [(1, 2), pytest.param((2, 1), marks=pytest.mark.slow)])
def test_experts_resume_with_the_other_kind_of_optimizer(
    pools: Pools, tmp_path: Path, layouts: tuple[int, int]
) -> None:
    """Dense and expert parameters have an optimizer each; one rank is not sharded, two data-parallel ranks are."""
    for role, seed in (("student", 0), ("teacher", 1)):
        save_random(tmp_path / role, SIZES | MODELS["qwen3_moe"], seed)
    models = [f"{role}.hf_path={tmp_path / role}" for role in ("student", "teacher")]
    write_rollouts(tmp_path / "rollouts.jsonl", [Rollout([5, 6, 7], [8, 9, 10, 11, 12]), Rollout([1, 2], [3, 4, 5])])
    shared = [*BASE, *models, f"rollout.replay={tmp_path / 'rollouts.jsonl'}", "train.save_every=1", "train.lr=1e-3"]
    sizes = {1: [], 2: ["student.parallel.expert=2"]}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    first, after = layouts
    pools[first].run("cases:run_train", overrides=[*shared, *sizes[first], "train.steps=3", f"output={whole}"])
    pools[first].run("cases:run_train", overrides=[*shared, *sizes[first], "train.steps=2", f"output={parts}"])
    shutil.rmtree(parts / "hf")
    pools[after].run("cases:run_train", overrides=[*shared, *sizes[after], "train.steps=3", f"output={parts}"])
    expected, got = weights(whole / "hf"), weights(parts / "hf")
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-5, atol=5e-6, msg=name)


@pytest.mark.parametrize("layout", ["PP2 VPP2", pytest.param("DP2", marks=pytest.mark.slow)])
def test_resume_with_tied_embeddings(pools: Pools, tmp_path: Path, layout: str) -> None:
    """Megatron gives a shared embedding a bucket of its own, behind padding, as sizes here leave some."""
    save_random(tmp_path / "student", SIZES | MODELS["qwen2_tied"], 0)
    save_random(tmp_path / "teacher", SIZES | MODELS["qwen2_tied"], 1)
    models = [f"{role}.hf_path={tmp_path / role}" for role in ("student", "teacher")]
    rollouts = [Rollout([5, 6, 7], [8, 9, 10, 11, 12]), Rollout([1, 2], [3, 4, 5])]
    write_rollouts(tmp_path / "rollouts.jsonl", rollouts)
    sizes = ["student.parallel.pipeline=2", "student.parallel.virtual_pipeline=2"] if layout != "DP2" else []
    shared = [*BASE, *models, f"rollout.replay={tmp_path / 'rollouts.jsonl'}", "loss.output.kind=full_vocab"]
    shared += ["loss.output.weight=1", "train.save_every=1", "train.keep_checkpoints=0", "train.steps=3"]
    run = tmp_path / "run"
    pools[2].run("cases:run_train", overrides=[*shared, *sizes, f"output={run}"])
    got = weights(run / "hf")
    for again_at in (sizes, ["student.parallel.tensor=2"]):
        shutil.rmtree(run / "hf")
        (run / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("1\n")
        pools[2].run("cases:run_train", overrides=[*shared, *again_at, f"output={run}"])
        again = weights(run / "hf")
        for name, value in got.items():
            torch.testing.assert_close(again[name], value, rtol=1e-5, atol=2e-6 * (again_at is not sizes), msg=name)


def test_idle_ranks_are_said_once(pools: Pools, tmp_path: Path) -> None:
    """By the first rank alone, before the first of two steps; with work for all ranks nothing is said."""
    lines = (GOLDEN / "rollouts.jsonl").read_text().splitlines(keepends=True)
    recorded = tmp_path / "one.jsonl"
    recorded.write_text(lines[0])
    run = [*BASE, "train.steps=2", "train.export_hf=false"]
    first, second = pools[2].run(
        "cases:said_by_train", overrides=[*run, f"rollout.replay={recorded}", f"output={tmp_path / 'idle'}"]
    )
    warnings = [line for line in first.splitlines() if "idle_ranks" in line]
    assert len(warnings) == 1 and first.index(warnings[0]) < first.index("step 1/2")
    assert warnings[0].startswith("warning (idle_ranks): 1 of 2 student ranks have no response in a step of 1,")
    assert "idle" not in second
    sizes = ["student.parallel.tensor=2", "teacher.parallel.tensor=2"]
    busy = [*run, *sizes, f"rollout.replay={recorded}", f"output={tmp_path / 'busy'}"]
    assert all("idle_ranks" not in said for said in pools[2].run("cases:said_by_train", overrides=busy))
