"""Environments as rollouts and evaluations step them: action masks and the rewards of the learner."""
