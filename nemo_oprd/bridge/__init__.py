"""OPRD-Bridge, the parts that are pure arithmetic: statistics of paired hidden states, the fit, and the artifact.

`sampling` says which responses train, select and test, and keeps a bounded sample of rows; `covariance` accumulates
second moments; `fit` turns them into a teacher basis and a student projector; `rank` says how many dimensions to keep
and compares with baselines; `adamw` is the paper's own training; `maps` is the result in memory, `artifact` saves and
loads it; `ps_bank` reads the paper's files;
`build` puts it together. Nothing here knows Megatron: each rank feeds the rows that it holds, in any
order.
"""
