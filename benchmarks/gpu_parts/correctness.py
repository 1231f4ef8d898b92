"""The parts of `gpu_check` that compare with known results: golden cases, gradient check, decoding, training, resuming.

`training` and `save_resume` train a tiny random pair on a recorded batch with the real loop, in fp32 and bf16.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file, save_file

from benchmarks.gpu_parts.forking import run_forked
from benchmarks.gpu_parts.outcome import Outcome, Settings
from nemo_oprd.batch.layout import Layout
from nemo_oprd.config.loading import load_config
from nemo_oprd.config.schema import Config
from nemo_oprd.distillation.reference import agreement, reference
from nemo_oprd.megatron.parallel import device, init_distributed
from nemo_oprd.megatron.weights.hf import HFCheckpoint
from nemo_oprd.models import read_model_spec
from nemo_oprd.rollout.engine import Request, SamplingParams
from nemo_oprd.rollout.in_process_engine import MegatronEngine
from nemo_oprd.rollout.replay import read_rollouts
from nemo_oprd.run.models import world_size
from nemo_oprd.run.preflight import preflight
from nemo_oprd.run.step_recorder import StepRecorder
from nemo_oprd.run.verify import verify
from nemo_oprd.runtime.signals import Stopped
from nemo_oprd.train import accumulate_gradients, train
from tests.support.plain_bf16 import plain_bf16_gradients
from tests.support.random_pair import Shape, save_random_model, save_random_rollouts

GOLDEN = Path(__file__).parents[2] / "tests" / "golden"
# tests/golden/README.md: fp32 against float64
FP32_LIMIT = 1e-5
# limit of (this project's bf16 error) / (error of a plain Hugging Face bf16 run): rounding differs by less than that
BF16_LIMIT = 2.0
GREEDY_TOKENS = 24
# the options that a golden case of the representation loss may set
REPRESENTATION = {"k", "layers", "positions", "position", "final_norm", "aggregation", "kind", "dim_reduction"}
# the golden case of the output loss that runs, too: every probability counts, so rounding cannot change a choice
OUTPUT_CASE = "opd_full_vocab"
# the golden program's names of options -> ours; the others are those of loss.representation
NAMES = {"w_rep": "loss.representation.weight", "w_out": "loss.output.weight", "out": "loss.output.kind"}

# the tiny pair of `training` and `save_resume`
SHAPE = Shape(4, 64, 128, 4, 2, 256, 256)
RESPONSES = [20, 35, 50, 60, 75, 90, 100, 120]
STEPS = 50
# The batch is the same at every step. On the CPU the loss falls to 0.19 of its initial value (--quick: 0.11) in both
# precisions; without learning it would stay at 1.
FALLS_TO = 0.5
PRECISIONS = ("fp32", "bf16")
# Of the run that is interrupted: its steps, and the step after which a signal makes it save and end.
RESUME_STEPS, STOPPED_AFTER = 8, 4
# Limits of the deviation of a metric of the resumed run from the uninterrupted one's. On a CPU there is none; on a GPU
# sums may be added in another order every time, in both runs from the first step on (not yet measured). Without the
# optimizer's moments the loss deviates by 0.08 and the norm of the gradient by 1.
RESUME_LIMITS = {"cpu": {"fp32": 0.0, "bf16": 0.0}, "cuda": {"fp32": 1e-4, "bf16": 2e-2}}
# metrics that are compared
COMPARED = ("loss/total", "rep/loss", "actor/grad_norm", "lr")


def golden_cases() -> dict[str, dict[str, Any]]:
    """The golden cases of the representation loss and one of the output loss: name -> options and expected losses."""
    cases = all_golden_cases()
    return {
        name: case
        for name, case in cases.items()
        if name == OUTPUT_CASE or (case["teacher"] == "teacher" and set(case["options"]) <= REPRESENTATION)
    }


def all_golden_cases() -> dict[str, dict[str, Any]]:
    """Every golden case: name -> options and expected losses."""
    return json.loads((GOLDEN / "expected.json").read_text())


def configure(case: dict[str, Any], output: Path, *more: str, models: Path = GOLDEN, precision: str = "fp32") -> Config:
    """A golden case as the configuration of a `verify`, with `more` overrides."""
    options = [
        f"{NAMES.get(name, f'loss.representation.{name}')}={value}".replace(" ", "")
        for name, value in case["options"].items()
    ]
    sources = [f"{role}.hf_path={models / role}" for role in ("student", "teacher")]
    fixed = [f"rollout.replay={GOLDEN / 'rollouts.jsonl'}", f"output={output}", f"precision={precision}"]
    return load_config("verify", [*sources, *options, *fixed, *more])


def _worst(deviations: Iterable[float]) -> float:
    """The largest value, or NaN if there is one (`max` may skip NaN)."""
    return max(deviations, key=lambda value: (math.isnan(value), value))


def compare_with_golden(outcome: Outcome, name: str, output: Path, label: str) -> None:
    """Adds the deviations of a `verify` of case `name` in fp32 from its float64 numbers to `outcome`, as `label`."""
    case = all_golden_cases()[name]
    losses, gradients = _read(output)
    pairs = [(losses[key], case[key]) for key in ("loss/total", "rep/loss", "output/loss") if key in case]
    pairs += [(losses["rep/loss_per_layer"][layer], value) for layer, value in case["rep/loss_per_layer"].items()]
    loss = _worst(abs(ours - expected) / abs(expected) for ours, expected in pairs)
    gradient = _worst(agreement(gradients, load_file(GOLDEN / f"grads_{name}.safetensors")).values())
    outcome.numbers[label] = {"loss_deviation": loss, "worst_gradient_deviation": gradient}
    for what, deviation in (("the loss", loss), ("a gradient", gradient)):
        outcome.require(deviation <= FP32_LIMIT, f"{label}: {what} deviates by {deviation:.1e}")


def worst_line(outcome: Outcome, what: str) -> str:
    """The worst deviations that `compare_with_golden` added."""
    cases = [case for case in outcome.numbers.values() if isinstance(case, dict)]
    worst = {key: _worst(case[key] for case in cases) for key in ("loss_deviation", "worst_gradient_deviation")}
    return (
        f"{what}: loss within {worst['loss_deviation']:.1e}, every gradient within "
        f"{worst['worst_gradient_deviation']:.1e} of float64 (limit {FP32_LIMIT:.0e})"
    )


def _read(output: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    return json.loads((output / "losses.json").read_text()), load_file(output / "grads.safetensors")


def golden_fp32(settings: Settings, outcome: Outcome) -> None:
    """Compares each golden case with its float64 numbers: the worst loss (total and per layer), the worst gradient."""
    for name, case in golden_cases().items():
        output = settings.scratch / name
        verify(preflight(configure(case, output), world_size(), "verify"), accumulate_gradients)
        compare_with_golden(outcome, name, output, name)
        outcome.save()
    outcome.lines.append(worst_line(outcome, f"{len(outcome.numbers)} cases"))


def golden_bf16(settings: Settings, outcome: Outcome) -> None:
    """Compares each golden case in bf16 with float64, and with plain Hugging Face models in bf16 on the same device.

    The weights are first rounded to bf16, the dtype in which real weights are stored, so that only the arithmetic is
    measured. The float64 gradients of the rounded weights are computed by the reference, which agrees with the golden
    gradients on unrounded weights.
    """
    models = settings.scratch
    for role in ("student", "teacher"):
        shutil.copytree(GOLDEN / role, models / role)
        weights = models / role / "model.safetensors"
        save_file({n: t.bfloat16() for n, t in load_file(weights).items()}, weights, metadata={"format": "pt"})
    cases = golden_cases()
    for name in [*list(cases)[:-1:4], OUTPUT_CASE] if settings.quick else cases:
        config = configure(cases[name], models / name, models=models, precision="bf16")
        rollouts = read_rollouts(str(config.rollout.replay), vocab_size=61)
        expected = reference(config, rollouts)["gradients"]
        plain = plain_bf16_gradients(config, rollouts, device())
        verify(preflight(config, world_size(), "verify"), accumulate_gradients)
        _, ours = _read(models / name)
        errors = {"ours": _error(ours, expected), "plain": _error(plain, expected)}
        worst = {
            "ours": _worst(agreement(ours, expected).values()),
            "plain": _worst(agreement(plain, expected).values()),
        }
        ratio, worst_ratio = errors["ours"] / errors["plain"], worst["ours"] / worst["plain"]
        outcome.numbers[name] = {"error": errors, "worst": worst, "ratio": ratio, "worst_ratio": worst_ratio}
        outcome.require(
            ratio <= BF16_LIMIT, f"{name}: the error of all gradients is {ratio:.2f} times a plain bf16 run's"
        )
        problem = f"{name}: the worst gradient's error is {worst_ratio:.2f} times a plain bf16 run's"
        outcome.require(worst_ratio <= BF16_LIMIT, problem)
    found = outcome.numbers.values()
    outcome.lines.append(
        f"{len(found)} cases: gradient error at most {_worst(c['ratio'] for c in found):.2f} times (worst parameter: "
        f"{_worst(c['worst_ratio'] for c in found):.2f} times) a plain Hugging Face bf16 run's (limit {BF16_LIMIT:.0f})"
    )


def _error(ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The relative error of all gradients together."""
    squared = sum(float((ours[name].double() - g.double()).square().sum()) for name, g in expected.items())
    return (squared / sum(float(g.double().square().sum()) for g in expected.values())) ** 0.5


