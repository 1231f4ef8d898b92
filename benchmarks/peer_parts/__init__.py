"""The parts of `benchmarks.peers`: its batches, and the processes that it measures."""
