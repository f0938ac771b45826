"""Act and ActStream are two ways into the same: answers, refusals, fallbacks and counts are alike."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import numpy as np
import pytest
import torch
from torch import nn

from penstock.actor.serving.policy_service import ActStream
from penstock.protocol.refusal import Reason, Refusal
from penstock.protocol.spaces import Box, Dict, Discrete, MultiDiscrete, Space
from penstock.protocol.tensor import to_tensor
from penstock.registry.records import Traffic
from penstock.registry.routing import Arms
from penstock.runtime import metrics
from penstock.v1 import policy_pb2 as pb
from penstock.v1.tensor_pb2 import Tensor
from tests.support.serving.server_parts import (
    OBSERVATION,
    Stand,
    broken,
    policy_of,
    seen,
    specification,
)

REAL: Final = Box(np.full((2, 2), -1, np.float32), np.full((2, 2), 1, np.float32))
SPACES: Final[dict[str, Space]] = {
    "one": OBSERVATION,
    "double": Box(np.array(-1.0), np.array(1.0)),
    "many numbers": Box(np.full(40, -1, np.float32), np.full(40, 1, np.float32)),
    "bytes": Box(np.zeros(3, np.uint8), np.full(3, 255, np.uint8)),
    "nested": Dict((("seen", REAL), ("felt", OBSERVATION))),
}
ACTIONS: Final[dict[str, Space]] = {
    "choice": Discrete(3, start=-1),
    "choices": MultiDiscrete((2, 3)),
    "nested": Dict((("move", Discrete(4)), ("force", REAL))),
}


class Call:
    """gRPC's side of a call."""

    def __init__(self) -> None:
        self.replies: list[pb.ActReply] = []

    def time_remaining(self) -> None:
        """No deadline."""

    async def write(self, reply: bytes) -> None:
        """Keep it."""
        self.replies.append(pb.ActReply.FromString(reply))


def drawn(space: Space, seed: int = 0) -> Any:
    """A value of a space."""
    random = np.random.default_rng(seed)
    match space:
        case Dict():
            return {name: drawn(part, seed) for name, part in space.spaces}
        case Box():
            return np.asarray(random.uniform(0, 1, space.shape), space.dtype)
    raise AssertionError(space)


Way = Callable[..., Awaitable[list[pb.ActReply]]]
"""Asks all requests at once; the replies stand in the order of the requests."""


async def by_stream(stand: Stand, *requests: pb.ActRequest) -> list[pb.ActReply]:
    """Over one ActStream."""

    async def sent() -> AsyncIterator[bytes]:
        for request in requests:
            yield request.SerializeToString()

    call = Call()
    await ActStream(stand.handler.act).serve(sent(), call)
    by_id = {reply.request_id: reply for reply in call.replies}
    return [by_id[request.request_id] for request in requests]


async def by_calls(stand: Stand, *requests: pb.ActRequest) -> list[pb.ActReply]:
    """An Act each."""
    service = stand.service()
    replies = await asyncio.gather(*(service.act(request, Call()) for request in requests))
    return [pb.ActReply.FromString(reply) for reply in replies]


@pytest.fixture(params=[by_stream, by_calls], ids=["ActStream", "Act"])
def asked(request: pytest.FixtureRequest) -> Way:
    """Either way in."""
    way: Way = request.param
    return way


WRONG: Final[dict[str, Tensor]] = {
    "dtype": to_tensor(np.zeros(4, np.int32)),
    "shape": to_tensor(np.zeros((1, 4), np.float32)),
    "too much": Tensor(dtype="float32", shape=[4], data=bytes(20)),
    "too little": Tensor(dtype="float32", shape=[4], data=bytes(12)),
    "NaN": to_tensor(np.array([0, np.nan, 0, 0], np.float32)),
    "infinity": to_tensor(np.array([0, 0, 0, -np.inf], np.float32)),
    "too far": to_tensor(np.array([0, -20_000, 0, 0], np.float32)),
    "both infinities": to_tensor(np.array([0, 0, np.inf, -np.inf], np.float32)),
}


