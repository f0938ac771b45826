"""Fixtures of tests of language models."""

from tests.support.language.language_learner import base, begin, broker, prompts, reward

__all__ = ["base", "begin", "broker", "prompts", "reward"]
