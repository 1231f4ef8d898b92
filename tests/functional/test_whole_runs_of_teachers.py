"""Runs from prompt files with several teachers, with the student as its own, or with weights, start to end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from golden_runs import metrics
from pool import Pools
from safetensors.torch import load_file

from nemo_oprd.data.tokenizer import Tokenizer
from nemo_oprd.tools.toy.pair import make_tiny_pair

STEPS = 2


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny pair; its training prompts also as a second file, of another data source, each with a hint."""
    root = tmp_path_factory.mktemp("runs")
    make_tiny_pair(root, log=lambda line: None)
    lines = (root / "prompts" / "train.jsonl").read_text().splitlines()
    rows = [{"prompt": json.loads(line)["prompt"], "hint": "12", "answer": "3"} for line in lines]
    (root / "hinted.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


@pytest.fixture(scope="module")
def settings(models: Path) -> list[str]:
    return [
        f"student.hf_path={models / 'student'}",
        "student.parallel.tensor=2",
        "teacher.checkpoint=null",
        "data.validation={}",
        "train.prompts_per_step=8",
        f"train.steps={STEPS}",
        "train.save_every=1",
        "train.export_hf=false",
        "evaluation.every=0",
        "evaluation.teacher=false",
        "rollout.max_new_tokens=24",
        "rollout.save=true",
        "logging.tensorboard=false",
    ]


def test_two_teachers_of_two_files(pools: Pools, models: Path, settings: list[str], tmp_path: Path) -> None:
    """Each response is counted for its file's teacher; one that teaches what the other would gives the same update."""
    files = [models / "prompts" / "train.jsonl", models / "hinted.jsonl"]
    data = f"data.train=[{','.join(map(str, files))}]"
    teacher = f"hf_path: {models / 'teacher'}"
    several = f"teachers=[{{{teacher}, data_sources: [toy_addition]}}, {{{teacher}, name: rest}}]"
    run, alone = tmp_path / "run", tmp_path / "alone"
    pools[2].run("cases:run_train", overrides=[*settings, data, several, f"output={run}"], config="quickstart")
    (start,) = json.loads((run / "environment.json").read_text())
    weights = load_file(models / "teacher" / "model.safetensors")
    config = json.loads((models / "teacher" / "config.json").read_text())
    size = {"model_type": "qwen2", "layers": config["num_hidden_layers"], "hidden_size": config["hidden_size"]}
    size["parameters"] = sum(tensor.numel() for tensor in weights.values())
    assert start["model_sizes"] == dict.fromkeys(("student", "teachers[0]", "teachers[1]"), size)
    one = f"teacher.hf_path={models / 'teacher'}"
    pools[2].run("cases:run_train", overrides=[*settings, data, one, f"output={alone}"], config="quickstart")
    for line, same, number in zip(metrics(run), metrics(alone), range(1, STEPS + 1), strict=True):
        rows = (run / "rollouts" / f"step_{number:07d}.jsonl").read_text().splitlines()
        sources = [json.loads(row)["data_source"] for row in rows]
        counts = [line[f"teachers/{label}/responses"] for label in ("toy_addition", "rest")]
        assert counts == [sources.count("toy_addition"), sources.count("hinted")]
        assert min(counts) > 0
        assert line["loss/total"] == pytest.approx(same["loss/total"], rel=1e-5)
        assert line["actor/grad_norm"] == pytest.approx(same["actor/grad_norm"], rel=1e-4)


@pytest.mark.parametrize("weights", [pytest.param("student", marks=pytest.mark.slow), "ema"])
def test_the_student_teaches_itself(
    pools: Pools, models: Path, settings: list[str], tmp_path: Path, weights: str
) -> None:
    """It samples, reads its responses behind the told prompt, trains, goes on; the recorded rollouts verify."""
    told = [f"teacher.weights={weights}", "teacher.prompt='{hint}+{prompt}{answer}'", "loss.output.kind=full_vocab"]
    common = [*settings, *told, "loss.output.weight=1", f"data.train={models / 'hinted.jsonl'}"]
    run, parts = tmp_path / "run", tmp_path / "parts"
    constant = ["train.schedule=constant", "train.warmup_fraction=0"]
    pools[2].run("cases:run_train", overrides=[*common, *constant, f"output={run}"], config="quickstart")
    for steps in range(1, STEPS + 1):
        overrides = [*common, *constant, f"train.steps={steps}", f"output={parts}"]
        pools[2].run("cases:run_train", overrides=overrides, config="quickstart")
    assert metrics(parts) == metrics(run)
    tokenizer = Tokenizer.load(models / "student")
    file = run / "rollouts" / "step_0000001.jsonl"
    for row in map(json.loads, file.read_text().splitlines()):
        assert tokenizer.decode(row["teacher_prompt_ids"]) == f"12+{tokenizer.decode(row['prompt_ids'])}3"
        assert "teacher_response_ids" not in row
    replay = [*settings[:1], *told, "loss.output.weight=1", f"rollout.replay={file}", f"output={tmp_path / 'verify'}"]
    pools[1].run("cases:run_verify", overrides=[*replay, "loss.representation.k=24"])
    losses = json.loads((tmp_path / "verify" / "losses.json").read_text())
    assert losses["loss/total"] == pytest.approx(metrics(run)[0]["loss/total"], rel=1e-5)


def test_files_with_weights_and_held_out_problems(
    pools: Pools, models: Path, settings: list[str], tmp_path: Path
) -> None:
    """Each step has the shares, also after a restart; held-out problems are evaluated and never trained on.

    The prompts are in a chat template of the run's own, which is exported with the student.
    """
    template = tmp_path / "own.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}{% if twice %}={% endif %}")
    lines = (models / "prompts" / "train.jsonl").read_text().splitlines()
    files = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    files[0].write_text("\n".join(lines[:60]) + "\n")
    files[1].write_text("".join(json.dumps({**json.loads(line), "data_source": "two"}) + "\n" for line in lines[55:70]))
    common = [
        *settings, f"data.train={{{files[0]}: 3, {files[1]}: 1}}", "data.held_out=0.2", "data.contamination=drop",
        f"data.validation={{known: {files[1]}}}", "evaluation.every=1", "evaluation.samples=1",
        f"teacher.hf_path={models / 'teacher'}", "train.schedule=constant", "train.warmup_fraction=0",
        f"data.chat_template={template}", "data.chat_template_args={twice: true}", "train.export_hf=true",
        "rollout.max_new_tokens=12",
    ]  # fmt: skip
    run, parts, other = (tmp_path / name for name in ("run", "parts", "other"))
    # all of two.jsonl stands in the set `known`
    with pytest.raises(AssertionError, match=r"no prompt of .*two\.jsonl remains to train on .*contamination=drop"):
        pools[2].run("cases:run_train", overrides=[*common, f"output={run}"], config="quickstart")
    assert not run.exists()
    common.append("data.contamination=warn")
    pools[2].run("cases:run_train", overrides=[*common, f"output={run}"], config="quickstart")
    for steps in range(1, STEPS + 1):
        overrides = [*common, f"train.steps={steps}", f"output={parts}"]
        pools[2].run("cases:run_train", overrides=overrides, config="quickstart")
    assert metrics(parts) == metrics(run)
    found = json.loads((run / "data.json").read_text())
    assert json.loads((parts / "data.json").read_text()) == found
    sets = found["contamination"]["sets"]
    assert sets["held_out"]["same_text"] == 0 < found["held_out"]["problems"] == sets["held_out"]["problems"]
    assert sets["known"]["same_text"] == sets["known"]["problems"] - sum(p in aside(run) for p in prompts_of(files[1]))
    assert all(line["val/held_out/avg@1"] >= 0 for line in metrics(run) if "val/known/avg@1" in line)
    for number in range(1, STEPS + 1):
        rows = [json.loads(line) for line in (run / "rollouts" / f"step_{number:07d}.jsonl").read_text().splitlines()]
        assert [row["data_source"] for row in rows].count("two") == 2 and len(rows) == 8
        assert {row["prompt"] for row in rows}.isdisjoint(aside(run))
        tokenizer = Tokenizer.load(run / "hf")
        assert [tokenizer.decode(row["prompt_ids"]) for row in rows] == [f"{row['prompt']}=" for row in rows]
    assert (run / "hf" / "chat_template.jinja").read_text() == template.read_text()
    assert tokenizer.render([{"role": "user", "content": "1+1="}], True) == "1+1="
    # `evaluate` samples the same held-out problems
    model = ["student.checkpoint=null", f"student.hf_path={models / 'student'}", f"output={other}"]
    pools[2].run("cases:run_evaluate", overrides=[*common, *model], config="quickstart")
    assert aside(other, "generations") == aside(run)


def aside(run: Path, where: str = "evaluations/step_0000000/generations") -> set[str]:
    """The held-out problems that an evaluation sampled."""
    tokenizer = Tokenizer.load(Path(json.loads((run / where / "about.json").read_text())["model"]["directory"]))
    lines = (run / where / "held_out.jsonl").read_text().splitlines()
    return {tokenizer.decode(json.loads(line)["prompt_ids"]).removesuffix("=") for line in lines}


def prompts_of(file: Path) -> list[str]:
    return [json.loads(line)["prompt"][0]["content"] for line in file.read_text().splitlines()]
