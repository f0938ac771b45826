import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from functools import partial
from typing import Any, Final

import numpy as np
import pytest
import torch
from google.protobuf.message import DecodeError
from torch import nn

from penstock.actor.serving.batcher import Answered, NotFinite
from penstock.actor.serving.policy_service import MAX_IN_FLIGHT, ActStream
from penstock.actor.serving.request_handler import EVERY_S, OnReply, RequestErrors, rewards_of
from penstock.actor.serving.requests import Layout
from penstock.protocol.limits import MAX_NUMBER
from penstock.protocol.refusal import Reason, Refusal, Refused
from penstock.protocol.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Tuple, flatten
from penstock.protocol.tensor import to_tensor
from penstock.runtime import metrics
from penstock.v1 import policy_pb2 as pb
from penstock.v1.tensor_pb2 import Tensor
from tests.support.serving.server_parts import (
    FAR,
    OBSERVATION,
    Stand,
    loaded_of,
    parts_of,
    policy_of,
    question_of,
    ready,
    rows_of,
    seen,
    specification,
)

EVERY: Final = Dict((
    ("real", Box(np.full(2, -1, np.float32), np.full(2, 1, np.float32))),
    ("image", Box(np.zeros((2, 2), np.uint8), np.full((2, 2), 255, np.uint8))),
    ("one", Discrete(3, start=-1)),
    ("many", MultiDiscrete((2, 3))),
    ("bits", MultiBinary(3)),
    ("pair", Tuple((Discrete(2), Box(np.array(-1.0), np.array(1.0))))),
))  # fmt: skip
VALUE: Final = {
    "real": np.array([0.5, -2], np.float32),  # outside its bounds, as environments do
    "image": np.array([[0, 255], [7, 1]], np.uint8),
    "one": np.array(-1),
    "many": np.array([1, 2]),
    "bits": np.array([0, 1, 1], np.int8),
    "pair": (np.array(1), np.array(0.25)),
}
LAYOUT: Final = Layout("observation", EVERY)
NAMES: Final = "'real', 'image', 'one', 'many', 'bits', 'pair/0', 'pair/1'"


def sent(rows: int = 0, **changed: Any) -> list[pb.Part]:
    """VALUE as a message, `rows` times; other leaves where `changed` (pair_0: "pair/0")."""
    other = {name.replace("_", "/"): value for name, value in changed.items()}
    values = flatten(EVERY, VALUE) | other
    return [pb.Part(path=path, value=_tensor(value, rows)) for path, value in values.items()]


def _tensor(value: Any, rows: int) -> Tensor:
    if isinstance(value, Tensor):
        return value
    return to_tensor(np.stack([value] * rows) if rows else np.asarray(value))


def refused(parts: list[pb.Part], batch: int = 0) -> str:
    with pytest.raises(Refused) as error:
        LAYOUT.read("observation", parts, batch)
    assert error.value.refusal.reason is Reason.INVALID
    return error.value.refusal.detail


@pytest.mark.parametrize("batch", [0, 1, 3])
def test_every_kind_of_leaf_is_read_and_written_back(batch: int) -> None:
    parts = sent(batch)
    arrays = LAYOUT.read("observation", parts, batch)
    for name, value in flatten(EVERY, VALUE, "observation").items():
        np.testing.assert_array_equal(arrays[name], np.stack([value] * max(batch, 1)))
        assert arrays[name].dtype == np.asarray(value).dtype
    assert LAYOUT.write(arrays, batch) == parts


