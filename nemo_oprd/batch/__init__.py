"""From rollouts to microbatches, without torch: layouts of ranks, packing, the table of supervised tokens, the plan."""
