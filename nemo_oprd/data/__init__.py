"""The data that training reads: prompts, what is done to them before training, and the order of training.

`prompts` reads files, `preparation` adds a suffix, holds out and drops, `contamination` compares with validation sets,
`order` is the order in which training visits prompts. Rollouts are generated or replayed by `nemo_oprd.rollout`, and
represented by `nemo_oprd.batch.types.Rollout`.
`tokenizer` is the tokenizer of one model, `align` the alignment of two tokenizations. Models and losses see ids only: a
response is never decoded and encoded again for the model that sampled it.
"""
