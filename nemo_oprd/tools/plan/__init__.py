"""Estimates a run from its configuration and the models' config.json: memory, operations, bytes and seconds.

Everything here is arithmetic: no torch, no weights, no processes. `nemo-oprd plan` prints it. The memory of small
models is compared with counted live bytes in `tests/functional/test_capacity.py`.
"""