@pytest.mark.parametrize(
    ("leaf", "value", "said"),
    [
        ("real", np.zeros(2), "observation/real: float64(2,) came, float32(2,) is wanted"),
        ("real", np.zeros(3, np.float32), "observation/real: float32(3,) came, float32(2,) is wanted"),
        ("real", np.zeros((1, 2), np.float32), "float32(1, 2) came, float32(2,) is wanted"),
        ("real", np.array([0, np.nan], np.float32), "observation/real: holds NaN or infinity"),
        ("real", np.array([-np.inf, np.inf], np.float32), "observation/real: holds NaN or infinity"),
        (
            "real",
            np.array([0, -1001], np.float32),
            "observation/real: holds -1001, outside ±1000",
        ),
        ("real", Tensor(dtype="float32", shape=[2], data=bytes(7)), "8 bytes at 0 are needed, 7 are there"),
        ("real", Tensor(dtype="float32", shape=[2], data=bytes(9)), "9 bytes for 8 of content"),
        ("real", Tensor(dtype="object", shape=[2], data=bytes(8)), "observation/real: dtype 'object'"),
        ("real", Tensor(dtype="float32", shape=[1] * 9, data=bytes(4)), "observation/real: rank 9"),
        ("real", Tensor(dtype="float32", shape=[2**40], data=b""), "too large axis"),
        ("real", Tensor(), "observation/real: dtype ''"),
        ("image", np.zeros((2, 2), np.int8), "observation/image: int8(2, 2) came, uint8(2, 2) is wanted"),
        ("one", np.array(-2), "observation/one: holds -2, outside Discrete(n=3, start=-1"),
        ("one", np.array(2), "observation/one: holds 2, outside Discrete(n=3, start=-1"),
        ("one", np.array(1.0), "observation/one: float64() came, int64() is wanted"),
        ("many", np.array([1, 3]), "observation/many: holds 3, outside MultiDiscrete(nvec=(2, 3)"),
        ("many", np.array([2, 0]), "observation/many: holds 2"),
        ("bits", np.array([0, 2, 0], np.int8), "observation/bits: holds 2, outside MultiBinary(n=3"),
        ("pair_0", np.array(2), "observation/pair/0: holds 2"),
        ("pair_1", np.array(np.inf), "observation/pair/1: holds NaN or infinity"),
    ],
)
def test_a_wrong_leaf_is_named_with_the_expected_one(leaf: str, value: Any, said: str) -> None:
    assert said in refused(sent(**{leaf: value}))


def test_every_part_must_appear_once() -> None:
    parts = sent()
    assert f"6 parts, the space has {NAMES}" in refused(parts[1:])
    assert f"'real' is unknown or twice; give {NAMES}" in refused([parts[0], *parts[:-1]])
    parts[0].path = "depth"
    assert f"'depth' is unknown or twice; give {NAMES}" in refused(parts)
    parts[0].path = "x" * 10_000
    assert len(refused(parts)) < 300


def test_rows_must_match_the_declared_batch() -> None:
    assert "float32(3, 2) came, float32(2, 2) is wanted" in refused(sent(3), 2)


def test_one_bad_row_refuses_the_batch() -> None:
    parts = sent(3)
    parts[2].value.CopyFrom(to_tensor(np.array([0, 1, 7])))
    assert "observation/one: holds 7" in refused(parts, 3)


ACTIONS: Final = Layout(
    "action",
    Dict((("move", Discrete(3, start=5)), ("force", MultiDiscrete((2, 2))), ("hold", MultiBinary(2)))),
)


def mask(path: str = "move", value: Any = (True, False, True)) -> list[pb.Part]:
    return [pb.Part(path=path, value=to_tensor(np.asarray(value)))]


def test_masks_are_read_by_the_name_of_their_action() -> None:
    assert ACTIONS.read_masks([], 0) == {}
    single = ACTIONS.read_masks(mask(), 0)
    assert single is not None
    assert single["action/move"].tolist() == [[True, False, True]]
    rows = [[True, False, False], [False, True, True]]
    several = ACTIONS.read_masks(mask(value=rows), 2)
    assert several is not None
    assert several["action/move"].tolist() == rows
    choices = ACTIONS.read_masks(mask("force", [True, False, False, True]), 0)
    assert choices is not None
    assert choices["action/force"].tolist() == [[True, False, False, True]]


@pytest.mark.parametrize(
    ("parts", "batch", "said"),
    [
        (mask("hold"), 0, "no mask for 'hold'; leaves that take one: 'move', 'force'"),
        (mask("jump"), 0, "no mask for 'jump'; leaves that take one: 'move', 'force'"),
        (mask("force"), 0, "action_mask/force: bool(3,) came, bool(4,) is wanted"),
        (mask("force", [True, False, False, False]), 0, "action_mask/force: allows nothing"),
        (mask(value=[True, False]), 0, "action_mask/move: bool(2,) came, bool(3,) is wanted"),
        (mask(value=[1, 0, 1]), 0, "action_mask/move: int64(3,) came, bool(3,) is wanted"),
        (mask(), 2, "action_mask/move: bool(3,) came, bool(2, 3) is wanted"),
        (mask(value=[False] * 3), 0, "action_mask/move: allows nothing"),
        (mask(value=[[True] * 3, [False] * 3]), 2, "action_mask/move: allows nothing"),
        (
            [pb.Part(path="move", value=Tensor(dtype="bool", shape=[3], data=b"\1\2\0"))],
            0,
            "holds a bool that is neither 0 nor 1",
        ),
    ],
)
def test_a_wrong_mask_is_named_with_the_expected_one(parts: list[pb.Part], batch: int, said: str) -> None:
    with pytest.raises(Refused) as error:
        ACTIONS.read_masks(parts, batch)
    assert said in error.value.refusal.detail
    assert error.value.refusal.reason is Reason.INVALID


