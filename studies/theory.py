"""Measures the claims of the paper's theory on the toy pair in float64: variances, SNR, invisible directions of the
head.

    python -m studies.theory --output DIR [--pair DIR] [--quick]

Writes DIR/theory.json and DIR/theory.svg and prints a table; docs/theory.md derives and discusses the measurements.
`--pair` is a directory that `nemo-oprd toy` wrote; without it, a pair of width 96 is made in DIR/pair (a minute or
two). The gap between the models is varied by moving the student's weights on a straight line to the teacher's.
`DIR/narrow` is a second pair, narrower than its vocabulary, as real models are. Everything is seeded; the same pair
gives the same numbers on the same machine.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from studies import theory_gradients, theory_head, theory_rollouts
from studies.theory_figure import figure

# The remaining part of the way to the teacher: 1 is the student
GAPS = (1.0, 0.7, 0.5, 0.3, 0.1, 0.03, 0.01, 1e-3)
ROLLOUT_GAPS = (1.0, 0.3, 0.1, 0.01)
# Slopes are fitted below this gap, where the leading order dominates
FIT_BELOW = 0.05
DRAWS = 100_000
# 16 < 25 tokens: a head of full column rank
NARROW_LAYERS, NARROW_WIDTH, NARROW_STEPS = 2, 16, 300


@dataclass(frozen=True)
class Settings:
    """How much is measured: `positions` prefixes at each of `gaps`, `responses` at each of `rollout_gaps`."""

    positions: int = 24
    responses: int = 256
    gaps: tuple[float, ...] = GAPS
    rollout_gaps: tuple[float, ...] = ROLLOUT_GAPS
    seed: int = 0


QUICK = Settings(positions=4, responses=16, gaps=(1.0, 0.1, 0.01, 1e-3), rollout_gaps=(1.0, 0.1))

Rollouts = list[tuple[list[int], list[int]]]


class Pair:
    """Student and teacher of a toy directory in float64, and models on the line between them."""

    def __init__(self, directory: Path) -> None:
        """Raises ValueError if the directory holds no pair of equal architectures."""
        if missing := [n for n in ("student", "teacher", "prompts/heldout.jsonl") if not (directory / n).exists()]:
            raise ValueError(f"--pair {directory} has no {missing[0]}; expected a directory written by nemo-oprd toy")
        self.student, self.teacher, self.between = (
            load(directory / role) for role in ("student", "teacher", "student")
        )
        shapes = [[tuple(p.shape) for p in model.parameters()] for model in (self.student, self.teacher)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"--pair {directory}: student and teacher have weights of different shapes; expected equal"
            )
        self.problems = read_problems(directory / "prompts" / "heldout.jsonl")
        self.direction = theory_gradients.flat_parameters(self.student) - theory_gradients.flat_parameters(self.teacher)

    def at(self, gap: float) -> Any:
        """teacher + gap * (student - teacher); every call returns the same model object with new weights."""
        models = (self.between, self.student, self.teacher)
        with torch.no_grad():
            for between, student, teacher in zip(*(model.parameters() for model in models), strict=True):
                between.copy_(teacher + gap * (student - teacher))
        return self.between

    def rollouts(self, model: Any, count: int, seed: int) -> Rollouts:
        """Responses of `model` at temperature 1 to the first `count` held-out prompts."""
        from nemo_oprd.tools.toy import pair as task
        from nemo_oprd.tools.toy.pair import sample_responses

        problems = self.problems[np.arange(count) % len(self.problems)]
        responses = sample_responses(model, problems, temperature=1.0, seed=seed)
        prompts = [task.encode(task.prompt_text(a, b)) for a, b in problems.tolist()]
        return list(zip(prompts, responses, strict=True))


def load(directory: Path) -> Any:
    """The Hugging Face model, entirely in float64, with gradients for all parameters."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64, local_files_only=True)
    # the enumeration includes the padding id, whose embedding must have a gradient too
    model.get_input_embeddings().padding_idx = None
    return in_float64(model).eval()


def in_float64(model: Any) -> Any:
    """Makes `model` compute in float64 also where Hugging Face's code always uses float32.

    These places are RMS norms and the softmax of eager attention. Gradients at small gaps are differences of nearly
    equal numbers and would be lost in rounding errors. Rotary angles remain rounded to float32, because as constants
    they add no noise to differences.
    """
    model.double().set_attn_implementation("sdpa")
    for parent in list(model.modules()):
        for name, norm in list(parent.named_children()):
            if type(norm).__name__.endswith("RMSNorm"):
                exact = torch.nn.RMSNorm(norm.weight.shape, norm.variance_epsilon, dtype=torch.float64)
                exact.weight = norm.weight
                setattr(parent, name, exact)
    return model


