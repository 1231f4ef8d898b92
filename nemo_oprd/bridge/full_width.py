"""The full-width map of the paper's notation table: W_l h_S is compared with h_T, W_l being [Dt, Ds].

A full-width bridge needs neither a fit nor an artifact: W_l is drawn from the seed and trained with the student.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from nemo_oprd.bridge.covariance import LayerPair
from nemo_oprd.bridge.maps import Bridge, CapturePoint, LayerBridge, ModelIdentity

# the value of bridge.path that stands in place of a directory
FULL_WIDTH = "full_width"
# separates these draws from the run's other draws, which have the same seed
_STREAM = 0x57


def full_width_bridge(
    layers: Mapping[int, int], student: ModelIdentity, teacher: ModelIdentity, capture: CapturePoint
) -> Bridge:
    """The bridge between `layers` (student layer -> teacher layer), without tensors yet; its rank is Dt."""
    pairs = {LayerPair(*pair): LayerBridge() for pair in sorted(layers.items())}
    return Bridge(teacher.hidden_size, pairs, student, teacher, capture)


def draw_projector(seed: int, student_layer: int, teacher_width: int, student_width: int) -> torch.Tensor:
    """The initial W of a layer: float32 [Dt, Ds] from N(0, 1 / Ds), so that W h_S has about the size of h_S.

    The result depends on the arguments only, so it is the same on every rank and at every layout.
    """
    draw = np.random.default_rng((_STREAM, seed, student_layer))
    normal = draw.standard_normal((teacher_width, student_width), dtype=np.float32)
    return torch.from_numpy(normal) / student_width**0.5
