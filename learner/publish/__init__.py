"""Weights on their way out, and versions worth keeping."""
