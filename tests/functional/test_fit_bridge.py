"""`fit-bridge` at different layouts of both models.

Its tensors are compared with numpy and plain Hugging Face models, and `verify` uses the bridge that it writes.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from layout_cases import read_result
from pool import Pools, WorkerError
from safetensors.torch import load_file

from nemo_oprd.batch.types import Rollout
from nemo_oprd.bridge.covariance import LayerPair, PairStatistics
from nemo_oprd.bridge.fit import fit_ridge
from nemo_oprd.bridge.row_sample import TRAIN, assign_parts
from nemo_oprd.config.loading import load_config
from nemo_oprd.distillation.reference import agreement, reference
from nemo_oprd.rollout.replay import read_rollouts, write_rollouts
from nemo_oprd.runtime.run_lock import RunLock
from nemo_oprd.tools.toy.pair import write_tokenizer

GOLDEN = Path(__file__).parent.parent / "golden"
MODELS = {"student": GOLDEN / "student", "teacher": GOLDEN / "wide_teacher"}
RANK = 4
PAIRS = {1: 1, 2: 3, 3: 5}  # by the paper's rule
LAYOUTS = [
    (1, []),
    (2, ["student.parallel.tensor=2", "teacher.parallel.pipeline=2"]),
    (2, ["student.parallel.tensor=2", "student.parallel.sequence=true", "teacher.resident_microbatches=1"]),
    (2, ["student.parallel.pipeline=2", "teacher.parallel.tensor=2"]),
    (2, ["teacher.parallel.context=2", "train.prompts_per_step=7"]),
    (3, ["student.parallel.pipeline=2", "teacher.placement=dedicated", "teacher.offload=true"]),
]


def make_rollouts() -> list[Rollout]:
    draw = random.Random(0)

    def ids(low: int, high: int) -> list[int]:
        return [draw.randrange(61) for _ in range(draw.randint(low, high))]

    made = [Rollout(ids(1, 9), ids(3, 30)) for _ in range(40)]
    return [Rollout(r.prompt_ids, r.response_ids, [int(draw.random() < 0.8) for _ in r.response_ids]) for r in made]


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("fit") / "rollouts.jsonl"
    write_rollouts(file, make_rollouts())
    return file


@pytest.fixture(scope="module")
def states() -> dict[str, dict[int, torch.Tensor]]:
    """Role -> layer -> float64 states of all response tokens with mask 1."""
    from transformers import AutoModelForCausalLM

    found: dict[str, dict[int, torch.Tensor]] = {}
    for role, path in MODELS.items():
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager")
        rows: dict[int, list[torch.Tensor]] = {}
        for rollout in make_rollouts():
            where = [len(rollout.prompt_ids) + t for t, m in enumerate(rollout.mask) if m]
            ids = torch.tensor([rollout.ids.tolist()])
            with torch.no_grad():
                hidden = model.model(ids, output_hidden_states=True, use_cache=False).hidden_states
            for layer in range(1, len(hidden)):
                rows.setdefault(layer, []).append(hidden[layer][0, where])
        found[role] = {layer: torch.cat(parts) for layer, parts in rows.items()}
    return found


def ids_of_rows() -> tuple[np.ndarray, np.ndarray]:
    """Response and token of every row."""
    pairs = [(i, t) for i, rollout in enumerate(make_rollouts()) for t, m in enumerate(rollout.mask) if m]
    return np.array([i for i, _ in pairs]), np.array([t for _, t in pairs])


@pytest.mark.parametrize(("ranks", "layout"), LAYOUTS)
def test_tensors(
    pools: Pools, tmp_path: Path, rollouts: Path, states: dict[str, dict[int, torch.Tensor]], ranks: int, layout: list
) -> None:
    output = tmp_path / "bridge"
    overrides = [*(f"{role}.hf_path={path}" for role, path in MODELS.items()), f"rollout.replay={rollouts}"]
    settings = [f"bridge.rank={RANK}", "bridge.center_student=true", "train.tokens_per_microbatch=100"]
    pools[ranks].run("cases:run_fit_bridge", overrides=[*overrides, *settings, *layout, f"output={output}"])
    tensors = load_file(output / "bridge.safetensors")
    manifest = json.loads((output / "bridge.json").read_text())
    assert manifest["layer_pairs"] == [list(pair) for pair in PAIRS.items()]

    response, token = ids_of_rows()
    parts = assign_parts(range(40), 0.1, 0)
    part = np.array([parts[i] for i in response.tolist()])
    for student_layer, teacher_layer in PAIRS.items():
        key = f"s{student_layer}.t{teacher_layer}"
        teacher, student = states["teacher"][teacher_layer], states["student"][student_layer]
        # mean and basis: numpy alone
        train = teacher.numpy()[part == TRAIN]
        np.testing.assert_allclose(tensors[f"{key}.teacher_mean"], train.mean(0), rtol=1e-4, atol=1e-5)
        vectors = np.linalg.eigh(np.cov(train.T))[1][:, ::-1][:, :RANK].T
        overlap = np.abs(np.sum(tensors[f"{key}.teacher_basis"].numpy() * vectors, axis=1))
        np.testing.assert_allclose(overlap, 1.0, atol=1e-4)
        # projector: the closed form (test_bridge_fit.py has it against numpy) on the plain models' rows
        statistics = PairStatistics(LayerPair(student_layer, teacher_layer), teacher.shape[1], student.shape[1])
        statistics.update(teacher, student, response, token, part)
        expected = fit_ridge(statistics, center_student=True).bridge(RANK)
        for name, value in expected.tensors().items():
            # fp32 states against float64 ones, and a regression with small penalties
            torch.testing.assert_close(tensors[f"{key}.{name}"], value, rtol=1e-2, atol=1e-3, msg=f"{key}.{name}")


def test_pairs_of_ones_own(pools: Pools, tmp_path: Path, rollouts: Path) -> None:
    """A bridge between layers that the paper's rule does not pair; a run with another layer map is refused."""
    base = [*(f"{role}.hf_path={path}" for role, path in MODELS.items()), f"rollout.replay={rollouts}"]
    bridge, chosen = (
        tmp_path / "bridge",
        ["loss.representation.layers=[1,3]", "loss.representation.layer_map={1:4,3:2}"],
    )
    pools[2].run(
        "cases:run_fit_bridge",
        overrides=[*base, *chosen, "bridge.rank=3", f"output={bridge}", "teacher.parallel.pipeline=2"],
    )
    assert json.loads((bridge / "bridge.json").read_text())["layer_pairs"] == [[1, 4], [3, 2]]
    overrides = [*base, *chosen, f"bridge.path={bridge}", "student.parallel.tensor=2", f"output={tmp_path / 'out'}"]
    pools[2].run("cases:run_verify", overrides=overrides)
    _, gradients = read_result(tmp_path / "out")
    expected = reference(load_config("verify", overrides), make_rollouts())
    assert max(agreement(gradients, expected["gradients"]).values()) < 1e-5
    other = [*overrides, "loss.representation.layer_map={1:1,3:2}"]
    with pytest.raises(WorkerError, match=r"layer_map=\{1: 1, 3: 2\} and .* was fitted for \{1: 4, 3: 2\}"):
        pools[2].run("cases:run_verify", overrides=other)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_bridge_is_used(pools: Pools, tmp_path: Path, rollouts: Path, ranks: int) -> None:
    """Losses and gradients of `verify` equal the plain computation with the same tensors."""
    base = [*(f"{role}.hf_path={path}" for role, path in MODELS.items()), f"rollout.replay={rollouts}"]
    bridge = tmp_path / "bridge"
    pools[ranks].run("cases:run_fit_bridge", overrides=[*base, f"bridge.rank={RANK}", f"output={bridge}"])
    settings = [f"bridge.path={bridge}", "loss.representation.kind=normalized_mse", "loss.output.kind=full_vocab"]
    more = ["loss.representation.dim_reduction=sum", "loss.output.weight=0.5", "loss.output.chunk_tokens=50"]
    layout = ["student.parallel.pipeline=2", "teacher.parallel.tensor=2"] if ranks == 2 else []
    overrides = [*base, *settings, *more, *layout, f"output={tmp_path / 'out'}"]
    pools[ranks].run("cases:run_verify", overrides=overrides)
    losses, gradients = read_result(tmp_path / "out")
    expected = reference(load_config("verify", overrides), make_rollouts())
    for name in ("loss/total", "rep/loss", "output/loss"):
        assert losses[name] == pytest.approx(expected[name], rel=1e-5)
    assert max(agreement(gradients, expected["gradients"]).values()) < 1e-5


