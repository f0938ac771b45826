"""What a step and a fragment cost, counted and not timed: a change that costs more is seen in any weather.

Calls are those that Python makes (functions of ours, of libraries and built-in ones); bytes are what is
allocated at the peak beyond what was there before. Limits have about a third of headroom over what was
counted when they were set: raise one only with a measurement that says what it buys.
"""

import asyncio
import math
import sys
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import grpc
import gymnasium
import numpy as np
import pytest

from penstock.actor.acting.stepper import Stepper
from penstock.actor.rollout.generator import FragmentBuilder, HeaderFields
from penstock.actor.serving import batcher
from penstock.actor.serving.policy_service import ActStream
from penstock.broker.log.connection import ServerFacts
from penstock.broker.log.store import Store
from penstock.broker.service.experience_service import Admission, ExperienceService, StagingLimit, check_all
from penstock.broker.service.process import build_boundary
from penstock.broker.service.sessions import Changes, LastCredit, SessionOwners
from penstock.broker.service.weight_service import WeightCache, WeightService
from penstock.config.settings import PolicySection, PPOSection
from penstock.learner.algorithms.ppo import PPO
from penstock.policy.policy import build
from penstock.protocol import append
from penstock.protocol.fragment import Fragment, check, header_bytes, parse_header
from penstock.protocol.messages import Durability, Publication, Role
from penstock.protocol.schema import fragment_schema
from penstock.protocol.spaces import Box, Discrete, Space
from penstock.protocol.specification import RunSpecification
from penstock.rpc.gate import Gate, RateLimits, Rates
from penstock.v1 import policy_pb2, weights_pb2
from tests.support.experience.experience import Environment, Line, box, cartpoles, collect, small_policy
from tests.support.run.small_run import CHARGE, SCHEMA, specification
from tests.support.run.small_run import fragment as small_fragment
from tests.support.run.store_run import Begin, new_actor
from tests.support.serving.server_parts import Stand, seen

STEPS, SLOTS, CLIENTS = 32, 16, 64
LARGE_BYTES = 2**20
FIELDS = HeaderFields(run="run-a", session=1, sequence=1, weights=Publication(1, 0), round=0)
OBSERVATION = Box(np.full(4, -10, np.float32), np.full(4, 10, np.float32))


