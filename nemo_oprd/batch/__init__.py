"""Turns rollouts into microbatches, without torch: layouts, packing, the table of supervised tokens, the plan."""
