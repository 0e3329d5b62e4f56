"""Saving and restoring states: one checkpoint, or those of a run."""
