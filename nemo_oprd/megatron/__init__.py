"""Everything that touches Megatron-core. Import `ready()` first: it patches Megatron where there is no CUDA."""
