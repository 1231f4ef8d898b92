"""Rollouts: sampled by an engine from the student, or read from a file of recorded rollouts."""
