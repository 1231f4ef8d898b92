"""A fake CUDA device for parts that measure memory: their own code runs unchanged on tensors without data.

The device is that of `nemo-oprd rehearse`, which counts the bytes of every storage. `shim.load()` must have loaded
torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.nn.attention.bias  # it lists the functions of torch.cuda, so it comes before they are replaced
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.gpu_parts.outcome import Outcome
from nemo_oprd.tools.plan.gpus import GPUS

if TYPE_CHECKING:
    from nemo_oprd.megatron.parallel import Role
    from nemo_oprd.tools.rehearse.phases import Injections
    from nemo_oprd.tools.rehearse.recorder import Recorder

GPU = "h100"
_recorders: list[Recorder] = []
_injections: list[Injections] = []


def recorder() -> Recorder | None:
    """What counts in this rehearsal; None outside of one."""
    return _recorders[-1] if _recorders else None


def check_gradients_of(role: Role) -> None:
    """In a rehearsal: the layers of this role get the losses' gradients, which no sum on the device can tell."""
    for each in _injections:
        each.role = role


@contextmanager
def fake_device(outcome: Outcome) -> Iterator[None]:
    """Within the context tensors on "cuda" are fake; what a GPU would refuse becomes a problem of the part.

    torch is changed for the whole process.
    """
    from nemo_oprd.megatron.cpu_patches import take_torch_optimizer
    from nemo_oprd.tools.rehearse import device_kernels, fake_cuda
    from nemo_oprd.tools.rehearse.phases import Injections
    from nemo_oprd.tools.rehearse.recorder import Recorder
    from nemo_oprd.tools.rehearse.stand_ins import stand_in

    torch.set_num_threads(1)
    made = Recorder(stand_in)
    fake_cuda.install(int(GPUS[GPU].memory), lambda: made.memory.live, lambda: made.memory.most, made.wait)

    def reset_peak(*_: object) -> None:
        made.memory.most = made.memory.live

    torch.cuda.reset_peak_memory_stats = reset_peak  # type: ignore[assignment]
    fake_cuda.join(0, 1, 1)
    device_kernels.install()
    take_torch_optimizer()  # Transformer Engine's, where it is installed, would look for a driver
    # a tensor that is made on the device is otherwise made in host memory first
    FakeTensorMode.avoid_device_init = property(lambda self: True)  # type: ignore[assignment]
    _injections.append(Injections())
    _injections[-1].install(made)
    _recorders.append(made)
    with FakeTensorMode(allow_non_fake_inputs=True), made:
        yield
    for mistake, count in made.mistakes.items():
        outcome.problems.append(f"{mistake.place}: {mistake.text} ({count} times) [{mistake.code}]")
