"""The example client in JavaScript: its physics, and how it speaks."""

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator

import gymnasium as gym
import numpy as np
import pytest

from penstock.protocol.refusal import Reason
from tests.support.serving import node_client
from tests.support.serving.scripted_server import ScriptedPolicy, ScriptedServer, refuses, serving

TRAJECTORY = """
import { CartPole } from './cartpole.js';
const { state, actions } = JSON.parse(process.argv[1]);
const environment = new CartPole();
environment.state = state;
console.log(JSON.stringify(actions.map((action) => {
  const { observation, terminated } = environment.step(action);
  return [...observation, Number(terminated)];
})));
"""


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    """A server with the spaces of CartPole, which answers as the test says."""
    async with serving() as scripted:
        yield scripted


@pytest.fixture
def policy(server: ScriptedServer) -> ScriptedPolicy:
    """What the server does."""
    return server.policy


def test_the_physics_are_those_of_gymnasium() -> None:
    environment = gym.make("CartPole-v1").unwrapped
    first, _ = environment.reset(seed=3)
    state = [float(number) for number in environment.state]  # type: ignore[attr-defined]
    actions = [int(number) for number in np.random.default_rng(3).integers(0, 2, 12)]
    expected = []
    for action in actions:
        observation, _, terminated, _, _ = environment.step(action)
        expected.append([*observation, float(terminated)])
    done = subprocess.run(
        [
            node_client.node(), "--input-type=module", "-e", TRAJECTORY,
            json.dumps({"state": state, "actions": actions}),
        ],
        cwd=node_client.FOLDER, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert np.allclose(json.loads(done.stdout), expected, rtol=0, atol=1e-6)
    assert len(first) == 4


async def test_episodes_are_played_with_their_rewards(server: ScriptedServer, policy: ScriptedPolicy) -> None:
    result = await asyncio.to_thread(node_client.play, server.address, 3, learn=True)
    assert result["episodes"] == 3
    assert 8 <= result["mean_return"] <= 11
    assert len(policy.heard["Act"]) == 3 * result["mean_return"]
    assert [act.HasField("reward") for act in policy.heard["Act"][:2]] == [False, True]
    assert not policy.heard["StartEpisode"][0].not_learned
    assert policy.heard["EndEpisode"][0].reward == 1.0


async def test_lost_replies_and_overloads_cost_nothing(
    server: ScriptedServer, policy: ScriptedPolicy
) -> None:
    policy.lost["Act"] = [server.closes]
    policy.script["EndEpisode"] = [refuses(Reason.OVERLOADED, 50), refuses(Reason.EPISODE_UNKNOWN)]
    result = await asyncio.to_thread(node_client.play, server.address, 1)
    assert result["episodes"] == 1
    assert policy.heard["Act"][0] == policy.heard["Act"][1]
    assert policy.heard["EndEpisode"][0] == policy.heard["EndEpisode"][1]
    assert len(policy.heard["StartEpisode"]) == 2
    assert policy.heard["StartEpisode"][0].not_learned
