"""The maps of a bridge in a worker of a teacher's server; see `nemo_oprd_bridge.py`.

D hidden size, R bridge rank, n rows.
"""

from __future__ import annotations

import torch
from nemo_oprd_bridge import PROJECTED_ROWS, BridgeFile
from nemo_oprd_files import open_bucket


class Projection:
    """The maps of a bridge on the worker's device.

    Attributes:
        layers: for each map, the layer whose states it projects.
    """

    def __init__(self, file: BridgeFile, device: torch.device) -> None:
        """Reads the maps; ValueError if they are not those that `file` describes."""
        raw = file.read(open_bucket(file.path, file.size))
        values = torch.frombuffer(raw, dtype=torch.float32).view(len(file.layers), 1 + file.rank, file.width).to(device)
        self.digest, self.layers, self.rank = file.digest, file.layers, file.rank
        self._means, self._bases = values[:, :1], values[:, 1:]

    def project(self, states: list[torch.Tensor]) -> torch.Tensor:
        """Projects the states [n, D] of each map's layer; returns float32 [maps, n, R]."""
        found = torch.empty(len(states), len(states[0]), self.rank)
        for at, rows in enumerate(states):
            for start in range(0, len(rows), PROJECTED_ROWS):
                part = rows[start : start + PROJECTED_ROWS].to(self._means.device, torch.float32)
                found[at, start : start + len(part)] = ((part - self._means[at]) @ self._bases[at].T).cpu()
        return found