def guard(settings: Settings, outcome: Outcome) -> None:
    """A loss on a detached copy of a hidden state must stop the run before any output, and the error name the layer."""
    from nemo_oprd.distillation.hidden_state_loss import HiddenStateLoss
    from nemo_oprd.distillation.metrics.injection_counts import CaptureError

    broken_layer, output = 2, settings.scratch / "guard"
    supervise = HiddenStateLoss._supervise

    def detached(self: HiddenStateLoss, layer: int, hidden: torch.Tensor, *, keep_rows: bool) -> torch.Tensor:
        if layer != broken_layer:
            return supervise(self, layer, hidden, keep_rows=keep_rows)
        supervise(self, layer, hidden.detach().requires_grad_(), keep_rows=keep_rows)
        return hidden

    message = ""
    with mock.patch.object(HiddenStateLoss, "_supervise", detached):
        try:
            verify(preflight(configure({"options": {"k": 4}}, output), world_size(), "verify"), accumulate_gradients)
        except CaptureError as error:
            message = str(error)
    outcome.numbers["message"] = message
    outcome.lines.append(message.partition(";")[0].partition(": the")[0] or "nothing was raised")
    outcome.require(
        f"layer {broken_layer} " in message, f"the error does not name detached layer {broken_layer}: {message!r}"
    )
    outcome.require(not output.exists(), "gradients were written although a layer was not trained")


