"""Guardrails outside the policy: what may be said to it, and what of it may be said to people.

No policy is asked and none is needed, and nothing here loads torch.
"""
