"""The phases of `gpu_check` that compare with known results: golden cases in fp32 and bf16, gradient check, decoding.

Also the phase `environment`, which records the software and hardware of the comparison.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import platform
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file, save_file

from benchmarks.outcome import Outcome, Settings
from benchmarks.plain_bf16 import plain_bf16_gradients
from nemo_oprd.commands.verify.step import verify
from nemo_oprd.config.loading import load_config
from nemo_oprd.config.schema import Config
from nemo_oprd.distillation.reference.hugging_face import agreement, reference
from nemo_oprd.layout import Layout
from nemo_oprd.models import read_model_spec
from nemo_oprd.models.megatron.model import layer_backend
from nemo_oprd.models.megatron.parallel import device, init_distributed
from nemo_oprd.models.weights.hf import HFCheckpoint
from nemo_oprd.rollout.engine import Request, SamplingParams
from nemo_oprd.rollout.in_process.engine import MegatronEngine
from nemo_oprd.rollout.replay import read_rollouts
from nemo_oprd.setup.models import world_size
from nemo_oprd.setup.preflight import preflight

GOLDEN = Path(__file__).parent.parent / "tests" / "golden"
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


def environment(settings: Settings) -> Outcome:
    """Describes this machine; fails without a CUDA device, unless the check is a quick one."""
    versions = {name: importlib.metadata.version(name) for name in ("torch", "megatron-core", "transformers")}
    cuda = torch.cuda.is_available()
    gpu = torch.cuda.get_device_name() if cuda else "none (CPU)"
    numbers: dict[str, Any] = {
        "gpu": gpu,
        "gpus": torch.cuda.device_count(),
        "gpu_memory_gb": round(torch.cuda.get_device_properties(0).total_memory / 1e9, 1) if cuda else None,
        "cuda": torch.version.cuda if cuda else None,
        "driver": _driver() if cuda else None,
        "python": platform.python_version(),
        **versions,
        "layer_backend": {"bf16": layer_backend(torch.bfloat16), "fp32": layer_backend(torch.float32)},
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
    }
    lines = [
        f"{gpu}, {numbers['gpu_memory_gb']} GB, driver {numbers['driver']}, CUDA {numbers['cuda']}",
        ", ".join(f"{name} {version}" for name, version in versions.items()) + f", Python {numbers['python']}",
        "layer backend: " + ", ".join(f"{name} {layers}" for name, layers in numbers["layer_backend"].items()),
    ]
    outcome = Outcome(numbers, lines)
    outcome.require(cuda or settings.quick, "torch sees no CUDA device; use --quick to check on a CPU")
    return outcome


def _driver() -> str:
    if shutil.which("nvidia-smi") is None:
        return "not known (no nvidia-smi)"
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout.split()[0]


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
    cases = outcome.numbers.values()
    worst = {key: _worst(case[key] for case in cases) for key in ("loss_deviation", "worst_gradient_deviation")}
    return (
        f"{what}: loss within {worst['loss_deviation']:.1e}, every gradient within "
        f"{worst['worst_gradient_deviation']:.1e} of float64 (limit {FP32_LIMIT:.0e})"
    )


def _read(output: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    return json.loads((output / "losses.json").read_text()), load_file(output / "grads.safetensors")


def golden_fp32(settings: Settings) -> Outcome:
    """Compares each golden case with its float64 numbers: the worst loss (total and per layer), the worst gradient."""
    outcome = Outcome()
    for name, case in golden_cases().items():
        output = settings.scratch / "golden_fp32" / name
        verify(preflight(configure(case, output), world_size(), "verify"))
        compare_with_golden(outcome, name, output, name)
    outcome.lines.append(worst_line(outcome, f"{len(outcome.numbers)} cases"))
    return outcome


def golden_bf16(settings: Settings) -> Outcome:
    """Compares each golden case in bf16 with float64, and with plain Hugging Face models in bf16 on the same device.

    The weights are first rounded to bf16, the dtype in which real weights are stored, so that only the arithmetic is
    measured. The float64 gradients of the rounded weights are computed by the reference, which agrees with the golden
    gradients on unrounded weights.
    """
    models = settings.scratch / "golden_bf16"
    for role in ("student", "teacher"):
        shutil.copytree(GOLDEN / role, models / role)
        weights = models / role / "model.safetensors"
        save_file({n: t.bfloat16() for n, t in load_file(weights).items()}, weights, metadata={"format": "pt"})
    outcome = Outcome()
    cases = golden_cases()
    for name in [*list(cases)[:-1:4], OUTPUT_CASE] if settings.quick else cases:
        config = configure(cases[name], models / name, models=models, precision="bf16")
        rollouts = read_rollouts(str(config.rollout.replay), vocab_size=61)
        expected = reference(config, rollouts)["gradients"]
        plain = plain_bf16_gradients(config, rollouts, device())
        verify(preflight(config, world_size(), "verify"))
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
    return outcome


def _error(ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The relative error of all gradients together."""
    squared = sum(float((ours[name].double() - g.double()).square().sum()) for name, g in expected.items())
    return (squared / sum(float(g.double().square().sum()) for g in expected.values())) ** 0.5


def guard(settings: Settings) -> Outcome:
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
            verify(preflight(configure({"options": {"k": 4}}, output), world_size(), "verify"))
        except CaptureError as error:
            message = str(error)
    outcome = Outcome({"message": message}, [message.partition(";")[0].partition(": the")[0] or "nothing was raised"])
    outcome.require(
        f"layer {broken_layer} " in message, f"the error does not name detached layer {broken_layer}: {message!r}"
    )
    outcome.require(not output.exists(), "gradients were written although a layer was not trained")
    return outcome


def decoding(settings: Settings) -> Outcome:
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
    outcome = Outcome({"prompts": len(prompts), "tokens_each": GREEDY_TOKENS})
    for prompt, rollout in zip(prompts, rollouts, strict=True):
        ids = list(prompt)
        for _ in range(GREEDY_TOKENS):
            with torch.no_grad():
                ids.append(int(plain(torch.tensor([ids])).logits[0, -1].argmax()))
        outcome.require(rollout.response_ids.tolist() == ids[len(prompt) :], f"the response to {prompt} differs")
    outcome.lines.append(
        f"{len(prompts)} greedy responses of {GREEDY_TOKENS} tokens compared with float64 full forwards"
    )
    return outcome
