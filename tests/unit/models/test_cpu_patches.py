"""The CPU patches: they touch what they name and nothing else, and nothing at all where CUDA is used."""

from __future__ import annotations

import subprocess
import sys
import textwrap


def run(code: str) -> str:
    """Runs `code` in a process of its own: patches are per process."""
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_nothing_is_patched_where_cuda_is_used() -> None:
    """With CUDA "available", installing is refused, and importing our Megatron modules changes nothing of Megatron."""
    out = run(
        """
        import importlib, torch
        torch.version.cuda = "12.8"
        from nemo_oprd.models.megatron import cpu_patches
        from megatron.core import jit
        assert jit.jit_fuser is torch.compile
        modules = [importlib.import_module(name) for name in cpu_patches.MODULES_ASKING_FOR_CUDA]
        named = cpu_patches.FUNCTIONS_COMPARING_TYPE_NAMES
        functions = [cpu_patches._find(importlib.import_module(m), f) for m, f in named]
        codes = [f.__code__ for f in functions]
        torch.cuda.is_available = lambda: True
        import nemo_oprd.models.megatron.model, nemo_oprd.distillation.student, nemo_oprd.rollout.in_process.engine
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

    And the compiler, which a start would wait for, is there but not imported, if torch was built without CUDA.
    """
    out = run(
        """
        import importlib, sys, torch
        before = {name: getattr(torch, name) for name in ("empty", "zeros", "tensor", "cuda", "compile")}
        import nemo_oprd.train
        from nemo_oprd.models.megatron import cpu_patches
        compilers = [name for name in sys.modules if name.startswith(("torch._dynamo", "torch._inductor"))]
        assert torch.version.cuda or not compilers, compilers
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
