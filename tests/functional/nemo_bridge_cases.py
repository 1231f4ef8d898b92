"""What test_nemo_bridge.py runs in Megatron-Bridge's environment: `python nemo_bridge_cases.py CASE JSON-ARGUMENTS`.

The real Megatron-Bridge on CPUs and gloo, with the stand-in for Transformer Engine. Several ranks are started by
torchrun. Models are the golden ones. Results go into files, which the test reads.
"""

from __future__ import annotations

import json
import sys
import types
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from adopt_cases import LENGTH, gathered_gradients
from safetensors.torch import save_file
from stock_models import GOLDEN, megatron_groups

from nemo_oprd.batch.layout import Layout

# modules of Megatron-Bridge that name CUDA devices in what the cases run; as for Megatron-core's, see cpu_patches.py
NAMING_CUDA = (
    "megatron.bridge.models.conversion.param_mapping",
    "megatron.bridge.models.model_provider",
    "megatron.bridge.training.checkpointing",
    "megatron.bridge.training.train",
    "megatron.bridge.training.utils.train_utils",
    # with Megatron-core 0.19, what Megatron-Bridge leaves to Megatron's own loop
    "megatron.training.models.dist_utils",
)
# packages that an environment may lack, and that recipes and the loop import without using them here -> their classes
ABSENT = {
    "nvidia_resiliency_ext": (),
    "nvidia_resiliency_ext.inprocess": ("CallWrapper",),
    "megatron.energon": ("Batch", "DefaultTaskEncoder", "WorkerConfig"),
    "megatron.energon.flavors.base_dataset": ("Sample",),
    "megatron.energon.task_encoder.cooking": ("Cooker",),
}
TOKENS = torch.arange(20).view(2, 10) * 3


class Absent:
    """Stands for a class of a package that is not installed, of which others are derived."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __class_getitem__(cls, _: Any) -> type:
        return cls


def prepare() -> None:
    """Megatron-core and Megatron-Bridge without CUDA."""
    from nemo_oprd.megatron import cpu_patches
    from nemo_oprd.megatron.parallel import init_distributed

    torch.set_num_threads(1)
    init_distributed()
    view = cpu_patches._TorchOnCpu()
    stream = types.SimpleNamespace(wait_stream=lambda _: None)
    view.cuda.Stream = view.cuda.current_stream = lambda: stream  # type: ignore[attr-defined]
    view.cuda.stream = lambda _: nullcontext()  # type: ignore[attr-defined]
    for name in NAMING_CUDA:
        if name.startswith("megatron.training.") and find_spec("megatron.training") is None:
            continue
        import_module(name).torch = view


def settings(layout: Layout) -> dict[str, Any]:
    """Fields of a provider: no fused CUDA kernels, and Megatron-core's attention, which reads ordinary batches."""
    from megatron.core.transformer.enums import AttnBackend

    return {
        "attention_backend": AttnBackend.local,
        "gradient_accumulation_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
        "attention_softmax_in_fp32": True,
        "pipeline_dtype": torch.float32,
        "calculate_per_token_loss": True,
        "seq_length": LENGTH,
        "tensor_model_parallel_size": layout.tensor,
        "sequence_parallel": layout.sequence,
        "pipeline_model_parallel_size": layout.pipeline,
        "num_layers_in_first_pipeline_stage": 2 if layout.pipeline > 1 else None,
    }


def provider(name: str, layout: Layout) -> Any:
    """The provider of a golden model. Megatron-Bridge loads its weights, but cannot split 61 ids over two ranks."""
    from megatron.bridge import AutoBridge

    bridge, alone = AutoBridge.from_hf_pretrained(str(GOLDEN / name), dtype=torch.float32), layout.tensor == 1
    made = bridge.to_megatron_provider(load_weights=alone)
    if not alone:
        made.vocab_size = 256
        made.register_pre_wrap_hook(partial(_load, name, layout))
    for field, value in settings(layout).items():
        assert hasattr(made, field), field
        setattr(made, field, value)
    return made


