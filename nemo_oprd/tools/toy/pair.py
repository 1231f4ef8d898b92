"""Makes the toy pair in one supervised run of a small model: an intermediate step is the student, the last the teacher.

The model is a Qwen2, a Qwen3-MoE if experts are asked for, or of one of the families that Megatron-Bridge builds.

The training is plain single-process PyTorch on Hugging Face's model, so that the models to distil do not depend on the
code that distils them. The learning rate decays, because at a constant rate the accuracy jumps from step to step. The
step at which a model learns to add depends on the seed and even on rounding, hence on the machine. By default the
student is therefore not the model at a fixed step but the first that solves `STUDENT_ACCURACY` of the tune problems.
The run takes about a minute, so it cannot be resumed, and it does not use GPUs.
"""

from __future__ import annotations

import io
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from nemo_oprd.runtime.files import read_json, write_atomically

# The toy task: adding two 4-digit numbers digit by digit, as text, with a character tokenizer and prompt files.
#
#     prompt    1234+5678=
#     response  482'371'269.156.\boxed{6912}
#
# The response starts with the least significant column. A column is four characters: the digits of the two numbers, the
# last digit of their sum plus the carry, and `'` for a carry of one or `.` for none (4+8: write 2, carry 1). A model
# learns copying, adding and carrying one after the other, so a half-trained model is partly correct, and its mistakes
# come early in the response, far from the graded answer in `\boxed{}`.


ALPHABET = "0123456789+='.\\boxed{}"
PAD_ID, EOS_ID, UNK_ID = 0, 1, 2
SPECIAL_TOKENS = ("<pad>", "<eos>", "<unk>")
VOCAB_SIZE = len(SPECIAL_TOKENS) + len(ALPHABET)
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
DATA_SOURCE = "toy_addition"
COLUMNS = 4
SMALLEST, LARGEST = 10 ** (COLUMNS - 1), 10**COLUMNS - 1
PROMPT_LENGTH = 2 * COLUMNS + 2

_CHARACTER_TO_ID = {character: len(SPECIAL_TOKENS) + i for i, character in enumerate(ALPHABET)}


def prompt_text(a: int, b: int) -> str:
    """Returns the user's message: `PROMPT_LENGTH` characters for 4-digit numbers."""
    return f"{a}+{b}="


def response_text(a: int, b: int) -> str:
    """Returns the correct response, without the end-of-sequence token: 28 characters, 29 if the sum has five digits."""
    columns, carry = [], 0
    for place in range(COLUMNS):
        x, y = a // 10**place % 10, b // 10**place % 10
        carry, digit = divmod(x + y + carry, 10)
        columns.append(f"{x}{y}{digit}{chr(39) if carry else '.'}")
    return "".join(columns) + boxed(a + b)


def boxed(answer: int) -> str:
    """Returns the boxed answer that ends a response."""
    return f"\\boxed{{{answer}}}"


def encode(text: str) -> list[int]:
    """Returns a toy text's ids, as the tokenizer of `write_tokenizer` gives them, without loading a tokenizer."""
    return [_CHARACTER_TO_ID[character] for character in text]


def is_correct(ids: list[int], a: int, b: int) -> bool:
    """Returns whether sampled response ids end with the correct boxed answer, followed by the end-of-sequence id."""
    ending = [*encode(boxed(a + b)), EOS_ID]
    stop = ids.index(EOS_ID) + 1 if EOS_ID in ids else len(ids)
    return ids[:stop][-len(ending) :] == ending


def sample_problems(rng: np.random.Generator, count: int, exclude: np.ndarray) -> np.ndarray:
    """Returns int64 [count, 2]: random problems (a, b), perhaps repeated, none with a `problem_key` in `exclude`."""
    problems = rng.integers(SMALLEST, LARGEST + 1, (count, 2))
    while (taken := np.isin(problem_key(problems), exclude)).any():
        problems[taken] = rng.integers(SMALLEST, LARGEST + 1, (int(taken.sum()), 2))
    return problems


