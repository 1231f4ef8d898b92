"""The data that training reads: prompts, and the order in which training visits them (`prompts`).

Rollouts are generated or replayed by `nemo_oprd.rollout`, and represented by `nemo_oprd.batch.types.Rollout`.
"""
