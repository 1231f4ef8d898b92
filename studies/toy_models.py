"""Toy models for two applications: specialists to merge, and a student that benefits from seeing the solution.

All models are trained from scratch like the toy pair (`nemo_oprd/commands/toy/pair.py`), with the same layers and
tokenizer. The second task is subtraction modulo 10000, in the same columns: `5678.1234=` asks for 5678 - 1234.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from nemo_oprd.commands.toy import task
from nemo_oprd.commands.toy.pair import IGNORED, Recipe, new_model, train_step

# teacher.prompt of a teacher that is shown the worked solution
SOLUTION_PROMPT = "{hint}={prompt}"
DONE = "models.json"
CHECK_EVERY, REQUIRED_ACCURACY = 5, 0.4  # of greedy decoding; the accuracy at T = 0.7 is somewhat lower
MODULUS = 10**task.COLUMNS
# Of the students that docs/results_toy.md and docs/theory.md measure; the quickstart's pair is wider (`make_pair`).
PAIR_WIDTH = 96


@dataclass(frozen=True)
class Example:
    """A problem, its correct response, the graded number and the data source."""

    prompt: str
    response: str
    answer: int
    source: str


def addition(a: int, b: int) -> Example:
    """The toy task."""
    return Example(task.prompt_text(a, b), task.response_text(a, b), a + b, task.DATA_SOURCE)


def subtraction(a: int, b: int) -> Example:
    """Modulo 10000, column by column with a borrow."""
    columns, borrow = [], 0
    for place in range(task.COLUMNS):
        x, y = a // 10**place % 10, b // 10**place % 10
        digit = x - y - borrow
        borrow = int(digit < 0)
        columns.append(f"{x}{y}{digit % 10}{chr(39) if borrow else '.'}")
    answer = (a - b) % MODULUS
    return Example(f"{a}.{b}=", "".join(columns) + task.boxed(answer), answer, "toy_subtraction")


def with_solution(example: Example) -> Example:
    """The same example with the solution before the problem, as in `SOLUTION_PROMPT`."""
    prompt = SOLUTION_PROMPT.replace("{hint}", example.response).replace("{prompt}", example.prompt)
    return Example(prompt, example.response, example.answer, example.source)


Draw = Callable[[np.ndarray], list[Example]]


def examples_from(*makers: Callable[[int, int], Example]) -> Draw:
    """A function: problems [n, 2] -> examples, from the makers in turn."""
    return lambda problems: [makers[i % len(makers)](a, b) for i, (a, b) in enumerate(problems.tolist())]


def addition_with_solution(a: int, b: int) -> Example:
    """An addition whose solution is shown."""
    return with_solution(addition(a, b))


def make_specialists(output: Path, *, seed: int, log: Callable[[str], None] = print) -> None:
    """Makes `student`, which partly solves both tasks, and two teachers that continue training with one task each.

    Writes `student`, `teacher_addition`, `teacher_subtraction` and `prompts/*.jsonl` unless they exist.
    """
    if (output / DONE).is_file():
        return
    training = _Training(seed, steps=600, log=log)
    training.until(
        examples_from(addition, subtraction),
        {"addition": examples_from(addition), "subtraction": examples_from(subtraction)},
    )
    training.write(output / "student")
    start = {name: value.clone() for name, value in training.model.state_dict().items()}
    found = {
        "student": training.accuracies({"addition": examples_from(addition), "subtraction": examples_from(subtraction)})
    }
    for name, maker in (("addition", addition), ("subtraction", subtraction)):
        training.model.load_state_dict(start)
        training.restart(steps=300)
        training.run(examples_from(maker), 300)
        training.write(output / f"teacher_{name}")
        found[f"teacher_{name}"] = training.accuracies(
            {"addition": examples_from(addition), "subtraction": examples_from(subtraction)}
        )
        log(f"teacher of {name}: {found[f'teacher_{name}']}")
    training.write_prompts(output, {"addition": addition, "subtraction": subtraction})
    (output / DONE).write_text(json.dumps(found, indent=1) + "\n")


def make_self_teaching_student(output: Path, *, seed: int, log: Callable[[str], None] = print) -> None:
    """Makes `student`, which solves some additions, and nearly all if it is shown the solution, unless it exists."""
    if (output / DONE).is_file():
        return
    training = _Training(seed, steps=600, log=log)
    draws = {"plain": examples_from(addition), "told": examples_from(addition_with_solution)}
    training.until(
        examples_from(addition, addition_with_solution, addition_with_solution), {"plain": examples_from(addition)}
    )
    training.write(output / "student")
    training.write_prompts(output, {"addition": addition})
    found = training.accuracies(draws)
    log(f"student: {found}")
    (output / DONE).write_text(json.dumps({"student": found}, indent=1) + "\n")


class _Training:
    """Supervised training of one model, with held-out problems."""

    def __init__(self, seed: int, steps: int, log: Callable[[str], None]) -> None:
        rng, self.rng = (np.random.default_rng([seed, stream]) for stream in range(2))
        self.problems = task.disjoint_problems(rng, {"train": 4000, "tune": 200, "heldout": 500})
        self.unseen = task.problem_key(np.concatenate([self.problems["tune"], self.problems["heldout"]]))
        self.seed, self.log = seed, log
        self.restart(steps, new=True)

    def restart(self, steps: int, *, new: bool = False) -> None:
        """Starts a new optimizer and schedule, and a new model if `new`."""
        self.recipe = Recipe(self.seed, steps, None, layers=4, hidden=PAIR_WIDTH)
        if new:
            self.model = new_model(self.recipe)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), betas=self.recipe.betas, weight_decay=self.recipe.weight_decay
        )

    def run(self, draw: Draw, steps: int, first: int = 1) -> float:
        """Runs updates `first` to `first + steps - 1` of the schedule; returns the last one's loss."""
        loss = float("nan")
        for step in range(first, first + steps):
            examples = draw(task.sample_problems(self.rng, self.recipe.batch, self.unseen))
            loss = train_step(self.model, self.optimizer, self.recipe, step, *_batch(examples))
        return loss

    def until(self, draw: Draw, tests: dict[str, Draw]) -> None:
        """Trains until the accuracy of every test is at least `REQUIRED_ACCURACY`."""
        for first in range(1, self.recipe.steps, CHECK_EVERY):
            loss = self.run(draw, CHECK_EVERY, first)
            if loss > 0.15:
                continue
            found = self.accuracies(tests)
            self.log(f"step {first + CHECK_EVERY - 1}  loss {loss:.4f}  {found}")
            if min(found.values()) >= REQUIRED_ACCURACY:
                return
        raise ValueError(
            f"seed {self.seed}: {self.recipe.steps} steps were not enough; expected {REQUIRED_ACCURACY:.0%} solved"
        )

    @torch.inference_mode()
    def accuracies(self, tests: dict[str, Draw]) -> dict[str, float]:
        """Share of tune problems solved greedily: every token of the correct response is the likeliest."""
        found = {}
        for name, draw in tests.items():
            inputs, labels = _batch(draw(self.problems["tune"]))
            predicted = self.model(input_ids=inputs, use_cache=False).logits.argmax(-1)
            found[name] = float(((predicted == labels) | (labels == IGNORED)).all(-1).float().mean())
        return found

    def write(self, directory: Path) -> None:
        """Writes a Hugging Face model directory."""
        self.model.save_pretrained(directory)
        task.write_tokenizer(directory)

    def write_prompts(self, output: Path, makers: dict[str, Callable[[int, int], Example]]) -> None:
        """Writes the prompts of every split and task to one file each."""
        (output / "prompts").mkdir(parents=True, exist_ok=True)
        for split, problems in self.problems.items():
            for name, maker in makers.items():
                file = output / "prompts" / (f"{split}_{name}.jsonl")
                rows = [maker(a, b) for a, b in problems.tolist()]
                file.write_text("".join(json.dumps(_row(row)) + "\n" for row in rows), encoding="utf-8")


def _row(example: Example) -> dict[str, object]:
    return {
        "prompt": [{"role": "user", "content": example.prompt}],
        "data_source": example.source,
        "hint": example.response,
        "reward_model": {"ground_truth": str(example.answer)},
    }


def _batch(examples: list[Example]) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels, both int64 [B, S]; labels of prompt and padding are `IGNORED`."""
    rows = [(task.encode(e.prompt), [*task.encode(e.response), task.EOS_ID]) for e in examples]
    longest = max(len(prompt) + len(response) for prompt, response in rows)
    ids = torch.full((len(rows), longest), task.PAD_ID)
    labels = torch.full((len(rows), longest), IGNORED)
    for i, (prompt, response) in enumerate(rows):
        ids[i, : len(prompt) + len(response)] = torch.tensor(prompt + response)
        labels[i, len(prompt) : len(prompt) + len(response)] = torch.tensor(response)
    return ids[:, :-1], labels[:, 1:]
