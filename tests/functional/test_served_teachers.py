"""A teacher behind vLLM servers: deaths, wrong answers, refusals, and proofs; the servers are stand-ins.

That its gradients are those of the teacher in the trainer is in test_layouts.py, test_output_layouts.py and
test_across_tokenizers.py.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from layout_cases import Workbench, read_result
from pool import Pools, WorkerError
from served_teachers import SERVED, ServedTeachers, settings_of, state_requests, through_a_bridge

from nemo_oprd.distillation.reference import agreement
from nemo_oprd.run.timeline import AHEAD, read_timeline
from nemo_oprd.tools.toy.pair import make_tiny_pair
from tests.support.forked_run import differences, toy_overrides

SMALL = "train.tokens_per_microbatch=120"


@pytest.fixture
def settings(workbench: Workbench, tmp_path: Path) -> list[str]:
    """A run without its servers."""
    return [*workbench.settings("qwen3"), SMALL, f"output={tmp_path / 'out'}"]


def nothing_is_left(*benches: Path) -> bool:
    """Whether the folders of the servers, with all answers, are gone, and nothing else has their names."""
    folders = {Path(each["server"]).parent for bench in benches for each in state_requests(bench)}
    assert folders
    return not any(name.startswith(folder.name) for folder in folders for name in os.listdir("/dev/shm"))


def test_a_death_in_the_middle_changes_no_bit(
    pools: Pools, settings: list[str], served_teachers: ServedTeachers, tmp_path: Path
) -> None:
    """The server dies with half an answer in shared memory; of the answers before, none is asked for again."""
    layout = ["student.parallel.tensor=2", "student.parallel.sequence=true", "teacher.vllm.replicas=2"]
    calm = served_teachers.bench()
    pools[2].run("cases:run_verify", overrides=[*settings, *layout, *settings_of(calm)])
    losses, gradients = read_result(tmp_path / "out")
    killed = served_teachers.bench(die={"at": 9, "times": 2})
    pools[2].run("cases:run_verify", overrides=[*settings, *layout, *settings_of(killed)])
    again, gradients_again = read_result(tmp_path / "out")
    assert again == losses
    assert all(bool((gradients_again[name] == gradient).all()) for name, gradient in gradients.items())
    first, second = ([each for each in state_requests(bench) if each["ask"]["rows"]] for bench in (calm, killed))
    assert len({each["pid"] for each in second}) in (3, 4), "two servers, of which one or both died"
    assert len(first) < len(second) <= len(first) + 2 * 64
    assert nothing_is_left(calm, killed)


def test_two_deaths_at_the_start_end_the_run(
    pools: Pools, settings: list[str], served_teachers: ServedTeachers
) -> None:
    bench = served_teachers.bench(start={"text": "no such model class", "times": 9})
    with pytest.raises(WorkerError, match=r"no such model class; it died twice before it was ready"):
        pools[1].run("cases:run_verify", overrides=[*settings, *settings_of(bench)])


def test_an_error_in_a_hook_is_told(pools: Pools, settings: list[str], served_teachers: ServedTeachers) -> None:
    """Other wrong answers are in tests/unit/vllm."""
    bench = served_teachers.bench(answer={"error": "ValueError: off by one"})
    with pytest.raises(WorkerError, match="could not give the teacher's states: ValueError: off by one"):
        pools[1].run("cases:run_verify", overrides=[*settings, *settings_of(bench)])


DESCRIPTIONS = {
    "num_hidden_layers": 9, "hidden_size": 33, "dtype": "bfloat16", "eager": False, "runner_v1": False,
    "prefix_caching": True, "weights": "other", "quantization": "fp8", "kv_cache_dtype": "fp8_e4m3",
    "load_format": "dummy", "float32_matmul": "high",
}  # fmt: skip


def test_a_server_that_computes_in_another_way_is_refused(
    pools: Pools, settings: list[str], served_teachers: ServedTeachers
) -> None:
    bench = served_teachers.bench(describe=DESCRIPTIONS)
    with pytest.raises(WorkerError) as refused:
        pools[1].run("cases:run_verify", overrides=[*settings, *settings_of(bench)])
    for key, value in DESCRIPTIONS.items():
        assert f"{key}={value} instead of " in str(refused.value)


def test_the_canary_comes_before_the_first_step(
    pools: Pools, workbench: Workbench, served_teachers: ServedTeachers, tmp_path: Path
) -> None:
    """States of a model that is another one from layer 5 on; the right ones pass, and are seen again at every start."""
    right = workbench.root / "qwen2" / "teacher"
    settings = [*workbench.settings("qwen2-tied"), *SERVED, f"output={tmp_path / 'out'}"]
    wrong = served_teachers.bench()
    served_teachers.instead[str(right)] = served_teachers.changed_copy(
        right, lambda tensors: tensors["model.layers.4.mlp.down_proj.weight"].mul_(1.01)
    )
    try:
        with pytest.raises(
            WorkerError, match=r"canary of qwen2.*: layer 5 of 8, prompt 0, row 0 is the first wrong one"
        ):
            pools[1].run("cases:run_verify", overrides=[*settings, *settings_of(wrong)])
        assert len(state_requests(wrong)) == 6, "the prompts of the canary alone"
    finally:
        served_teachers.instead.clear()
    counts = []
    for _ in range(2):
        bench = served_teachers.bench()
        pools[1].run("cases:run_verify", overrides=[*settings, *settings_of(bench)])
        counts.append(len(state_requests(bench)))
    assert counts[0] == counts[1] > 6


@pytest.fixture
def wrong_teacher(workbench: Workbench, served_teachers: ServedTeachers) -> Iterator[Path]:
    """A copy of the teacher with another weight in the third layer."""
    teacher = workbench.root / "qwen3" / "teacher"
    yield served_teachers.changed_copy(
        teacher, lambda tensors: tensors["model.layers.2.mlp.down_proj.weight"].mul_(1.01)
    )
    served_teachers.choose = None


WRONG = r"canary of qwen3.*: layer 3 of \d, prompt 0, row 0 is the first wrong one"


@pytest.mark.slow
def test_each_server_and_each_start_of_it_is_compared(
    pools: Pools, settings: list[str], served_teachers: ServedTeachers, wrong_teacher: Path
) -> None:
    """Of two servers the second one computes something else; then one does so after its restart."""
    seen: list[str] = []

    def second(task: dict[str, Any]) -> Path | None:
        seen.append(task["server"])
        return wrong_teacher if task["server"] != seen[0] else None

    def restarted(task: dict[str, Any]) -> Path | None:
        return wrong_teacher if task["generation"] > 0 else None

    for choose, more in ((second, {}), (restarted, {"die": {"at": 9, "times": 1}})):
        served_teachers.choose = choose
        bench = served_teachers.bench(**more)
        servers = f"teacher.vllm.replicas={2 if choose is second else 1}"
        with pytest.raises(WorkerError, match=WRONG):
            pools[1].run("cases:run_verify", overrides=[*settings, servers, *settings_of(bench)])


@pytest.mark.slow
def test_a_server_that_turns_wrong_is_found_at_the_next_check(
    pools: Pools, settings: list[str], served_teachers: ServedTeachers, wrong_teacher: Path, tmp_path: Path
) -> None:
    seen: list[int] = []

    def after_some(task: dict[str, Any]) -> Path | None:
        seen.append(1)
        return wrong_teacher if len(seen) > 12 else None

    served_teachers.choose = after_some
    more = ["train.steps=3", "teacher.vllm.check_every=2", "logging.tensorboard=false"]
    with pytest.raises(WorkerError, match=WRONG):
        pools[1].run("cases:run_train", overrides=[*settings, *more, *settings_of(served_teachers.bench())])
    assert len((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()) == 2, "the steps before the check"


def test_a_head_that_is_not_the_servers_is_refused(
    pools: Pools, workbench: Workbench, settings: list[str], served_teachers: ServedTeachers
) -> None:
    """Of logits that are changed as no key of config.json says; what one says is refused before (bad_input_cases)."""
    teacher, output = workbench.root / "qwen3" / "teacher", ["loss.output.kind=full_vocab"]
    served_teachers.instead[str(teacher)] = served_teachers.changed_copy(
        teacher, lambda tensors: tensors["lm_head.weight"].mul_(0.9)
    )
    overrides = [*settings, *output, *settings_of(served_teachers.bench())]
    of_server = [*settings, "loss.output.kind=sampled_token", *settings_of(served_teachers.bench())]
    try:
        with pytest.raises(WorkerError, match=r"LM head in its files differ .* cap None, scale 1\.0 and no bias"):
            pools[1].run("cases:run_verify", overrides=overrides)
        with pytest.raises(WorkerError, match=r"canary of qwen3: the \S+ by the server's head differs from transf"):
            pools[1].run("cases:run_verify", overrides=of_server)
    finally:
        served_teachers.instead.clear()


@pytest.fixture
def bridged(workbench: Workbench, settings: list[str], tmp_path: Path) -> list[str]:
    """A run through a bridge, of which two maps read the same layer, and one the state after the final norm."""
    return [*settings, *through_a_bridge(workbench.root / "qwen3", tmp_path)]


def test_servers_project_what_a_bridge_compares(
    pools: Pools, bridged: list[str], served_teachers: ServedTeachers, tmp_path: Path
) -> None:
    """Gradients are those with the teacher in the trainer; states do not leave in their full width."""
    output, layout = f"output={tmp_path / 'out'}", ["student.parallel.tensor=2", "student.parallel.sequence=true"]
    found, bench = [], served_teachers.bench()
    for engine in (settings_of(bench), ["teacher.engine=megatron"]):
        pools[2].run("cases:run_verify", overrides=[*bridged, *layout, *engine, output])
        found.append(read_result(tmp_path / "out"))
    (losses, gradients), (expected, theirs) = found
    assert losses["rep/loss"] == pytest.approx(expected["rep/loss"], rel=1e-5)
    assert max(agreement(gradients, theirs).values()) < 1e-5
    of_run = [each["ask"] for each in state_requests(bench) if each["ask"]["bridge"]]
    assert len(of_run) > 10 and {each["rank"] for each in of_run} == {5}
    assert {tuple(each["layers"]) for each in of_run} == {(3, 3, 6, 9)}
    states = [each["ask"] for each in state_requests(bench) if not each["ask"]["bridge"]]
    assert len(states) == 6, "those of the canary"


@pytest.mark.slow
def test_answers_without_room_in_shared_memory_come_in_pieces(
    pools: Pools, settings: list[str], bridged: list[str], served_teachers: ServedTeachers, tmp_path: Path
) -> None:
    """Row by row, also those of the canary: the same bits as from whole answers."""
    output = ["loss.output.kind=sampled_token", f"output={tmp_path / 'out'}"]
    for run in (settings, bridged):
        found, counts = [], []
        for case in ("cases:run_verify", "little_room:run_verify"):
            bench = served_teachers.bench()
            pools[1].run(case, overrides=[*run, *settings_of(bench), *output])
            found.append(read_result(tmp_path / "out"))
            counts.append(len(state_requests(bench)))
        (losses, gradients), (again, gradients_again) = found
        assert again == losses and counts[1] > counts[0] + 10
        assert all(bool((gradients_again[name] == gradient).all()) for name, gradient in gradients.items())


def test_states_of_another_bridge_are_refused(
    pools: Pools, bridged: list[str], served_teachers: ServedTeachers
) -> None:
    for fault, said in (
        ({"header": {"bridge": "0" * 32}}, f"answered something else than was asked: bridge={'0' * 32} instead of"),
        (
            {"bridge": {"digest": "0" * 32}},
            "could not load the bridge: {'digest': '" + "0" * 32 + "'}; expected bridge",
        ),
    ):
        with pytest.raises(WorkerError, match=re.escape(said)):
            pools[1].run("cases:run_verify", overrides=[*bridged, *settings_of(served_teachers.bench(**fault))])


def test_two_steps_of_training(
    pools: Pools, settings: list[str], served_teachers: ServedTeachers, tmp_path: Path
) -> None:
    """Weights and metrics as with the teacher in the trainer, to rounding; the servers end with the run."""
    from golden_runs import metrics, weights

    common = ["train.steps=2", "train.lr=1e-3", "train.adam_eps=1e-2", "logging.tensorboard=false"]
    common += ["loss.output.kind=sampled_token", "loss.output.weight=0.5", "student.parallel.pipeline=2"]
    bench = served_teachers.bench()
    runs = {"megatron": ["teacher.engine=megatron"], "vllm": settings_of(bench)}
    for name, engine in runs.items():
        output = f"output={tmp_path / name}"
        pools[2].run("cases:run_train", overrides=[*settings, *common, *engine, output])
    ours, theirs = (metrics(tmp_path / name) for name in ("vllm", "megatron"))
    for one, other in zip(ours, theirs, strict=True):
        for key in ("loss/total", "rep/loss", "output/loss", "teacher/entropy", "actor/grad_norm"):
            assert one[key] == pytest.approx(other[key], rel=1e-5), key
    served, held = (weights(tmp_path / name / "hf") for name in ("vllm", "megatron"))
    assert all(bool(((served[name] - held[name]).abs() <= 1e-6).all()) for name in held)
    assert nothing_is_left(bench)


def beside_a_megatron_teacher(toy: Path) -> list[str]:
    """The toy's prompts and as many of another data source, whose teacher is in the trainer."""
    rows = [json.loads(line) for line in (toy / "prompts" / "train.jsonl").read_text().splitlines()]
    (toy / "others.jsonl").write_text("".join(json.dumps({"prompt": row["prompt"]}) + "\n" for row in rows))
    teacher = f"hf_path: {toy / 'teacher'}"
    return [
        f"data.train=[{toy / 'prompts' / 'train.jsonl'},{toy / 'others.jsonl'}]",
        f"teachers=[{{{teacher}, data_sources: [toy_addition]}}, {{{teacher}, name: others, engine: megatron}}]",
        "teacher.hf_path=null",
    ]


