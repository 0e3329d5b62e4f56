"""A checkpoint on disk: its files, their sums, their formats, and how they replace each other."""
