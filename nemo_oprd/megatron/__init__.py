"""Everything that touches Megatron-core. `cpu_patches.install()` patches Megatron where there is no CUDA."""

from nemo_oprd.megatron import cpu_patches

cpu_patches.import_uncompiled()  # before any other module of this package imports it
