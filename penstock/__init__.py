"""Penstock: an asynchronous actor-learner reinforcement-learning system."""

__version__ = "0.1.0"
