"""What the pool's workers run: a `verify` of a configuration, given as overrides."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nemo_oprd.config.loading import load_config
from nemo_oprd.data.token_ids import TokenIds


def run_verify(overrides: list[str]) -> None:
    """The command `nemo-oprd verify`, in this process."""
    from nemo_oprd.run.models import world_size
    from nemo_oprd.run.preflight import preflight
    from nemo_oprd.run.verify import verify
    from nemo_oprd.train import accumulate_gradients

    verify(preflight(load_config("verify", overrides), world_size(), "verify"), accumulate_gradients)


def run_train(overrides: list[str], config: str = "verify") -> None:
    """The command `nemo-oprd train`, in this process."""
    from nemo_oprd.train import train

    train(load_config(config, overrides))


def weights_of_train(overrides: list[str]) -> list[int]:
    """The optimizer steps behind each of the weights that a training run gives to its engine."""
    from unittest import mock

    from nemo_oprd.rollout.replay import ReplayEngine

    steps: list[int] = []
    with mock.patch.object(ReplayEngine, "update_weights", lambda _, weights, step: steps.append(step)):
        run_train(overrides)
    return steps


def read_for_digests(overrides: list[str]) -> list[str]:
    """Trains; the files of checkpoints that this rank has read for their digests, by their paths in there."""
    from unittest import mock

    from nemo_oprd.run import checkpoint_directory

    names: list[str] = []

    def reading(file: Path) -> str:
        names.append(str(file).split("iter_", 1)[1].split("/", 1)[1])
        return sha256_of(file)

    sha256_of = checkpoint_directory.sha256_of
    with mock.patch.object(checkpoint_directory, "sha256_of", reading):
        run_train(overrides)
    return names


def said_by_train(overrides: list[str]) -> list[str]:
    """What each rank writes to stderr in a training run."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        run_train(overrides)
    everywhere = [""] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everywhere, said.getvalue())
    return everywhere


def run_evaluate(overrides: list[str], config: str = "verify") -> None:
    """The command `nemo-oprd evaluate`, in this process."""
    from nemo_oprd.run.evaluate import evaluate
    from nemo_oprd.run.models import world_size
    from nemo_oprd.run.preflight import preflight_evaluation

    evaluate(preflight_evaluation(load_config(config, overrides), world_size()))


def generate(
    hf_path: str,
    tensor: int,
    prompts: list[list[int]],
    temperature: float,
    top_p: float,
    steps: int,
    expert: int = 1,
    sampled: TokenIds | None = None,
) -> list:
    """Responses of the in-process engine, with fixed uniforms: [(ids, finish reason)]."""
    from nemo_oprd.rollout.engine import Request, SamplingParams

    engine = _engine(hf_path, tensor, "rollout.max_batch=5", f"rollout.expert={expert}")
    engine.sampled = sampled or engine.sampled
    requests = [Request(prompt) for prompt in prompts]
    rollouts = engine.generate(requests, SamplingParams(temperature, top_p, steps, (7, 1, 0)))
    return [(r.response_ids.tolist(), r.finish_reason) for r in rollouts]


def generate_logprobs(hf_path: str, prompts: list[list[int]], steps: int) -> tuple[list[list[int]], list[np.ndarray]]:
    """Sampled ids of each prompt, and the log-probabilities of all ids [steps, V] from which they were sampled."""
    from unittest import mock

    from nemo_oprd.rollout import decoding as generation
    from nemo_oprd.rollout.engine import Request, SamplingParams

    engine = _engine(hf_path, 1, "rollout.max_batch=16")
    engine.eos_ids = ()  # no response ends early, so that all sequences stay in the batch
    seen: list[np.ndarray] = []

    def pick(logits: Any, *args: Any) -> Any:
        seen.append(logits.double().log_softmax(-1).numpy())
        return pick_tokens(logits, *args)

    pick_tokens = generation.pick_tokens
    with mock.patch.object(generation, "pick_tokens", pick):
        rollouts = engine.generate([Request(p) for p in prompts], SamplingParams(1.0, 1.0, steps, (7, 1, 0)))
    assert len(seen) == steps  # one batch, sorted by length
    order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), i))
    return [r.response_ids.tolist() for r in rollouts], [np.stack(seen)[:, order.index(i)] for i in range(len(prompts))]


