"""Checkpoints: writing them, choosing one, resuming from it."""