def problem_key(problems: np.ndarray) -> np.ndarray:
    """Returns a key int64 [n] per problem (a, b), equal only for a+b and b+a, by which sets are kept disjoint."""
    return problems.min(axis=1) * (LARGEST + 1) + problems.max(axis=1)


def disjoint_problems(rng: np.random.Generator, sizes: dict[str, int]) -> dict[str, np.ndarray]:
    """Returns int64 [size, 2] for each name: no problem occurs twice, in one set or in two, not even as b+a."""
    total = sum(sizes.values())
    drawn = rng.integers(SMALLEST, LARGEST + 1, (2 * total, 2))
    _, first = np.unique(problem_key(drawn), return_index=True)
    chosen = drawn[np.sort(first)][:total]
    assert len(chosen) == total, "the sets are too large for drawing twice as many problems as needed"
    ends = np.cumsum(list(sizes.values()))[:-1]
    return dict(zip(sizes, np.split(chosen, ends), strict=True))


def write_prompts(file: Path, problems: np.ndarray) -> None:
    """Writes one JSON object per problem ([n, 2]), in the format that `nemo_oprd.data.prompts` reads."""
    rows = (
        {
            "prompt": [{"role": "user", "content": prompt_text(a, b)}],
            "data_source": DATA_SOURCE,
            "reward_model": {"ground_truth": str(a + b)},
        }
        for a, b in problems.tolist()
    )
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_tokenizer(directory: Path) -> None:
    """Writes the tokenizer as a sentencepiece file and as Hugging Face files, because engines read one or the other."""
    pad, eos, unk = SPECIAL_TOKENS
    # pieces are numbered by decreasing frequency, so the training text determines the order
    text = "".join(character * (len(ALPHABET) - i) for i, character in enumerate(ALPHABET))
    numbers = {"pad_id": PAD_ID, "eos_id": EOS_ID, "unk_id": UNK_ID, "remove_extra_whitespaces": False}
    pieces = {"pad_piece": pad, "eos_piece": eos, "unk_piece": unk}
    write_sentencepiece(directory, [text], model_type="char", vocab_size=VOCAB_SIZE, **numbers, **pieces)
    _write_tokenizer_json(directory / "tokenizer.json")
    # The generic class: a release of transformers that follows this entry reads everything from tokenizer.json.
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": pad, "eos_token": eos, "unk_token": unk}
    write_tokenizer_config(directory, names)


def write_tokenizer_config(directory: Path, names: Mapping[str, str | None]) -> None:
    """Writes tokenizer_config.json; `names` are the class and the special tokens."""
    config = {**names, "clean_up_tokenization_spaces": False, "chat_template": CHAT_TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def write_sentencepiece(directory: Path, texts: list[str], **settings: Any) -> None:
    """Trains a sentencepiece model without a beginning of sequence on `texts`, and writes tokenizer.model."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=model,
        character_coverage=1.0,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        bos_id=-1,
        num_threads=1,
        minloglevel=2,
        **settings,
    )
    (directory / "tokenizer.model").write_bytes(model.getvalue())


def _write_tokenizer_json(file: Path) -> None:
    """Writes the same vocabulary as byte-pair encoding without merges, so that every token is a single character.

    transformers 5 loads the tokenizer of any Qwen2 model as `Qwen2Tokenizer`, which reads only the vocabulary and the
    merges from this file and drops characters outside the alphabet. This tokenizer also drops them: it has no unknown
    token.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models

    vocabulary = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *ALPHABET])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(file))


# Part of the settings in toy.json. Increment it when the text format or the training changes, to reject old pairs.
RECIPE_VERSION = 1
SETTINGS_FILE = "toy.json"
HEADS, KV_HEADS = 4, 2
EXPERTS_PER_TOKEN = 2
MAX_POSITIONS = 128
MAX_RESPONSE_TOKENS = 40
IGNORED = -100
TEMPERATURE = 0.7

STUDENT_ACCURACY = 0.40
# The accuracy rises by at most some 5 points per step. Above this loss it was never seen near 40 %.
CHECK_EVERY = 5
CHECK_BELOW_LOSS = 0.15
LOG_EVERY = 25
EVALUATE_EVERY = 100


