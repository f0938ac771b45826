"""Fixtures of tests of language models."""

from tests.support.language.fixtures import base, begin, broker, prompts, reward

__all__ = ["base", "begin", "broker", "prompts", "reward"]
