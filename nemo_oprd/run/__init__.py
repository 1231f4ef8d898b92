"""A run from its configuration to its end: what it is (`resolve`, `checks`), what it reads (`data`, `resume`), what it
is built of (`models`, `training`), its checkpoints, and what it records.
"""
