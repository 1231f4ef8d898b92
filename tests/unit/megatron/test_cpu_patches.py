"""The CPU patches: they touch what they name and nothing else, and nothing at all where CUDA is used."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

TE_STAND_IN = Path(__file__).parents[2] / "functional" / "te_stand_in"


def run(code: str, *more_paths: Path) -> str:
    """Runs `code` in a process of its own: patches are per process."""
    path = os.pathsep.join([*map(str, more_paths), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_nothing_is_patched_where_cuda_is_used() -> None:
    """With CUDA "available", installing is refused, and importing our Megatron modules changes nothing of Megatron."""
    out = run(
        """
        import importlib, torch
        torch.version.cuda = "12.8"
        available, torch.cuda.is_available = torch.cuda.is_available, lambda: True
        from nemo_oprd.megatron import cpu_patches
        torch.cuda.is_available = available
        from megatron.core import jit
        assert jit.jit_fuser is torch.compile
        modules = [importlib.import_module(name) for name in cpu_patches.MODULES_ASKING_FOR_CUDA]
        named = cpu_patches.FUNCTIONS_COMPARING_TYPE_NAMES
        functions = [cpu_patches._find(importlib.import_module(m), f) for m, f in named]
        codes = [f.__code__ for f in functions]
        torch.cuda.is_available = lambda: True
        import nemo_oprd.megatron.model, nemo_oprd.distillation.student, nemo_oprd.rollout.in_process_engine
        try:
            cpu_patches.install()
        except RuntimeError as error:
            print("refused:", error)
        assert all(module.torch is torch for module in modules)
        assert all(f.__code__ is code for f, code in zip(functions, codes))
        print("untouched")
        """
    )
    assert "refused" in out
    assert "untouched" in out


def test_every_named_place_is_changed_and_global_torch_stays_as_it_is() -> None:
    """A Megatron version in which a named place is gone must fail here, not in a training run.

    Asking for a CUDA device outside the named Megatron modules still fails after installing.

    And the compiler, which a start would wait for, is there but not imported, if torch was built without CUDA; garbage
    is collected again, except among what was imported.
    """
    out = run(
        """
        import gc, importlib, sys, torch
        before = {name: getattr(torch, name) for name in ("empty", "zeros", "tensor", "cuda", "compile")}
        import nemo_oprd.train
        from nemo_oprd.megatron import cpu_patches
        compilers = [name for name in sys.modules if name.startswith(("torch._dynamo", "torch._inductor"))]
        assert torch.version.cuda or not compilers, compilers
        assert gc.isenabled() and gc.get_freeze_count() > 100_000
        type_method = torch.Tensor.type
        named = cpu_patches.FUNCTIONS_COMPARING_TYPE_NAMES
        found = [cpu_patches._find(importlib.import_module(m), f) for m, f in named]
        codes = [f.__code__ for f in found]
        assert all(importlib.import_module(name).torch is torch for name in cpu_patches.MODULES_ASKING_FOR_CUDA)
        cpu_patches.install()
        assert all(f.__code__ is not code for f, code in zip(found, codes))
        for f in found:
            names = [c for c in f.__code__.co_consts if isinstance(c, str) and c in cpu_patches.CPU_TYPE_NAMES]
            assert not names, (f, names)
        cpu_patches.install()  # again: no change
        assert all(getattr(torch, name) is value for name, value in before.items())
        assert torch.Tensor.type is type_method
        mistakes = lambda: torch.zeros(1, device="cuda"), lambda: torch.zeros(1).cuda(), torch.cuda.current_device
        for mistake in mistakes:
            try:
                mistake()
            except (AssertionError, RuntimeError):
                print("fails")
        """
    )
    assert out.split() == ["fails"] * 3


def test_without_cuda_the_optimizer_is_torchs_beside_transformer_engine() -> None:
    """A login node has the packages of a GPU. Megatron has chosen those of Transformer Engine, which look for a driver,
    wherever it imports them; afterwards it computes with torch's."""
    out = run(
        """
        import torch
        from megatron.core import optimizer
        from megatron.core.optimizer import clip_grads, distrib_optimizer, optimizer as mixed
        from nemo_oprd.megatron import cpu_patches
        theirs = [optimizer.Adam, optimizer.SGD, distrib_optimizer.Adam, clip_grads.l2_norm_impl]
        theirs += [clip_grads.multi_tensor_applier, mixed.multi_tensor_applier]
        for one in theirs:
            try:
                one([torch.ones(2)])
            except RuntimeError as error:
                assert "Found no NVIDIA driver" in str(error), error
                print("looks for a driver")
        assert not optimizer.USING_PYTORCH_OPTIMIZER and distrib_optimizer.USING_TE_OPTIMIZER
        cpu_patches.install()
        assert (optimizer.Adam, optimizer.SGD) == (torch.optim.AdamW, torch.optim.SGD)
        assert optimizer.USING_PYTORCH_OPTIMIZER
        assert not distrib_optimizer.USING_TE_OPTIMIZER and not distrib_optimizer.HAVE_APEX_OR_TE
        gradients = [torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0, 0.0])]
        buffer = torch.zeros(1, dtype=torch.int)
        norm, _ = clip_grads.multi_tensor_applier(clip_grads.l2_norm_impl, buffer, [gradients], False)
        assert abs(float(norm) - 5.0) < 1e-6
        target = [torch.zeros(2), torch.zeros(3)]
        mixed._multi_tensor_copy_this_to_that(gradients, target, buffer)
        assert all(torch.equal(a, b) for a, b in zip(gradients, target))
        parameters = [torch.nn.Parameter(gradient.clone()) for gradient in gradients]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        clip_grads.clip_grad_by_total_norm_fp32(parameters, 0.5, 5.0)
        assert all(abs(float(p.grad[0]) - 0.1) < 1e-6 for p in parameters)
        """,
        TE_STAND_IN,
    )
    assert out.splitlines() == ["looks for a driver"] * 6


