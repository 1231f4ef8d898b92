"""The teacher's side of a frozen bridge, which servers apply, so that they send R values per row instead of D.

The trainer writes the maps to a file in the servers' folder (`vllm/worker/nemo_oprd_bridge.py`). Every answer names the
digest of its maps, and whenever the canary runs, this process compares a server's projections with float64 ones.

D hidden size of the teacher, R bridge rank, T tokens of a prompt.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from nemo_oprd.bridge.maps import Bridge
from nemo_oprd.distillation.objective import TeacherMatch
from nemo_oprd.vllm.worker.nemo_oprd_bridge import BridgeFile, bridge_digest

# tolerance of a projected row, relative to the norms of the centred state and of the basis
_TOLERANCE = 1e-6


def number_of_layer(layer: int, match: TeacherMatch) -> int:
    """Converts a teacher's layer to the servers' number: L + 1 for the last layer's state after the final norm."""
    return layer + 1 if layer == match.final_layer else layer


@dataclass(frozen=True)
class ServedBridge:
    """The maps of one teacher, one per supervised student layer, in the order of `TeacherMatch.layers`.

    Attributes:
        layers: for each map, the teacher's layer whose states it projects, as servers number layers.
    """

    bridge: Bridge
    students: tuple[int, ...]
    layers: list[int]

    @staticmethod
    def of(match: TeacherMatch) -> ServedBridge | None:
        """Collects the maps of a teacher; None if the loss compares its states in full width."""
        if match.bridge is None or match.project is None:
            return None
        return ServedBridge(
            match.bridge, tuple(match.layers), [number_of_layer(layer, match) for layer in match.layers.values()]
        )

    @property
    def rank(self) -> int:
        """The bridge rank R."""
        return self.bridge.rank

    @property
    def width(self) -> int:
        """The hidden size D."""
        return self.bridge.teacher.hidden_size

    @cached_property
    def digest(self) -> str:
        """The digest by which requests and answers name the maps."""
        return bridge_digest(self.rank, self.width, self.layers, [part.numpy().data for part in self._parts()])

    def write(self, folder: Path) -> BridgeFile:
        """Writes the file into the servers' folder, if it is missing there; returns its description.

        Raises:
            ValueError: the folder has no room for it.
        """
        path = folder / f"bridge_{self.digest}"
        file = BridgeFile(str(path), self.digest, self.rank, self.width, self.layers)
        if path.exists():
            return file
        try:
            made = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with os.fdopen(made, "wb") as stream:
                for part in self._parts():
                    stream.write(part.numpy().data)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise ValueError(
                f"{path}: {file.size:,} bytes of the bridge don't fit into shared memory ({error.strerror}); expected "
                "room for the teacher's maps: enlarge /dev/shm (docker --shm-size)"
            ) from error
        return file

    def loading(self, folder: Path) -> dict[str, Any]:
        """Makes the body of the call that lets a server's workers load the maps; see `/collective_rpc`."""
        return {"method": "nemo_oprd_load_bridge", "kwargs": {"file": asdict(self.write(folder))}}

    def check_loaded(self, answers: Sequence[Mapping[str, Any]], server: str) -> None:
        """Raises ValueError unless all workers of a server have loaded these maps."""
        for said in answers:
            if said.get("digest") != self.digest:
                raise ValueError(
                    f"{server} could not load the bridge: {said.get('error', said)}; expected bridge {self.digest}: "
                    "does somebody else use the folder of this run in shared memory?"
                )

    def check_projection(self, projected: torch.Tensor, states: Sequence[torch.Tensor], server: str) -> None:
        """Compares the projections of a server with float64 ones.

        Args:
            projected: [maps, T, R].
            states: of each map's layer [T, D], in the server's dtype.

        Raises:
            ValueError: they differ by more than float32 rounding explains.
        """
        for at, (layer, rows) in enumerate(zip(self.students, states, strict=True)):
            maps = self.bridge.for_layer(layer)
            assert maps.teacher_mean is not None and maps.teacher_basis is not None
            centred, basis = rows.double() - maps.teacher_mean.cpu().double(), maps.teacher_basis.cpu().double()
            scale = centred.norm(dim=-1) * basis.norm()
            off = float(((projected[at].double() - centred @ basis.T).norm(dim=-1) / scale.clamp_min(1e-30)).max())
            if not off < _TOLERANCE:
                raise ValueError(
                    f"{server} projects states for student layer {layer} by something else than the bridge: a row is "
                    f"off by {off:.1e}; expected at most {_TOLERANCE:g} in float32: look for a setting of "
                    "teacher.vllm.flags or of its environment that lowers the precision of multiplications"
                )

    def _parts(self) -> list[torch.Tensor]:
        """Returns the values of the file as tensors, in order: mean and basis of each map."""
        found = []
        for layer in self.students:
            maps = self.bridge.for_layer(layer)
            assert maps.teacher_mean is not None and maps.teacher_basis is not None
            found += [maps.teacher_mean, maps.teacher_basis]
        return [part.detach().to("cpu", torch.float32).contiguous() for part in found]