def decoding(settings: Settings, outcome: Outcome) -> None:
    """Compares greedy responses of the in-process engine in fp32 with plain full forwards in float64."""
    from transformers import AutoModelForCausalLM

    source = str(GOLDEN / "student")
    prompts = [[5], [9, 2, 40], [7, 7, 1, 30, 12, 3, 60], [11, 50, 4, 8, 33]]  # of different lengths
    init_distributed()
    config = configure({"options": {}}, settings.scratch / "unused")
    engine = MegatronEngine(config.rollout, read_model_spec(source), Layout(), eos_ids=(), precision=config.precision)
    engine.load(HFCheckpoint(source).__getitem__, source)
    rollouts = engine.generate(
        [Request(prompt) for prompt in prompts], SamplingParams(0.0, 1.0, GREEDY_TOKENS, (0, 1, 0))
    )
    plain = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float64, attn_implementation="eager").eval()
    outcome.numbers |= {"prompts": len(prompts), "tokens_each": GREEDY_TOKENS}
    for prompt, rollout in zip(prompts, rollouts, strict=True):
        ids = list(prompt)
        for _ in range(GREEDY_TOKENS):
            with torch.no_grad():
                ids.append(int(plain(torch.tensor([ids])).logits[0, -1].argmax()))
        outcome.require(rollout.response_ids.tolist() == ids[len(prompt) :], f"the response to {prompt} differs")
    outcome.lines.append(
        f"{len(prompts)} greedy responses of {GREEDY_TOKENS} tokens compared with float64 full forwards"
    )


def training(settings: Settings, outcome: Outcome) -> None:
    """Trains `STEPS` steps; the last step's loss must be at most `FALLS_TO` times the first step's."""
    root = settings.scratch
    _save_pair(root, quick=settings.quick)
    for precision in PRECISIONS:
        train(_training(root, precision, precision, STEPS))
        losses = [line["loss/total"] for line in _metrics(root / precision)]
        ratio = losses[-1] / losses[0]
        outcome.numbers[precision] = {"ratio": ratio, "losses": losses}
        outcome.lines.append(f"{precision}: loss {losses[0]:.4g} -> {losses[-1]:.4g} in {STEPS} steps ({ratio:.2f})")
        outcome.require(len(losses) == STEPS, f"{precision}: {len(losses)} steps were logged, expected {STEPS}")
        outcome.require(
            ratio <= FALLS_TO, f"{precision}: the loss fell to {ratio:.2f} of its initial value, limit {FALLS_TO}"
        )


