"""A stand-in for NeMo-RL 0.7.0, with the interfaces that this project uses and code of its own.

It lets the loss, the worker and the policy of `nemo_oprd.integrations` run where NeMo-RL is not. Names, parameters and
the order of events are NeMo-RL's; test_nemo_rl.py compares the signatures with a source tree where `NEMO_RL_SOURCE`
names one, and runs the same cases on it.
"""