def test_a_space_without_choices_takes_no_mask() -> None:
    with pytest.raises(Refused, match="leaves that take one: none"):
        Layout("action", MultiBinary(2)).read_masks(mask(""), 0)


REPLIES_ACTIONS: Final[dict[str, Space]] = {
    "choice": Discrete(3, start=-1),
    "choices": MultiDiscrete((2, 3)),
    "bits": MultiBinary(3),
    "real": Box(np.full((2, 2), -1, np.float32), np.full((2, 2), 1, np.float32)),
    "nested": Dict((("move", Discrete(4)), ("force", Box(np.array(-1.0), np.array(1.0))))),
}


@pytest.mark.parametrize("batch", [0, 1, 3])
@pytest.mark.parametrize("action", REPLIES_ACTIONS)
async def test_every_kind_of_action_is_written_as_protobuf_does(action: str, batch: int) -> None:
    stand = Stand(specification(action=REPLIES_ACTIONS[action]))
    await stand.publish(300)
    rows = rows_of(max(batch, 1))["observation"]
    observation = parts_of(OBSERVATION, rows if batch else rows[0])
    for request_id in ("", "a", "b" * 128, "ä"):
        request = pb.ActRequest(request_id=request_id, observation=observation, batch=batch)
        written = await stand.reply(request, FAR)
        expected = stand.handler.writer.reply(request, stand.told[-1])
        assert expected.version == 300
        assert written == expected.SerializeToString()


OVERLOADED = Refused(Refusal(reason=Reason.OVERLOADED, detail="70 observations wait", retry_after_ms=9))


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [record.__dict__ for record in caplog.records]


def test_a_log_line_in_ten_seconds_counts_the_suppressed_ones(caplog: pytest.LogCaptureFixture) -> None:
    now = [100.0]
    request_errors = RequestErrors(lambda: now[0])
    with caplog.at_level(logging.INFO):
        for number in range(1000):
            request = pb.ActRequest(request_id=f"r-{number}", episode_id="e-1")
            assert request_errors.refused(request, OVERLOADED).retry_after_ms == 9
        request_errors.refused(
            pb.DescribeRequest(), Refused(Refusal(reason=Reason.INVALID, detail="policy=x"))
        )
        now[0] += EVERY_S
        request_errors.refused(pb.RewardRequest(request_id="late"), OVERLOADED)
    told = [
        (one["reason"], one.get("client_request_id"), one.get("episode_id"), one["others"])
        for one in lines(caplog)
    ]
    assert told == [
        ("overloaded", "r-0", "e-1", 0),
        ("invalid", None, None, 0),
        ("overloaded", "late", None, 999),
    ]


def test_a_version_that_fails_is_named_with_the_request_that_met_it(caplog: pytest.LogCaptureFixture) -> None:
    question = question_of(request_id="r-7")
    RequestErrors().failed(
        loaded_of(specification(), version=9), question, NotFinite("version 9: not finite")
    )
    (line,) = lines(caplog)
    assert (line["version"], line["client_request_id"]) == (9, "r-7")
    assert line["levelno"] == logging.ERROR
    assert line["exc_info"] is not None


def test_the_callers_text_is_in_the_reply_and_not_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    refused = Refused(Refusal(reason=Reason.INVALID, detail="'hunter2' is no word", logged="a word is none"))
    with caplog.at_level(logging.INFO):
        assert RequestErrors().refused(pb.DescribeRequest(), refused).detail == "'hunter2' is no word"
    (line,) = lines(caplog)
    assert line["detail"] == "a word is none"


