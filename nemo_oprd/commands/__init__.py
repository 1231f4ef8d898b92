"""The commands that train, sample, measure and prepare: one file each, with the options. Other packages do the work."""
