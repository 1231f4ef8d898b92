"""How much of a loss is computed at a time, for the losses and for `plan`, which imports no torch."""

from __future__ import annotations

# Rows converted to float32 at a time. This bounds the transient memory of a value and of its gradient, for width 4096
# to 8192 x 4096 x 4 B = 128 MiB each.
ROW_CHUNK = 8192
# Columns per step of an operation that would otherwise need one more [c, V] tensor; wide enough for an efficient GEMM.
SLAB = 16384