def _engine(hf_path: str, tensor: int, *overrides: str) -> Any:
    import torch.distributed as dist

    from nemo_oprd.batch.layout import Layout
    from nemo_oprd.megatron.parallel import init_distributed
    from nemo_oprd.megatron.weights.hf import HFCheckpoint
    from nemo_oprd.models import read_model_spec
    from nemo_oprd.run.engine_kinds import make_engine

    init_distributed()
    config = load_config("verify", ["student.hf_path=a", "teacher.hf_path=b", f"rollout.tensor={tensor}", *overrides])
    layout = Layout(data=dist.get_world_size())
    engine: Any = make_engine(config, read_model_spec(hf_path), Path(hf_path), layout, eos_ids=(1, 3))
    engine.load(HFCheckpoint(hf_path).__getitem__, hf_path)
    return engine


def generate_until_given_up(hf_path: str, tensor: int, prompts: list[list[int]], asked: int, rank: int) -> list[Any]:
    """Sampling that `rank` cancels when it is asked the `asked`-th time, then resumed, then once more without a break.

    Returns:
        Per rank, whether it was cancelled and how often it was asked; how many responses were complete then; whether
        the resumed responses are those of the last call; and per rank, which responses it kept in the first two calls.
    """
    from unittest import mock

    import torch.distributed as dist

    from nemo_oprd.rollout import decoding as generation
    from nemo_oprd.rollout.engine import GenerationCancelled, Request, SamplingParams

    engine = _engine(hf_path, tensor, "rollout.max_batch=3")
    requests, sampling = [Request(prompt) for prompt in prompts], SamplingParams(0.0, 1.0, 12, (7, 1, 0))
    times = 0

    def give_up() -> bool:
        nonlocal times
        times += 1
        return dist.get_rank() == rank and times >= asked

    given_up, completed, kept = False, {}, list[dict]()
    with mock.patch.object(generation, "CANCEL_CHECK_EVERY", 4):
        try:
            engine.generate(requests, sampling, give_up, None, kept.append)
        except GenerationCancelled as cancelled:
            given_up, completed = True, cancelled.completed
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, (given_up, times))
        kept.append({})  # between the two calls
        resumed = engine.generate(requests, sampling, lambda: False, completed, kept.append)
        whole = engine.generate(requests, sampling, lambda: False)
    assert all(completed[i] is resumed[i] for i in completed)  # not sampled again
    assert all(whole[i] == rollout for batch in kept for i, rollout in batch.items())
    first = sorted(i for batch in kept[: kept.index({})] for i in batch)
    second = sorted(i for batch in kept[kept.index({}) :] for i in batch)
    keepers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(keepers, (first, second))
    if given_up:
        assert sorted(sum((first for first, _ in keepers), [])) == sorted(completed)
    return [*found, len(completed), resumed == whole and len(whole) == len(requests), keepers]


def teacher_products_of_verify(overrides: list[str]) -> int:
    """How often `verify`'s teacher computes log-probabilities of sampled tokens."""
    from unittest import mock

    from nemo_oprd.distillation import teacher as runner

    with mock.patch.object(runner, "chunked_logprob", wraps=runner.chunked_logprob) as products:
        run_verify(overrides)
    return products.call_count


def bf16_logits(hf_path: str, hidden: torch.Tensor) -> torch.Tensor:
    """What the engine samples from [B, padded V], for bf16 final hidden states [B, H], at TP over all ranks."""
    import torch.distributed as dist

    from nemo_oprd.batch.layout import Layout
    from nemo_oprd.config.rollout_schema import RolloutConfig
    from nemo_oprd.megatron.parallel import init_distributed
    from nemo_oprd.megatron.weights.hf import HFCheckpoint
    from nemo_oprd.models import read_model_spec
    from nemo_oprd.rollout.in_process_engine import MegatronEngine

    init_distributed()
    rollout, layout = RolloutConfig(tensor=dist.get_world_size()), Layout(tensor=dist.get_world_size())
    engine = MegatronEngine(rollout, read_model_spec(hf_path), layout, (1,), precision="bf16")
    engine.load(HFCheckpoint(hf_path).__getitem__, hf_path)
    return engine.model.logits(hidden[None])[0]


def run_broken_verify(overrides: list[str], breakage: str) -> None:
    """`verify` with a broken capture."""
    _with_broken_layer(run_verify, overrides, breakage)


