"""The doctor finds what is planted, and nothing in what is healthy."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pools
from tiny_models import edit_config, edit_tensors
from vllm_engine_cases import lines, make_bench, requests

from nemo_oprd.tools.doctor.findings import Finding
from nemo_oprd.vllm.worker.nemo_oprd_guard import group_members
from tests.support import known_sums as doctor_models

CHECKS = [
    "settings",
    "templates",  # a prompt as it is rendered
    "student's weights",
    "stop ids",
    "templates",
    "vocabularies",
    "RoPE",
    "config values",
    "same weights",
]
CHECKS += ["teacher's weights", "layer map", "data", "prompt tokens", "suffix", "truncation"]
CHECKS += [
    "teacher is better",
    *("hidden states", "hidden states"),  # of the student, of the teacher
    "positions",
    "teacher's positions",
    "repeatability",
    "KL and overlap",
    "similar layers",
    "massive activations",
]
# no letter of the toy alphabet, so that the models read the same tokens as without it
INSTRUCTION = "sum it all up right away\n"
Result = dict[str, Finding]
Diagnose = Callable[..., Result]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The student, its teacher and the prompts of `known_sums`."""
    root = tmp_path_factory.mktemp("doctor")
    doctor_models.make_pair(root)
    return root


@pytest.fixture
def diagnose(pools: Pools, models: Path) -> Diagnose:
    """Runs the doctor; returns the findings that are not "ok" by their check."""

    def run(
        *overrides: str, config: str = "quickstart", plant: str | None = None, ranks: int = 1, **sizes: int
    ) -> Result:
        common = [f"student.hf_path={models / 'student'}", f"data.train={models / 'prompts' / 'train.jsonl'}"]
        common += [f"data.validation={{heldout: {models / 'prompts' / 'heldout.jsonl'}}}", "precision=fp32"]
        common += ["rollout.max_new_tokens=40", "evaluation.max_new_tokens=40", "train.tokens_per_microbatch=512"]
        common += ["student.parallel.tensor=1"] if config == "quickstart" else []
        # ten prompts for hundreds of steps would be a finding
        common += ["train.steps=20", "train.prompts_per_step=8"]
        target, sizes = "doctor_cases:diagnose", {"prompts": 6, **sizes}
        arguments = {"config": config, "overrides": [*common, *overrides], "plant": plant, **sizes}
        wrong, found = pools[ranks].run(target, **arguments)
        assert wrong == any(finding.verdict == "wrong" for finding in found)
        for finding in found:
            print(finding.line)
            assert "\n" not in finding.line and finding.check in [*CHECKS, "start", "engine"]
            if finding.verdict in ("warning", "wrong") and finding.check != "start":
                assert "expected" in finding.text and "; fix: " in finding.text
        json.dumps([finding.numbers for finding in found], allow_nan=False)
        stops = any(finding.check == "start" for finding in found)
        assert stops or {finding.check for finding in found} >= set(CHECKS)
        starts = [finding for finding in found if finding.check == "start"]  # `train` stops at the first
        return {finding.check: finding for finding in [*found, *starts[:1]] if finding.verdict != "ok"}

    return run


def verdicts(found: Result) -> dict[str, str]:
    return {check: finding.verdict for check, finding in found.items()}


