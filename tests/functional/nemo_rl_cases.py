"""What workers run for test_nemo_rl.py: updates of `OPRDWorker` by NeMo-RL's own `train`, or by the stand-in's.

The models are stock Megatron-core models of the golden pair. Of NeMo-RL's source tree run: sharding and packing of the
batch, `MegatronPolicyWorkerImpl.train` with its microbatches, forward step, loss function calls and scaling, and the
broadcasts of metrics. Its constructor, which needs CUDA, Ray and Megatron-Bridge, does not run: the attributes that
`train` reads are set here.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from absent_packages import AbsentPackages
from adopt_cases import gathered_gradients
from stock_models import GOLDEN, megatron_groups, stock_model, wrapped
from torch.overrides import TorchFunctionMode

from nemo_oprd.batch.layout import Layout

# of NeMo-RL's dependencies, those that are not installed here; of NeMo-RL itself, what needs a newer Megatron-core
ABSENT = (
    "datasets", "fastapi", "megatron.bridge", "mlflow", "prometheus_client", "pynvml", "ray", "swanlab", "tensordict",
    "uvicorn", "wandb", "zmq", "nemo_rl.models.generation.megatron", "nemo_rl.models.megatron.setup",
)  # fmt: skip
WORKER = "nemo_rl.models.policy.workers.megatron_policy_worker"
MULTIPLE = 4  # of a sequence's length, for two context ranks, and two ranks with sequence parallelism


class OnCpu(TorchFunctionMode):
    """The CPU where NeMo-RL asks for a CUDA device by name."""

    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.cuda:
            return args[0]
        kwargs = {name: "cpu" if name == "device" and at == "cuda" else at for name, at in (kwargs or {}).items()}
        args = tuple("cpu" if isinstance(at, str) and at == "cuda" else at for at in args)
        return function(*args, **kwargs)


@contextmanager
def on_cpu() -> Iterator[None]:
    """Calls of `torch.cuda` that fail without CUDA, and devices by name."""
    named = {"get_device_name": lambda: "CPU", "nvtx.range_push": lambda _: None, "nvtx.range_pop": lambda: None}
    with ExitStack() as stack:
        for name, function in named.items():
            stack.enter_context(mock.patch(f"torch.cuda.{name}", function))
        stack.enter_context(OnCpu())
        yield


def prepare(source: str | None) -> None:
    """Makes `nemo_rl` importable: a source tree, or the stand-in."""
    if "nemo_rl" in sys.modules:
        return
    if source is None:
        sys.path.insert(0, str(Path(__file__).parent / "nemo_rl_stand_in"))
        return
    AbsentPackages(*ABSENT).install()
    sys.path.insert(0, source)
    transformers = sys.modules.get("transformers") or import_module("transformers")
    # it refuses 5.12 and later, because of a patch for one family's tokenizer, which nothing here uses
    with mock.patch.object(transformers, "__version__", "5.11.0"):
        worker = import_module(WORKER)
    worker.get_pg_collection = lambda _: types.SimpleNamespace(mp=None)
    worker.logical_and_across_model_parallel_group = lambda value, mp_group: value
    worker.reduce_max_stat_across_model_parallel_group = lambda value, mp_group: value
    data = import_module("nemo_rl.models.megatron.data")
    made, known = data.PackedSeqParams, {field.name for field in dataclasses.fields(data.PackedSeqParams)}
    # Megatron-core 0.16.1 has no total_tokens, which only Mamba reads
    data.PackedSeqParams = lambda **given: made(**{name: at for name, at in given.items() if name in known})


def training_data() -> Any:
    """The golden responses as NeMo-RL's driver has them, in an order of their own."""
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

    from nemo_oprd.rollout.replay import read_rollouts

    rollouts = read_rollouts(GOLDEN / "rollouts.jsonl", 61)
    longest = -(-max(rollout.length for rollout in rollouts) // MULTIPLE) * MULTIPLE
    ids = torch.zeros(len(rollouts), longest, dtype=torch.int64)
    mask = torch.zeros(len(rollouts), longest)
    for i, rollout in enumerate(rollouts):
        ids[i, : rollout.length] = torch.tensor(rollout.ids)
        mask[i, len(rollout.prompt_ids) : rollout.length] = torch.tensor(rollout.mask, dtype=torch.float32)
    lengths = torch.tensor([rollout.length for rollout in rollouts])
    order = torch.randperm(len(rollouts), generator=torch.Generator().manual_seed(3))
    named = {"input_ids": ids, "input_lengths": lengths, "token_mask": mask, "sample_mask": torch.ones(len(rollouts))}
    return BatchedDataDict({name: values[order] for name, values in named.items()})


def shard(data: Any, layout: Layout, rank: int, updates: int, *, packed: bool) -> Any:
    """This rank's responses, as NeMo-RL's driver shards them."""
    packing = {
        "algorithm": "modified_first_fit_decreasing",
        "input_key": "input_ids",
        "input_lengths_key": "input_lengths",
        "sequence_length_pad_multiple": MULTIPLE,
        "max_tokens_per_microbatch": 64,
    }
    arguments = {"sequence_packing_args": packing} if packed else {}
    shards = data.shard_by_batch_size(layout.data, batch_size=data.size // updates, **arguments)
    return (shards[0] if packed else shards)[layout.coordinates(rank).data]


def policy_config(layout: Layout, loss: dict[str, Any], size: int, responses: int, *, packed: bool) -> dict[str, Any]:
    """The keys of a policy that an update reads."""
    return {
        "train_global_batch_size": responses,
        "train_micro_batch_size": size,
        "sequence_packing": {"enabled": packed},
        "dynamic_batching": {"enabled": False},
        "make_sequence_length_divisible_by": MULTIPLE,
        "logprob_chunk_size": None,
        "megatron_cfg": {
            "tensor_model_parallel_size": layout.tensor,
            "sequence_parallel": layout.sequence,
            "pipeline_model_parallel_size": layout.pipeline,
            "context_parallel_size": layout.context,
            "empty_unused_memory_level": 0,
        },
        "oprd": {"teacher": str(GOLDEN / "teacher"), **loss},
    }


def make_worker(layout: Layout, backend: str, cfg: dict[str, Any], temperature: float) -> Any:
    """An `OPRDWorker` with stock models, without its constructor."""
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from nemo_oprd.integrations.colocated_teacher import ColocatedTeacher
    from nemo_oprd.integrations.hidden_states import adopt
    from nemo_oprd.integrations.rl_batch import Settings
    from nemo_oprd.integrations.rl_worker import OPRDWorker

    (model,) = wrapped(stock_model("student", layout, backend))
    (teacher,) = stock_model("teacher", layout, backend)
    teacher.requires_grad_(False).eval()
    adopt([model], hf_config=GOLDEN / "student")
    adopt([teacher], hf_config=GOLDEN / "teacher")
    worker = OPRDWorker.__new__(OPRDWorker)
    config = OptimizerConfig(optimizer="adam", lr=1e-2, weight_decay=0.0, clip_grad=0.0, params_dtype=torch.float32)
    worker.model, worker.cfg, worker.dp_size = model, cfg, layout.data
    worker.optimizer = get_megatron_optimizer(config, [model], use_gloo_process_groups=False)
    worker.optimizer.grad_norms_by_group = {}  # of a newer Megatron-core
    model.module.config.grad_scale_func = worker.optimizer.scale_loss
    model.module.config.finalize_model_grads_func = finalize_model_grads
    space = types.SimpleNamespace
    worker.scheduler = space(get_lr=lambda _: 1e-2, get_wd=lambda: 0.0, step=lambda increment: None)
    worker.sampling_params = space(temperature=temperature, top_k=None, top_p=1.0)
    worker.megatron_cfg = space(optimizer=space(), ddp=space())
    worker.mcore_state = space(straggler_timer=_timer())
    worker.draft_model, worker.defer_fp32_logits, worker.delegate_pack_to_model = None, False, False
    worker.should_disable_forward_pre_hook = worker._router_replay_enabled = False
    worker._first_train_step_forward_pre_hook_disabled, worker.dtype, worker.fp8_cfg = False, torch.float32, None
    worker.distil(ColocatedTeacher(teacher, parallel_state.get_pipeline_model_parallel_group()), Settings.read(cfg))
    return worker


def _timer() -> Any:
    return lambda *_, **__: nullcontext()


class Zero:
    """A loss function that is none of this project's."""

    def __call__(self, data: Any, *_: Any, logits: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
        return 0.0 * logits.sum(), {"loss": 0.0}


def golden_updates(
    loss: dict[str, Any],
    layout: dict[str, Any],
    *,
    size: int = 2,
    packed: bool = False,
    backend: str = "local",
    temperature: float = 1.0,
    calls: int = 1,
    parts: int = 1,
    fault: str | None = None,
    another_loss: bool = False,
    source: str | None = None,
) -> tuple[dict[str, float], dict[str, torch.Tensor], list[float]]:
    """Metrics and HF gradients of the first call of `train`, and `global_loss` of every call.

    `logged/loss` among the metrics is what NeMo-RL's driver logs: the sum over microbatches and workers.

    Args:
        loss: the keys below `loss`.
        size: responses per microbatch of ordinary batches.
        temperature: of the sampling, by which NeMo-RL divides logits.
        calls: of `train`, on the same responses.
        parts: updates of a call.
        another_loss: a loss function of NeMo-RL's, here a zero, in place of `OPRDOutputLoss`.
        fault: "no weights": the driver has not added them; "bypassed": a layer of the last rank runs as a stock one.
    """
    import torch.distributed as dist
    from megatron.core.rerun_state_machine import (
        RerunMode,
        destroy_rerun_state_machine,
        initialize_rerun_state_machine,
    )
    from megatron.core.transformer.transformer_layer import TransformerLayer

    prepare(source)
    from nemo_oprd.config.messages import build
    from nemo_oprd.config.schema import LossConfig
    from nemo_oprd.integrations.rl_batch import with_weights
    from nemo_oprd.integrations.rl_loss import OPRDOutputLoss

    sizes, terms = Layout(**layout), build(LossConfig, loss)
    with megatron_groups(sizes), on_cpu():
        destroy_rerun_state_machine()
        initialize_rerun_state_machine(mode=RerunMode.DISABLED)
        data = training_data()
        cfg = policy_config(sizes, loss, size, data.size // parts, packed=packed)
        worker = make_worker(sizes, backend, cfg, temperature)
        if fault == "bypassed" and dist.get_rank() == dist.get_world_size() - 1:
            layer = worker.model.module.decoder.layers[-1]
            layer.forward = lambda *, packed_seq_params, **kwargs: TransformerLayer.forward(layer, **kwargs)
        if fault != "no weights":
            with_weights(data, terms, data.size // parts)
        results = []
        for call in range(calls):
            mine = shard(data, sizes, dist.get_rank(), parts, packed=packed)
            results.append(worker.train(mine, Zero() if another_loss else OPRDOutputLoss(terms.output, 61)))
            if call == 0:
                held = gathered_gradients([worker.model.module], sizes)
                gradients = {name: tensor.clone() for name, tensor in held.items()}
        lines = results[0]["all_mb_metrics"]
        metrics = {name: sum(lines[name]) * sizes.data for name in lines if name.startswith("rep/")}
        metrics["loss/total"] = float(results[0]["global_loss"].sum())
        logged = torch.tensor(sum(lines["loss"]), dtype=torch.float64)
        dist.all_reduce(logged, group=worker.model.module.pg_collection.dp)
        metrics["logged/loss"] = float(logged)
        return metrics, gradients, [float(result["global_loss"].sum()) for result in results]


def driver(source: str | None) -> dict[str, Any]:
    """What `OPRDPolicy`, which `setup` builds in the place of NeMo-RL's, does to the data of a step."""
    prepare(source)
    from nemo_rl.models.policy.lm_policy import Policy

    from nemo_oprd.integrations.rl_policy import OPRDPolicy, TeacherInWorkers, policies_of

    cfg = policy_config(Layout(), {"output": {"kind": "full_vocab", "weight": 1.0}}, 1, 3, packed=False)
    cfg["megatron_cfg"]["enabled"] = True
    distillation = types.SimpleNamespace(Policy=Policy)
    named = {"cluster": None, "tokenizer": None}
    with policies_of(distillation):
        teacher = distillation.Policy(name_prefix="teacher", config={}, **named)
        student = distillation.Policy(name_prefix="student", config=cfg, **named)
    assert isinstance(teacher, TeacherInWorkers) and isinstance(student, OPRDPolicy)
    teacher.offload_after_refit()
    teacher.prepare_for_lp_inference()
    data = training_data()
    found = teacher.get_topk_logits(data, k=64, timer=None)
    data["teacher_topk_logits"], data["teacher_topk_indices"] = found["topk_logits"], found["topk_indices"]
    for _ in range(2):  # data that has weights already, as of an update that is repeated
        sent = student.train(data, "a loss", timer=None)["data"]
    return {
        "restored": distillation.Policy is Policy,
        "worker": student.worker,
        "keys": sorted(sent),
        "sums": {name: sent[name].sum(dim=1).tolist() for name in ("mtp_loss_mask", "oprd_output_weight")},
    }


def source_named() -> str | None:
    """The source tree that the environment names."""
    return os.environ.get("NEMO_RL_SOURCE") or None
