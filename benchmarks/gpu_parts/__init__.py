"""The parts of `benchmarks/gpu_check.py`: what one GPU can tell of correctness, memory and speed in a few minutes."""