def test_sampled_rollouts_are_kept(pools: Pools, tmp_path: Path) -> None:
    """An interrupted command reads the steps that it sampled, samples the others, and refuses other settings."""
    for role, path in MODELS.items():
        shutil.copytree(path, tmp_path / role)
        write_tokenizer(tmp_path / role)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in range(12)))
    overrides = [*(f"{role}.hf_path={tmp_path / role}" for role in MODELS), f"data.train={prompts}", "bridge.rank=2"]
    overrides += ["bridge.prompts=12", "train.prompts_per_step=4", "rollout.per_prompt=1", "rollout.max_new_tokens=8"]
    output = tmp_path / "bridge"
    overrides.append(f"output={output}")
    pools[2].run("cases:run_fit_bridge", overrides=overrides)
    steps = [output / "rollouts" / f"step_{number:07d}.jsonl" for number in (1, 2, 3)]
    assert sorted((output / "rollouts").iterdir()) == [output / "rollouts" / "about.json", *steps]
    first = [file.read_bytes() for file in steps]
    tensors = load_file(output / "bridge.safetensors")

    # other responses of the same prompts show that the file is read
    write_rollouts(steps[1], [Rollout(r.prompt_ids, [5, 6, 7]) for r in read_rollouts(steps[1], 61)])
    changed = steps[1].read_bytes()
    steps[2].unlink()
    pools[2].run("cases:run_fit_bridge", overrides=overrides)
    assert [file.read_bytes() for file in steps] == [first[0], changed, first[2]]
    again = load_file(output / "bridge.safetensors")
    assert any(not torch.equal(again[name], value) for name, value in tensors.items())
    with pytest.raises(WorkerError, match=r"rollouts holds rollouts that were sampled with .* remove that directory"):
        pools[2].run("cases:run_fit_bridge", overrides=[*overrides, "rollout.temperature=0.5"])


