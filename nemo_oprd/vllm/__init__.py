"""vLLM servers, in processes and an environment of their own: some sample for the student (`engine.py`,
docs/vllm.md), others compute the states of teachers (`teacher_servers.py`, docs/teacher_placement.md).

`worker/` holds the modules that vLLM's own processes import.
"""