def read_problems(file: Path) -> np.ndarray:
    """int64 [n, 2]: the numbers to add."""
    prompts = [json.loads(line)["prompt"][0]["content"] for line in file.read_text(encoding="utf-8").splitlines()]
    return np.array([[int(x) for x in prompt.rstrip("=").split("+")] for prompt in prompts])


def choose_prefixes(rollouts: Rollouts, seed: int) -> list[list[int]]:
    """One prefix of each response: the prompt and the tokens before a position drawn uniformly."""
    draw = np.random.default_rng([seed, 1])
    return [prompt + response[: int(draw.integers(len(response)))] for prompt, response in rollouts]


def measure_gaps(pair: Pair, prefixes: list[list[int]], settings: Settings) -> dict[str, Any]:
    """The means of `measure_position` at each gap, their theoretical limit for small gaps, and the slopes."""
    targets = [theory_gradients.teacher_target(pair.teacher, prefix) for prefix in prefixes]
    rows = []
    for gap in settings.gaps:
        model = pair.at(gap)
        found = [
            theory_gradients.measure_position(theory_gradients.position(model, prefix, target), target)
            for prefix, target in zip(prefixes, targets, strict=True)
        ]
        row: dict[str, Any] = {"gap": gap} | {name: float(np.mean([one[name] for one in found])) for name in found[0]}
        for name in ("sampled", "baseline", "token"):
            row[f"{name}_snr"] = row[f"{name}_signal"] / row[f"{name}_variance"]
            ratios = [one[f"{name}_signal"] / one[f"{name}_variance"] for one in found]
            row[f"{name}_median_snr"] = float(np.median(ratios))
        row["positions"] = found
        rows.append(row)
        print(f"gap {gap:g}: delta {row['delta']:.3g}, SNR sampled {row['sampled_snr']:.3g}", flush=True)
    limits = [theory_gradients.limit_of_sampled(pair.teacher, prefix, pair.direction) for prefix in prefixes]
    limit = {name: float(np.mean([one[name] for one in limits])) for name in limits[0]}
    names = [f"{name}_{what}" for name in ("sampled", "token") for what in ("signal", "variance", "snr")]
    return {
        "rows": rows,
        "limit": limit | {"snr": limit["signal"] / limit["variance"]},
        "slopes": {name: slope(rows, name) for name in [*names, "predicting_signal", "sampling_term"]},
    }


def slope(rows: list[dict[str, Any]], name: str) -> float:
    """d log name / d log delta over the small gaps: 1 means proportional to delta, 0 independent of delta."""
    small = [row for row in rows if row["gap"] <= FIT_BELOW]
    x, y = (np.log([row[key] for row in small]) for key in ("delta", name))
    return float(np.polyfit(x, y, 1)[0])


def check_by_sampling(pair: Pair, prefixes: list[list[int]], seed: int) -> dict[str, Any]:
    """Compares exact variances with Monte Carlo at the position with the largest entropy, at the full gap."""
    student = pair.at(1.0)
    logits = [student(torch.tensor([prefix])).logits[0, -1].detach().log_softmax(-1) for prefix in prefixes]
    prefix = prefixes[int(np.argmax([float(-(x.exp() * x).sum()) for x in logits]))]
    target = theory_gradients.teacher_target(pair.teacher, prefix)
    at = theory_gradients.position(student, prefix, target)
    gradients = {"sampled": (at.log_p - target.log_q)[:, None] * at.scores, "token": at.gradients["token"]}
    found = {}
    for name, values in gradients.items():
        exact = theory_gradients.moments(at.log_p.exp(), values)
        signal, variance, error = theory_gradients.sampled_moments(at.log_p.exp(), values, DRAWS, seed)
        found[name] = {"exact": asdict(exact), "signal": signal, "variance": variance, "error_of_variance": error}
    return {"draws": DRAWS, **found}


def measure_rollouts(pair: Pair, settings: Settings) -> list[dict[str, Any]]:
    """Measures whole responses, which are sampled again at each gap from the model at that gap."""
    rows = []
    for gap in settings.rollout_gaps:
        model = pair.at(gap)
        rollouts = pair.rollouts(model, settings.responses, settings.seed + 2)
        rows.append({"gap": gap} | theory_rollouts.measure_rollouts(model, pair.teacher, rollouts))
        print(f"responses at gap {gap:g}: SNR sampled {rows[-1]['sampled']['snr']:.3g}", flush=True)
    return rows


