"""Text and token ids: one model's tokenizer here, the alignment of two tokenizations beside it.

Models and losses see ids only; a response is never decoded and encoded again on its way to the model that sampled it.
"""