def calls(work: Callable[[], Any]) -> int:
    """Calls that `work` makes, once it has been done before."""
    work()
    count = 0

    def note(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


def allocated(work: Callable[[], Any]) -> int:
    """Bytes that `work` holds at its peak beyond what was held before."""
    work()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        work()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


class Rollout:
    def __init__(self, vectorise: str) -> None:
        environment: Any = gymnasium.make_vec("CartPole-v1", SLOTS, vectorization_mode=vectorise)
        self.stepper = Stepper(environment, OBSERVATION)
        self.policy = build(OBSERVATION, Discrete(2), PolicySection(), seed=0)
        self.builder = FragmentBuilder(fragment_schema(OBSERVATION, Discrete(2)), STEPS, SLOTS)
        self.builder.start(self.stepper.reset(range(SLOTS)))

    def act(self) -> None:
        self.policy.act(self.builder.observation())

    def unroll(self) -> Fragment:
        while not self.builder.is_full:
            acted = self.policy.act(self.builder.observation())
            stepped = self.stepper.step(self.policy.environment_action(acted.action))
            self.builder.record(acted.action, acted.log_prob, stepped)
        return self.builder.cut(FIELDS)[0]


@pytest.fixture
def rollout() -> Rollout:
    """With the environment's own vector entry point, so that the environment is few of the calls."""
    return Rollout("vector_entry_point")


def lines(count: int) -> Sequence[Environment]:
    return [Line(8, "terminated") for _ in range(count)]


@pytest.mark.parametrize("of", [(Discrete(2), cartpoles), (box(1), lines)], ids=["a choice", "reals"])
def test_the_calls_of_a_gradient_step_are_bounded(
    of: tuple[Space, Callable[[int], Sequence[Environment]]],
) -> None:
    action, environments = of
    policy = small_policy(0, action)
    batch, counted = collect(policy, environments), []
    for epochs in (1, 5):
        ppo = PPO(policy, PPOSection(epochs=epochs, learning_rate=0.0), seed=0)
        counted.append(calls(partial(ppo.update, batch, progress=0.0)))
    assert (counted[1] - counted[0]) / (4 * PPOSection().minibatches) <= 140


def admit(raw: bytes, run: RunSpecification) -> None:
    assert check_all(1, append.parse(raw).fragments, run).refusal is None


def test_the_calls_of_a_forward_pass_are_bounded(rollout: Rollout) -> None:
    assert calls(rollout.act) <= 75


def test_the_calls_of_a_step_are_bounded(rollout: Rollout) -> None:
    assert calls(rollout.unroll) / STEPS <= 180


def test_the_calls_to_admit_a_fragment_are_bounded() -> None:
    raw = append.encode(1, 0, [small_fragment(1, sequence) for sequence in range(1, 17)])
    assert calls(lambda: admit(raw, specification())) / 16 <= 115


def test_the_calls_to_read_a_fragment_are_bounded() -> None:
    given = small_fragment(1)
    encoded = header_bytes(given.header)

    def read() -> None:
        fragment = Fragment(parse_header(encoded), given.payload)
        check(fragment, SCHEMA, "run-a")
        fragment.arrays()

    assert calls(read) <= 500


Call = Callable[[bytes, Any], Awaitable[Any]]


class Caller:
    """gRPC's side: of a broker on this machine, or of a policy server, whose requests are all there."""

    def __init__(self) -> None:
        self.answered = 0

    def peer(self) -> str:
        return "unix:"

    def time_remaining(self) -> None:
        """No deadline."""

    async def write(self, _reply: bytes) -> None:
        self.answered += 1

    async def requests(self, data: bytes) -> AsyncIterator[bytes]:
        for _ in range(CLIENTS):
            yield data


async def call_of(service: Any, name: str) -> Call:
    """What a broker does for a call, from bytes to the reply: gate and handler."""
    gate = Gate(build_boundary(), RateLimits(Rates(calls=1e9, bytes=1e12)))
    method: Any = SimpleNamespace(
        method=f"/penstock.v1.{type(service).__name__}/{name}", invocation_metadata=()
    )
    read = weights_pb2.WatchLatestRequest.FromString  # Append has a parser of its own
    served = grpc.unary_unary_rpc_method_handler(getattr(service, name), read)

    async def find(_details: object) -> object:
        return served

    gated = await gate.intercept_service(find, method)
    call: Call = gated.unary_unary
    return call


def append_of(store: Store, session: int) -> tuple[Any, list[bytes]]:
    """The service, and what is sent to it."""
    owners, admission = (
        SessionOwners(store.owner_of, store.confirm),
        Admission(store.specification, store.confirm),
    )
    facts = ServerFacts(version="7", durability=Durability.MEMORY, max_memory_bytes=0)
    service = ExperienceService(store, admission, StagingLimit(2**20), facts, owners, LastCredit(), Changes())
    return service, [append.encode(session, 0, [small_fragment(session, i + 1)]) for i in range(2 * STEPS)]


def watch_of(store: Store, session: int) -> tuple[Any, list[bytes]]:
    owners = SessionOwners(store.owner_of, store.confirm)
    service = WeightService(store, WeightCache(store.weights_chunk), Changes(), owners, LastCredit())
    asked = weights_pb2.WatchLatestRequest(session=session, known_version=1).SerializeToString()
    return service, [asked] * (2 * STEPS)


@pytest.mark.parametrize(("of", "name", "most"), [(append_of, "Append", 600), (watch_of, "WatchLatest", 340)])
def test_calls_of_a_broker(
    redis_url: str, begin: Begin, of: Callable[..., Any], name: str, most: int
) -> None:
    begin(budget=10_000 * CHARGE)
    with asyncio.Runner() as runner:
        store = Store.connect(redis_url)
        service, sent = of(store, runner.run(new_actor(store, "server-0", role=Role.SERVER)).session)
        call = runner.run(call_of(service, name))

        async def send() -> None:
            for _ in range(STEPS):
                reply = await call(sent.pop(0), Caller())
                assert name != "Append" or not reply.HasField("refusal")

        assert calls(lambda: runner.run(send())) / STEPS <= most
        runner.run(store.aclose())


async def crowded(**asked: Any) -> tuple[Stand, bytes]:
    stand = Stand()
    await stand.publish(1)
    stand.batcher._expected = CLIENTS
    return stand, stand.asking(seen(0), **asked).SerializeToString()


async def act_of(stand: Stand) -> Callable[[bytes, Any], Any]:
    service = stand.service()
    return lambda data, context: service.act(policy_pb2.ActRequest.FromString(data), context)


@pytest.fixture
def pass_in_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every forward pass leaves the loop's thread, so that none of its calls is counted here.

    Otherwise its CPU time decides. `test_the_calls_of_a_forward_pass_are_bounded` counts a pass.
    """
    monkeypatch.setattr(batcher, "INLINE_S", 0.0)


@pytest.mark.usefixtures("pass_in_thread")
@pytest.mark.parametrize(("asked", "most"), [({}, 105), ({"client_key": "ada"}, 113)])
def test_the_calls_to_answer_a_request_are_bounded(asked: dict[str, Any], most: int) -> None:
    with asyncio.Runner() as runner:
        stand, data = runner.run(crowded(**asked))
        act, context = runner.run(act_of(stand)), Caller()

        async def client() -> None:
            for _ in range(STEPS):
                await act(data, context)

        async def crowd() -> None:
            await asyncio.gather(*(client() for _ in range(CLIENTS)))

        assert calls(lambda: runner.run(crowd())) / (CLIENTS * STEPS) <= most


@pytest.mark.usefixtures("pass_in_thread")
def test_the_calls_of_a_learned_step_are_bounded() -> None:
    with asyncio.Runner() as runner:
        stand, _ = runner.run(crowded())
        act, context = runner.run(act_of(stand)), Caller()
        asked = [stand.asking(seen(0), episode_id=stand.start(), request_id="") for _ in range(CLIENTS)]

        async def client(request: policy_pb2.ActRequest) -> None:
            for _ in range(STEPS):
                await act(request.SerializeToString(), context)
                request.reward = 1.0

        async def crowd() -> None:
            await asyncio.gather(*map(client, asked))

        assert calls(lambda: runner.run(crowd())) / (CLIENTS * STEPS) <= 210
        assert all(episode.learned for episode in stand.episodes)


def test_the_calls_to_answer_a_lonely_request_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batcher, "INLINE_S", math.inf)
    with asyncio.Runner() as runner:
        stand, data = runner.run(crowded())
        stand.batcher._expected, stand.batcher._until_probe = 1, 3 * STEPS
        act, context = runner.run(act_of(stand)), Caller()

        async def client() -> None:
            for _ in range(STEPS):
                await act(data, context)

        assert calls(lambda: runner.run(client())) / STEPS <= 265


@pytest.mark.usefixtures("pass_in_thread")
@pytest.mark.parametrize(("asked", "most"), [({}, 95), ({"client_key": "ada"}, 135)])
def test_the_calls_to_answer_a_request_of_a_stream_are_bounded(asked: dict[str, Any], most: int) -> None:
    with asyncio.Runner() as runner:
        stand, data = runner.run(crowded(**asked))
        asking = Caller()

        async def serve() -> None:
            await ActStream(stand.handler.act).serve(asking.requests(data), asking)

        assert calls(lambda: runner.run(serve())) / CLIENTS <= most
        assert asking.answered == 2 * CLIENTS


def test_the_copies_of_a_payload_on_its_way_out_are_bounded(rollout: Rollout) -> None:
    fragment = rollout.unroll()

    def refill_and_cut() -> None:
        rollout.builder.length = STEPS
        rollout.builder.cut(FIELDS)

    assert allocated(refill_and_cut) <= len(fragment.payload) + 32_768


def test_a_payload_is_copied_once_when_sent_and_never_when_admitted() -> None:
    wide = Box(
        np.full(LARGE_BYTES // (4 * (STEPS + 1)), -1, np.float32),
        np.full(LARGE_BYTES // (4 * (STEPS + 1)), 1, np.float32),
    )
    builder = FragmentBuilder(fragment_schema(wide, Discrete(2)), STEPS, 1)
    builder.length = STEPS
    given, _ = builder.cut(FIELDS)
    run = replace(specification(), schema=fragment_schema(wide, Discrete(2)), unroll_length=STEPS)
    raw = append.encode(1, 0, [given])
    assert allocated(lambda: append.encode(1, 0, [given])) <= len(given.payload) + 65_536
    assert allocated(lambda: admit(raw, run)) <= 65_536
