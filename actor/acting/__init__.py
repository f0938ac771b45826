"""Environments that rollouts and evaluations step, their action masks and what the learner is given as reward."""
