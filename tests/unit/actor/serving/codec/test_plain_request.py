"""A plain request gets, from bytes to bytes, the reply that it would have got as a message; whatever else looks like one is none."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import numpy as np
import pytest

from actor.serving.calls.act_stream import ActStream
from actor.serving.calls.policy_service import PolicyService
from actor.serving.calls.request_handler import Answered
from actor.serving.codec.arrays import Layout
from actor.serving.codec.plain_request import Plain, PlainForm
from actor.serving.codec.replies import ReplyEncoder
from penstock.registry.records import Traffic
from penstock.registry.routing import Arms
from penstock.runtime import metrics
from penstock.v1 import policy_pb2 as pb
from penstock.v1.tensor_pb2 import Tensor
from penstock.wire.refusal import Reason, Refusal
from penstock.wire.spaces import Box, Dict, Discrete, MultiDiscrete, Space
from penstock.wire.tensor import to_tensor
from tests.support.serving.server_parts import (
    ACTION,
    FAR,
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
    """gRPC's side of a call without a deadline, or of a stream."""

    def __init__(self, left_s: float | None = None) -> None:
        self.left_s, self.replies = left_s, list[pb.ActReply]()

    def time_remaining(self) -> float | None:
        """In seconds."""
        return self.left_s

    async def write(self, reply: bytes) -> None:
        """Of a stream."""
        self.replies.append(pb.ActReply.FromString(reply))


def form_of(space: Space) -> PlainForm:
    """For observations of a space."""
    return PlainForm(
        "default", Layout("observation", space), space, ReplyEncoder(Layout("action", ACTION), ACTION)
    )


def drawn(space: Space, seed: int = 0) -> Any:
    """A value of a space."""
    random = np.random.default_rng(seed)
    match space:
        case Dict():
            return {name: drawn(part, seed) for name, part in space.spaces}
        case Box():
            return np.asarray(random.uniform(0, 1, space.shape), space.dtype)
    raise AssertionError(space)


def act_of(stand: Stand, told: list[Answered] | None = None) -> Callable[..., Any]:
    """The method Act of a server; `told`: of what it answered."""
    made = stand.specification
    service = PolicyService(
        stand.desk,
        stand.turns,
        stand.episode_desk,
        stand.episodes,
        stand.section,
        (made.run, made.observation_space, made.action_space),
        learns=False,
        on_answer=([] if told is None else told).append,
    )
    return service.act_on_bytes


async def asked(
    act: Callable[..., Any], *requests: pb.ActRequest, left_s: float | None = None
) -> list[pb.ActReply]:
    """All at once."""
    replies = await asyncio.gather(*(act(request.SerializeToString(), Call(left_s)) for request in requests))
    return [pb.ActReply.FromString(reply) for reply in replies]


@pytest.mark.parametrize("name", SPACES)
def test_the_bytes_of_one_observation_are_plain(name: str) -> None:
    """With an id or without, with the policy or without; read as it was sent, several as rows of one question."""
    space = SPACES[name]
    form, values = form_of(space), [drawn(space, seed) for seed in range(3)]
    sent = [
        pb.ActRequest(
            policy=policy, request_id=request_id, observation=parts_of(space, value)
        ).SerializeToString()
        for policy, request_id, value in zip(("", "", "default"), ("", "a", "b" * 127), values, strict=True)
    ]
    assert all(map(form.holds, sent))
    read = form.observation([Plain(form, data, b"") for data in sent])
    layout = Layout("observation", space)
    assert all(len(rows) == 3 for rows in read.values())
    for row, value in enumerate(values):
        for path, array in layout.read("observation", parts_of(space, value), 0).items():
            np.testing.assert_array_equal(read[path][row], array[0])


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
    "both infinities": to_tensor(np.array([0, 0, np.inf, -np.inf], np.float32)),
}