@pytest.mark.parametrize("wrong", WRONG)
async def test_what_is_not_the_space_s_is_refused(asked: Way, wrong: str) -> None:
    stand = Stand(learns=False)
    await stand.publish(1)
    beside = [stand.asking(seen(step)) for step in range(2)]
    replies = await asked(
        stand, beside[0], pb.ActRequest(observation=[pb.Part(value=WRONG[wrong])]), beside[1]
    )
    refusals = [Refusal.from_proto(reply.refusal) for reply in replies]
    assert [refusal and refusal.reason for refusal in refusals] == [None, Reason.INVALID, None]
    if wrong in ("NaN", "infinity"):
        assert refusals[1] is not None
        assert "observation/: holds NaN or infinity" in refusals[1].detail


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("observation", ["one", "nested"])
async def test_both_ways_in_lead_to_the_same_answers(observation: str, action: str) -> None:
    made = specification(observation=SPACES[observation], action=ACTIONS[action])
    replies = []
    for asked in (by_stream, by_calls):
        stand = Stand(made, learns=False)
        await stand.publish(300)
        stand.batcher._expected = 64
        assert stand.loaded_versions.latest is not None
        stand.loaded_versions.latest.random.bit_generator.state = np.random.default_rng(5).bit_generator.state
        requests = [
            stand.asking(
                drawn(SPACES[observation], i),
                request_id=f"r{i}" if i else "",
                policy="default" if i % 2 else "",
                want_value=i == 4,
            )
            for i in range(5)
        ]
        before = _counted()
        replies.append(await asked(stand, *requests))
        assert len(stand.told) == 5
        assert [reply.request_id for reply in replies[-1]] == ["", "r1", "r2", "r3", "r4"]
        assert [len(reply.value) for reply in replies[-1]] == [0, 0, 0, 0, 1]
        rises = {name: value - before.get(name, 0) for name, value in _counted().items()}
        assert sum(rise for name, rise in rises.items() if "policy_calls" in name) == 5
        assert sum(rise for name, rise in rises.items() if "batch_rows_sum" in name) == 5
    assert replies[0] == replies[1]


def _counted() -> dict[str, float]:
    families = (metrics.POLICY_CALLS, metrics.SERVING_BATCH_ROWS)
    samples = [sample for family in families for one in family.collect() for sample in one.samples]
    wanted = [one for one in samples if one.name.endswith("_total") or "batch_rows_sum" in one.name]
    return {f"{one.name}{one.labels}": one.value for one in wanted}


@pytest.mark.filterwarnings("ignore:.* encountered in dot:RuntimeWarning")
async def test_who_cannot_be_answered_costs_his_neighbours_nothing(asked: Way) -> None:
    stand = Stand(specification(activation="relu"), learns=False)
    policy = policy_of(stand.specification, 1)
    with torch.no_grad():
        next(part for part in policy.modules() if isinstance(part, nn.Linear)).weight[:, 0] *= 1e36
    await stand.publish(1, policy=policy)
    stand.batcher._expected = 64
    huge = np.full(4, 1e4, np.float32)
    replies = await asked(stand, *(stand.asking(value) for value in (seen(0), huge, seen(1))))
    assert [reply.fallback for reply in replies] == [0, pb.FALLBACK_UNIFORM, 0]
    assert [reply.version for reply in replies] == [1, 0, 1]
    assert len(stand.told) == 3


async def test_the_fallback_answers_both_ways(asked: Way) -> None:
    stand = Stand(learns=False)
    for version, policy in ((0, None), (1, None), (2, broken(policy_of(stand.specification, 2)))):
        if version:
            await stand.publish(version, policy=policy)
        (reply,) = await asked(stand, stand.asking(seen(0)))
        expected = {0: pb.FALLBACK_UNIFORM, 1: pb.FALLBACK_UNSPECIFIED, 2: pb.FALLBACK_PREVIOUS}
        assert reply.fallback == expected[version]
        assert reply.version == min(version, 1)


async def test_no_request_is_answered_beyond_what_the_server_can_do(asked: Way) -> None:
    stand = Stand(learns=False)
    await stand.publish(1)
    stand.batcher._max_delay_s = 0.1
    stand.batcher._cost.note(1, 5.0)
    stand.batcher._rows = 1
    (full,) = await asked(stand, stand.asking(seen(0), request_id="full"))
    assert (full.request_id, full.refusal.reason) == ("full", Reason.OVERLOADED.value)


async def test_a_shadow_looks_on_both_ways(asked: Way) -> None:
    stand = Stand(learns=False)
    for number in (2, 3):
        stand.keep(number)
    traffic = Traffic(policy="default", shadow=3)
    await stand.loaded_versions.steer(Arms(active=2, canary=None, traffic=traffic, pinned=frozenset({2, 3})))
    before = metrics.SHADOW_AGREEMENT._sum.get()
    (reply,) = await asked(stand, stand.asking(seen(0)))
    assert reply.version == 2
    await stand.handler.shadow.finish()
    assert metrics.SHADOW_AGREEMENT._sum.get() > before