@pytest.fixture
def variant(models: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a model that a test may spoil."""
    return lambda name: Path(shutil.copytree(models / name, tmp_path / name))


def of(path: Path) -> str:
    return f"teacher.hf_path={path}"


def test_states_that_are_not_transformers_are_named(diagnose: Diagnose, models: Path) -> None:
    """Nothing else finds it: sampling and scoring rotate alike, and so do student and teacher."""
    found = diagnose(of(models / "teacher"), plant="rotated_otherwise", problems=1, prompts=2)
    assert verdicts(found)["hidden states"] == "wrong" and found["hidden states"].code == "states-differ"
    assert "layer 1 of " in found["hidden states"].text and "rotation (base" in found["hidden states"].text
    assert "positions" not in found


PLAIN = ["quickstart", "opd_full_1p5b", "opd_top16_1p5b", "opd_top1_1p5b", "oprd_1p5b"]
PLAIN += ["oprd_opd_mu1_1p5b", "oprd_opd_mu10_1p5b", "oprd_prefix_1p5b"]
# one of each kind of loss by default
REPEATED = {"opd_full_1p5b", "opd_top16_1p5b", "oprd_1p5b", "oprd_opd_mu1_1p5b", "oprd_prefix_1p5b"}


@pytest.mark.parametrize(
    "config", [pytest.param(name, marks=[pytest.mark.slow] if name in REPEATED else []) for name in PLAIN]
)
def test_no_alarm_for_recipes_of_one_shape(diagnose: Diagnose, models: Path, config: str) -> None:
    found = diagnose(of(models / "teacher"), config=config)
    opd = (
        dict.fromkeys(("layer map", "similar layers", "massive activations"), "skipped")
        if config.startswith("opd")
        else {}
    )
    assert verdicts(found) == opd


@pytest.fixture(scope="module")
def bridge(pools: Pools, models: Path) -> Callable[..., list[str]]:
    """The settings of a teacher of another shape, with its bridge, which is fitted here."""

    def fit(config: str, teacher: str, rank: int, *further: str) -> list[str]:
        settings = [f"student.hf_path={models / 'student'}", of(models / teacher), "precision=fp32"]
        sizes = ["bridge.prompts=36", f"bridge.rank={rank}", "rollout.max_new_tokens=24", "bridge.held_out=0.2"]
        data = [f"data.train={models / 'prompts' / 'train.jsonl'}", f"output={models / f'bridge_{teacher}'}"]
        data += [f"data.validation={{heldout: {models / 'prompts' / 'heldout.jsonl'}}}"]
        pools[1].run("cases:run_fit_bridge", overrides=[*settings, *sizes, *data, *further], config=config)
        return [of(models / teacher), f"bridge.path={models / f'bridge_{teacher}'}"]

    return fit


@pytest.fixture(scope="module")
def wide(models: Path, bridge: Callable[..., list[str]]) -> list[str]:
    """A teacher of three layers of width 56."""
    doctor_models.make_wide_teacher(models)
    return bridge("bridge_qwen3_4b_to_1p7b", "wide", 8)


@pytest.mark.slow
@pytest.mark.parametrize("config", ["bridge_qwen3_4b_to_1p7b", "bridge_then_opd_qwen3_4b_to_1p7b"])
def test_no_alarm_for_a_bridge(diagnose: Diagnose, wide: list[str], config: str) -> None:
    stages = [
        f"loss.{term}.weight=[{{until:10,weight:{first}}},{{weight:{second}}}]"
        for term, first, second in (("representation", 10.0, 0.0), ("output", 0.0, 1.0))
    ]
    assert diagnose(*wide, *(stages if "then" in config else []), config=config) == {}


@pytest.mark.slow
def test_no_alarm_for_a_teacher_that_reads_text(
    diagnose: Diagnose, models: Path, bridge: Callable[..., list[str]]
) -> None:
    doctor_models.make_text_teacher(models)
    # so short a response has few tokens that end where one of the other tokenizer does
    coverage = ["alignment.min_coverage=0.3"]
    settings = bridge("bridge_phi4mini_to_qwen3_1p7b", "text", 4, *coverage)
    found = diagnose(*settings, *coverage, config="bridge_phi4mini_to_qwen3_1p7b")
    assert verdicts(found) == {"teacher's positions": "skipped", "KL and overlap": "skipped"}


def test_no_alarm_for_two_teachers(diagnose: Diagnose, models: Path) -> None:
    """Each has its own lines; only one has validation problems of its data source."""
    teacher = f"hf_path: {models / 'teacher'}"
    several = f"teachers=[{{{teacher}, data_sources: [toy_addition]}}, {{{teacher}, name: rest}}]"
    data = f"data.train=[{models / 'prompts' / 'train.jsonl'},{models / 'prompts' / 'code.jsonl'}]"
    assert diagnose(several, data, config="merge_two_teachers_1p5b") == {}


@pytest.mark.slow
def test_no_alarm_for_self_distillation(diagnose: Diagnose, models: Path) -> None:
    doctor_models.make_told_student(models)
    overrides = [f"student.hf_path={models / 'told'}", f'teacher.prompt="{doctor_models.TOLD}"']
    found = diagnose(*overrides, config="self_distill_1p5b")
    assert verdicts(found) == {"same weights": "skipped", "teacher is better": "skipped"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        ["student.parallel.tensor=2", "student.parallel.sequence=true"],
        ["student.parallel.pipeline=2", "teacher.parallel.context=2"],
        ["teacher.placement=dedicated"],
        ["teacher.parallel.tensor=2"],
    ],
)
def test_layouts(diagnose: Diagnose, models: Path, layout: list[str]) -> None:
    """The same verdicts at every layout, in particular of the hidden-state error."""
    found = diagnose(of(models / "teacher"), *layout, ranks=2)
    assert found == {}
    exchanged = diagnose(f"student.hf_path={models / 'teacher'}", of(models / "student"), *layout, ranks=2)
    assert verdicts(exchanged) == {"teacher is better": "wrong"}


@pytest.mark.slow
def test_the_command(models: Path, tmp_path: Path) -> None:
    """Exit codes, the last line, the file; and a directory for the file that does not exist, at once."""
    command = [sys.executable, "-m", "nemo_oprd", "doctor", "--config-name=quickstart", "--prompts=4"]
    command += ["student.parallel.tensor=1", f"student.hf_path={models / 'student'}"]
    command += ["train.steps=20", "train.prompts_per_step=8"]
    command += [f"data.train={models / 'prompts' / 'train.jsonl'}", "precision=fp32"]
    command += [f"data.validation.heldout={models / 'prompts' / 'heldout.jsonl'}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path)}
    found = tmp_path / "found.json"
    for teacher, status, last in (("teacher", 0, "0 wrong, 0 warnings, 24 ok"), ("student", 1, "1 wrong, 2 warnings")):
        arguments = [*command, of(models / teacher), "--json", str(found)]
        done = subprocess.run(arguments, capture_output=True, text=True, env=environment)
        assert (done.returncode, done.stdout.splitlines()[-1][: len(last)]) == (status, last), done.stderr
        written = json.loads(found.read_text())
        assert [finding["check"] for finding in written["findings"]] == CHECKS
        assert written["summary"].get("wrong", 0) == status
    nowhere = [*command, of(models / "teacher"), "--json", str(tmp_path / "nowhere" / "found.json")]
    done = subprocess.run(nowhere, capture_output=True, text=True, env=environment)
    assert done.returncode == 2 and "there is no directory" in done.stderr and not done.stdout


def test_the_engine_of_the_configuration_samples(diagnose: Diagnose, models: Path, tmp_path: Path) -> None:
    """Servers of each model in turn, which sample something else here; nothing of them is left."""
    bench, output = make_bench(tmp_path / "bench"), tmp_path / "run"
    settings = ["rollout.engine=vllm", f"rollout.vllm.python={bench}/python", f"output={output}"]
    found = diagnose(of(models / "teacher"), *settings, plant="vllm_of_any_head_size")
    assert found["positions"].verdict == "wrong" and "engine" not in found and not output.exists()
    assert len({call["pid"] for call in requests(bench)}) == 2
    assert not any(group_members(call["group"]) for call in lines(bench))


def test_an_engine_that_is_not_installed(diagnose: Diagnose, models: Path) -> None:
    found = diagnose(of(models / "teacher"), "rollout.engine=vllm", "rollout.vllm.python=nowhere")
    assert found["start"].code == "train-refuses" and "nowhere does not exist" in found["start"].text


def test_servers_of_a_teacher_that_can_not_be_started(diagnose: Diagnose, models: Path) -> None:
    settings = ["teacher.engine=vllm", "teacher.vllm.python=nowhere", "evaluation.teacher=false"]
    found = diagnose(of(models / "teacher"), *settings, problems=1, prompts=2)
    assert found["start"].code == "train-refuses" and "nowhere does not exist" in found["start"].text


def test_recorded_rollouts_are_not_read(diagnose: Diagnose, models: Path) -> None:
    found = diagnose(of(models / "teacher"), "rollout.engine=vllm", "rollout.replay=recorded.jsonl")
    assert verdicts(found) == {"engine": "skipped"}


def edit_json(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


@pytest.mark.parametrize(("ids", "verdict"), [([0, 1], "wrong"), ([1, 0], "warning")])
def test_stop_ids(diagnose: Diagnose, variant: Callable[[str], Path], ids: list[int], verdict: str) -> None:
    """The first id of a model without marks in its template is the one that ends its turn."""
    teacher = variant("teacher")
    edit_json(teacher / "generation_config.json", lambda content: content.update(eos_token_id=ids))
    found = diagnose(of(teacher))
    assert verdicts(found) == {"stop ids": verdict}
    assert "the student stops at [1 <eos>], the teacher at [" in found["stop ids"].text


@pytest.mark.parametrize("system", [True, False])
def test_templates(diagnose: Diagnose, variant: Callable[[str], Path], system: bool) -> None:
    teacher = variant("teacher")
    start = "<|system|>You are great at sums." if system else "<|user|>"
    template = start + "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    edit_json(teacher / "tokenizer_config.json", lambda content: content.update(chat_template=template))
    found = diagnose(of(teacher))
    assert verdicts(found) == {"templates": "warning"}
    said = "only the teacher's template adds a system prompt, 'You are great at sums.'"
    assert (said in found["templates"].text) == system


def test_a_teacher_without_a_template(diagnose: Diagnose, variant: Callable[[str], Path]) -> None:
    """Training does not need one."""
    teacher = variant("teacher")
    edit_json(teacher / "tokenizer_config.json", lambda content: content.pop("chat_template"))
    assert verdicts(diagnose(of(teacher))) == {"templates": "skipped"}


def test_vocabularies(diagnose: Diagnose, variant: Callable[[str], Path]) -> None:
    """Two ids with exchanged meanings: the run itself would be refused. Rows of padding only are fine."""
    teacher = variant("teacher")
    edit_config(teacher, vocab_size=32)

    def pad(tensors: dict[str, torch.Tensor]) -> None:
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[name] = torch.nn.functional.pad(tensors[name], (0, 0, 0, 7))

    edit_tensors(teacher, pad)
    # evaluations could not sample a teacher of another number of rows
    assert diagnose(of(teacher), "evaluation.teacher=false") == {}

    def exchange(content: dict[str, Any]) -> None:
        ids = content["model"]["vocab"]
        ids["1"], ids["2"] = ids["2"], ids["1"]

    edit_json(teacher / "tokenizer.json", exchange)
    found = diagnose(of(teacher))
    assert verdicts(found) == {"vocabularies": "wrong", "start": "skipped"}
    assert "2 ids mean other tokens to the teacher, the first one is 4: '1' for the student, '2'" in str(found)


def test_a_tokenizer_with_more_ids_than_the_model(diagnose: Diagnose, variant: Callable[[str], Path]) -> None:
    teacher = variant("teacher")
    edit_json(teacher / "tokenizer.json", lambda content: content["model"]["vocab"].update({"~": 25}))
    found = diagnose(of(teacher))
    assert verdicts(found) == {"vocabularies": "wrong", "start": "skipped"}
    assert "the teacher's tokenizer knows ids up to 25, its model has 25 rows" in found["vocabularies"].text


def test_another_base_of_the_rotation(diagnose: Diagnose, variant: Callable[[str], Path]) -> None:
    """Both values are named, and why `train` refuses a teacher that its evaluations are to sample."""
    teacher = variant("teacher")
    edit_json(teacher / "config.json", lambda content: content.pop("rope_parameters", None))
    edit_json(teacher / "config.json", lambda content: content.update(rope_theta=12000.0))
    found = diagnose(of(teacher))
    assert verdicts(found) == {"config values": "warning", "start": "wrong"}
    assert found["config values"].code == "rope-theta-differs" and found["start"].code == "train-refuses"
    assert "is 10000 in the student's config.json and 12000 in the teacher's" in found["config values"].text
    assert "differ in rope 10000 and 12000; expected equal architectures: correct a config" in found["start"].text


def test_same_weights(diagnose: Diagnose, models: Path, variant: Callable[[str], Path]) -> None:
    """A copy under another name; what follows from it is said, too."""
    found = diagnose(of(variant("student")))
    assert verdicts(found) == {"same weights": "wrong", "teacher is better": "warning", "KL and overlap": "warning"}
    assert "there is nothing to learn" in found["KL and overlap"].text
    # with more to read, the same weights are no mistake
    told = diagnose(of(models / "student"), "teacher.prompt='{prompt}'", "evaluation.teacher=false")
    assert verdicts(told) == {"teacher is better": "skipped", "KL and overlap": "warning"}


@pytest.mark.parametrize("place", ["file", "teacher.prompt"])
def test_suffix(diagnose: Diagnose, models: Path, tmp_path: Path, place: str) -> None:
    rows = [json.loads(line) for line in (models / "prompts" / "train.jsonl").read_text().splitlines()]
    for row in rows:
        message = row["prompt"][0]
        message["content"] = INSTRUCTION * (2 if place == "file" else 1) + message["content"]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = [of(models / "teacher"), f"data.train={tmp_path / 'train.jsonl'}"]
    if place == "file":
        found = diagnose(*overrides)
    else:
        told = f"teacher.prompt='{INSTRUCTION.strip()}\n{{prompt}}'"
        found = diagnose(*overrides, told, "evaluation.teacher=false")
        assert found.pop("teacher is better").verdict == "skipped"
    # the toy tokenizer has no letters, so a prompt with an instruction in it loses them
    assert verdicts(found) == {"prompt tokens": "warning", "suffix": "warning"}
    assert f"hold an instruction twice: '{INSTRUCTION.strip()}'" in found["suffix"].text


def test_truncation(diagnose: Diagnose, models: Path) -> None:
    """At the run's own limit it is a warning; at a shorter one nothing is known."""
    found = diagnose(of(models / "teacher"), "rollout.max_new_tokens=6")
    assert verdicts(found) == {"settings": "warning", "truncation": "warning"}
    assert found["settings"].code == "response-limit-short"
    found = diagnose(of(models / "teacher"), max_new_tokens=6)
    assert verdicts(found) == {"truncation": "skipped", "teacher is better": "skipped"}
    assert (
        "--max-new-tokens 40" in found["truncation"].text and "--max-new-tokens 40" in found["teacher is better"].text
    )


def test_a_student_that_never_stops(diagnose: Diagnose, models: Path, variant: Callable[[str], Path]) -> None:
    """Its files name another end than the one that it was taught, and that the teacher writes."""
    student = variant("student")
    edit_json(student / "generation_config.json", lambda content: content.update(eos_token_id=[2]))
    found = diagnose(f"student.hf_path={student}", of(models / "teacher"))
    found.pop("KL and overlap", None)  # no model was taught what comes after the end
    assert verdicts(found) == {"stop ids": "wrong", "truncation": "warning"}
    assert "the teacher ends its turn with 1" in found["stop ids"].text
    assert found["truncation"].text.startswith("6 of 6 responses reach the limit of 40 tokens")


def test_a_teacher_that_is_worse(diagnose: Diagnose, models: Path, variant: Callable[[str], Path]) -> None:
    exchanged = f"student.hf_path={models / 'teacher'}", of(models / "student")
    found = diagnose(*exchanged)
    assert verdicts(found) == {"teacher is better": "wrong"}
    assert "the student is better" in found["teacher is better"].text

    def disturb(tensors: dict[str, torch.Tensor]) -> None:
        generator = torch.Generator().manual_seed(0)
        for tensor in tensors.values():
            tensor += 0.01 * tensor.std() * torch.randn(tensor.shape, generator=generator)

    other = variant("student")
    edit_tensors(other, disturb)
    assert verdicts(diagnose(of(other))) == {"teacher is better": "warning"}


def test_no_validation_set(diagnose: Diagnose, models: Path) -> None:
    quiet = "data.validation={}", "evaluation.every=0", "evaluation.teacher=false"
    assert verdicts(diagnose(of(models / "teacher"), *quiet)) == {"teacher is better": "skipped"}


def test_a_shuffled_vocabulary(diagnose: Diagnose, variant: Callable[[str], Path]) -> None:
    """The tokenizer files agree, and the rows of the weights do not."""
    teacher = variant("teacher")
    order = torch.randperm(25, generator=torch.Generator().manual_seed(0))

    def shuffle(tensors: dict[str, torch.Tensor]) -> None:
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[name] = tensors[name][order].clone()

    edit_tensors(teacher, shuffle)
    assert verdicts(diagnose(of(teacher))) == {"teacher is better": "wrong", "KL and overlap": "wrong"}


@pytest.mark.parametrize(
    ("plant", "said"),
    [
        ("first_token_lost", "the first tokens differ most"),
        ("one_position_early", "the states one position before explain the tokens better"),
    ],
)
def test_positions(diagnose: Diagnose, models: Path, plant: str, said: str) -> None:
    found = diagnose(of(models / "teacher"), plant=plant)
    assert verdicts(found) == {"positions": "wrong"}
    assert said in found["positions"].text


def test_positions_of_the_teacher(diagnose: Diagnose, models: Path) -> None:
    """States of the next token; the distributions are those after it, too."""
    told = "teacher.prompt='{prompt}'", "evaluation.teacher=false"
    found = diagnose(of(models / "teacher"), *told, plant="teacher_one_token_late")
    assert verdicts(found) == {
        "teacher is better": "skipped", "teacher's positions": "wrong", "KL and overlap": "wrong"
    }  # fmt: skip
    assert verdicts(diagnose(of(models / "teacher"), *told)) == {"teacher is better": "skipped"}


@pytest.mark.parametrize(
    ("plant", "verdict"), [("noise_in_the_targets", "wrong"), ("rounding_in_the_targets", "warning")]
)
def test_repeatability(diagnose: Diagnose, models: Path, plant: str, verdict: str) -> None:
    assert verdicts(diagnose(of(models / "teacher"), plant=plant)) == {"repeatability": verdict}


def test_massive_activations(diagnose: Diagnose, variant: Callable[[str], Path]) -> None:
    """One dimension of the teacher's residual stream carries a large constant, which no layer reads."""
    teacher, dimension, size = variant("teacher"), 7, 20.0

    def plant(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.embed_tokens.weight"][:, dimension] = size
        for name, tensor in tensors.items():
            if name.endswith(("layernorm.weight", "norm.weight")):
                tensor[dimension] = 0.0

    edit_tensors(teacher, plant)
    found = diagnose(of(teacher))
    assert found["massive activations"].verdict == "warning"
    assert "1 of 48 dimensions (7) hold" in found["massive activations"].text
    assert "loss.representation.kind=normalized_mse" in found["massive activations"].text
    assert "massive activations" not in diagnose(of(teacher), "loss.representation.layers=last")