@pytest.mark.parametrize("wish", NOT_PLAIN)
def test_what_says_more_is_not_plain(wish: str) -> None:
    """Whatever it is."""
    request = pb.ActRequest()
    request.CopyFrom(NOT_PLAIN[wish])
    if wish != "nothing":
        request.observation.extend(parts_of(OBSERVATION, seen(0)))
    assert not form_of(OBSERVATION).holds(request.SerializeToString())


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_not_the_space_s_is_not_plain(wrong: str) -> None:
    """It is read as a message, to be refused with words."""
    request = pb.ActRequest(observation=[pb.Part(value=WRONG[wrong])])
    assert not form_of(OBSERVATION).holds(request.SerializeToString())
    many = np.zeros(40, np.float32)
    many[-1] = np.nan
    spoilt = pb.ActRequest(observation=parts_of(SPACES["many numbers"], many))
    assert not form_of(SPACES["many numbers"]).holds(spoilt.SerializeToString())


@pytest.mark.parametrize(
    "change", [b"\x12\x00", b"\x12\x02a", b"\x0a\x01a", b"\x0a\x07default" * 2, b"\x12\x01\xff", b"?"]
)
def test_bytes_in_front_that_are_no_id_are_not_plain(change: bytes) -> None:
    """An empty one, one of another length, another policy, one twice, no text, no field."""
    data = pb.ActRequest(observation=parts_of(OBSERVATION, seen(0))).SerializeToString()
    assert form_of(OBSERVATION).holds(data)
    assert not form_of(OBSERVATION).holds(change + data)


@pytest.mark.parametrize("space", [ACTION, Box(np.zeros(2, np.bool_), np.ones(2, np.bool_))])
def test_where_values_are_looked_at_one_by_one_nothing_is_plain(space: Space) -> None:
    """Choices and bits have a range."""
    value = np.array(1) if space is ACTION else np.ones(2, np.bool_)
    assert not form_of(space).holds(pb.ActRequest(observation=parts_of(space, value)).SerializeToString())


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("observation", ["one", "nested"])
async def test_a_plain_request_is_answered_as_its_message_is(observation: str, action: str) -> None:
    """Byte for byte, given the same draw; alone and beside others that are none."""
    made = specification(observation=SPACES[observation], action=ACTIONS[action])
    replies = []
    for is_message in (False, True):
        stand, told = Stand(made, learns=False), list[Answered]()
        await stand.publish(300)
        stand.batcher._expected = 64
        assert stand.shelf.latest is not None
        act, random = act_of(stand, told), stand.shelf.latest.random
        random.bit_generator.state = np.random.default_rng(5).bit_generator.state
        requests = [
            stand.asking(
                drawn(SPACES[observation], i),
                request_id=f"r{i}" if i else "",
                policy="default" if i % 2 else "",
            )
            for i in range(5)
        ]
        if is_message:
            stand.desk._plain._has_any = False
        replies.append(await asked(act, *requests))
        assert len(told) == 5
        assert all(bool(answered.reply) is not is_message for answered in told)
        beside = stand.asking(drawn(SPACES[observation]), want_value=True)
        mixed = await asked(act, requests[1], beside, requests[0])
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
async def test_what_is_counted_is_the_same(wrong: bool) -> None:
    """Calls, answers, rows and passes; nothing but the call of what is refused."""
    rises = []
    for is_message in (False, True):
        stand = Stand(learns=False)
        await stand.publish(1)
        stand.batcher._expected = 64
        stand.desk._plain._has_any = not is_message
        requests = [stand.asking(seen(step)) for step in range(3)]
        if wrong:
            requests.append(pb.ActRequest(observation=[pb.Part(value=WRONG["NaN"])]))
        before = _counted()
        replies = await asked(act_of(stand), *requests)
        rises.append({name: value - before.get(name, 0) for name, value in _counted().items()})
        if wrong:
            refusal = Refusal.from_proto(replies[-1].refusal)
            assert refusal is not None
            assert "observation/: holds NaN or infinity" in refusal.detail
    assert rises[0] == rises[1]


@pytest.mark.filterwarnings("ignore:.* encountered in dot:RuntimeWarning")
async def test_who_cannot_be_answered_costs_his_neighbours_nothing() -> None:
    """He gets the fallback, they get the version's answers."""
    stand, told = Stand(specification(activation="relu"), learns=False), list[Answered]()
    await stand.publish(1)
    stand.batcher._expected = 64
    huge = np.full(4, 3e38, np.float32)
    replies = await asked(act_of(stand, told), *(stand.asking(value) for value in (seen(0), huge, seen(1))))
    assert [reply.fallback for reply in replies] == [0, pb.FALLBACK_UNIFORM, 0]
    assert [reply.version for reply in replies] == [1, 0, 1]
    assert len(told) == 3


