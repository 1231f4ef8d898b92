"""The published numbers of GPUs, and the share of them that a run is assumed to reach."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from nemo_oprd.commands.options import positive


@dataclass(frozen=True)
class Gpu:
    """The published numbers of one GPU.

    Attributes:
        memory: bytes that programs can use.
        flops: dense bfloat16 operations per second.
        bandwidth: bytes per second of its memory.
        link: bytes per second, in one direction, to the GPUs of the same machine.
        network: bytes per second, in one direction, to other machines, per GPU.
    """

    name: str
    memory: float
    flops: float
    bandwidth: float
    link: float
    network: float


GPUS = {
    "a100": Gpu("A100 SXM 80 GB", 79.1 * 2**30, 312e12, 2.04e12, 300e9, 25e9),
    "h100": Gpu("H100 SXM 80 GB", 79.1 * 2**30, 989e12, 3.35e12, 450e9, 50e9),
    "h200": Gpu("H200 SXM 141 GB", 139.8 * 2**30, 989e12, 4.8e12, 450e9, 50e9),
    "b200": Gpu("B200 SXM 180 GB", 178.3 * 2**30, 2250e12, 7.7e12, 900e9, 50e9),
}


def gpu_with(name: str, memory_gb: float | None) -> Gpu:
    """Returns a GPU of `GPUS`; `memory_gb` replaces its memory, in GB of 10^9 bytes."""
    gpu = GPUS[name]
    if memory_gb is None:
        return gpu
    kind = gpu.name.rsplit(" ", 2)[0]
    return replace(gpu, name=f"{kind} with {memory_gb:g} GB", memory=memory_gb * 1e9)


# Transformer Engine's layers, as on GPUs in bf16; Megatron's local ones on GPUs; the same on CPUs, whose norms are
# composed of operations in float32
Layers: TypeAlias = Literal["transformer_engine", "local", "cpu"]


@dataclass(frozen=True)
class Cluster:
    """The GPUs of a run: one rank per GPU.

    Attributes:
        layers: the implementation of the models' layers.
    """

    ranks: int
    gpu: Gpu
    gpus_per_node: int = 8
    layers: Layers = "transformer_engine"


@dataclass(frozen=True)
class Assumptions:
    """Assumptions of an estimate of seconds. None of these numbers was measured with this project on a GPU.

    Attributes:
        compute: the share of a GPU's operations per second that training and a teacher's forward pass reach.
        bandwidth: the share of the memory's and of the links' bytes per second that is reached.
        launch: seconds between two operations of the in-process engine, which has no CUDA graphs.
        server_token: seconds of a vLLM server per token beside reading weights and cache.
        host: bytes per second between a GPU and the memory of its machine, for the states of a teacher's servers.
        reserve: bytes that CUDA, NCCL and the allocator take.
    """

    compute: float = 0.4
    bandwidth: float = 0.7
    launch: float = 5e-6
    server_token: float = 2e-3
    host: float = 15e9
    reserve: float = 3 * 2**30


ASSUMED = Assumptions()

_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def unit(size: float) -> tuple[float, str]:
    """Returns (bytes, name) of the largest unit that fits a number of bytes."""
    return next((each for each in _UNITS if size >= each[0]), (1.0, "B"))


def in_bytes(size: float, digits: int = 1) -> str:
    """Formats a number of bytes. Example: "12.3 MB"."""
    scale, name = unit(size)
    return f"{size / scale:.{digits if scale > 1 else 0}f} {name}"


def count(number: float) -> str:
    """Formats a number of parameters. Example: "1.54 B"."""
    scale, name = next((each for each in ((1e9, "B"), (1e6, "M"), (1e3, "k")) if number >= 0.1 * each[0]), (1.0, ""))
    return f"{number / scale:.{2 if scale > 1 else 0}f} {name}".strip()


def add_gpus(parser: argparse.ArgumentParser) -> None:
    """Adds the options for the GPUs of a job; `gpu_of` reads the kind."""
    parser.add_argument("--gpus-per-node", type=positive, default=8, metavar="N", help="default: %(default)s")
    parser.add_argument("--gpu", choices=sorted(GPUS), default="h100", help="default: %(default)s")
    text = "memory of one GPU in GB of 10^9 bytes, if another than that of --gpu, whose speed it has"
    parser.add_argument("--gpu-memory", type=_gigabytes, metavar="GB", help=text)


def gpu_of(options: argparse.Namespace) -> Gpu:
    """Returns the kind of GPU that the options of `add_gpus` name."""
    return gpu_with(options.gpu, options.gpu_memory)


def _gigabytes(text: str) -> float:
    reserve_gb = ASSUMED.reserve / 1e9
    try:
        size = float(text)
    except ValueError:
        size = math.nan
    if not reserve_gb < size < math.inf:
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected the GB of one GPU, such as 24; {reserve_gb:.1f} of them are for CUDA and NCCL"
        )
    return size
