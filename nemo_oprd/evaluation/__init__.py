"""Evaluation on math problems: samples responses, grades their boxed answers, summarises the grades.

There is deliberately no checkpoint selection: selecting a checkpoint on the reported sets inflates the results.
"""
