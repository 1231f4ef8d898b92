"""A run from its configuration to its end: its checks (`resolve`, `checks`), its inputs (`inputs`, `data`, `resume`),
its parts (`models`, `start`), its checkpoints, and its records of metrics, rollouts and times.
"""
