"""Rollout workers: environments are stepped, what happened becomes fragments."""
