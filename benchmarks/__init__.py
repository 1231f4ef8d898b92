"""Checks and measurements that are not part of the package; run them from the source tree."""
