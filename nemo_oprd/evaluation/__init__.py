"""Evaluation on math problems: samples responses, grades their boxed answers, summarises the grades.

There is deliberately no checkpoint selection: a selection on the reported sets would inflate the results.
"""
