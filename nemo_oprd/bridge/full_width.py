"""The full-width map of the paper's notation table: W_l in R^(d_T x d_S) on the student's side, the teacher's states as
they are. There is nothing to fit and no artifact to start from: W is drawn from the seed and learned with the student.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from nemo_oprd.bridge.covariance import LayerPair
from nemo_oprd.bridge.maps import Bridge, CapturePoint, LayerBridge, ModelIdentity

# the word in place of a directory: bridge.path=full_width
FULL_WIDTH = "full_width"
# keeps these draws apart from the run's others, which have the same seed
_STREAM = 0x57


def full_width_bridge(
    layers: Mapping[int, int], student: ModelIdentity, teacher: ModelIdentity, capture: CapturePoint
) -> Bridge:
    """A bridge without tensors for student layer -> teacher layer; its rank is d_T."""
    pairs = {LayerPair(*pair): LayerBridge() for pair in sorted(layers.items())}
    return Bridge(teacher.hidden_size, pairs, student, teacher, capture)


def draw_projector(seed: int, student_layer: int, teacher_width: int, student_width: int) -> torch.Tensor:
    """Where W starts: float32 [d_T, d_S], N(0, 1 / d_S), so that W h has about the size of h.

    A pure function of its arguments: the same on every rank and at every layout.
    """
    draw = np.random.default_rng((_STREAM, seed, student_layer))
    normal = draw.standard_normal((teacher_width, student_width), dtype=np.float32)
    return torch.from_numpy(normal) / student_width**0.5
