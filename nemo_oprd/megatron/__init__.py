"""Everything that touches Megatron-core. `cpu.install()` patches Megatron where there is no CUDA."""

from nemo_oprd.megatron import cpu

cpu.import_uncompiled()  # before any other module of this package imports it
