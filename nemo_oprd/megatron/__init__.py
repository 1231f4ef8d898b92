"""The adapter to Megatron-core. `cpu_patches.install()` patches Megatron-core on machines without CUDA."""

from nemo_oprd.megatron import cpu_patches

cpu_patches.import_uncompiled()  # before any other module of this package imports Megatron-core