def run_broken_train(overrides: list[str], breakage: str) -> None:
    """`train` with a broken capture, and an engine that must not be asked."""
    from unittest import mock

    from nemo_oprd.rollout.replay import ReplayEngine

    with mock.patch.object(ReplayEngine, "generate", side_effect=AssertionError("sampled before the gradient check")):
        _with_broken_layer(run_train, overrides, breakage)


def check_gradients(overrides: list[str]) -> str:
    """What the gradient check says before training."""
    from nemo_oprd.distillation import gradient_check
    from nemo_oprd.run.models import distiller_for
    from nemo_oprd.train import accumulate_gradients

    return gradient_check.check_gradients(distiller_for(load_config("verify", overrides)), accumulate_gradients)


def run_with_cuda_graphs(overrides: list[str]) -> None:
    """A step of a model whose Megatron config asks for CUDA graphs."""
    from nemo_oprd.distillation import gradient_check
    from nemo_oprd.run.models import distiller_for
    from nemo_oprd.train import accumulate_gradients

    distiller = distiller_for(load_config("verify", [*overrides, "output=unused"]))
    distiller.student.chunks[0].config.cuda_graph_impl = "local"
    gradient_check.check_gradients(distiller, accumulate_gradients)


def _with_broken_layer(command: Callable[[list[str]], None], overrides: list[str], breakage: str) -> None:
    """Runs a command with layer 2's capture broken in one of the ways that train nothing without any error."""
    from nemo_oprd.distillation.hidden_state_loss import HiddenStateLoss

    supervise = HiddenStateLoss._supervise

    def broken(self, layer, hidden, *, keep_rows):  # type: ignore[no-untyped-def]
        if layer != 2:
            return supervise(self, layer, hidden, keep_rows=keep_rows)
        if breakage == "skipped":
            return hidden
        if breakage == "detached":
            supervise(self, layer, hidden.detach().requires_grad_(), keep_rows=keep_rows)
            return hidden
        if breakage == "hook in a recomputed region":
            # a forward hook acts on the first pass, where a recomputed region has no gradient, and not on the second
            return hidden if layer in self.measured else supervise(self, layer, hidden, keep_rows=keep_rows)
        assert breakage == "twice"
        once = supervise(self, layer, hidden, keep_rows=keep_rows)
        return supervise(self, layer, once, keep_rows=keep_rows)

    HiddenStateLoss._supervise = broken  # type: ignore[method-assign]
    try:
        command(overrides)
    finally:
        HiddenStateLoss._supervise = supervise  # type: ignore[method-assign]


def models_and_rollouts(overrides: list[str]) -> tuple[Any, list[Any]]:
    """The models of `verify`, and its recorded rollouts."""
    from nemo_oprd.run.data import recorded_rollouts
    from nemo_oprd.run.models import build_distiller, make_plan, world_size
    from nemo_oprd.run.resolve import resolve

    config = load_config("verify", overrides)
    run = resolve(config, world_size())
    rollouts = recorded_rollouts(config, run.models)
    assert rollouts is not None
    return build_distiller(make_plan(run)), rollouts


def accumulate(distiller: Any, rollouts: list[Any], step: int | None) -> tuple[Any, Any]:
    """(Objective, metrics) of the update after `step` others on the rollouts."""
    from nemo_oprd.train import accumulate_gradients

    batch = distiller.batch(rollouts, distiller.objective_of(step))
    return batch.objective, accumulate_gradients(distiller, batch).metrics


def held_targets(overrides: list[str], free: int | None = None) -> int:
    """Bytes of targets that rank 0 held at a time, at most, in one step; `free`: bytes that a rank has free."""
    from unittest import mock

    from nemo_oprd.megatron import parallel
    from nemo_oprd.rollout.replay import read_rollouts
    from nemo_oprd.run.models import distiller_for

    config = load_config("verify", overrides)
    distiller = distiller_for(config)
    rollouts = read_rollouts(str(config.rollout.replay), distiller.objective.student.vocab_size)
    with mock.patch.object(parallel, "CPU_BYTES", free or parallel.CPU_BYTES):
        _, result = accumulate(distiller, rollouts, None)
    assert result is not None
    return result.targets_bytes


