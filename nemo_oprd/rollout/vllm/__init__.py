"""vLLM as the rollout engine: servers in processes and an environment of their own (docs/vllm.md)."""