async def test_the_fallback_answers_plain_requests_too() -> None:
    """Before there are weights, and when the newest cannot answer; over both kinds of call."""
    stand = Stand(learns=False)
    for version, policy in ((0, None), (1, None), (2, broken(policy_of(stand.specification, 2)))):
        if version:
            await stand.publish(version, policy=policy)
        (single,) = await asked(act_of(stand), stand.asking(seen(0)))
        call = Call()
        await ActStream(stand.desk, _never, lambda _answered: None).serve(_one(stand), call)
        for reply in (single, *call.replies):
            expected = {0: pb.FALLBACK_UNIFORM, 1: pb.FALLBACK_UNSPECIFIED, 2: pb.FALLBACK_PREVIOUS}
            assert reply.fallback == expected[version]
            assert reply.version == min(version, 1)


async def _never(_request: pb.ActRequest, _until_s: float) -> bytes:
    raise AssertionError


async def _one(stand: Stand) -> AsyncIterator[bytes]:
    yield stand.asking(seen(0)).SerializeToString()


async def test_a_plain_request_is_not_answered_after_its_deadline_nor_beyond_what_the_server_can_do() -> None:
    """Refused under its id, as any other."""
    stand = Stand(learns=False)
    await stand.publish(1)
    (late,) = await asked(act_of(stand), stand.asking(seen(0), request_id="late"), left_s=-1.0)
    assert (late.request_id, late.refusal.reason) == ("late", Reason.DEADLINE.value)
    stand.batcher._max_delay_s = 0.1
    stand.batcher._cost.note(1, 5.0)
    stand.batcher._rows = 1
    (full,) = await asked(act_of(stand), stand.asking(seen(0), request_id="full"))
    assert (full.request_id, full.refusal.reason) == ("full", Reason.OVERLOADED.value)


async def test_only_where_all_are_answered_alike_are_requests_plain() -> None:
    """Not where somebody's key decides, a shadow looks on, or another version stands in."""
    stand = Stand(learns=False)
    assert not asks_plainly(stand)
    await stand.publish(1)
    assert asks_plainly(stand)
    for number in (2, 3):
        stand.keep(number)
    for active, traffic in (
        (2, {}),
        (2, {"canary_share": 0.5}),
        (2, {"shadow": 3}),
        (2, {"pins": {"ada": 3}}),
        (9, {}),
    ):
        known: dict[str, Any] = {"traffic": Traffic(policy="default", **traffic), "pinned": frozenset({2, 3})}
        await stand.shelf.steer(Arms(active=active, canary=3 if "canary_share" in traffic else None, **known))
        assert asks_plainly(stand) is (active == 2 and not traffic)


def asks_plainly(stand: Stand) -> bool:
    """Whether a plain request is answered without a message."""
    data = stand.asking(seen(0)).SerializeToString()
    return stand.desk.ask_plain(data, FAR, lambda _said: None, lambda: False)


async def test_who_hangs_up_is_not_computed_for() -> None:
    """His call counts all the same; who asked beside him is answered."""
    stand = Stand(learns=False)
    await stand.publish(1)
    stand.batcher._expected = 64
    act, data, before = act_of(stand), stand.asking(seen(0)).SerializeToString(), _counted()
    gone, stays = (asyncio.create_task(act(data, Call())) for _ in range(2))
    while len(stand.batcher._waiting) < 2:  # noqa: ASYNC110 - rounds of the loop are what is waited for
        await asyncio.sleep(0)
    gone.cancel()
    assert pb.ActReply.FromString(await stays).version == 1
    rises = {name: value - before.get(name, 0) for name, value in _counted().items()}
    assert rises["penstock_policy_calls_total{'call': 'act'}"] == 2
    assert rises["penstock_policy_batch_rows_sum{}"] == 1
