import nemo_oprd.megatron  # noqa: F401 - before any other import of Megatron-core, which it readies for the CPU