def teacher_weight_bytes(overrides: list[str]) -> dict[str, int]:
    """Bytes of this rank's teacher weights before, during and after its forward."""
    from unittest import mock

    from nemo_oprd.distillation import teacher as runner
    from nemo_oprd.rollout.replay import read_rollouts
    from nemo_oprd.run.models import distiller_for

    config = load_config("verify", overrides)
    distiller = distiller_for(config)
    rollouts = read_rollouts(str(config.rollout.replay), distiller.objective.student.vocab_size)
    run_schedule = runner.run_schedule

    def size() -> int:
        parameters = [p for chunk in distiller.teachers[0].chunks or [] for p in chunk.parameters()]
        return sum(p.untyped_storage().nbytes() for p in parameters)

    sizes = {"before": size()}

    def spy(*args, **kwargs):  # type: ignore[no-untyped-def]
        sizes["during"] = size()
        return run_schedule(*args, **kwargs)

    with mock.patch.object(runner, "run_schedule", spy):
        batch = distiller.batch(rollouts, distiller.objective_of(None))
        distiller.targets(batch, batch.plan)
    return {**sizes, "after": size()}


def run_train_with_secrets(overrides: list[str], secrets: dict[str, str]) -> None:
    """`train` with secrets in the environment."""
    import os
    from unittest import mock

    with mock.patch.dict(os.environ, secrets):
        run_train(overrides)


def run_fit_bridge(overrides: list[str], config: str = "verify") -> None:
    """The command `nemo-oprd fit-bridge`, in this process."""
    from nemo_oprd.run.fit_bridge import fit_bridge
    from nemo_oprd.run.models import world_size
    from nemo_oprd.run.preflight import preflight

    fit_bridge(preflight(load_config(config, overrides), world_size(), "fit-bridge"))


def pairs_with_moments(overrides: list[str]) -> list[int]:
    """`fit-bridge`; per rank, of how many layer pairs it holds moments."""
    from unittest import mock

    import torch.distributed as dist

    from nemo_oprd.run import fit_bridge

    made: list[object] = []

    def spy(*args, **kwargs):  # type: ignore[no-untyped-def]
        made.append(statistics(*args, **kwargs))
        return made[-1]

    statistics = fit_bridge.PairStatistics
    with mock.patch.object(fit_bridge, "PairStatistics", spy):
        run_fit_bridge(overrides)
    counts: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(counts, len(made))
    return counts