@dataclass(frozen=True)
class Recipe:
    """All settings of the pair.

    `student_step` None: the student is chosen by accuracy (see the module docstring). `experts` 0: no experts. `family`
    "" is Qwen2 or Qwen3-MoE.
    """

    seed: int
    steps: int
    student_step: int | None
    layers: int
    hidden: int
    batch: int = 64
    learning_rate: float = 2e-3
    final_learning_rate: float = 1e-4
    warmup_steps: int = 50
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.01
    clip_grad: float = 1.0
    train_prompts: int = 4000
    tune_prompts: int = 200
    heldout_prompts: int = 500
    experts: int = 0
    family: str = ""

    def __post_init__(self) -> None:
        """Raises ValueError for settings that would fail late or silently."""
        if self.steps < 2 or self.layers < 1 or self.seed < 0:
            raise ValueError(
                f"steps={self.steps}, layers={self.layers}, seed={self.seed}; "
                "expected at least 2 steps, 1 layer and a seed of 0 or more"
            )
        if self.hidden < 1 or self.hidden % (2 * HEADS):
            raise ValueError(
                f"hidden={self.hidden}; rotary embeddings on {HEADS} heads need a multiple of {2 * HEADS}, such as 128"
            )
        if self.student_step is not None and not 0 < self.student_step < self.steps:
            raise ValueError(
                f"student_step={self.student_step}, steps={self.steps}; expected a student_step from 1 to steps - 1, "
                "because the teacher is the model after the last step"
            )
        if self.family not in ("", *FAMILIES) or (self.family and self.experts):
            raise ValueError(
                f"family={self.family!r}, experts={self.experts}; expected one of {', '.join(FAMILIES)} without "
                "experts, or none"
            )
        if self.experts and self.experts < EXPERTS_PER_TOKEN:
            raise ValueError(
                f"experts={self.experts}: expected 0, for a model without experts, or at least {EXPERTS_PER_TOKEN}, "
                f"because each token visits {EXPERTS_PER_TOKEN}; such as 4"
            )

    def settings(self) -> dict[str, Any]:
        """Returns the settings as in toy.json, with lists for tuples; `experts` and `family` only where given."""
        settings = {"recipe_version": RECIPE_VERSION, **asdict(self)}
        for name in ("experts", "family"):
            if not settings[name]:
                del settings[name]
        return json.loads(json.dumps(settings))

    def learning_rate_at(self, step: int) -> float:
        """Returns a cosine that ends at `final_learning_rate`, times a linear warm-up; `step` counts from 1."""
        cosine = 0.5 * (1 + math.cos(math.pi * step / self.steps))
        decayed = self.final_learning_rate + (self.learning_rate - self.final_learning_rate) * cosine
        return decayed * min(1.0, step / self.warmup_steps)


