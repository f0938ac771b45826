"""Whole episodes of an environment that lives in the client."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.client import EpisodeElsewhere, ExternalEnvironment, PolicyClient
from penstock.protocol.refusal import Reason
from penstock.v1 import policy_pb2 as pb
from tests.support.serving.scripted_server import ScriptedPolicy, ScriptedServer, refuses

EXAMPLE = Path(__file__).resolve().parents[4] / "examples" / "python" / "cartpole_client.py"


class Corridor:
    """Three steps of reward 1, 2 and 3; counts its resets."""

    def __init__(self, *, truncates: bool = False) -> None:
        self.seeds: list[int | None] = []
        self._truncates = truncates
        self._at = 0

    def reset(self, *, seed: int | None = None) -> tuple[Any, Any]:
        """At its beginning."""
        self.seeds.append(seed)
        self._at = 0
        return [0.0] * 4, {}

    def step(self, action: int, /) -> tuple[Any, Any, bool, bool, Any]:
        """One further."""
        assert isinstance(action, int)
        self._at += 1
        is_over = self._at == 3
        return (
            [float(self._at)] * 4,
            self._at,
            is_over and not self._truncates,
            is_over and self._truncates,
            {},
        )


def run(address: str, environment: Corridor, episodes: int) -> list[float]:
    """The returns."""
    with PolicyClient(address) as client:
        return list(ExternalEnvironment(client).run(environment, episodes, seed=4))


@pytest.mark.parametrize("truncates", [True, False])
async def test_rewards_travel_with_the_next_step(
    server: ScriptedServer, policy: ScriptedPolicy, truncates: bool
) -> None:
    environment = Corridor(truncates=truncates)
    assert await asyncio.to_thread(run, server.address, environment, 2) == [6.0, 6.0]
    assert environment.seeds == [4, None]
    acts: list[pb.ActRequest] = policy.heard["Act"]
    assert [act.reward if act.HasField("reward") else None for act in acts] == [None, 1.0, 2.0] * 2
    end: pb.EndEpisodeRequest = policy.heard["EndEpisode"][0]
    assert end.reward == 3.0
    assert end.ending == (pb.ENDING_TRUNCATED if truncates else pb.ENDING_TERMINATED)
    assert len(end.final_observation) == 1
    assert policy.heard["Reward"] == []


async def test_an_episode_that_is_lost_is_played_anew(server: ScriptedServer, policy: ScriptedPolicy) -> None:
    environment = Corridor()
    policy.script["EndEpisode"] = [refuses(Reason.EPISODE_UNKNOWN), refuses(Reason.EPISODE_ELSEWHERE)]
    assert await asyncio.to_thread(run, server.address, environment, 1) == [6.0]
    assert len(environment.seeds) == 3
    assert len(policy.heard["StartEpisode"]) == 3


async def test_a_server_that_loses_every_episode_is_given_up(
    server: ScriptedServer, policy: ScriptedPolicy
) -> None:
    policy.script["EndEpisode"] = [refuses(Reason.EPISODE_ELSEWHERE)] * 3
    with pytest.raises(EpisodeElsewhere):
        await asyncio.to_thread(run, server.address, Corridor(), 1)


async def test_the_example_plays_cartpole(server: ScriptedServer, policy: ScriptedPolicy) -> None:
    command = [sys.executable, str(EXAMPLE), server.address, "2"]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    printed, _ = await process.communicate()
    assert process.returncode == 0
    returns = [float(line) for line in printed.split()]
    assert sum(returns) == len(policy.heard["Act"])
    assert all(8 <= total <= 11 for total in returns)
