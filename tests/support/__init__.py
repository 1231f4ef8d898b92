"""What tests share, and benchmarks and studies with them: models, rollouts, shapes, measurements."""
