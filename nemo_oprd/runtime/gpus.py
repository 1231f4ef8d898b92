"""Checks that a process has the GPUs which its launcher promises, and that this project runs on them.

There is no silent fallback to CPUs, e.g. for an old driver: if a launcher gives GPUs and torch sees none, a command
ends at once with torch's own reason. Importing this module imports no torch; nor does a check without promised GPUs.
"""

from __future__ import annotations

import os
import warnings

# 1: use the CPU, although the launcher gives GPUs
CPU_VARIABLE = "NEMO_OPRD_CPU"
# bfloat16 in hardware, and the kernels of attention over packed sequences
LEAST_CAPABILITY = (8, 0)
# values of CUDA_VISIBLE_DEVICES without GPUs: -1 by custom, NoDevFiles from Slurm
_NO_DEVICES = ("", "-1", "NoDevFiles")


def cpu_is_meant() -> bool:
    """Returns whether the user has chosen the CPU.

    Raises:
        ValueError: `NEMO_OPRD_CPU` is set, but not to 1.
    """
    value = os.environ.get(CPU_VARIABLE, "")
    if value not in ("", "1"):
        raise ValueError(f"{CPU_VARIABLE}={value!r}; expected 1, if the run is meant for CPUs, or unset it")
    return value == "1"


def promise() -> str | None:
    """Returns the variable by which a launcher gives GPUs to this process, with its value; None without one."""
    on_node = os.environ.get("SLURM_GPUS_ON_NODE", "")
    if on_node.isdecimal() and int(on_node):
        return f"SLURM_GPUS_ON_NODE={on_node}"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").strip()
    return None if visible in _NO_DEVICES else f"CUDA_VISIBLE_DEVICES={visible}"


def check_promise() -> None:
    """Checks that torch sees the promised GPUs; every command that computes calls this before it reads models.

    A torch without CUDA is refused only in a Slurm job with GPUs: CUDA_VISIBLE_DEVICES is often set permanently.

    Raises:
        ValueError: a launcher gives GPUs, torch sees none, and the user has not chosen the CPU.
    """
    promised = promise()
    if cpu_is_meant() or promised is None:
        return
    import torch

    with warnings.catch_warnings():  # torch would repeat the content of the error as a warning on every rank
        warnings.simplefilter("ignore")
        if torch.cuda.is_available():
            return
        has_cuda = torch.version.cuda is not None or torch.version.hip is not None
        if not has_cuda and promised.startswith("CUDA_VISIBLE_DEVICES"):
            return
        reason = f": {why_none()}" if has_cuda else ", because it is a build without CUDA"
    raise ValueError(
        f"{promised}, but torch {torch.__version__} sees no GPU{reason}; expected a CUDA build and a driver for it: "
        f'see "An environment" in docs/cluster.md, or set {CPU_VARIABLE}=1 if the run is meant for CPUs'
    )


def why_none() -> str:
    """Returns torch's reason for seeing no GPU, in one sentence."""
    import torch

    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return " ".join(str(error).split()).partition(". ")[0].rstrip(".")
    return "torch.cuda.device_count() is 0"


def check_device(index: int, ranks: int) -> None:
    """Checks that the CUDA device of this rank fits a job of `ranks` ranks.

    Raises:
        ValueError: it is too old, or a slice of a GPU in a job of several ranks.
    """
    import torch

    name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
    if capability < LEAST_CAPABILITY:
        raise ValueError(
            f"the GPU {name} has compute capability {_dotted(capability)}; expected {_dotted(LEAST_CAPABILITY)} or "
            "more (A100, H100, L4, ...), for which there are kernels: ask for other GPUs"
        )
    if ranks > 1 and "MIG" in name.split():
        raise ValueError(
            f"{ranks} ranks on slices of GPUs ({name}): NCCL does not connect slices that MIG makes; expected whole "
            "GPUs, or one rank: ask for GPUs without MIG, or start one rank"
        )


def identity(index: int) -> str:
    """Returns a name of a CUDA device that is unique among all machines; for a MIG slice, that of the slice."""
    import torch

    return str(torch.cuda.get_device_properties(index).uuid)


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
