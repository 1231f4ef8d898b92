"""Proof that an engine computes a model's hidden states, by comparison with transformers' states on a few prompts.

`canary_prompts` makes the prompts, `reference_states` lets transformers compute their states in a process of its own,
`prove` compares, and `kept_verdict` reads a verdict that passed earlier. Nothing here depends on the engine: the same
code checks a model of this process, one that Megatron-Bridge has built and a server. docs/canary.md states the limits.

Shapes: T tokens of a prompt, D hidden size.
"""

from nemo_oprd.canary.prompts import canary_key, canary_prompts, keep_verdict, kept_verdict
from nemo_oprd.canary.reference import ReferenceStates, reference_states
from nemo_oprd.canary.verdict import CanaryRefused, CanaryVerdict, prove

__all__ = [
    "CanaryRefused",
    "CanaryVerdict",
    "ReferenceStates",
    "canary_key",
    "canary_prompts",
    "keep_verdict",
    "kept_verdict",
    "prove",
    "reference_states",
]