def make_pair(
    output: Path,
    *,
    seed: int = 0,
    steps: int = 400,
    student_step: int | None = None,
    layers: int = 4,
    hidden: int = 128,
    experts: int = 0,
    family: str = "",
    log: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Trains the pair; writes `student/`, `teacher/`, `prompts/{train,tune,heldout}.jsonl` and `toy.json` in `output`.

    The same arguments give the same files on the same machine with the same number of threads (`torch.set_num_threads`;
    two are enough for models of this size). An existing pair with the same settings is kept.

    Args:
        student_step: the step whose model is the student; None chooses the first that solves `STUDENT_ACCURACY` of the
            tune set.
        experts: experts of each layer of a Qwen3-MoE, of which each token visits 2; 0 for a Qwen2 without experts.
        family: one of `FAMILIES`, which provider=bridge trains; "" for Qwen2 or Qwen3-MoE.

    Returns:
        The contents of toy.json: `settings`, `student_step`, and for each model `accuracy` (fraction of the held-out
        problems solved by one sample at temperature 0.7), `greedy_accuracy` and `mean_response_tokens`.

    Raises:
        ValueError: an argument is out of range, `output` holds other files, or no student was found in `steps`.
    """
    return build_pair(
        Recipe(seed, steps, student_step, layers, hidden, experts=experts, family=family), Path(output), log
    )


def make_tiny_pair(
    output: Path, *, seed: int = 0, steps: int = 30, experts: int = 0, log: Callable[[str], None] = print
) -> dict[str, Any]:
    """Makes the files of `make_pair` in seconds, for tests: two layers of width 32, hardly trained."""
    tiny = Recipe(seed, steps, max(1, steps // 2), layers=2, hidden=32, batch=16, warmup_steps=5, experts=experts)
    return build_pair(replace(tiny, train_prompts=64, tune_prompts=16, heldout_prompts=16), Path(output), log)


def build_pair(recipe: Recipe, output: Path, log: Callable[[str], None]) -> dict[str, Any]:
    """Does the work of `make_pair` for any recipe."""
    existing = _existing_pair(output, recipe)
    if existing is not None:
        log(f"{output} already holds this pair (same settings in {SETTINGS_FILE}); nothing to do")
        return existing
    output.mkdir(parents=True, exist_ok=True)

    problem_rng, training_rng = (np.random.default_rng([recipe.seed, stream]) for stream in range(2))
    sizes = {"train": recipe.train_prompts, "tune": recipe.tune_prompts, "heldout": recipe.heldout_prompts}
    problems = disjoint_problems(problem_rng, sizes)
    unseen = problem_key(np.concatenate([problems["tune"], problems["heldout"]]))

    model = new_model(recipe)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    experts = f" with {recipe.experts} experts" if recipe.experts else ""
    sizes_in_words = f"{recipe.layers} layers of width {recipe.hidden}{experts}, {parameters:,} parameters"
    log(f"{sizes_in_words}; {torch.get_num_threads()} threads")
    student_weights, student_step = _train(model, recipe, training_rng, problems["tune"], unseen, log)

    found: dict[str, Any] = {"settings": recipe.settings(), "student_step": student_step}
    for role, weights in (("teacher", None), ("student", student_weights)):
        if weights is not None:
            model.load_state_dict(weights)
        found[role] = _evaluate(model, problems["heldout"])
        model.save_pretrained(output / role)
        write_tokenizer(output / role)
        log(f"{role}: held-out accuracy {_percent(found[role]['accuracy'])} at temperature {TEMPERATURE}")
    (output / "prompts").mkdir(exist_ok=True)
    for name, rows in problems.items():
        write_prompts(output / "prompts" / f"{name}.jsonl", rows)
    # Written last, because this file marks the directory as complete.
    write_atomically(output / SETTINGS_FILE, json.dumps(found, indent=2) + "\n")
    return found


def new_model(recipe: Recipe) -> PreTrainedModel:
    """Returns an untrained float32 model, seeded by `recipe` only; the state of torch's CPU generator is restored."""
    sizes = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": recipe.hidden,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": MAX_POSITIONS,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
    }
    # 8/3 of the hidden size, as usual for a gated feed-forward block, rounded up so that tensor parallelism fits.
    feed_forward = -(-8 * recipe.hidden // 96) * 32
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model: PreTrainedModel
        if recipe.family:
            model = AutoModelForCausalLM.from_config(FAMILIES[recipe.family](sizes, recipe, feed_forward))
        elif recipe.experts:
            model = Qwen3MoeForCausalLM(
                Qwen3MoeConfig(
                    **sizes,
                    head_dim=recipe.hidden // HEADS,
                    intermediate_size=feed_forward,
                    # the experts that a token visits have the parameters of one block without experts
                    moe_intermediate_size=feed_forward // EXPERTS_PER_TOKEN,
                    num_experts=recipe.experts,
                    num_experts_per_tok=EXPERTS_PER_TOKEN,
                    norm_topk_prob=True,
                )
            )
        else:
            model = Qwen2ForCausalLM(Qwen2Config(**sizes, intermediate_size=feed_forward))
    model.generation_config = GenerationConfig(eos_token_id=EOS_ID, pad_token_id=PAD_ID)
    return model


def _qwen3_5(sizes: dict[str, Any], recipe: Recipe, feed_forward: int) -> Any:
    """Configures gated delta nets with two value heads per key head; the 4th and the last layer have attention."""
    from transformers import Qwen3_5TextConfig  # newer than what the rest of the pair needs

    last = recipe.layers - 1
    channels = recipe.hidden // HEADS
    return Qwen3_5TextConfig(
        **{name: value for name, value in sizes.items() if name != "use_sliding_window"},
        head_dim=channels,
        intermediate_size=feed_forward,
        layer_types=["full_attention" if i in (3, last) else "linear_attention" for i in range(recipe.layers)],
        linear_num_key_heads=KV_HEADS,
        linear_num_value_heads=HEADS,
        linear_key_head_dim=channels,
        linear_value_head_dim=channels,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    )


def _gpt_oss(sizes: dict[str, Any], recipe: Recipe, feed_forward: int) -> Any:
    """Configures windows of 16 tokens in every other layer, learned softmax terms, 4 experts, YaRN from 32 tokens."""
    from transformers import GptOssConfig

    return GptOssConfig(
        **{name: value for name, value in sizes.items() if name != "use_sliding_window"},
        head_dim=recipe.hidden // HEADS,
        intermediate_size=feed_forward // EXPERTS_PER_TOKEN,
        num_local_experts=2 * EXPERTS_PER_TOKEN,
        num_experts_per_tok=EXPERTS_PER_TOKEN,
        sliding_window=16,
        rope_parameters={
            "rope_type": "yarn",  # the only one that Megatron-Bridge builds for this family
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": MAX_POSITIONS // 4,
            "truncate": False,
        },
    )


# families that Megatron-Bridge builds -> the config of a model with the toy's sizes
FAMILIES: dict[str, Callable[[dict[str, Any], Recipe, int], Any]] = {
    "qwen3_5": _qwen3_5,
    "gpt_oss": _gpt_oss,
}


def training_batch(problems: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the inputs and labels, both int64 [B, S], of problems [B, 2]; labels of prompt and padding are `IGNORED`.

    Padding comes last, where causal attention ignores it.
    """
    texts = [encode(prompt_text(a, b) + response_text(a, b)) for a, b in problems.tolist()]
    longest = max(map(len, texts)) + 1
    ids = torch.tensor([[*text, EOS_ID] + [PAD_ID] * (longest - 1 - len(text)) for text in texts])
    labels = ids[:, 1:].masked_fill(ids[:, 1:] == PAD_ID, IGNORED)
    labels[:, : PROMPT_LENGTH - 1] = IGNORED
    return ids[:, :-1], labels


@torch.inference_mode()
def sample_responses(
    model: PreTrainedModel, problems: np.ndarray, *, temperature: float, seed: int = 0
) -> list[list[int]]:
    """Returns one response's ids per problem ([n, 2]), with the end-of-sequence id if sampled within 40 tokens.

    Temperature 0 is greedy. All prompts have the same length, so a batch with a key/value cache needs no padding.
    """
    generator = torch.Generator().manual_seed(seed)
    step_ids = torch.tensor([encode(prompt_text(a, b)) for a, b in problems.tolist()])
    done = torch.zeros(len(problems), dtype=torch.bool)
    cache = None
    sampled: list[torch.Tensor] = []
    while len(sampled) < MAX_RESPONSE_TOKENS and not done.all():
        result = model(input_ids=step_ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, logits = result.past_key_values, result.logits[:, -1]
        if temperature == 0:
            step_ids = logits.argmax(dim=-1, keepdim=True)
        else:
            step_ids = torch.multinomial((logits / temperature).softmax(dim=-1), 1, generator=generator)
        sampled.append(step_ids)
        done |= step_ids[:, 0] == EOS_ID
    rows = torch.cat(sampled, dim=1).tolist()
    return [row[: row.index(EOS_ID) + 1] if EOS_ID in row else row for row in rows]


def solved(responses: list[list[int]], problems: np.ndarray) -> float:
    """Returns the fraction of problems ([n, 2]) whose response ends with the correct answer."""
    pairs = zip(responses, problems.tolist(), strict=True)
    return sum(is_correct(ids, a, b) for ids, (a, b) in pairs) / len(problems)


def _train(
    model: PreTrainedModel,
    recipe: Recipe,
    rng: np.random.Generator,
    tune: np.ndarray,
    unseen: np.ndarray,
    log: Callable[[str], None],
) -> tuple[dict[str, torch.Tensor], int]:
    """Trains `model` to the last step, where it is the teacher; returns the student's weights and step."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=recipe.betas, weight_decay=recipe.weight_decay)
    student: tuple[dict[str, torch.Tensor], int] | None = None
    start = time.monotonic()
    for step in range(1, recipe.steps + 1):
        batch = training_batch(sample_problems(rng, recipe.batch, unseen))
        loss = train_step(model, optimizer, recipe, step, *batch)
        check = recipe.student_step is None and student is None and step % CHECK_EVERY == 0 and loss < CHECK_BELOW_LOSS
        accuracy = None
        if check or step % EVALUATE_EVERY == 0:
            accuracy = solved(sample_responses(model, tune, temperature=TEMPERATURE), tune)
        if step == recipe.student_step or (check and accuracy is not None and accuracy >= STUDENT_ACCURACY):
            student = {name: value.clone() for name, value in model.state_dict().items()}, step
        if accuracy is not None or step % LOG_EVERY == 0:
            mark = "  <- student" if student is not None and student[1] == step else ""
            left = (time.monotonic() - start) / step * (recipe.steps - step)
            measured = "" if accuracy is None else f"  tune accuracy {_percent(accuracy)}"
            log(f"step {step:3d}/{recipe.steps}  loss {loss:.4f}{measured}  {left:.0f} s left{mark}")
    if student is None:
        raise ValueError(
            f"steps={recipe.steps}: no evaluated step solved {_percent(STUDENT_ACCURACY)} of the tune problems, so "
            "there is no student; use more steps, or set student_step"
        )
    return student


def train_step(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    recipe: Recipe,
    step: int,
    inputs: torch.Tensor,
    labels: torch.Tensor,
) -> float:
    """Updates on correct responses (int64 [B, S], labels `IGNORED` outside them); returns the mean loss in nats."""
    logits = model(input_ids=inputs, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_grad)
    for group in optimizer.param_groups:
        group["lr"] = recipe.learning_rate_at(step)
    optimizer.step()
    return loss.item()


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.1f} %"


def _evaluate(model: PreTrainedModel, problems: np.ndarray) -> dict[str, float]:
    responses = sample_responses(model, problems, temperature=TEMPERATURE)
    return {
        "accuracy": solved(responses, problems),
        "greedy_accuracy": solved(sample_responses(model, problems, temperature=0.0), problems),
        "mean_response_tokens": sum(map(len, responses)) / len(responses),
    }


def _existing_pair(output: Path, recipe: Recipe) -> dict[str, Any] | None:
    """Returns toy.json of the pair with these settings in `output`; None if the directory is missing or empty."""
    if output.exists() and not output.is_dir():
        raise ValueError(f"{output}: is a file, expected a directory for the pair; choose another output")
    if not output.exists() or not any(output.iterdir()):
        return None
    file = output / SETTINGS_FILE
    if not file.is_file():
        raise ValueError(
            f"{output}: not empty and without {SETTINGS_FILE}, so it holds no finished pair; expected an empty or "
            "missing directory; remove it or choose another output"
        )
    found = read_json(file, "an object with the pair's settings", f"remove {output} or choose another output")
    existing, requested = found["settings"], recipe.settings()
    if existing != requested:
        keys = [key for key in {**existing, **requested} if existing.get(key) != requested.get(key)]
        different = [f"{key} is {existing.get(key)}, expected {requested.get(key)}" for key in keys]
        raise ValueError(
            f"{output}: holds a pair with other settings ({'; '.join(different)}); remove it or choose another output"
        )
    return found
