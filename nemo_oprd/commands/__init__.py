"""The commands that train, sample, measure and prepare, one file each: options. The work is in the rooms below."""
