"""What makes distillation fail silently, found before a run: `nemo-oprd doctor` (docs/doctor.md)."""
