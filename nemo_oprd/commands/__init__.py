"""The commands that train, sample, measure and prepare: one file each, with its options. Other packages do the work."""
