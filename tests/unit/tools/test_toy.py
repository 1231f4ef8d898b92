"""The toy task and pair: the text, one tokenizer in two formats, sets that don't overlap, and files that reproduce."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import sentencepiece
import torch
from transformers import GenerationConfig, Qwen2ForCausalLM

from nemo_oprd.data.prompts import load_prompts
from nemo_oprd.data.tokenizer import Tokenizer
from nemo_oprd.models import read_model_spec
from nemo_oprd.tools.toy import pair
from studies import theory
from studies.toy_study import Study
from tests.support.bpe_teacher import make_bpe_teacher

SETS = {"train": 64, "tune": 16, "heldout": 16}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("toy") / "pair"
    pair.make_tiny_pair(output, log=lambda line: None)
    return output


@pytest.fixture(scope="module")
def student(tiny) -> Qwen2ForCausalLM:
    return Qwen2ForCausalLM.from_pretrained(tiny / "student")


def operands(prompt_text: str) -> tuple[int, int]:
    a, b = re.fullmatch(r"(\d{4})\+(\d{4})=", prompt_text).groups()
    return int(a), int(b)


def files(directory: Path) -> dict[str, bytes]:
    return {str(f.relative_to(directory)): f.read_bytes() for f in sorted(directory.rglob("*")) if f.is_file()}


# The text


@pytest.mark.parametrize(
    ("a", "b", "response"),
    [
        (1234, 5678, "482'371'269.156.\\boxed{6912}"),
        (9999, 1001, "910'900'900'911'\\boxed{11000}"),
        (1000, 1000, "000.000.000.112.\\boxed{2000}"),
        (9999, 9999, "998'999'999'999'\\boxed{19998}"),
    ],
)
def test_response_text(a, b, response):
    assert pair.response_text(a, b) == response
    assert len(pair.prompt_text(a, b)) == pair.PROMPT_LENGTH


def test_scratch_adds_up():
    """Reads the columns back: they hold both numbers and, with the last carry, the sum that is boxed."""
    for a, b in np.random.default_rng(0).integers(pair.SMALLEST, pair.LARGEST + 1, (300, 2)).tolist():
        columns, answer = re.fullmatch(r"((?:\d{3}[.'])+)\\boxed\{(\d+)\}", pair.response_text(a, b)).groups()
        of_a, of_b, of_sum, marks = (columns[i::4][::-1] for i in range(4))
        assert (int(of_a), int(of_b)) == (a, b)
        assert int(("1" if marks[0] == "'" else "") + of_sum) == a + b == int(answer)


def test_correct_responses():
    right = pair.encode(pair.response_text(1234, 5678))
    assert pair.is_correct([*right, pair.EOS_ID], 1234, 5678)
    assert pair.is_correct([*right, pair.EOS_ID, 5, 6], 1234, 5678), "what follows the end does not count"
    assert not pair.is_correct(right, 1234, 5678), "it must end"
    assert not pair.is_correct([*right, pair.EOS_ID], 1234, 5679)
    assert not pair.is_correct([*pair.encode("\\boxed{16912}"), pair.EOS_ID], 1234, 5678)
    assert not pair.is_correct([], 1234, 5678)


# The tokenizer


@pytest.mark.parametrize("with_config", [True, False])
def test_both_tokenizer_formats_agree(tiny, tmp_path, with_config):
    """transformers 5 chooses another class where it knows the model type; neither may change an id."""
    directory = tiny / "student"
    if not with_config:
        directory = tmp_path
        pair.write_tokenizer(directory)
    tokenizer = Tokenizer.load(directory)
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(directory / "tokenizer.model"))
    assert (pieces.pad_id(), pieces.eos_id(), pieces.unk_id(), pieces.bos_id()) == (0, 1, 2, -1)
    assert {pieces.id_to_piece(i): i for i in range(pieces.get_piece_size())} == tokenizer._vocab
    for name in SETS:
        for prompt in load_prompts(tiny / "prompts" / f"{name}.jsonl"):
            question = prompt.messages[0]["content"]
            text = question + pair.response_text(*operands(question))
            ids = pair.encode(text)
            assert tokenizer.encode(text) == pieces.encode(text) == ids
            assert tokenizer.decode([*ids, pair.EOS_ID]) == pieces.decode(ids) == text
            assert tokenizer.encode_prompt(list(prompt.messages)) == ids[: pair.PROMPT_LENGTH]


def test_every_character_has_its_own_id():
    assert sorted(pair.encode(pair.ALPHABET)) == list(range(3, pair.VOCAB_SIZE))


# The prompt sets


def test_prompt_files(tiny):
    seen = set()
    for name, size in SETS.items():
        prompts = load_prompts(tiny / "prompts" / f"{name}.jsonl")
        assert len(prompts) == size
        for prompt in prompts:
            (message,) = prompt.messages
            a, b = operands(message["content"])
            assert (message["role"], prompt.data_source, prompt.answer) == ("user", "toy_addition", str(a + b))
            assert frozenset((a, b)) not in seen
            seen.add(frozenset((a, b)))
    row = json.loads((tiny / "prompts" / "tune.jsonl").read_text().splitlines()[0])
    assert set(row) == {"prompt", "data_source", "reward_model"}


def test_sets_drop_repetitions():
    class Repeating:
        """A generator that draws every problem twice: (a, b), (b, a)."""

        def integers(self, low, high, shape):
            fresh = np.random.default_rng(0).integers(low, high, (shape[0] // 2, 2))
            return np.stack([fresh, fresh[:, ::-1]], axis=1).reshape(-1, 2)

    sets = pair.disjoint_problems(Repeating(), {"one": 3, "two": 1})
    assert {name: len(rows) for name, rows in sets.items()} == {"one": 3, "two": 1}
    assert len({frozenset(row) for rows in sets.values() for row in rows.tolist()}) == 4


def test_training_problems_avoid_the_evaluation_sets():
    free = pair.sample_problems(np.random.default_rng(5), 50, np.array([], dtype=np.int64))
    forbidden = pair.problem_key(free[::2, ::-1])
    avoided = pair.sample_problems(np.random.default_rng(5), 50, forbidden)
    assert not np.isin(pair.problem_key(avoided), forbidden).any()
    assert (avoided[1::2] == free[1::2]).all(), "only the forbidden ones are drawn again"


# The models


def test_model_directories(tiny):
    weights = {}
    for role in ("student", "teacher"):
        spec = read_model_spec(tiny / role)
        assert (spec.num_layers, spec.hidden_size, spec.num_heads, spec.num_kv_heads) == (2, 32, 4, 2)
        assert spec.vocab_size == Tokenizer.load(tiny / role).vocab_size == pair.VOCAB_SIZE
        assert (spec.max_positions, spec.tied_embeddings, spec.dtype) == (128, False, "float32")
        assert spec.ffn_size % 32 == 0
        generation = GenerationConfig.from_pretrained(tiny / role)
        assert (generation.eos_token_id, generation.pad_token_id) == (pair.EOS_ID, pair.PAD_ID)
        assert Tokenizer.load(tiny / role).eos_ids == (pair.EOS_ID,)
        weights[role] = Qwen2ForCausalLM.from_pretrained(tiny / role).state_dict()
    assert weights["student"].keys() == weights["teacher"].keys()
    assert all(not torch.equal(weights["student"][name], weights["teacher"][name]) for name in weights["student"])


def test_training_learns(tiny):
    """The teacher, trained twice as long, predicts the responses better than the student, and both beat guessing."""
    problems = pair.sample_problems(np.random.default_rng(7), 64, np.array([], dtype=np.int64))
    inputs, labels = pair.training_batch(problems)
    loss = {}
    for role in ("student", "teacher"):
        with torch.no_grad():
            logits = Qwen2ForCausalLM.from_pretrained(tiny / role)(input_ids=inputs).logits
        loss[role] = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100).item()
    assert loss["teacher"] < loss["student"] - 0.1 < math.log(pair.VOCAB_SIZE) - 0.2


def test_training_batch():
    inputs, labels = pair.training_batch(np.array([[1234, 5678], [9999, 9999]]))
    assert inputs.shape == labels.shape == (2, pair.PROMPT_LENGTH + 29)
    for row, (a, b) in enumerate([(1234, 5678), (9999, 9999)]):
        response = [*pair.encode(pair.response_text(a, b)), pair.EOS_ID]
        assert labels[row][labels[row] != -100].tolist() == response
        assert labels[row, pair.PROMPT_LENGTH - 1].item() == response[0]
        text = pair.encode(pair.prompt_text(a, b)) + response[:-1]
        assert inputs[row, : len(text)].tolist() == text


def test_cached_sampling_is_the_full_forward(student):
    problems = pair.sample_problems(np.random.default_rng(3), 6, np.array([], dtype=np.int64))
    responses = pair.sample_responses(student, problems, temperature=0.0)
    for response, (a, b) in zip(responses, problems.tolist(), strict=True):
        ids = [*pair.encode(pair.prompt_text(a, b)), *response]
        with torch.no_grad():
            predicted = student(input_ids=torch.tensor([ids])).logits[0].argmax(dim=-1).tolist()
        assert response == predicted[pair.PROMPT_LENGTH - 1 : -1]
        ends_at_eos = response.count(pair.EOS_ID) == 1 and response[-1] == pair.EOS_ID
        assert ends_at_eos or (pair.EOS_ID not in response and len(response) == pair.MAX_RESPONSE_TOKENS)


def test_sampling_ends_at_the_end_of_sequence():
    class Scripted:
        """Stands in for a model: row i says token 5 until its (i+1)-th step, then the end, then token 6 for ever."""

        steps = 0

        def __call__(self, input_ids, **_):
            self.steps += 1
            tokens = [5 if self.steps <= row else pair.EOS_ID if self.steps == row + 1 else 6 for row in range(3)]
            logits = torch.nn.functional.one_hot(torch.tensor(tokens), pair.VOCAB_SIZE)[:, None].float()
            return SimpleNamespace(past_key_values=None, logits=logits)

    model = Scripted()
    problems = np.full((3, 2), 1000)
    assert pair.sample_responses(model, problems, temperature=0.0) == [[1], [5, 1], [5, 5, 1]]
    assert model.steps == 3, "it goes on after all have ended"


def test_sampling_follows_its_seed_and_temperature(student):
    problems = pair.sample_problems(np.random.default_rng(3), 20, np.array([], dtype=np.int64))
    first = pair.sample_responses(student, problems, temperature=1.0, seed=1)
    assert first == pair.sample_responses(student, problems, temperature=1.0, seed=1)
    assert first != pair.sample_responses(student, problems, temperature=1.0, seed=2)
    cold = pair.sample_responses(student, problems, temperature=1e-6, seed=1)
    assert cold == pair.sample_responses(student, problems, temperature=0.0)


def test_solved_counts_right_answers():
    problems = np.array([[1234, 5678], [2000, 3000], [1111, 1111], [4000, 4000]])
    responses = [[*pair.encode(pair.response_text(a, b)), pair.EOS_ID] for a, b in problems.tolist()]
    assert pair.solved(responses, problems) == 1.0
    responses[2] = responses[1]
    assert pair.solved(responses, problems) == 0.75


# Making a pair


def test_same_seed_same_files(tiny, tmp_path):
    torch.manual_seed(123)
    before = torch.get_rng_state()
    pair.make_tiny_pair(tmp_path / "again", log=lambda line: None)
    assert torch.equal(before, torch.get_rng_state()), "the caller's generator moved"
    assert files(tmp_path / "again") == files(tiny)
    pair.make_tiny_pair(tmp_path / "other", seed=1, log=lambda line: None)
    ours, theirs = files(tiny), files(tmp_path / "other")
    for name in ("student/model.safetensors", "prompts/train.jsonl"):
        assert ours[name] != theirs[name]


def tiny_recipe(**changes) -> pair.Recipe:
    sizes = {"train_prompts": 8, "tune_prompts": 8, "heldout_prompts": 8, "batch": 8, "warmup_steps": 2}
    return pair.Recipe(**{"seed": 0, "steps": 12, "student_step": 6, "layers": 1, "hidden": 16, **sizes, **changes})


def test_student_step_leaves_the_teacher_alone(tmp_path):
    built = {step: tmp_path / str(step) for step in (3, 9)}
    for step, output in built.items():
        assert pair.build_pair(tiny_recipe(student_step=step), output, lambda line: None)["student_step"] == step
    three, nine = (files(output) for output in built.values())
    assert three["teacher/model.safetensors"] == nine["teacher/model.safetensors"]
    assert three["student/model.safetensors"] != nine["student/model.safetensors"]


def test_student_chosen_by_accuracy(tmp_path, monkeypatch):
    monkeypatch.setattr(pair, "CHECK_BELOW_LOSS", math.inf)
    scores = iter([0.0, 0.45, 0.9, 0.9])
    monkeypatch.setattr(pair, "solved", lambda responses, problems: next(scores))
    monkeypatch.setattr(pair, "_evaluate", lambda model, problems: {"accuracy": 0.0})
    lines: list[str] = []
    made = pair.build_pair(tiny_recipe(steps=20, student_step=None), tmp_path / "chosen", lines.append)
    assert made["student_step"] == 2 * pair.CHECK_EVERY
    assert [line for line in lines if "<- student" in line] == [
        line for line in lines if "tune accuracy 45.0 %" in line
    ]

    monkeypatch.undo()
    fixed = tiny_recipe(steps=20, student_step=2 * pair.CHECK_EVERY)
    pair.build_pair(fixed, tmp_path / "fixed", lambda line: None)
    weights = [(tmp_path / name / "student" / "model.safetensors").read_bytes() for name in ("chosen", "fixed")]
    assert weights[0] == weights[1], "looking for the student changed the training"


def test_no_student_found(tmp_path):
    with pytest.raises(ValueError, match=r"steps=12: no evaluated step solved 40\.0 % .* use more steps"):
        pair.build_pair(tiny_recipe(student_step=None), tmp_path / "pair", lambda line: None)


def test_finished_pair_is_kept(tiny):
    before, lines = files(tiny), []
    made = pair.make_tiny_pair(tiny, log=lines.append)
    assert made == json.loads((tiny / "toy.json").read_text())
    assert set(made["student"]) == {"accuracy", "greedy_accuracy", "mean_response_tokens"}
    assert len(lines) == 1
    assert "already holds this pair" in lines[0]
    assert files(tiny) == before


def test_nothing_is_overwritten(tiny, tmp_path):
    with pytest.raises(ValueError, match=r"holds a pair with other settings \(seed is 0, expected 1\)"):
        pair.make_tiny_pair(tiny, seed=1)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"not empty and without toy\.json"):
        pair.make_tiny_pair(tmp_path)
    with pytest.raises(ValueError, match=r"notes\.txt: is a file"):
        pair.make_tiny_pair(tmp_path / "notes.txt")
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def test_experts(tmp_path):
    """A Qwen3-MoE as the package reads it; the settings of a pair without experts are those of earlier versions."""
    output = tmp_path / "experts"
    pair.make_tiny_pair(output, steps=8, experts=4, log=lambda line: None)
    spec = read_model_spec(output / "teacher")
    assert spec.model_type == "qwen3_moe"
    assert spec.experts is not None
    assert (spec.experts.count, spec.experts.per_token) == (4, pair.EXPERTS_PER_TOKEN)
    student, teacher = (files(output / role)["model.safetensors"] for role in ("student", "teacher"))
    assert student != teacher
    assert "experts" not in pair.Recipe(0, 400, None, 4, 128).settings()
    for there, asked, message in ((4, 0, "experts is 4, expected None"), (None, 4, "experts is None, expected 4")):
        directory = output if there else tmp_path / "without"
        if not there:
            pair.make_tiny_pair(directory, steps=8, log=lambda line: None)
        with pytest.raises(ValueError, match=message):
            pair.make_tiny_pair(directory, steps=8, experts=asked)


@pytest.mark.parametrize(
    ("family", "kinds"),
    [
        ("qwen3_5", ["linear_attention", "linear_attention", "linear_attention", "full_attention"]),
        ("gpt_oss", ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]),
    ],
)
def test_families_of_megatron_bridge(family, kinds):
    """What provider=bridge builds, with YaRN for gpt-oss. The settings of other pairs stay as they were."""
    recipe = pair.Recipe(0, 400, None, 4, 32, family=family)
    config = pair.new_model(recipe).config
    assert config.layer_types == kinds
    assert config.rope_parameters["rope_type"] == {"qwen3_5": "default", "gpt_oss": "yarn"}[family]
    assert recipe.settings()["family"] == family
    assert "family" not in pair.Recipe(0, 400, None, 4, 32).settings()
    with pytest.raises(ValueError, match=rf"family='{family}', experts=4; expected one of qwen3_5, gpt_oss without"):
        pair.Recipe(0, 400, None, 4, 32, experts=4, family=family)
    with pytest.raises(ValueError, match="family='qwen35', experts=0; expected one of qwen3_5, gpt_oss"):
        pair.Recipe(0, 400, None, 4, 32, family="qwen35")


def test_a_pair_of_an_earlier_version_is_refused(tmp_path):
    """The default width was 96; a pair of that width is neither replaced nor taken for the present one."""
    earlier = pair.Recipe(seed=0, steps=400, student_step=None, layers=4, hidden=96)
    (tmp_path / "toy.json").write_text(json.dumps({"settings": earlier.settings()}))
    with pytest.raises(ValueError, match=r"other settings \(hidden is 96, expected 128\); remove it or"):
        pair.make_pair(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["toy.json"]


@pytest.fixture
def recipes(monkeypatch) -> list[pair.Recipe]:
    """Receives the recipe of each pair; no pair is trained."""
    asked: list[pair.Recipe] = []
    monkeypatch.setattr(pair, "build_pair", lambda recipe, output, log: asked.append(recipe))
    return asked


def test_width_of_the_quickstart(recipes, tmp_path):
    """Heads of 32 dimensions: vLLM's attention on CPUs takes these, but not the 24 of width 96."""
    pair.make_pair(tmp_path)
    config = pair.new_model(recipes[0]).config
    assert (config.hidden_size, config.num_attention_heads, config.num_key_value_heads) == (128, 4, 2)
    assert (recipes[0].layers, config.hidden_size // config.num_attention_heads) == (4, 32)


def test_published_results_keep_their_width(recipes, tmp_path, monkeypatch):
    """docs/results_toy.md and docs/theory.md measure pairs of width 96, which is not the default."""
    Study("objectives", tmp_path)._models(1)
    assert recipes == [pair.Recipe(seed=1, steps=400, student_step=None, layers=4, hidden=96)]
    monkeypatch.setattr(sys, "argv", ["theory", "--output", str(tmp_path)])
    with pytest.raises(SystemExit):  # the pair has not been trained
        theory.main()
    assert recipes[1:] == [pair.Recipe(seed=0, steps=400, student_step=None, layers=4, hidden=96)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"student_step": 0}, "student_step=0, steps=12"),
        ({"student_step": 12}, "student_step=12, steps=12"),
        ({"hidden": 20}, "hidden=20.*multiple of 8"),
        ({"steps": 1}, "steps=1.*at least 2"),
        ({"layers": 0}, "layers=0"),
        ({"seed": -1}, "seed=-1"),
        ({"experts": 1}, "experts=1: expected 0.*at least 2"),
    ],
)
def test_refused_settings(changes, message):
    with pytest.raises(ValueError, match=message):
        tiny_recipe(**changes)


def test_learning_rate():
    recipe = pair.Recipe(seed=0, steps=400, student_step=None, layers=4, hidden=96)
    rates = [recipe.learning_rate_at(step) for step in range(1, 401)]
    assert rates[0] == pytest.approx(2e-3 / 50, rel=1e-3)
    assert rates[-1] == pytest.approx(1e-4)
    assert max(rates) < 2e-3
    assert rates[49:] == sorted(rates[49:], reverse=True)
    assert rates[:45] == sorted(rates[:45])


def test_a_bpe_teacher_of_other_settings_is_not_taken(tmp_path: Path) -> None:
    small = {"layers": 1, "hidden": 16, "batch": 2, "log": lambda line: None}
    accuracy = make_bpe_teacher(tmp_path / "teacher", steps=2, **small)
    weights = (tmp_path / "teacher" / "model.safetensors").stat().st_mtime_ns
    assert make_bpe_teacher(tmp_path / "teacher", steps=2, **small) == accuracy
    assert (tmp_path / "teacher" / "model.safetensors").stat().st_mtime_ns == weights
    with pytest.raises(ValueError, match="holds a teacher with settings .*'steps': 2.* expected .*'steps': 3"):
        make_bpe_teacher(tmp_path / "teacher", steps=3, **small)
