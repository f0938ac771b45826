"""Checkpoints on disk, when one is due, and which one a learner begins from."""