def test_a_step_that_no_episode_can_have_is_refused() -> None:
    last = pb.RewardRequest(rewards=[pb.StepReward(step=MAX_NUMBER, amount=1.0)])
    assert rewards_of(None, last) == [(MAX_NUMBER, 1.0)]
    for step in (MAX_NUMBER + 1, 2**63, 2**64 - 1):
        request = pb.RewardRequest(rewards=[pb.StepReward(step=step, amount=1.0)])
        with pytest.raises(Refused, match=f"rewards.step={step}: no episode has more"):
            rewards_of(None, request)


REAL: Final = Box(np.full((2, 2), -1, np.float32), np.full((2, 2), 1, np.float32))
SPACES: Final[dict[str, Space]] = {
    "one": OBSERVATION,
    "nested": Dict((("seen", REAL), ("felt", OBSERVATION))),
}
IN_ACTIONS: Final[dict[str, Space]] = {
    "choice": Discrete(3, start=-1),
    "choices": MultiDiscrete((2, 3)),
    "nested": Dict((("move", Discrete(4)), ("force", REAL))),
}


class Caller:
    """gRPC's side of a call: what the server writes, which is read when `reads` is set."""

    def __init__(self) -> None:
        self.replies: list[pb.ActReply] = []
        self.reads = asyncio.Event()
        self.reads.set()
        self._is_written = False

    def time_remaining(self) -> None:
        """No deadline."""

    async def write(self, reply: bytes) -> None:
        """As a ServicerContext does: gRPC takes one at a time."""
        assert not self._is_written
        self._is_written = True
        await asyncio.sleep(0)
        await self.reads.wait()
        self._is_written = False
        self.replies.append(pb.ActReply.FromString(reply))

    def by_id(self) -> dict[str, pb.ActReply]:
        assert len({reply.request_id for reply in self.replies}) == len(self.replies)
        return {reply.request_id: reply for reply in self.replies}


async def stream_of(requests: Iterable[pb.ActRequest | bytes]) -> AsyncIterator[bytes]:
    for request in requests:
        await asyncio.sleep(0)
        yield request if isinstance(request, bytes) else request.SerializeToString()


def drawn(space: Space, seed: int) -> Any:
    if isinstance(space, Dict):
        return {name: drawn(part, seed) for name, part in space.spaces}
    assert isinstance(space, Box)
    return np.random.default_rng(seed).uniform(0, 1, space.shape).astype(space.dtype)


Way = Callable[..., Awaitable[list[pb.ActReply]]]
"""Asks all requests at once; the replies stand in the order of the requests."""


async def by_stream(stand: Stand, *requests: pb.ActRequest) -> list[pb.ActReply]:
    """Over one ActStream."""

    async def sent() -> AsyncIterator[bytes]:
        for request in requests:
            yield request.SerializeToString()

    caller = Caller()
    await ActStream(stand.handler.act).serve(sent(), caller)
    by_id = caller.by_id()
    return [by_id[request.request_id] for request in requests]


async def by_calls(stand: Stand, *requests: pb.ActRequest) -> list[pb.ActReply]:
    service = stand.service()
    replies = await asyncio.gather(*(service.act(request, Caller()) for request in requests))
    return [pb.ActReply.FromString(reply) for reply in replies]


@pytest.fixture(params=[by_stream, by_calls], ids=["ActStream", "Act"])
def asked(request: pytest.FixtureRequest) -> Way:
    way: Way = request.param
    return way


@pytest.mark.parametrize("action", IN_ACTIONS)
@pytest.mark.parametrize("observation", ["one", "nested"])
async def test_calls_and_streams_give_the_same_answers(observation: str, action: str) -> None:
    made = specification(observation=SPACES[observation], action=IN_ACTIONS[action])
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
async def test_a_request_that_cannot_be_answered_affects_no_other_request(asked: Way) -> None:
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


async def test_requests_beyond_the_servers_capacity_are_refused(asked: Way) -> None:
    stand = await ready(learns=False)
    stand.batcher._max_delay_s = 0.1
    stand.batcher._cost.note(1, 5.0)
    stand.batcher._rows = 1
    (full,) = await asked(stand, stand.asking(seen(0), request_id="full"))
    assert (full.request_id, full.refusal.reason) == ("full", Reason.OVERLOADED.value)


