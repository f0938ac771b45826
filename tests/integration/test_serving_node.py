"""A policy server played by another language."""

import pytest

from tests import node_client


@pytest.mark.skip(reason="waits for the policy server")
def test_a_node_client_plays_episodes_that_are_learned_from(serving: str) -> None:
    """`serving` is the address of a policy server with a CartPole policy that learns: HOST:PORT or unix:/path."""
    result = node_client.play(serving, 5, learn=True)
    assert result["episodes"] == 5
    assert 1 <= result["mean_return"] <= 500


@pytest.mark.skip(reason="waits for the policy server")
def test_a_node_client_plays_episodes_that_are_not_learned_from(serving: str) -> None:
    """The same without `--learn`."""
    assert node_client.play(serving, 2)["episodes"] == 2
