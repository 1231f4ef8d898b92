"""Stands in for Transformer Engine on a machine without CUDA, where the real one can't be imported.

Put the folder above this one on the path of a process of its own, before Megatron is imported. The classes take the
arguments, in order, that the real ones of `__version__` take (`tests/functional/te_signatures.json`), have parameters
and buffers of the same names, and compute the same in plain PyTorch. `__version__` follows the installed Megatron-core:
2.11.0 for 0.16, 2.20.2 for later ones. Arguments that would change the result and that Megatron's layers don't use here
are refused, never ignored. Nothing of the real package's kernels, FP8 or CUDA is in it: what passes here proves names,
shapes, marks, arithmetic and communication, not that the real layers run.
"""

from . import common, interfaces, pytorch  # noqa: F401

__version__ = interfaces.VERSION
