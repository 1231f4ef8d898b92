"""The process that rehearses one rank: `python -m nemo_oprd.tools.rehearse.rank`, its task as JSON on stdin.

It is a process of its own, because it changes torch for good. Two steps of the rank run as in `train.py`, on fake
tensors: nothing is computed, no weight is read, and everything that a GPU would hold, wait for or refuse is counted.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_oprd.tools.rehearse import shim
from nemo_oprd.tools.rehearse.places import PACKAGE

if TYPE_CHECKING:
    from nemo_oprd.tools.rehearse.recorder import Recorder


def main() -> None:
    """Reads the task, rehearses, and writes the report, or the error that ended it, as JSON to the task's file."""
    carry_out(json.load(sys.stdin))


def carry_out(task: dict[str, Any]) -> None:
    """Rehearses one rank and ends this process; see `main`."""
    started = time.monotonic()
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # Megatron compiles small functions, for which there is no GPU
    try:
        shim.load()
        found = rehearse(task)
    except ValueError as error:  # a mistake in the configuration, or no compiler
        found = {"error": " ".join(str(error).split())}
    Path(task["result"]).write_text(json.dumps(found | {"seconds": round(time.monotonic() - started, 1)}))
    sys.stdout.flush()
    os._exit(0)  # torch's destructors would look for the device


def rehearse(task: dict[str, Any]) -> dict[str, Any]:
    """Runs two steps of a rank as the module's docstring says; returns the report."""
    import torch

    torch.set_num_threads(1)
    import torch.nn.attention.bias  # it lists the functions of torch.cuda, so it comes before they are replaced
    from torch._subclasses.fake_tensor import FakeTensorMode

    from nemo_oprd.tools.rehearse import device_kernels, fake_cuda, layers
    from nemo_oprd.tools.rehearse.recorder import Recorder
    from nemo_oprd.tools.rehearse.stand_ins import stand_in

    recorder = Recorder(stand_in)
    fake_cuda.install(task["gpu_bytes"], lambda: recorder.memory.live, lambda: recorder.memory.most, recorder.wait)
    layers.choose(task.get("layers", "local"), recorder)
    fake_cuda.join(task["rank"], task["ranks"], task["gpus_per_node"])
    device_kernels.install()
    # a tensor that is made on the device is otherwise made in host memory first
    FakeTensorMode.avoid_device_init = property(lambda self: True)  # type: ignore[assignment]
    failure = None
    with FakeTensorMode(allow_non_fake_inputs=True) as fake, recorder:
        try:
            run_steps(task, recorder, fake)
        except Exception as error:  # whatever a GPU would stumble over, too: a finding
            if isinstance(error, ValueError) and "step" not in recorder.phases:
                raise  # of the configuration
            failure = failure_of(error)
    return described(recorder) | {"failure": failure}


def failure_of(error: Exception) -> dict[str, Any]:
    """Describes the error that ended a rehearsal, with the package's innermost line, outside the rehearsal if any."""
    here = str(Path(__file__).parent)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(str(PACKAGE))]
    own = [frame for frame in frames if not frame.filename.startswith(here)] or frames
    said = f"{type(error).__name__}: {error}" if str(error).strip() else _without_message(error)
    text = " ".join(said.split())[:400]
    file = str(Path(own[-1].filename).relative_to(PACKAGE.parent)) if own else "torch"
    return {"code": "failed", "file": file, "line": own[-1].lineno if own else 0, "text": text}


def _without_message(error: Exception) -> str:
    """Returns a text for an error without a message, with the line of code that raised it."""
    raised = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} without a message at {raised.filename}:{raised.lineno}: {raised.line}"