def test_weight_gradients_are_added_to_the_buffer() -> None:
    """Against float64, over two microbatches; also with Transformer Engine, whose own empty gradient is on a GPU."""
    run(
        """
        import torch
        from nemo_oprd.megatron import cpu_patches
        cpu_patches.install()
        from megatron.core.tensor_parallel import layers
        for layers.HAVE_TE in (False, True):
            weight = torch.nn.Parameter(torch.randn(5, 3))
            weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(5, 3), False
            expected = torch.zeros(5, 3, dtype=torch.float64)
            for _ in range(2):
                inputs, upstream = torch.randn(7, 3, requires_grad=True), torch.randn(7, 5)
                settings = {"gradient_accumulation_fusion": True, "allreduce_dgrad": False, "sequence_parallel": False}
                linear = layers.linear_with_grad_accumulation_and_async_allreduce
                linear(inputs, weight, None, tp_group="of one rank", **settings).backward(upstream)
                expected += upstream.double().T @ inputs.double()
                torch.testing.assert_close(inputs.grad, upstream @ weight)
                assert weight.grad_added_to_main_grad
            assert (weight.main_grad - expected).abs().max() < 1e-5
        """
    )


def test_gradients_of_an_embedding_are_added_to_the_buffer() -> None:
    """Against float64, over two microbatches with repeated ids, where the weight is used otherwise, too."""
    run(
        """
        import torch
        from nemo_oprd.megatron import cpu_patches
        cpu_patches.install()
        from megatron.core.tensor_parallel import layers
        module = layers.VocabParallelEmbedding.__new__(layers.VocabParallelEmbedding)
        torch.nn.Module.__init__(module)
        module.weight = weight = torch.nn.Parameter(torch.randn(5, 3))
        cpu_patches.add_rows_to_buffer(module)
        assert not hasattr(weight, "rows_into_buffer")
        weight.main_grad = torch.zeros(5, 3)
        cpu_patches.add_rows_to_buffer(module)
        exact = torch.zeros(5, 3, dtype=torch.float64)
        for _ in range(2):
            ids, upstream = torch.randint(4, (2, 7)), torch.randn(2, 7, 3)
            rows = layers.F.embedding(ids, weight)
            assert torch.equal(rows, weight[ids])
            ((rows * upstream).sum() + weight.square().sum()).backward()
            exact += torch.nn.functional.one_hot(ids, 5).flatten(0, 1).double().T @ upstream.flatten(0, 1).double()
        assert (weight.main_grad - exact).abs().max() < 1e-5
        assert (weight.grad - 4 * weight).abs().max() < 1e-5
        assert layers.F.embedding(torch.tensor([4]), weight.detach()).grad_fn is None
        """
    )


def test_an_update_does_not_import_the_compiler() -> None:
    """From the start to the end of an update; the optimizer's steps and checkpoints are torch's, bit for bit."""
    golden = Path(__file__).parents[2] / "golden"
    run(
        f"""
        import sys, torch
        from nemo_oprd.config.loading import load_config
        from nemo_oprd.rollout.replay import read_rollouts
        from nemo_oprd.run.models import distiller_for
        from nemo_oprd.train import accumulate_gradients
        models = [f"{{role}}.hf_path={golden}/{{role}}" for role in ("student", "teacher")]
        lines = "{golden}/rollouts.jsonl"
        config = load_config("verify", [*models, f"rollout.replay={{lines}}", "output=unused", "precision=fp32"])
        distiller = distiller_for(config)
        batch = distiller.batch(
            read_rollouts(lines, distiller.student.spec.vocab_size), distiller.objective_of(0)
        )
        metrics, _ = accumulate_gradients(distiller, batch)
        assert distiller.student.optimizer_step(0, batch.objective, metrics).nonfinite_reason is None
        compilers = [name for name in sys.modules if name.startswith(("torch._dynamo", "torch._inductor"))]
        assert not compilers, compilers
        [part] = distiller.student.optimizer.chained_optimizers
        chosen = type(part.optimizer)
        assert issubclass(chosen, torch.optim.AdamW) and chosen is not torch.optim.AdamW

        def steps(kind):
            torch.manual_seed(0)
            weights = [torch.nn.Parameter(torch.randn(5, 3)) for _ in range(3)]
            hooked = []

            def made():
                made = kind([{{"params": weights[:2], "weight_decay": 0.1}}], lr=0.1, fused=True)
                made.add_param_group({{"params": weights[2:], "weight_decay": 0.0}})
                made.register_step_post_hook(lambda *_: hooked.append(1))
                return made

            optimizer = made()
            for step in range(4):
                if step == 2:
                    state, optimizer = optimizer.state_dict(), made()
                    optimizer.load_state_dict(state)
                sum(weight.square().sum() * weight.std() for weight in weights).backward()
                assert optimizer.step(lambda: torch.is_grad_enabled()) is True
                optimizer.zero_grad()
                assert all(weight.grad is None for weight in weights)
            return weights, hooked

        assert all(torch.equal(a, b) for a, b in zip(steps(chosen)[0], steps(torch.optim.AdamW)[0], strict=True))
        assert steps(chosen)[1] == [1] * 4
        """
    )
