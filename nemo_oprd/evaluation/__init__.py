"""Evaluation on math problems: sampling responses, grading their boxed answers, summarising the grades.

Checkpoint selection is left out on purpose: choosing a checkpoint by the sets it is reported on inflates the report.
"""
