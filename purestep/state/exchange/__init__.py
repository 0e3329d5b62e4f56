"""Checkpoints to and from what other libraries read and write."""
