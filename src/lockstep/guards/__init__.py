"""The checks that are always on: one file each."""
