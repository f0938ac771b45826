"""A plain request is read from its bytes as its message is, and answered alike.

Whatever else looks like one is none.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final, Protocol

import numpy as np
import pytest
import torch
from torch import nn

from penstock.actor.serving.calls.act_stream import ActStream
from penstock.actor.serving.codec.requests import Layout, PlainRequests
from penstock.actor.serving.versions.answering import Answered
from penstock.protocol.refusal import Reason, Refusal
from penstock.protocol.spaces import Box, Dict, Discrete, MultiDiscrete, Space
from penstock.protocol.tensor import to_tensor
from penstock.registry.records import Traffic
from penstock.registry.routing import Arms
from penstock.runtime import metrics
from penstock.v1 import policy_pb2 as pb
from penstock.v1.tensor_pb2 import Tensor
from tests.support.serving.server_parts import (
    ACTION,
    OBSERVATION,
    Stand,
    broken,
    parts_of,
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


def form_of(space: Space) -> PlainRequests:
    """For observations of a space."""
    return PlainRequests("default", space)


def drawn(space: Space, seed: int = 0) -> Any:
    """A value of a space."""
    random = np.random.default_rng(seed)
    match space:
        case Dict():
            return {name: drawn(part, seed) for name, part in space.spaces}
        case Box():
            return np.asarray(random.uniform(0, 1, space.shape), space.dtype)
    raise AssertionError(space)


class Asked(Protocol):
    """One way in."""

    async def __call__(
        self, stand: Stand, *requests: pb.ActRequest, told: list[Answered] | None = None
    ) -> list[pb.ActReply]:
        """Ask all at once; the replies stand in the order of the requests. told: of answers."""


async def by_stream(
    stand: Stand, *requests: pb.ActRequest, told: list[Answered] | None = None
) -> list[pb.ActReply]:
    """Over one ActStream."""

    async def act(request: pb.ActRequest, until_s: float) -> bytes:
        return (await stand.answer(request, until_s))[0].SerializeToString()

    async def sent() -> AsyncIterator[bytes]:
        for request in requests:
            yield request.SerializeToString()

    call = Call()
    await ActStream(stand.handler, act, ([] if told is None else told).append).serve(sent(), call)
    by_id = {reply.request_id: reply for reply in call.replies}
    return [by_id[request.request_id] for request in requests]


async def by_calls(
    stand: Stand, *requests: pb.ActRequest, told: list[Answered] | None = None
) -> list[pb.ActReply]:
    """An Act each."""
    service = stand.service(([] if told is None else told).append, learns=False)
    read = [service.read_act(request.SerializeToString()) for request in requests]
    replies = await asyncio.gather(*(service.act(request, Call()) for request in read))
    return [pb.ActReply.FromString(reply) for reply in replies]


@pytest.fixture(params=[by_stream, by_calls], ids=["ActStream", "Act"])
def asked(request: pytest.FixtureRequest) -> Asked:
    """Either way in."""
    way: Asked = request.param
    return way


@pytest.mark.parametrize("name", SPACES)
def test_the_bytes_of_one_observation_are_plain(name: str) -> None:
    space = SPACES[name]
    form, layout = form_of(space), Layout("observation", space)
    for seed, (policy, request_id) in enumerate((("", ""), ("", "a"), ("default", "b" * 127))):
        parts = parts_of(space, drawn(space, seed))
        request = pb.ActRequest(policy=policy, request_id=request_id, observation=parts)
        question = form.read(request.SerializeToString())
        assert question is not None
        assert (question.request_id, question.rows, question.shares_draw) == (request_id, 1, True)
        expected = layout.read("observation", parts, 0)
        assert question.observation.keys() == expected.keys()
        for path, array in expected.items():
            np.testing.assert_array_equal(question.observation[path], array, strict=True)


NOT_PLAIN: Final[dict[str, pb.ActRequest]] = {
    "nothing": pb.ActRequest(),
    "another id": pb.ActRequest(request_id="ä"),
    "a long id": pb.ActRequest(request_id="b" * 128),
    "another policy": pb.ActRequest(policy="other"),
    "rows": pb.ActRequest(batch=1),
    "a mask": pb.ActRequest(action_mask=[pb.Part(value=to_tensor(np.ones(3, bool)))]),
    "no chance": pb.ActRequest(deterministic=True),
    "a seed": pb.ActRequest(seed=0),
    "a key": pb.ActRequest(client_key="ada"),
    "a version": pb.ActRequest(version=1),
    "a wish": pb.ActRequest(want_value=True),
    "an episode": pb.ActRequest(episode_id="e"),
    "a deadline": pb.ActRequest(deadline_ms=1),
}
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


@pytest.mark.parametrize("wish", NOT_PLAIN)
def test_what_says_more_is_not_plain(wish: str) -> None:
    request = pb.ActRequest()
    request.CopyFrom(NOT_PLAIN[wish])
    if wish != "nothing":
        request.observation.extend(parts_of(OBSERVATION, seen(0)))
    assert form_of(OBSERVATION).read(request.SerializeToString()) is None


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_not_the_space_s_is_not_plain(wrong: str) -> None:
    request = pb.ActRequest(observation=[pb.Part(value=WRONG[wrong])])
    assert form_of(OBSERVATION).read(request.SerializeToString()) is None
    many = np.zeros(40, np.float32)
    many[-1] = np.nan
    spoilt = pb.ActRequest(observation=parts_of(SPACES["many numbers"], many))
    assert form_of(SPACES["many numbers"]).read(spoilt.SerializeToString()) is None


@pytest.mark.parametrize(
    "change", [b"\x12\x00", b"\x12\x02a", b"\x0a\x01a", b"\x0a\x07default" * 2, b"\x12\x01\xff", b"?"]
)
def test_bytes_in_front_that_are_no_id_are_not_plain(change: bytes) -> None:
    data = pb.ActRequest(observation=parts_of(OBSERVATION, seen(0))).SerializeToString()
    assert form_of(OBSERVATION).read(data) is not None
    assert form_of(OBSERVATION).read(change + data) is None


@pytest.mark.parametrize("space", [ACTION, Box(np.zeros(2, np.bool_), np.ones(2, np.bool_))])
def test_where_values_are_looked_at_one_by_one_nothing_is_plain(space: Space) -> None:
    value = np.array(1) if space is ACTION else np.ones(2, np.bool_)
    assert form_of(space).read(pb.ActRequest(observation=parts_of(space, value)).SerializeToString()) is None


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("observation", ["one", "nested"])
async def test_a_plain_request_is_answered_as_its_message_is(
    asked: Asked, observation: str, action: str
) -> None:
    made = specification(observation=SPACES[observation], action=ACTIONS[action])
    replies = []
    for is_message in (False, True):
        stand, told = Stand(made, learns=False), list[Answered]()
        await stand.publish(300)
        stand.batcher._expected = 64
        assert stand.loaded_versions.latest is not None
        stand.loaded_versions.latest.random.bit_generator.state = np.random.default_rng(5).bit_generator.state
        requests = [
            stand.asking(
                drawn(SPACES[observation], i),
                request_id=f"r{i}" if i else "",
                policy="default" if i % 2 else "",
            )
            for i in range(5)
        ]
        if is_message:
            stand.handler.reader._plain._has_any = False
        plain = [stand.handler.reader.read_plain(request.SerializeToString()) for request in requests]
        assert all((question is None) is is_message for question in plain)
        replies.append(await asked(stand, *requests, told=told))
        assert len(told) == 5
        beside = stand.asking(drawn(SPACES[observation]), want_value=True)
        mixed = await asked(stand, requests[1], beside, requests[0])
        assert [reply.request_id for reply in mixed] == ["r1", beside.request_id, ""]
        assert [len(reply.value) for reply in mixed] == [0, 1, 0]
    assert replies[0] == replies[1]


def _counted() -> dict[str, float]:
    families = (metrics.POLICY_CALLS, metrics.ANSWERS, metrics.ANSWER_SECONDS, metrics.SERVING_BATCH_ROWS)
    samples = [sample for family in families for one in family.collect() for sample in one.samples]
    wanted = [
        one for one in samples if one.name.endswith(("_total", "_count")) or "batch_rows_sum" in one.name
    ]
    return {f"{one.name}{one.labels}": one.value for one in wanted}


@pytest.mark.parametrize("wrong", [False, True])
async def test_what_is_counted_is_the_same(asked: Asked, wrong: bool) -> None:
    rises = []
    for is_message in (False, True):
        stand = Stand(learns=False)
        await stand.publish(1)
        stand.batcher._expected = 64
        stand.handler.reader._plain._has_any = not is_message
        requests = [stand.asking(seen(step)) for step in range(3)]
        if wrong:
            requests.append(pb.ActRequest(observation=[pb.Part(value=WRONG["NaN"])]))
        before = _counted()
        replies = await asked(stand, *requests)
        rises.append({name: value - before.get(name, 0) for name, value in _counted().items()})
        if wrong:
            refusal = Refusal.from_proto(replies[-1].refusal)
            assert refusal is not None
            assert "observation/: holds NaN or infinity" in refusal.detail
    assert rises[0] == rises[1]


@pytest.mark.filterwarnings("ignore:.* encountered in dot:RuntimeWarning")
async def test_who_cannot_be_answered_costs_his_neighbours_nothing(asked: Asked) -> None:
    stand, told = Stand(specification(activation="relu"), learns=False), list[Answered]()
    policy = policy_of(stand.specification, 1)
    with torch.no_grad():
        next(part for part in policy.modules() if isinstance(part, nn.Linear)).weight[:, 0] *= 1e36
    await stand.publish(1, policy=policy)
    stand.batcher._expected = 64
    huge = np.full(4, 1e4, np.float32)
    replies = await asked(stand, *(stand.asking(value) for value in (seen(0), huge, seen(1))), told=told)
    assert [reply.fallback for reply in replies] == [0, pb.FALLBACK_UNIFORM, 0]
    assert [reply.version for reply in replies] == [1, 0, 1]
    assert len(told) == 3


async def test_the_fallback_answers_plain_requests_too(asked: Asked) -> None:
    stand = Stand(learns=False)
    for version, policy in ((0, None), (1, None), (2, broken(policy_of(stand.specification, 2)))):
        if version:
            await stand.publish(version, policy=policy)
        (reply,) = await asked(stand, stand.asking(seen(0)))
        expected = {0: pb.FALLBACK_UNIFORM, 1: pb.FALLBACK_UNSPECIFIED, 2: pb.FALLBACK_PREVIOUS}
        assert reply.fallback == expected[version]
        assert reply.version == min(version, 1)


async def test_a_plain_request_is_not_answered_beyond_what_the_server_can_do(asked: Asked) -> None:
    stand = Stand(learns=False)
    await stand.publish(1)
    stand.batcher._max_delay_s = 0.1
    stand.batcher._cost.note(1, 5.0)
    stand.batcher._rows = 1
    (full,) = await asked(stand, stand.asking(seen(0), request_id="full"))
    assert (full.request_id, full.refusal.reason) == ("full", Reason.OVERLOADED.value)


async def test_a_shadow_looks_on_at_plain_requests_too(asked: Asked) -> None:
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


async def test_what_is_read_of_an_act_names_its_request() -> None:
    service = Stand(learns=False).service(learns=False)
    for want_value in (False, True):
        request = pb.ActRequest(
            request_id="r-7", observation=parts_of(OBSERVATION, seen(0)), want_value=want_value
        )
        assert service.read_act(request.SerializeToString()).request_id == "r-7"