@torch.no_grad()
def states(model: Any, rollouts: Rollouts) -> tuple[torch.Tensor, torch.Tensor]:
    """(states before, states after the final norm), [N, D] each, at all positions that predict a response token."""
    before: list[torch.Tensor] = []
    after: list[torch.Tensor] = []
    inputs: list[torch.Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    for prompt, response in rollouts:
        hidden = model.model(input_ids=torch.tensor([prompt + response]), use_cache=False).last_hidden_state
        where = slice(len(prompt) - 1, -1)
        before.append(inputs.pop()[0, where])
        after.append(hidden[0, where])
    hook.remove()
    return torch.cat(before), torch.cat(after)


def measure_head(pair: Pair, settings: Settings) -> dict[str, Any]:
    """How objectives respond to perturbations of the teacher's states, on responses of the student."""
    rollouts = pair.rollouts(pair.student, settings.positions, settings.seed)
    before, after = states(pair.teacher, rollouts)
    head = pair.teacher.lm_head.weight.detach()
    found = theory_head.after_norm(head, after, settings.seed) | {
        "positions": len(after),
        "before_norm": theory_head.before_norm(pair.teacher, before),
        "constructed": theory_head.constructed(head, after),
        "pair": theory_head.pair_at(pair.student, pair.teacher, states(pair.student, rollouts)[1], after),
    }
    largest, smallest = (found["directions"][name] for name in ("largest", "smallest"))
    found["gap_claimed"] = (largest["sigma"] / smallest["sigma"]) ** 2
    found["gap_measured"] = largest["full_vocab"] / smallest["full_vocab"]
    return found


def measure(pair: Pair, narrow: Pair, settings: Settings) -> dict[str, Any]:
    """The contents of theory.json."""
    start = time.monotonic()
    prefixes = choose_prefixes(pair.rollouts(pair.student, settings.positions, settings.seed), settings.seed)
    found = {
        "settings": asdict(settings),
        "parameters": len(pair.direction),
        "vocabulary": pair.teacher.config.vocab_size,
        "given_prefix": measure_gaps(pair, prefixes, settings),
        "monte_carlo": check_by_sampling(pair, prefixes, settings.seed + 3),
        "responses": measure_rollouts(pair, settings),
        "head": measure_head(pair, settings),
        "narrow_head": measure_head(narrow, settings),
    }
    return found | {"seconds": round(time.monotonic() - start, 1)}


def table(found: dict[str, Any]) -> str:
    """The numbers of docs/theory.md as Markdown tables."""
    lines = ["| gap | delta | sampled: signal | variance | SNR | token SNR | predicting variance / signal |"]
    lines.append("|---|---|---|---|---|---|---|")
    for row in found["given_prefix"]["rows"]:
        zero = row["predicting_variance"] / row["predicting_signal"]
        values = [row[f"sampled_{name}"] for name in ("signal", "variance", "snr")] + [row["token_snr"], zero]
        lines.append(f"| {row['gap']:g} | {row['delta']:.2e} | " + " | ".join(f"{x:.3g}" for x in values) + " |")
    lines.append("slopes: " + ", ".join(f"{k} {v:.3f}" for k, v in found["given_prefix"]["slopes"].items()))
    lines.append(f"limit of the sampled SNR: {found['given_prefix']['limit']['snr']:.4g}")
    for row in found["responses"]:
        parts = [
            f"{name} {row[name]['snr']:.3g} +- {row[name]['snr_error']:.2g}" for name in theory_rollouts.ESTIMATORS
        ]
        lines.append(f"responses, gap {row['gap']:g}: SNR " + ", ".join(parts))
    for name in ("head", "narrow_head"):
        head = found[name]
        lines.append(
            f"{name} {head['shape']}, rank {head['rank']}, {head['invisible_dimensions']} invisible dimensions"
        )
        for direction, numbers in (head["directions"] | {"constructed": head["constructed"]}).items():
            lines.append(f"  {direction}: " + ", ".join(f"{k} {v:.3g}" for k, v in numbers.items()))
        for direction, numbers in head["before_norm"].items():
            lines.append(f"  before the norm, {direction}: " + ", ".join(f"{k} {v:.3g}" for k, v in numbers.items()))
        lines.append(f"  claimed {head['gap_claimed']:.3g}, measured {head['gap_measured']:.3g}, pair {head['pair']}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the paper's theory on the toy pair")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--pair", type=Path, help="written by nemo-oprd toy; made in OUTPUT/pair if not given")
    parser.add_argument("--quick", action="store_true", help="only a few positions and gaps, as a functional test")
    options = parser.parse_args()
    from nemo_oprd.tools.toy.pair import make_pair
    from studies.toy_models import PAIR_WIDTH

    directory = options.pair or options.output / "pair"
    if options.pair is None:
        make_pair(directory, hidden=PAIR_WIDTH)
    try:
        pair = Pair(directory)
    except ValueError as error:
        parser.error(str(error))
    make_pair(
        options.output / "narrow",
        steps=NARROW_STEPS,
        student_step=NARROW_STEPS // 2,
        layers=NARROW_LAYERS,
        hidden=NARROW_WIDTH,
    )
    found = measure(pair, Pair(options.output / "narrow"), QUICK if options.quick else Settings())
    (options.output / "theory.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    (options.output / "theory.svg").write_text(figure(found), encoding="utf-8")
    print(table(found))


if __name__ == "__main__":
    main()
