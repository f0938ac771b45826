"""Learner: reads the log, updates the policy, publishes, checkpoints."""