def _load(name: str, layout: Layout, chunks: list[Any]) -> list[Any]:
    """A golden model's weights, by this project's loader."""
    from nemo_oprd.megatron.parallel import Role
    from nemo_oprd.megatron.weights.hf import HFCheckpoint, load_hf
    from nemo_oprd.models import read_model_spec

    role = Role(name, layout, None, layout.coordinates(dist.get_rank()))
    load_hf(chunks, read_model_spec(GOLDEN / name), role, HFCheckpoint(GOLDEN / name).__getitem__, name)
    return chunks


def provided(made: Any, **arguments: Any) -> list[Any]:
    """The models of a provider, in Megatron's global groups."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    made.finalize()
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return made.provide_distributed_model(use_cpu_initialization=True, pg_collection=groups, **arguments)


class Recorder:
    """An observer that keeps every state."""

    def __init__(self) -> None:
        self.states: dict[int, torch.Tensor] = {}

    def at_layer(self, layer: int, hidden: torch.Tensor, *, stage_ends: bool) -> torch.Tensor:
        self.states[layer] = hidden.detach()
        return hidden

    def after_final_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        self.states[0] = hidden.detach()
        return hidden


def forward(output: str) -> None:
    """States and logits of Megatron-Bridge's student, adopted, and of transformers' model."""
    from transformers import AutoModelForCausalLM

    from nemo_oprd.integrations.hidden_states import adopt, observed

    with megatron_groups(Layout()), torch.no_grad():
        (model,) = adopt(provided(provider("student", Layout()), wrap_with_ddp=False), hf_config=GOLDEN / "student")
        recorder = Recorder()
        logits = model(TOKENS, None, None, packed_seq_params=observed(None, recorder, sequence_length=10))
        reference = AutoModelForCausalLM.from_pretrained(GOLDEN / "student", dtype=torch.float32)
        expected = reference(TOKENS, output_hidden_states=True)
        states = [recorder.states[1], recorder.states[2], recorder.states[0]]
        found = {f"state{i}": state.transpose(0, 1).contiguous() for i, state in enumerate(states, 1)}
        wanted = {f"expected_state{i}": state for i, state in enumerate(expected.hidden_states[1:], 1)}
        tensors = {**found, **wanted, "logits": logits[..., :61].contiguous(), "expected_logits": expected.logits}
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, output)


def save(output: str) -> None:
    """A checkpoint of the golden student, written by Megatron-Bridge."""
    from megatron.bridge.training.model_load_save import save_megatron_model

    with megatron_groups(Layout()):
        save_megatron_model(provided(provider("student", Layout()), wrap_with_ddp=False), output)


def _export(model: list[Any], output: Path) -> None:
    """HF weights by Megatron-Bridge, and the model's own logits."""
    from megatron.bridge import AutoBridge

    bridge = AutoBridge.from_hf_pretrained(str(GOLDEN / "student"), dtype=torch.float32)
    weights = {name: tensor.clone() for name, tensor in bridge.export_hf_weights(model, cpu=True, show_progress=False)}
    with torch.no_grad():
        logits = model[0](TOKENS, None, None)[..., :61]
    save_file({**weights, "logits": logits.contiguous()}, output)


def load(checkpoint: str, output: str) -> None:
    """Loads a checkpoint of this project by Megatron-Bridge's `load_megatron_model`, its model by run_config.yaml."""
    from megatron.bridge.training.model_load_save import load_megatron_model

    overrides = settings(Layout()) | {"seq_length": 64}
    with megatron_groups(Layout()):
        model = load_megatron_model(checkpoint, use_cpu_init=True, skip_temp_dist_context=True, mp_overrides=overrides)
        _export(model, Path(output))


def load_pretrained(checkpoints: str, output: str) -> None:
    """Loads a run's newest checkpoint as Megatron-Bridge's training loop does for `pretrained_checkpoint`."""
    from megatron.bridge.training.checkpointing import load_checkpoint
    from megatron.bridge.training.config import CheckpointConfig, ConfigContainer, LoggerConfig, OptimizerConfig
    from megatron.bridge.training.state import GlobalState

    with megatron_groups(Layout()):
        made = provider("student", Layout())
        model = provided(made, wrap_with_ddp=False)
        with torch.no_grad():
            for parameter in model[0].parameters():
                parameter.fill_(torch.nan)
        empty = dict.fromkeys(("train", "ddp", "scheduler", "dataset", "tokenizer", "dist"))
        state = GlobalState()
        state.cfg = ConfigContainer(
            model=made,
            optimizer=OptimizerConfig(use_distributed_optimizer=False),
            logger=LoggerConfig(),
            checkpoint=CheckpointConfig(pretrained_checkpoint=checkpoints),
            **empty,
        )
        load_checkpoint(state, model, None, None)
        _export(model, Path(output))


