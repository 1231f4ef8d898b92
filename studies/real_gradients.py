"""Where the gradient of a hidden-state loss goes on a real language model: shares per layer, dimension and token.

    python -m studies.real_gradients --models runs/real_study/models --responses RUN/compare/teacher.jsonl

The gradient is that of the loss with respect to the student's hidden states, before backpropagation, at the student's
first update: what is injected at every layer. Plain Hugging Face models read the recorded responses one by one. A share
is a part of the sum of absolute values. The teacher's massive activations are looked for, too: at the first token,
which no loss sees, and at the response's tokens. Written to studies/results/real_study_gradients.json.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from nemo_oprd.evaluation.agreement import load_model
from nemo_oprd.losses.representation import RowLoss, cosine, mse
from studies.real_losses import relative_mse
from studies.real_models import kept_layers, layer_map

RESULT = Path(__file__).parent / "results" / "real_study_gradients.json"
LOSSES: dict[str, RowLoss] = {"mse": mse, "cosine": cosine, "relative_mse": relative_mse}
RESPONSES = 16
THIRDS = 3


def hidden_states(model: Any, ids: list[int], prompt: int) -> torch.Tensor:
    """States of all layers at the response's tokens, [L, N, D]; the last one is after the final norm."""
    with torch.no_grad():
        states = model.model(torch.tensor([ids]), output_hidden_states=True, use_cache=False).hidden_states[1:]
    return torch.stack([state[0, prompt:] for state in states])


def injected(loss: RowLoss, student_LND: torch.Tensor, teacher_LND: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values [L, N] and gradients [L, N, D] of the mean over layers and tokens."""
    student_LND = student_LND.clone().requires_grad_()
    values_LN = torch.stack([loss(s, t, "mean") for s, t in zip(student_LND, teacher_LND, strict=True)])
    (gradient_LND,) = torch.autograd.grad(values_LN.mean(), student_LND)
    return values_LN.detach(), gradient_LND


def sizes(rows_LND: torch.Tensor) -> dict[str, list[float]]:
    """Per layer: root mean square, largest absolute value, and the share of the five largest dimensions' squares."""
    square_LD = rows_LND.double().square().mean(1)
    return {
        "rms": _list(square_LD.mean(1).sqrt()),
        "largest": _list(rows_LND.abs().amax((1, 2))),
        "five_dimensions_share": _list(square_LD.topk(5, dim=1).values.sum(1) / square_LD.sum(1)),
    }


def teacher_sizes(teacher: Any, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """`sizes` of the teacher's states at the first token of a sequence and at response tokens."""
    first, response = [], []
    for row in rows:
        ids, prompt = row["prompt_ids"] + row["response_ids"], len(row["prompt_ids"])
        states_LND = hidden_states(teacher, ids, 0)
        first.append(states_LND[:, :1])
        response.append(states_LND[:, prompt:])
    return {"first_token": sizes(torch.cat(first, 1)), "response": sizes(torch.cat(response, 1))}


class Shares:
    """Sums of absolute gradients of one loss over responses."""

    def __init__(self, layers: int, width: int) -> None:
        self.by_dimension_LD = torch.zeros(layers, width, dtype=torch.float64)
        self.by_third_LT = torch.zeros(layers, THIRDS, dtype=torch.float64)
        self.values_L = torch.zeros(layers, dtype=torch.float64)
        self.rows = 0

    def add(self, values_LN: torch.Tensor, gradient_LND: torch.Tensor) -> None:
        """Adds one response."""
        size_LND = gradient_LND.abs().double()
        self.by_dimension_LD += size_LND.sum(1)
        for third, part_LND in enumerate(size_LND.tensor_split(THIRDS, dim=1)):
            self.by_third_LT[:, third] += part_LND.sum((1, 2))
        self.values_L += values_LN.double().sum(1)
        self.rows += values_LN.shape[1]

    def result(self) -> dict[str, Any]:
        """Per layer: the mean loss, the layer's share, and the share of its five dimensions with most gradient."""
        by_layer_L = self.by_dimension_LD.sum(1)
        leading_L = self.by_dimension_LD.topk(5, dim=1).values.sum(1) / by_layer_L.clamp_min(1e-300)
        return {
            "loss": _list(self.values_L / self.rows),
            "layer_share": _list(by_layer_L / by_layer_L.sum()),
            "five_dimensions_share": _list(leading_L),
            "third_of_response_share": _list(self.by_third_LT.sum(0) / by_layer_L.sum()),
        }


def _list(values: torch.Tensor) -> list[float]:
    return [float(f"{value:.4g}") for value in values.tolist()]


def measure(models: Path, rows: list[dict[str, Any]], student: str) -> dict[str, Any]:
    """The shares of every loss for one student, each compared with the teacher's layers whose weights it has."""
    pairs = None
    if student == "pruned":
        kept = kept_layers(models)
        pairs = layer_map("kept", kept, kept[-1])
    small, large = (load_model(models / name, torch.float32) for name in (student, "teacher"))
    found: dict[str, Shares] = {}
    for row in rows:
        ids, prompt = row["prompt_ids"] + row["response_ids"], len(row["prompt_ids"])
        student_LND, teacher_LND = hidden_states(small, ids, prompt), hidden_states(large, ids, prompt)
        if pairs is not None:
            teacher_LND = teacher_LND[[layer - 1 for layer in pairs.values()]]
        for name, loss in LOSSES.items():
            shares = found.setdefault(name, Shares(len(student_LND), student_LND.shape[-1]))
            shares.add(*injected(loss, student_LND, teacher_LND))
    return {name: shares.result() for name, shares in found.items()}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", required=True, metavar="DIR", help="the study's models")
    parser.add_argument("--responses", required=True, metavar="FILE", help="responses that nemo-oprd compare recorded")
    options = parser.parse_args()
    models = Path(options.models)
    rows = [json.loads(text) for text in Path(options.responses).read_text().splitlines()[:RESPONSES]]
    found = {name: measure(models, rows, name) for name in ("pruned", "quantised")}
    teacher = teacher_sizes(load_model(models / "teacher", torch.float32), rows)
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps({**found, "teacher": teacher}) + "\n")
    print("teacher: layer, then at the first token and at the response's: rms, largest value, share of 5 dimensions")
    for layer in range(len(teacher["response"]["rms"])):
        cells = [" ".join(f"{part[key][layer]:8.3g}" for key in part) for part in teacher.values()]
        print(f"{layer + 1:>3}  " + "   ".join(cells))
    for student, losses in found.items():
        print(f"\n{student}: layer, then for each of {', '.join(losses)}: loss, share of the gradient, 5 dimensions")
        for layer in range(len(next(iter(losses.values()))["loss"])):
            keys = ("loss", "layer_share", "five_dimensions_share")
            cells = [" ".join(f"{result[key][layer]:8.3g}" for key in keys) for result in losses.values()]
            print(f"{layer + 1:>3}  " + "   ".join(cells))
        for name, result in losses.items():
            print(f"{name}: thirds of the response {result['third_of_response_share']}")


if __name__ == "__main__":
    main()
