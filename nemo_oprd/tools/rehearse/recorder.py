"""Watches every operation of a rehearsed rank: bytes in use, waits of the host, collectives, and mistakes.

Tensors on "cuda" are fake: they have a shape, a dtype and a storage that is counted, and no data. Tensors in host
memory are real, so that plans, rows and lengths are computed as in a run; only weights are never read and are fake.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from nemo_oprd.tools.rehearse.fake_cuda import HOST
from nemo_oprd.tools.rehearse.host_values import LARGEST, HostValues
from nemo_oprd.tools.rehearse.places import CodeLocation, current_place

# The memory of a rehearsed rank: every storage of a fake tensor, who allocated it, and the peaks of the phases.


# PyTorch's allocator rounds each block up to a multiple of this
BLOCK = 512
# the share of the bytes in use by which they may grow between two moments that should be alike
_TOLERATED_GROWTH = 1e-3


@dataclass
class Peak:
    """The most bytes in use in a phase.

    Attributes:
        bytes, rounded: on the device, as tensors and as blocks of PyTorch's allocator.
        at_peak: place of the allocation, and operation -> bytes.
        host: bytes in host memory, of data that a run would copy from the device or read from files.
    """

    bytes: int = 0
    rounded: int = 0
    at_peak: dict[str, int] = field(default_factory=dict)
    host: int = 0


@dataclass(frozen=True)
class _Block:
    """Memory that is in use. `number` counts the blocks in the order of their allocation."""

    size: int
    place: CodeLocation
    what: str
    number: int


class Memory:
    """The memory in use. `peak` is that of the current phase; `freed` is called with the key of each freed storage."""

    def __init__(self, freed: Callable[[int], None]) -> None:
        self.live = self.most = self.host = 0
        self.peak = Peak()
        self._freed, self._rounded, self._count = freed, 0, 0
        self._blocks: dict[int, _Block] = {}
        self._references: dict[int, Any] = {}
        self._marks: dict[str, tuple[int, int]] = {}  # moment -> live bytes and number of blocks when it came last

    def begin(self, peak: Peak) -> None:
        """Begins a phase, or goes on with it: the memory in use counts for it."""
        self.peak = peak
        peak.bytes, peak.rounded = max(peak.bytes, self.live), max(peak.rounded, self._rounded)
        peak.host = max(peak.host, self.host)

    def track(self, tensor: torch.Tensor, operation: str) -> None:
        """Counts the memory of a tensor that an operation returned, unless it is a view of memory that is counted."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._references:
            return
        if tensor.device.type == "cuda":
            self._allocate(storage, f"{operation}{list(tensor.shape)}")
        elif tensor.device.type == "cpu" and isinstance(tensor, FakeTensor):
            self.host += size
            self.peak.host = max(self.peak.host, self.host)
            self._references[key] = weakref.ref(storage, lambda _: self._free_host(key, size))

    def forget(self, moment: str) -> None:
        """Forgets a moment: the next `settled` at it counts as the first one."""
        self._marks.pop(moment, None)

    def settled(self, moment: str) -> dict[CodeLocation, int]:
        """Returns line -> its newly allocated bytes, if clearly more is alive than when this moment came last."""
        before, self._marks[moment] = self._marks.get(moment), (self.live, self._count)
        tolerated = 0.0 if before is None else _TOLERATED_GROWTH * before[0]
        if before is None or self.live - before[0] <= tolerated:
            return {}
        newer: Counter[CodeLocation] = Counter()
        for block in self._blocks.values():
            if block.number > before[1]:
                newer[block.place] += block.size
        return {place: size for place, size in newer.items() if size > tolerated}

    def allocated_at(self, tensor: torch.Tensor) -> CodeLocation:
        """Returns the line that allocated the memory of a tensor on the device."""
        return self._blocks[tensor.untyped_storage()._cdata].place

    def _allocate(self, storage: Any, what: str) -> None:
        key, size = storage._cdata, storage.nbytes()
        rounded = -(-size // BLOCK) * BLOCK
        self._count += 1
        self._blocks[key] = _Block(size, current_place(), what, self._count)
        self._references[key] = weakref.ref(storage, lambda _: self._free(key, size, rounded))
        self.live += size
        self._rounded += rounded
        self.most = max(self.most, self.live)
        peak = self.peak
        peak.rounded = max(peak.rounded, self._rounded)
        if self.live > peak.bytes:
            # a list of all tensors is made only where the peak has grown enough to be worth it
            is_new = self.live > 1.002 * sum(peak.at_peak.values())
            peak.bytes = self.live
            if is_new:
                peak.at_peak = self._by_place()

    def _free(self, key: int, size: int, rounded: int) -> None:
        self.live -= size
        self._rounded -= rounded
        self._blocks.pop(key, None)
        self._references.pop(key, None)
        self._freed(key)

    def _free_host(self, key: int, size: int) -> None:
        self.host -= size
        self._references.pop(key, None)

    def _by_place(self) -> dict[str, int]:
        found: Counter[str] = Counter()
        for block in self._blocks.values():
            found[f"{block.place} {block.what}"] += block.size
        return dict(found)


aten = torch.ops.aten
# operations that multiply matrices -> the arguments whose dtypes must be equal; fake tensors accept any
_PRODUCTS: dict[Any, tuple[int, ...]] = {
    aten.mm.default: (0, 1),
    aten.mm.out: (0, 1),
    aten.bmm.default: (0, 1),
    aten.addmm.default: (0, 1, 2),
    aten.addmm_.default: (0, 1, 2),
    aten.baddbmm.default: (0, 1, 2),
    aten._grouped_mm.default: (0, 1),
}
# operations of a layer that keep what they take for a backward pass, in which gradients are enabled for sums only
_KEEPING = (aten.mul, aten.silu, aten._fused_rms_norm, aten._scaled_dot_product_flash_attention, aten.bmm)
_READS = (aten._local_scalar_dense.default,)
_COUNTS_ROWS = (aten.nonzero.default, aten.masked_select.default)
# phases that every step passes through; "step" is what is in none of the others
STEP_PHASES = ("step", "teacher", "update", "optimizer")
# phases without a backward pass
FORWARD_PHASES = ("teacher", "sampling check", "generation")
# moments at which the memory of earlier work should have been freed
BETWEEN_GROUPS, AFTER_STEP = "when the next group of microbatches begins", "after the next step"


@dataclass(frozen=True)
class Mistake:
    """A call that a GPU would refuse, compute otherwise, or be slowed down by."""

    code: str
    place: CodeLocation
    text: str


@dataclass(frozen=True)
class Message:
    """A collective or a message between two ranks, in the order in which the host issues them.

    `ranks`: of the group; `peer`: the rank that a message goes to or comes from, in the world; None for collectives.
    `rows`: of an uneven all-to-all, the rows that come from each rank and those that go there.
    """

    kind: str
    ranks: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    bytes: int
    device: str
    place: CodeLocation
    peer: int | None = None
    rows: tuple[tuple[int, ...], tuple[int, ...]] | None = None


@dataclass
class Phase:
    """The record of a phase."""

    peak: Peak = field(default_factory=Peak)
    kernels: int = 0
    waits: Counter = field(default_factory=Counter)  # (place, what)
    messages: list[Message] = field(default_factory=list)
    leaves: Counter = field(default_factory=Counter)  # where to -> bytes that leave the process there


class Recorder(TorchDispatchMode):
    """Records every operation of a rehearsed rank. It must be entered inside of a `FakeTensorMode`.

    Args:
        invent: the value that a read of the device returns, by (place, dtype); raises UnknownValue.
    """

    def __init__(self, invent: Callable[[CodeLocation, torch.dtype], float | int | bool]) -> None:
        super().__init__()
        self._invent = invent
        self.phases: dict[str, Phase] = {}
        self.mistakes: Counter[Mistake] = Counter()
        # functions of a library that stand-ins answer, with their tensors
        self.calls: Counter[tuple[str, tuple[str, ...]]] = Counter()
        self.known = HostValues()
        self.memory = Memory(self.known.freed)
        self.phase_name, self._phase = "", Phase()  # between the phases
        self._invents_host = False

    @contextmanager
    def phase(self, name: str, part: str | None = None) -> Iterator[None]:
        """Counts what happens within the context, and memory that is alive at its start, for the phase `name`.

        Takes the place of a `PhaseTimer`, which also times `part`s of phases; here they count for their phase.
        """
        before = self.phase_name, self._phase
        self._enter(name, self.phases.setdefault(name, Phase()))
        try:
            yield
        finally:
            self._enter(*before)

    def _enter(self, name: str, phase: Phase) -> None:
        self.phase_name, self._phase = name, phase
        self.memory.begin(phase.peak)

    def begin_step(self) -> None:
        """Forgets the waits, calls, kernels and messages of earlier steps; their peaks are kept."""
        self.calls.clear()
        self.memory.forget(BETWEEN_GROUPS)
        for name in STEP_PHASES:
            phase = self.phases.setdefault(name, Phase())
            phase.kernels = 0
            phase.waits.clear()
            phase.messages.clear()

    @contextmanager
    def invented_host_memory(self) -> Iterator[None]:
        """Makes large tensors in host memory fake within the context, and counts them, as copies of device memory."""
        self._invents_host = True
        try:
            yield
        finally:
            self._invents_host = False

    def settled(self, moment: str) -> None:
        """Notes a mistake at each line with new memory, if clearly more is alive than when this moment came last."""
        for place, size in self.memory.settled(moment).items():
            self.mistake("held-too-long", f"{size:,} bytes that are allocated here are still held {moment}", place)

    def wait(self, what: str) -> None:
        """Notes that the host waits for the device."""
        self._phase.waits[current_place(), what] += 1

    def call(self, function: str, tensors: list[torch.Tensor]) -> None:
        """Notes a call of a function that a stand-in answers."""
        self._phase.kernels += 1
        self.calls[function, tuple(_described(tensor) for tensor in tensors)] += 1

    def mistake(self, code: str, text: str, place: CodeLocation | None = None) -> None:
        """Notes a mistake at a place; None: the current one."""
        self.mistakes[Mistake(code, place or current_place(), text)] += 1

    def leave(self, where_to: str, size: int) -> None:
        """Notes bytes that a run would write to a file, or send to a process outside of the job."""
        self._phase.leaves[where_to] += size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            return self._collective(func, args, kwargs)
        if func in (aten._pin_memory.default, aten.pin_memory.default, aten.is_pinned.default):
            return False if func is aten.is_pinned.default else args[0]
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        target = kwargs.get("device")
        on_device = target is not None and torch.device(target).type == "cuda"
        if not on_device and not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            if self._invents_host and not tensors:
                made = func(*args, **kwargs)
                if isinstance(made, FakeTensor) and made.numel() > LARGEST:
                    self._track(made, func)
                    return made
            with _disable_current_modes():  # host memory: real numbers
                return func(*args, **kwargs)
        if func in _READS:
            return self._read(args[0])
        if func is aten.equal.default:
            self.wait("equal() compares on the device")
            are_equal = self.known.are_equal(*args)
            return bool(self._invent(current_place(), torch.bool)) if are_equal is None else are_equal
        if func in _COUNTS_ROWS and args[0].device.type == "cuda":
            self.wait(f"{func.overloadpacket.__name__}() counts on the device")
            return self._counted(func, args)
        self._check(func, args, tensors)
        moved = self._moved(func, args, kwargs)
        if moved is not None:
            return moved
        out = func(*args, **kwargs)
        self._phase.kernels += 1
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self._track(tensor, func)
        self.known.follow(func, args, kwargs, out)
        return out

    def _read(self, tensor: torch.Tensor) -> Any:
        """Returns the number in a tensor: its twin's or an invented one; notes a wait if it is on the device."""
        if tensor.device.type == "cuda":
            self.wait("item(), tolist() or a branch on a tensor")
        twin = self.known.get(tensor)
        if twin is None:
            return self._invent(current_place(), tensor.dtype)
        with _disable_current_modes():
            return twin.item()

    def _counted(self, func: Any, args: Any) -> Any:
        """Carries out `nonzero` or `masked_select`; the last argument (tensor or mask) gives the number of rows."""
        tensor, counted, finds = args[0], self.known.get(args[-1]), func is aten.nonzero.default
        with _disable_current_modes():
            rows = None if counted is None else int(counted.count_nonzero())
        if rows is None:
            rows = int(self._invent(current_place(), torch.int64))
        shape = (rows, tensor.ndim) if finds else (rows,)
        out = tensor.new_empty(shape, dtype=torch.int64 if finds else tensor.dtype)
        self._phase.kernels += 1
        self._track(out, func)
        self.known.follow(func, args, {}, out)
        return out

    def _moved(self, func: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
        """Notes waits for copies between host and device; returns a small tensor's copy to the host, else None."""
        if func is aten._to_copy.default:
            source, target = args[0], torch.device(kwargs.get("device") or args[0].device)
        elif func is aten.copy_.default:
            source, target = args[1], args[0].device
        else:
            return None
        if not isinstance(source, torch.Tensor) or source.device.type == target.type:
            return None
        if target.type == "cuda":
            blocks = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
            if blocks and source.numel():
                self.wait("copy from the host")
            return None
        if not isinstance(source, FakeTensor) or source.device.type != "cuda":
            return None
        self.wait("copy to the host")
        invents = source.numel() > LARGEST or self._invents_host
        return None if invents else self._host_copy(func, args, kwargs)

    def _host_copy(self, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
        """Returns the host's copy of a small device tensor, filled with one invented number if there is no twin."""
        source = args[0] if func is aten._to_copy.default else args[1]
        dtype = kwargs.get("dtype") or (source if func is aten._to_copy.default else args[0]).dtype
        twin = self.known.get(source)
        value = self._invent(current_place(), dtype) if twin is None else 0
        with _disable_current_modes():
            copied = torch.full(source.shape, value, dtype=dtype) if twin is None else twin.to(dtype, copy=True)
            return args[0].copy_(copied) if func is aten.copy_.default else copied

    def _check(self, func: Any, args: Any, tensors: list[torch.Tensor]) -> None:
        """Notes mistakes that fake tensors let pass."""
        if func in _PRODUCTS:
            found = [args[i].dtype for i in _PRODUCTS[func]]
            if len(set(found)) > 1:
                names = ", ".join(str(dtype).removeprefix("torch.") for dtype in found)
                self.mistake("mixed-dtypes", f"{func.overloadpacket.__name__} multiplies {names}")
        enabled = self.phase_name in FORWARD_PHASES and torch.is_grad_enabled()
        if enabled and func.overloadpacket in _KEEPING and any(tensor.requires_grad for tensor in tensors):
            self.mistake("graph-without-backward", "what a backward pass needs is kept, and none follows")
        if func is aten.copy_.default or len(tensors) < 2:
            return
        devices = {tensor.device.type for tensor in tensors if tensor.ndim}
        if len(devices) > 1:
            named = " and ".join(sorted(devices))
            self.mistake("host-tensor", f"{func.overloadpacket.__name__} takes tensors of {named}")

    def _collective(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Notes a collective, and runs it on small host tensors, because fake tensors do not support all of them."""
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        name = func.overloadpacket.__name__
        group = next((found for found in map(_group, tree_leaves((args, kwargs))) if found is not None), None)
        ranks = tuple(dist.get_process_group_ranks(group)) if group is not None else ()
        on_host = group is not None and group.group_desc == HOST
        for tensor in tensors:
            if tensor.device.type != "cuda" and not on_host:
                self.mistake("host-tensor-in-collective", f"{name} of a tensor in host memory, over NCCL")
            elif not tensor.is_contiguous():
                self.mistake("not-contiguous", f"{name} of a tensor that is not contiguous")
        dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors}
        if len(dtypes) > 1:
            self.mistake("mixed-dtypes", f"{name} of {', '.join(sorted(dtypes))}")
        if tensors:
            size = sum(tensor.nbytes for tensor in tensors)
            device, shapes = tensors[0].device.type, tuple(tuple(tensor.shape) for tensor in tensors)
            peer = None
            if name in ("send", "recv_"):
                peer = ranks[args[2]]
            rows = None
            if name == "alltoall_base_":
                received, sent = (tuple(map(int, splits)) for splits in args[3:5])
                rows = (received, sent) if sent or received else None
                args = (*args[:3], [], [], *args[5:])  # carried out evenly
            at, kind = current_place(), min(dtypes)
            message = Message(
                name, ranks, shapes=shapes, dtype=kind, bytes=size, device=device, place=at, peer=peer, rows=rows
            )
            self._phase.messages.append(message)
        least = max(1, min((tensor.numel() for tensor in tensors), default=1))
        if name == "alltoall_base_":
            least = 0
        self.known.collective(name, tensors)
        with _disable_current_modes():
            # some collectives check that one tensor is as many times as large as another
            small = lambda tensor: torch.zeros(tensor.numel() // least if least else len(ranks))  # noqa: E731
            args, kwargs = tree_map_only(torch.Tensor, small, (args, kwargs))
            out = func(*args, **kwargs)
        if isinstance(out, torch.Tensor | tuple | list):  # (tensors, work): the tensors are those of the arguments
            return tree_map_only(torch.Tensor, lambda tensor: tensors[0], out)
        return out

    def _track(self, tensor: torch.Tensor, func: Any) -> None:
        self.memory.track(tensor, func.overloadpacket.__name__)


def _described(tensor: torch.Tensor) -> str:
    """Returns a tensor as text, such as "bfloat16[16384, 1, 1536]"."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _group(value: Any) -> dist.ProcessGroup | None:
    """Returns the process group in a dispatched argument."""
    if isinstance(value, dist.ProcessGroup):
        return value
    if isinstance(value, torch.ScriptObject):
        try:
            return dist.ProcessGroup.unbox(value)
        except RuntimeError:  # options, or a reduction
            return None
    return None
