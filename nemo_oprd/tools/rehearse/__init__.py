"""A dress rehearsal: the real step of a rank of a large job, at full size, on fake CUDA tensors, without a GPU.

`command.py` starts one process per rehearsed rank (`rank.py`), because such a process changes torch for good. It
prints their reports beside `plan`'s numbers. Training imports nothing of this package.
"""
