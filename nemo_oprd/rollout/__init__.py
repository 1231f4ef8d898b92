"""Rollouts: sampled from the student, or read from a file of recorded ones."""