@pytest.mark.parametrize("alone", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["alone", "of two engines"])
def test_states_that_are_asked_for_while_responses_are_sampled(
    pools: Pools, served_teachers: ServedTeachers, tmp_path: Path, alone: bool
) -> None:
    """The same metrics and weights bit by bit, whether all, some or none are; with all of them nothing is asked twice.

    The timeline says that servers compute for a batch before all its responses are there. Also beside a teacher that
    reads its responses in the trainer.
    """
    make_tiny_pair(tmp_path / "toy", steps=10, log=lambda _: None)
    common = [
        *toy_overrides(tmp_path / "toy", 3),
        "student.parallel.tensor=2",
        "rollout.max_batch=2",
        "rollout.save=true",
    ]
    common += ["data.validation={}", "evaluation.every=0", "train.keep_best=null", "loss.output.kind=sampled_token"]
    common += ["loss.output.weight=0.5", "train.prompts_per_step=8"]
    common += [] if alone else beside_a_megatron_teacher(tmp_path / "toy")
    counts = {}
    for name, ahead_gib in (("whole", 0), ("some", 3e-5), ("all", 0.01)):
        bench, output = served_teachers.bench(), tmp_path / name
        overrides = [*common, f"teacher.vllm.ahead_gib={ahead_gib}", *settings_of(bench), f"output={output}"]
        pools[2].run("cases:run_train", overrides=overrides, config="quickstart")
        asked = [json.dumps({**each["ask"], "name": ""}) + str(each["tokens"]) for each in state_requests(bench)]
        counts[name] = len(asked)
        assert differences(tmp_path / "whole", output) == [] and nothing_is_left(bench)
        early = [each for each in read_timeline(output) if each.phase == AHEAD]
        # a line needs an answer that came before the batch was complete, which is up to the clock
        assert len(early) <= (0 if name == "whole" else 3) and (early or name != "all")
        for each in early:
            (sampling,) = [one for one in read_timeline(output) if one.phase == "generate" and one.step == each.step]
            assert sampling.began < each.began < sampling.ended, "asked before the batch was complete"
    assert counts["all"] == counts["some"] == counts["whole"], counts
    if not alone:
        lines = [json.loads(line) for line in (tmp_path / "all" / "metrics.jsonl").read_text().splitlines()]
        read = [sum(line[f"teachers/{name}/responses"] for line in lines) for name in ("toy_addition", "others")]
        assert min(read) > 0 and sum(read) == 3 * 8, read
