"""The process and its machine: files, locks, signals, messages, exits, waits, the watchdog. Independent of models."""