SPREAD = [
    (2, ["student.parallel.tensor=2"], [2, 1]),
    (2, ["student.parallel.tensor=2", "student.parallel.sequence=true"], [2, 1]),
    (4, ["student.parallel.tensor=2", "student.parallel.pipeline=2"], [1, 1, 1, 0]),
    (2, [], [3, 3]),
]


@pytest.mark.parametrize(("ranks", "layout", "expected"), SPREAD)
def test_moments_are_spread_over_tensor_ranks(
    pools: Pools, tmp_path: Path, rollouts: Path, ranks: int, layout: list[str], expected: list[int]
) -> None:
    """The number of layer pairs whose moments each rank holds, which decides its memory."""
    base = [*(f"{role}.hf_path={path}" for role, path in MODELS.items()), f"rollout.replay={rollouts}"]
    overrides = [*base, f"bridge.rank={RANK}", *layout, f"output={tmp_path / 'bridge'}"]
    assert pools[ranks].run("cases:pairs_with_moments", overrides=overrides) == expected


def test_mistakes(pools: Pools, tmp_path: Path, rollouts: Path) -> None:
    base = [*(f"{role}.hf_path={path}" for role, path in MODELS.items()), f"rollout.replay={rollouts}"]
    bridge = tmp_path / "bridge"
    with pytest.raises(WorkerError, match="bridge.rank=40: expected at most 32"):
        pools[1].run("cases:run_fit_bridge", overrides=[*base, "bridge.rank=40", f"output={bridge}"])
    assert not bridge.exists()
    others = tmp_path / "others"
    others.mkdir()
    (others / "losses.json").write_text("{}")
    with pytest.raises(WorkerError, match="it is a verify result that verify made"):
        pools[1].run("cases:run_fit_bridge", overrides=[*base, f"bridge.rank={RANK}", f"output={others}"])
    assert [path.name for path in others.iterdir()] == ["losses.json"], "no lock, either"
    lock = RunLock(bridge)
    with pytest.raises(WorkerError, match=f"output={bridge} is in use by process"):
        pools[1].run("cases:run_fit_bridge", overrides=[*base, f"bridge.rank={RANK}", f"output={bridge}"])
    lock.release()
    pools[1].run("cases:run_fit_bridge", overrides=[*base, f"bridge.rank={RANK}", f"output={bridge}"])
    (bridge / "notes.txt").write_text("mine")
    with pytest.raises(WorkerError, match="is not a bridge; choose another directory"):
        pools[1].run("cases:run_fit_bridge", overrides=[*base, f"output={bridge}"])
    pools[1].run("cases:run_fit_bridge", overrides=[*base, "bridge.rank=1", f"output={tmp_path / 'one'}"])
    flat = [*base, f"bridge.path={tmp_path / 'one'}", "loss.representation.kind=cosine", f"output={tmp_path / 'o'}"]
    with pytest.raises(WorkerError, match="loss.representation.kind=cosine with a bridge of rank 1"):
        pools[1].run("cases:run_verify", overrides=flat)
    wrong = [*base, f"bridge.path={bridge}", "loss.representation.position=predicting", f"output={tmp_path / 'o'}"]
    with pytest.raises(WorkerError, match="position=token, this run has loss.representation.position=predicting"):
        pools[1].run("cases:run_verify", overrides=wrong)
