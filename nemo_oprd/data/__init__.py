"""The data that training reads: prompts, their preparation, their order, tokenizers and alignment.

`prompts` reads files; `preparation` adds a suffix, holds problems out, drops duplicates and compares with validation
sets; `order` is the order in which training visits prompts. `nemo_oprd.rollout` generates or replays rollouts, which
`nemo_oprd.batch.types.Rollout` represents.
`tokenizer` is the tokenizer of one model, `token_alignment` the alignment of two tokenizations. Models and losses see
ids only: a response is never decoded and encoded again for the model that sampled it.
"""
