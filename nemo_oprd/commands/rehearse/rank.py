"""The process that rehearses one rank: `python -m nemo_oprd.commands.rehearse.rank`, its task as JSON on stdin.

It is a process of its own, because it changes torch for good. Two steps of the rank run as in `train.py`, on fake
tensors: nothing is computed, no weight is read, and everything that a GPU would hold, wait for or refuse is counted.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_oprd.commands.rehearse import shim
from nemo_oprd.commands.rehearse.places import PACKAGE

if TYPE_CHECKING:
    from nemo_oprd.commands.rehearse.recorder import Message, Recorder

STEPS = 2


def main() -> None:
    """Reads the task, rehearses, and writes what was seen, or the error that ended it, as JSON to the task's file."""
    carry_out(json.load(sys.stdin))


def carry_out(task: dict[str, Any]) -> None:
    """Rehearses one rank and ends this process; see `main`."""
    started = time.monotonic()
    try:
        shim.load()
        found = rehearse(task)
    except ValueError as error:  # a mistake in the configuration, or no compiler
        found = {"error": " ".join(str(error).split())}
    Path(task["result"]).write_text(json.dumps(found | {"seconds": round(time.monotonic() - started, 1)}))
    sys.stdout.flush()
    os._exit(0)  # torch's destructors would look for the device


def rehearse(task: dict[str, Any]) -> dict[str, Any]:
    """See the module's docstring."""
    import torch

    torch.set_num_threads(1)
    import torch.nn.attention.bias  # it lists the functions of torch.cuda, so it comes before they are replaced
    from torch._subclasses.fake_tensor import FakeTensorMode

    from nemo_oprd.commands.rehearse import device_kernels, fake_cuda, fake_world
    from nemo_oprd.commands.rehearse.recorder import Recorder
    from nemo_oprd.commands.rehearse.stand_ins import stand_in

    recorder = Recorder(stand_in)
    fake_cuda.install(task["gpu_bytes"], lambda: recorder.live, lambda: recorder.peak, recorder.wait)
    fake_world.join(task["rank"], task["ranks"], task["gpus_per_node"])
    device_kernels.install()
    # a tensor that is made on the device is otherwise made in host memory first
    FakeTensorMode.avoid_device_init = property(lambda self: True)  # type: ignore[assignment]
    failure = None
    with FakeTensorMode(allow_non_fake_inputs=True) as fake, recorder:
        try:
            run_steps(task, recorder, fake)
        except ValueError:
            raise
        except Exception as error:  # whatever a GPU would stumble over, too: a finding
            failure = failure_of(error)
    return described(recorder) | {"failure": failure}


def failure_of(error: Exception) -> dict[str, Any]:
    """What ended the step, and the innermost line of this package (and not of the rehearsal) that led there."""
    here = str(Path(__file__).parent)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(str(PACKAGE))]
    own = [frame for frame in frames if not frame.filename.startswith(here)] or frames
    text = " ".join(f"{type(error).__name__}: {error}".split())[:400]
    file = str(Path(own[-1].filename).relative_to(PACKAGE.parent)) if own else "torch"
    return {"code": "failed", "file": file, "line": own[-1].lineno if own else 0, "text": text}


def run_steps(task: dict[str, Any], recorder: Recorder, fake: Any) -> None:
    """Builds the rank's models, checks gradients, and runs two steps."""
    from nemo_oprd.commands.rehearse import experts
    from nemo_oprd.commands.rehearse.device_kernels import known_shapes
    from nemo_oprd.commands.rehearse.injections import Injections
    from nemo_oprd.commands.rehearse.invented_inputs import longest_responses, unread_bridges
    from nemo_oprd.config.loading import load_config
    from nemo_oprd.distillation.gradient_check import check_gradients
    from nemo_oprd.setup.models import build_distiller, make_plan
    from nemo_oprd.setup.resolve import resolve
    from nemo_oprd.train import accumulate_gradients

    config = load_config(task["config_name"], task["overrides"], task["config_dir"])
    run = resolve(config, task["ranks"])
    unread_bridges(config)
    plan = make_plan(run, unread_files(run, fake))
    known_shapes()
    experts.install(task["experts_load"], recorder.known)
    injections = Injections()
    injections.install()
    distiller = build_distiller(plan)
    injections.role = distiller.student.role
    with recorder.phase("gradient check"):
        check_gradients(distiller, accumulate_gradients)
    rollouts = longest_responses(config, task["prompt_tokens"], task["response_tokens"])
    for step in range(STEPS):
        recorder.begin_step()
        batch = distiller.batch(rollouts, distiller.objective_of(step))
        metrics, _ = accumulate_gradients(distiller, batch, recorder.phase)  # type: ignore[arg-type]
        with recorder.phase("optimizer"):
            distiller.student.optimizer_step(step, batch.objective, metrics)


def unread_files(run: Any, fake: Any) -> Any:
    """The models' files, whose weights have shapes and no data."""
    import torch

    from nemo_oprd.models.weights.megatron_checkpoint import checkpoint_parameters
    from nemo_oprd.setup.models import RunFiles

    files = RunFiles(run.config, run.models)

    def reader(spec: Any) -> Any:
        shapes: dict[str, tuple[int, ...]] = {}
        for parameter in checkpoint_parameters(spec):
            whole = torch.empty(parameter.shape, device="meta")
            parts = parameter.mapping.form.split_to_hf(whole, spec)
            shapes |= {name: tuple(part.shape) for name, part in zip(parameter.mapping.hf, parts, strict=True)}

        def read(name: str) -> torch.Tensor:
            with fake:  # beneath the recorder: a weight in host memory that is never read
                return torch.empty(shapes[name], dtype=torch.bfloat16)

        return read

    for model in (files.student, *files.teachers):
        model.__dict__["read"] = reader(model.spec)
    files.same_tokenizer = lambda number: True  # type: ignore[method-assign,assignment]
    return files


def described(recorder: Recorder) -> dict[str, Any]:
    """What was seen, as JSON; waits, kernels and messages are those of the last step."""
    phases = {}
    for name, phase in recorder.phases.items():
        largest = sorted(phase.at_peak.items(), key=lambda item: -item[1])[:20]
        waits = [
            {"file": place.file, "line": place.line, "below": place.below, "what": what, "count": count}
            for (place, what), count in sorted(phase.waits.items())
        ]
        messages = [as_json(message) for message in phase.messages]
        phases[name] = {"bytes": phase.peak, "at_peak": dict(largest), "kernels": phase.kernels, "waits": waits}
        phases[name]["messages"] = messages
    mistakes = [
        {"code": m.code, "file": m.place.file, "line": m.place.line, "text": m.text, "count": count}
        for m, count in recorder.mistakes.items()
    ]
    return {"phases": phases, "mistakes": mistakes}


def as_json(message: Message) -> dict[str, Any]:
    """A message; the place in one string."""
    return vars(message) | {"place": str(message.place)}


if __name__ == "__main__":
    main()