def save_resume(settings: Settings, outcome: Outcome) -> None:
    """Stops a run by a signal in one process and resumes it in another; compares with an uninterrupted run."""
    found = run_forked(lambda: _save(settings))
    outcome.numbers["saved"] = found.numbers
    outcome.lines += found.lines
    outcome.problems += found.problems
    outcome.save()
    if not found.problems:
        _resume(settings, outcome)


def _save(settings: Settings) -> Outcome:
    """Trains without an interruption, and once more with a signal on the way, after which the run saves and ends."""
    root = settings.scratch
    _save_pair(root, quick=True)
    outcome = Outcome()
    record = StepRecorder.record

    def record_and_stop(recorder: StepRecorder, done: int, *arguments: Any) -> None:
        record(recorder, done, *arguments)
        if done == STOPPED_AFTER:
            os.kill(os.getpid(), signal.SIGTERM)

    for precision in PRECISIONS:
        train(_training(root, f"{precision}_whole", precision, RESUME_STEPS))
        message = ""
        with mock.patch.object(StepRecorder, "record", record_and_stop):
            try:
                train(_training(root, f"{precision}_stopped", precision, RESUME_STEPS))
            except Stopped as stop:
                message = str(stop)
        files = [file for file in (root / f"{precision}_stopped" / "checkpoints").rglob("*") if file.is_file()]
        outcome.numbers[precision] = {"message": message, "checkpoint_bytes": sum(f.stat().st_size for f in files)}
        outcome.lines.append(f"{precision}: {message or 'the run did not stop'}")
        outcome.require(f"after step {STOPPED_AFTER} " in message, f"{precision}: the run did not stop: {message!r}")
    return outcome


def _resume(settings: Settings, outcome: Outcome) -> None:
    """Resumes what `_save` interrupted; every later step must have the uninterrupted run's metrics."""
    root = settings.scratch
    for precision in PRECISIONS:
        before = len(_metrics(root / f"{precision}_stopped"))
        train(_training(root, f"{precision}_stopped", precision, RESUME_STEPS))
        whole, resumed = (_metrics(root / f"{precision}_{name}") for name in ("whole", "stopped"))
        outcome.require(
            before == STOPPED_AFTER and len(resumed) == len(whole) == RESUME_STEPS,
            f"{precision}: {before} steps were logged before and {len(resumed)} after the resume, "
            f"expected {STOPPED_AFTER} and {RESUME_STEPS}",
        )
        later = list(zip(resumed, whole, strict=True))[STOPPED_AFTER:]
        worst = {key: max(abs(a[key] - b[key]) / (abs(b[key]) or 1.0) for a, b in later) for key in COMPARED}
        limit = RESUME_LIMITS[device().type][precision]
        outcome.numbers[precision] = {"deviations": worst, "limit": limit}
        outcome.lines.append(
            f"{precision}: steps {STOPPED_AFTER + 1} to {RESUME_STEPS} after a resume, metrics within "
            f"{max(worst.values()):.1e} of an uninterrupted run (limit {limit:.0e})"
        )
        for key, deviation in worst.items():
            outcome.require(deviation <= limit, f"{precision}: {key} deviates by {deviation:.1e} after the resume")


def _save_pair(root: Path, *, quick: bool) -> None:
    for seed, role in enumerate(("student", "teacher")):
        save_random_model(root / role, SHAPE, seed=seed, std=0.1, dtype=torch.float32)
    save_random_rollouts(root / "rollouts.jsonl", SHAPE, prompt=8, responses=RESPONSES[: 3 if quick else None])


def _training(root: Path, output: str, precision: str, steps: int) -> Config:
    return load_config(
        "verify",
        [
            *(f"{role}.hf_path={root / role}" for role in ("student", "teacher")),
            f"rollout.replay={root / 'rollouts.jsonl'}",
            f"output={root / output}",
            f"precision={precision}",
            f"train.steps={steps}",
            "train.lr=3e-3",
            "train.schedule=cosine",
            "train.warmup_fraction=0.1",
            "train.tokens_per_microbatch=256",  # several microbatches per step
            "train.export_hf=false",
            "logging.tensorboard=false",
        ],
    )


def _metrics(output: Path) -> list[dict[str, float]]:
    """The lines of a run's metrics.jsonl that belong to a step."""
    lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "loss/total" in line]