def example(pretrained: str, output: str) -> None:
    """What examples/nemo/bridge_finetune.py makes of a recipe, after Megatron-Bridge's own checks of it.

    Args:
        pretrained: checkpoints, which are looked for and not read.
    """
    from megatron.bridge import AutoBridge
    from megatron.bridge.training.config import DatasetBuildContext, runtime_config_update

    lacking = [name for name in ("megatron.energon", "nvidia_resiliency_ext") if find_spec(name) is None]
    absent = {
        name: mock.MagicMock(**dict.fromkeys(classes, Absent))
        for name, classes in ABSENT.items()
        if name.startswith(tuple(lacking))
    }
    with mock.patch.dict(sys.modules, absent):
        from examples.nemo import bridge_finetune
    made = AutoBridge.from_hf_pretrained
    models = {"Qwen/Qwen3-1.7B": GOLDEN / "student", "TEACHER": GOLDEN / "teacher"}
    given = "--recipe qwen3_1p7b_sft_config --teacher TEACHER --output O --updates 5 --length 32"
    with mock.patch.object(AutoBridge, "from_hf_pretrained", lambda name: made(str(models[name]))):
        options = bridge_finetune.parse(
            [*given.split(), "--pretrained", pretrained, "--rollouts", str(GOLDEN / "rollouts.jsonl")]
        )
        config, step = bridge_finetune.configure(options)
    runtime_config_update(config)
    samples = config.train.train_iters * config.train.global_batch_size
    data, *others = config.dataset.build_datasets(
        DatasetBuildContext(train_samples=samples, valid_samples=0, test_samples=0, tokenizer=None)
    )
    found = {
        "provider": step._providers[0] is config.model,
        "per token": config.model.calculate_per_token_loss and not config.ddp.average_in_collective,
        "samples": len(data),
        "weight": sum(float(data[i]["weight"].sum()) for i in range(config.train.global_batch_size)),
        "length": [config.model.seq_length, len(data[0]["tokens"])],
        "others": others,
        "evaluations": config.train.eval_iters,
        "head": [config.optimizer.weight_decay, config.scheduler.start_weight_decay],
    }
    Path(output).write_text(json.dumps(found))


def one_rank(directory: str, ours: dict[str, str], run: str) -> None:
    """All cases of one rank, in one process: importing Megatron-Bridge takes longer than any of them."""
    root = Path(directory)
    forward(str(root / "forward.safetensors"))
    save(str(root / "bridge"))
    for name, checkpoint in ours.items():
        load(checkpoint, str(root / f"{name}.safetensors"))
    load_pretrained(run, str(root / "pretrained.safetensors"))
    example(run, str(root / "example.json"))


def _global_state(made: Any, layout: Layout, size: int) -> Any:
    """The part of the loop's state that `train_step` reads; the rest belongs to its set-up, which needs CUDA."""
    from megatron.bridge.training.state import GlobalState

    space = types.SimpleNamespace
    timer = space(start=lambda **_: None, stop=lambda: None)
    state = GlobalState()
    state._cfg = space(
        train=space(
            micro_batch_size=size,
            empty_unused_memory_level=0,
            check_optimizer_step_success=True,
            skip_sync_grad_norm_across_mp=False,
        ),
        optimizer=space(
            reuse_grad_buf_for_mxfp8_param_ag=False, barrier_with_L1_time=False, log_num_zeros_in_grad=False
        ),
        ddp=space(overlap_param_gather=False),
        dataset=space(dataloader_type="single"),
        dist=space(use_decentralized_pg=True),
        model=made,
        data_parallel_size=layout.data,
    )
    state._timers = lambda *_, **__: timer
    return state