def projectors_on_all_ranks(overrides: list[str]) -> list[dict[int, list]]:
    """Two updates with trained projectors; per rank, layer -> bytes of its projector (and bias) afterwards."""
    import torch.distributed as dist

    from nemo_oprd.distillation.trained_projectors import projectors_of
    from nemo_oprd.rollout.replay import read_rollouts
    from nemo_oprd.run.models import distiller_for

    config = load_config("verify", [*overrides, "output=unused"])
    distiller = distiller_for(config)
    rollouts = read_rollouts(str(config.rollout.replay), distiller.objective.student.vocab_size)
    for step in range(2):
        objective, result = accumulate(distiller, rollouts, None)
        update = distiller.student.optimizer_step(step, objective, result)
        assert update is not None and update.nonfinite_reason is None
    mine = {
        layer: [parameter.detach().numpy().tobytes() for parameter in projector.parameters()]
        for layer, projector in projectors_of(distiller.student.chunks).items()
    }
    everyone: list[dict[int, list]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    return everyone


def what_teachers_read(overrides: list[str]) -> tuple[list[list[int]], list[int]]:
    """One step; per teacher the responses that it read, over all ranks, and per reading how many had weights here."""
    from unittest import mock

    import torch.distributed as dist

    from nemo_oprd.distillation.teacher import MegatronTeacher

    distiller, rollouts = models_and_rollouts(overrides)
    read: list[list[int]] = [[] for _ in distiller.teachers]
    resident: list[int] = []
    forward = MegatronTeacher._forward

    def spy(self, rollouts, plan, objective):  # type: ignore[no-untyped-def]
        packs = plan.hidden.packs[self.role.coords.data]
        read[self.number] += [i for pack in packs for i in pack.sequences]
        return forward(self, rollouts, plan, objective)

    def present(*args, **kwargs):  # type: ignore[no-untyped-def]
        chunks = [teacher.chunks[0] for teacher in distiller.teachers]
        resident.append(sum(any(p.numel() for p in chunk.parameters()) for chunk in chunks))
        return run_schedule(*args, **kwargs)

    from nemo_oprd.distillation import teacher as runner

    run_schedule = runner.run_schedule
    with mock.patch.object(MegatronTeacher, "_forward", spy), mock.patch.object(runner, "run_schedule", present):
        accumulate(distiller, rollouts, 0)
    everyone: list[list[list[int]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, read)
    return [[i for part in everyone for i in part[t]] for t in range(len(distiller.teachers))], resident


def teacher_shares_parameters(overrides: list[str]) -> bool:
    """Whether the teacher's parameters are the student's, all or none of them."""
    from nemo_oprd.run.models import distiller_for

    distiller = distiller_for(load_config("verify", overrides))
    mine = {p.data_ptr() for chunk in distiller.student.chunks for p in chunk.parameters()}
    theirs = [p.data_ptr() for chunk in distiller.teachers[0].chunks or [] for p in chunk.parameters()]
    shared = [pointer in mine for pointer in theirs]
    assert len(set(shared)) == 1
    return shared[0]


def average_after_update(overrides: list[str]) -> tuple:
    """One update: a weight before it, the student's after it, and the teacher's average, float32."""
    distiller, rollouts = models_and_rollouts(overrides)
    average, name = distiller.student.average, "decoder.layers.1.mlp.linear_fc2.weight"
    assert average is not None
    start = average.average[name].clone()
    objective, result = accumulate(distiller, rollouts, 0)
    update = distiller.student.optimizer_step(0, objective, result)
    assert update is not None and update.nonfinite_reason is None
    from nemo_oprd.megatron.param_names import named_parameters

    student = named_parameters(distiller.student.chunks)[name].detach().float()
    return start, student, average.average[name].clone()


def open_weight_readers(overrides: list[str]) -> int:
    """How many readers of weight files are alive in a run that is ready to train."""
    import gc

    from nemo_oprd.megatron.weights.hf import HFCheckpoint
    from nemo_oprd.megatron.weights.megatron_checkpoint import MegatronCheckpoint
    from nemo_oprd.run.models import world_size
    from nemo_oprd.run.preflight import preflight
    from nemo_oprd.run.start import start_training

    with start_training(preflight(load_config("verify", overrides), world_size(), "train")):
        gc.collect()
        return sum(isinstance(thing, HFCheckpoint | MegatronCheckpoint) for thing in gc.get_objects())


def load_damaged_checkpoint(overrides: list[str]) -> None:
    """`verify` of a Megatron checkpoint whose norms come back one number short."""
    from unittest import mock

    from nemo_oprd.megatron.weights.megatron_checkpoint import MegatronCheckpoint

    whole = MegatronCheckpoint.__getitem__

    def cut(checkpoint: MegatronCheckpoint, name: str) -> torch.Tensor:
        tensor = whole(checkpoint, name)
        return tensor[:-1] if name.endswith("layernorm.weight") else tensor

    with mock.patch.object(MegatronCheckpoint, "__getitem__", cut):
        run_verify(overrides)


def resample(overrides: list[str], step: int, checkpoint: str | None) -> list[list[int]]:
    """What a step of a run samples, in an engine of its own with the weights of a checkpoint, or the initial ones.

    Returns:
        Per response, its ids.
    """
    from nemo_oprd.megatron.weights.hf import HFCheckpoint
    from nemo_oprd.megatron.weights.megatron_checkpoint import MegatronCheckpoint
    from nemo_oprd.rollout.schedule import training_requests, training_sampling
    from nemo_oprd.run.data import read_training_data
    from nemo_oprd.run.engine_kinds import make_engine
    from nemo_oprd.run.models import RunFiles, world_size
    from nemo_oprd.run.preflight import preflight

    config = load_config("quickstart", overrides)
    spec = preflight(config, world_size(), "train")
    files = RunFiles(config, spec.models)
    prompts = read_training_data(spec, files).prompts
    student, count = files.student, config.train.prompts_per_step
    engine: Any = make_engine(config, student.spec, student.directory, spec.student_layout, student.tokenizer.eos_ids)
    read = HFCheckpoint(student.directory) if checkpoint is None else MegatronCheckpoint(checkpoint)
    engine.load(read.__getitem__, str(checkpoint))
    requests = training_requests(prompts, config, step * count, count)
    rollouts = engine.generate(requests, training_sampling(config, step))
    return [rollout.response_ids.tolist() for rollout in rollouts]
