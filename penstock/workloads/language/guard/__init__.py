"""Guardrails outside the policy: what may be said to it, and what of it to people. Loads no torch."""