def train_steps(
    case: str, options: dict[str, Any], layout: dict[str, Any], size: int, updates: int, output: str
) -> None:
    """Megatron-Bridge's `train_step` with `OPRDForwardStep`; writes the first update's gradients and all metrics."""
    from megatron.bridge.data.samplers import build_pretraining_data_loader
    from megatron.bridge.training.train import train_step
    from megatron.bridge.training.utils.train_utils import prepare_forward_step_func
    from megatron.core import num_microbatches_calculator as counter
    from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.rerun_state_machine import (
        RerunDataIterator,
        RerunMode,
        destroy_rerun_state_machine,
        initialize_rerun_state_machine,
    )

    from nemo_oprd.integrations.forward_step import OPRDForwardStep
    from nemo_oprd.integrations.hidden_states import RepresentationLossConfig
    from nemo_oprd.integrations.recorded_rollouts import RolloutDataset
    from nemo_oprd.rollout.replay import read_rollouts

    sizes, loss = Layout(**layout), RepresentationLossConfig(**options)
    with megatron_groups(sizes):
        student = provider("student", sizes)
        step = OPRDForwardStep(student, provider("teacher", sizes), loss)
        model = provided(student, ddp_config=DistributedDataParallelConfig(grad_reduce_in_fp32=True))
        groups = ProcessGroupCollection.use_mpu_process_groups()
        student.finalize_model_grads_func = finalize = partial(finalize_model_grads, pg_collection=groups)
        config = OptimizerConfig(optimizer="adam", lr=1e-2, weight_decay=0.0, clip_grad=0.0, params_dtype=torch.float32)
        optimizer = get_megatron_optimizer(config, model, use_gloo_process_groups=False)
        student.grad_scale_func = optimizer.scale_loss
        rollouts = read_rollouts(GOLDEN / "rollouts.jsonl", 61)
        dataset = RolloutDataset(rollouts, LENGTH, len(rollouts), updates * len(rollouts), loss)
        loader = build_pretraining_data_loader(
            dataset, consumed_samples=0, dataloader_type="single", micro_batch_size=size, num_workers=0,
            data_sharding=True, pin_memory=False,
            data_parallel_rank=groups.dp.rank(), data_parallel_size=sizes.data,
        )  # fmt: skip
        iterator = RerunDataIterator(iter(loader))
        destroy_rerun_state_machine()
        initialize_rerun_state_machine(mode=RerunMode.DISABLED)
        counter.destroy_num_microbatches_calculator()
        counter.init_num_microbatches_calculator(dist.get_rank(), None, len(rollouts), size, sizes.data)
        state = _global_state(student, sizes, size)
        prepared = prepare_forward_step_func(step, state)
        scheduler = types.SimpleNamespace(step=lambda increment: None)
        schedule: dict[str, Any] = {"forward_backward_func": get_forward_backward_func()}
        if "p2p_communicator" in signature(train_step).parameters:  # from Megatron-Bridge 0.4 on
            schedule["p2p_communicator"] = P2PCommunicator(pp_group=groups.pp, config=student)
        lines = []
        for update in range(updates):
            reduced, skipped, *_ = train_step(
                prepared, iterator, model, optimizer, scheduler, state, groups, **schedule
            )
            assert not skipped and student.finalize_model_grads_func is finalize
            everyone: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, {name: float(value) for name, value in reduced.items()})
            lines.append({"metrics": step.metrics, "reduced": everyone})
            if update == 0:
                gathered = gathered_gradients([chunk.module for chunk in model], sizes)
                gradients = {name: tensor.contiguous() for name, tensor in gathered.items()}
        if dist.get_rank() == 0:
            save_file(
                {name: tensor.clone().contiguous() for name, tensor in gradients.items()}, f"{output}.safetensors"
            )
            Path(f"{output}.json").write_text(json.dumps(lines))


def two_ranks(cases: list[dict[str, Any]]) -> None:
    """All cases of two ranks."""
    for case in cases:
        train_steps(**case)


if __name__ == "__main__":
    prepare()
    globals()[sys.argv[1]](**json.loads(sys.argv[2]))
    dist.destroy_process_group()
