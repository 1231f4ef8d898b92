"""See `nemo_rl`."""
