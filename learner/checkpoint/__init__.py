"""Checkpoints: written, chosen, resumed from."""