def run_steps(task: dict[str, Any], recorder: Recorder, fake: Any) -> None:
    """Builds the rank's models, checks gradients, and runs two steps with the phases around them."""
    from nemo_oprd.config.loading import load_config
    from nemo_oprd.distillation.gradient_check import check_gradients
    from nemo_oprd.run.models import build_distiller, make_plan
    from nemo_oprd.run.resolve import resolve
    from nemo_oprd.tools.rehearse import fla_functions, host_values, phases
    from nemo_oprd.tools.rehearse.device_kernels import known_shapes
    from nemo_oprd.tools.rehearse.phases import Injections
    from nemo_oprd.tools.rehearse.recorder import AFTER_STEP
    from nemo_oprd.tools.rehearse.stand_ins import longest_responses, unread_bridges
    from nemo_oprd.train import accumulate_gradients

    config = load_config(task["config_name"], task["overrides"], task["config_dir"])
    run = resolve(config, task["ranks"])
    unread_bridges(config)
    files = unread_files(run, fake)
    known_shapes()
    host_values.install(task["experts_load"], recorder.known)
    fla_functions.install()
    injections = Injections()
    injections.install(recorder)
    phases.name_parts_of_building(recorder)
    plan = make_plan(run, files)
    with recorder.phase("build"):
        engine = phases.in_process_engine(recorder, run, files)
        distiller = build_distiller(plan)
    student = distiller.student
    injections.role = student.role
    with recorder.phase("gradient check"):
        check_gradients(distiller, accumulate_gradients)
    prompt, response, parts = task["prompt_tokens"], task["response_tokens"], task.get("phases", ())
    rollouts = longest_responses(config, prompt, response)
    # the second one measures whole distributions if the run does so in some updates: it is the one that holds most
    for step in 0, max(1, config.logging.output_metrics_every - 1):
        recorder.begin_step()
        injections.is_repeated = step > 0
        if step > 0:  # the optimizer has its state
            if engine is not None and "generation" in parts:
                phases.generate(recorder, engine, run, prompt, response)
            if "check" in parts:
                phases.check_sampling(recorder, run.config, files, student, rollouts, step)
        with recorder.phase("step"):
            batch = distiller.batch(rollouts, distiller.objective_of(step))
            metrics, _ = accumulate_gradients(distiller, batch, recorder.phase)  # type: ignore[arg-type]
            with recorder.phase("optimizer"):
                student.optimizer_step(step, batch.objective, metrics)
        del batch, metrics
        recorder.settled(AFTER_STEP)
    if "weights" in parts:
        phases.send_weights(recorder, engine, run, student, task["gpus_per_node"])
    if "checkpoint" in parts:
        phases.save_and_load(recorder, student, files.student.directory)


def unread_files(run: Any, fake: Any) -> Any:
    """Returns the models' files, whose weights have shapes and no data."""
    import torch

    from nemo_oprd.data.token_ids import TokenIds
    from nemo_oprd.megatron.weights.megatron_checkpoint import checkpoint_parameters
    from nemo_oprd.run.models import RunFiles

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
    sizes = [min(run.models.student.spec.vocab_size, spec.vocab_size) for spec in run.models.teacher_specs]
    files.__dict__ |= {
        "sampled_ids": TokenIds(run.models.vocab_limit),
        "shared_ids": lambda number: TokenIds(sizes[number]),
    }
    return files


def described(recorder: Recorder) -> dict[str, Any]:
    """Returns the report as JSON; waits, calls, kernels and messages are those of the last step."""
    phases = {}
    for name, phase in recorder.phases.items():
        peak = phase.peak
        largest = sorted(peak.at_peak.items(), key=lambda item: -item[1])[:20]
        lines: Counter[str] = Counter()
        for where, size in peak.at_peak.items():
            lines[where.partition(" ")[0]] += size
        waits = [
            {"file": place.file, "line": place.line, "below": place.below, "what": what, "count": count}
            | {"innermost": place.innermost}
            for (place, what), count in sorted(phase.waits.items())
        ]
        phases[name] = {
            "bytes": peak.bytes,
            "at_peak": dict(largest),
            "lines_at_peak": dict(lines.most_common(3)),
            "host_bytes": peak.host,
            "leaves": dict(phase.leaves),
            "kernels": phase.kernels,
            "waits": waits,
            "messages": [vars(message) | {"place": str(message.place)} for message in phase.messages],
        }
    mistakes = [
        {"code": m.code, "file": m.place.file, "line": m.place.line, "text": m.text, "count": count}
        for m, count in recorder.mistakes.items()
    ]
    calls = [
        {"function": function, "tensors": tensors, "count": count}
        for (function, tensors), count in sorted(recorder.calls.items())
    ]
    return {"phases": phases, "mistakes": mistakes, "te_calls": calls}


if __name__ == "__main__":
    main()