async def test_every_kind_of_request_is_answered_under_its_id() -> None:
    stand, caller = await ready(), Caller()
    stand.keep(7)
    requests = {
        "plain": stand.asking(seen(0), request_id="plain"),
        "episode": stand.asking(seen(0), request_id="episode", episode_id=stand.start()),
        "version": stand.asking(seen(0), request_id="version", version=7),
        "wrong": pb.ActRequest(request_id="wrong"),
        "unknown": stand.asking(seen(0), request_id="unknown", version=99),
    }
    await ActStream(stand.handler.act).serve(stream_of(requests.values()), caller)
    replies = caller.by_id()
    assert set(replies) == set(requests)
    assert [replies[name].version for name in ("plain", "episode", "version")] == [1, 1, 7]
    assert Refusal.from_proto(replies["wrong"].refusal).reason is Reason.INVALID  # type: ignore[union-attr]
    assert Refusal.from_proto(replies["unknown"].refusal).reason is Reason.UNKNOWN_VERSION  # type: ignore[union-attr]
    assert len(stand.told) == 3  # what was refused is no answer


async def test_a_request_is_not_answered_after_its_deadline() -> None:
    stand, caller = await ready(), Caller()
    late, patient = (
        stand.asking(seen(0), request_id=name, deadline_ms=ms) for name, ms in (("late", 1), ("patient", 0))
    )
    stand.batcher._is_busy = True  # a pass is under way
    serving = asyncio.create_task(ActStream(stand.handler.act).serve(stream_of([late, patient]), caller))
    waiting, clock = stand.batcher._waiting, stand.batcher._loop.time
    while len(waiting) < 2 or clock() < waiting[0].until_s:  # noqa: ASYNC110 - there is no event for time that passes
        await asyncio.sleep(0.001)
    stand.batcher._is_busy = False
    stand.batcher._schedule(0.0)
    await serving
    replies = caller.by_id()
    assert Refusal.from_proto(replies["late"].refusal).reason is Reason.DEADLINE  # type: ignore[union-attr]
    assert replies["patient"].version == 1


async def test_bytes_that_are_no_request_end_the_stream() -> None:
    stand, caller = await ready(), Caller()
    with pytest.raises(DecodeError):
        await ActStream(stand.handler.act).serve(stream_of([stand.asking(seen(0)), b"\xff\xff"]), caller)


async def test_an_unforeseen_error_ends_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    stand, caller = await ready(), Caller()

    def fail(_answered: Answered) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(stand.handler, "_note_answered", fail)
    with pytest.raises(ZeroDivisionError):
        await ActStream(stand.handler.act).serve(stream_of([stand.asking(seen(0))]), caller)


async def test_a_reply_does_not_wait_for_other_requests_of_its_stream() -> None:
    stand, caller = await ready(), Caller()
    slow = list[Callable[[], None]]()

    def act(request: pb.ActRequest, until_s: float, on_reply: OnReply, is_gone: Callable[[], bool]) -> None:
        if request.request_id == "slow":
            slow.append(partial(stand.handler.act, request, until_s, on_reply, is_gone))
        else:
            stand.handler.act(request, until_s, on_reply, is_gone)

    async def requests() -> AsyncIterator[bytes]:
        yield stand.asking(seen(0), request_id="slow").SerializeToString()
        yield stand.asking(seen(0), request_id="plain").SerializeToString()
        while not caller.replies:  # noqa: ASYNC110 - rounds of the loop are what is waited for
            await asyncio.sleep(0)
        slow[0]()

    await ActStream(act).serve(requests(), caller)
    assert [reply.request_id for reply in caller.replies] == ["plain", "slow"]


@pytest.mark.parametrize(("expected", "most"), [(1, 1), (MAX_IN_FLIGHT, MAX_IN_FLIGHT + 1)])
async def test_a_caller_that_goes_away_leaves_nothing(expected: int, most: int) -> None:
    stand, caller = await ready(), Caller()
    stand.batcher._expected = expected
    caller.reads.clear()
    read = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal read
        while True:
            await asyncio.sleep(0)
            read += 1
            yield stand.asking(seen(0)).SerializeToString()

    before = asyncio.all_tasks()
    call = asyncio.create_task(ActStream(stand.handler.act).serve(endless(), caller))
    while read < most:  # noqa: ASYNC110 - rounds of the loop are what is counted
        await asyncio.sleep(0)
    for _ in range(100):
        await asyncio.sleep(0)
    assert read == most
    call.cancel()
    await asyncio.wait([call])
    for _ in range(10):
        await asyncio.sleep(0)
    assert asyncio.all_tasks() == before
