"""Rollouts, which an engine samples from the student or a file of recorded ones provides."""
