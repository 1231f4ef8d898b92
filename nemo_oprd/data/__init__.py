"""What training reads: prompts and their order (`prompts`), and how responses are packed into microbatches (`packing`).

Rollouts are not read but made, by `nemo_oprd.rollout`; they travel as `nemo_oprd.batch.types.Rollout`.
"""
