"""Checks and measurements that are no part of the package: run from the source tree."""
