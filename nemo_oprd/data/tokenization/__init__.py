"""Text and token ids: the tokenizer of one model (`tokenizer`), and the alignment of two tokenizations (`align`).

Models and losses see ids only. A response is never decoded and encoded again for the model that sampled it.
"""
