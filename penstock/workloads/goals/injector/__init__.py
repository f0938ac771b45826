"""Proposing goals to a live system. Torch-free: it asks a policy server."""
