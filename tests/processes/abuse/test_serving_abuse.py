"""Clients of a policy server that are wrong, greedy or gone.

Refused with a reason, and no other caller notices.
"""

import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import grpc
import numpy as np
import pytest

from penstock.client import PolicyClient
from penstock.protocol.limits import MAX_MESSAGE_BYTES, MIB
from penstock.protocol.refusal import Reason, Refusal
from penstock.protocol.tensor import to_tensor
from penstock.v1 import policy_pb2 as pb
from penstock.v1.policy_pb2_grpc import PolicyServiceStub
from penstock.v1.tensor_pb2 import Tensor
from tests.support.abuse.corpus import STREAM, asking, case, observing, rpcs
from tests.support.abuse.stage import Memory, memory_within, open_files
from tests.support.abuse.wire import Answer, RawChannel, answer_of
from tests.support.run import harness
from tests.support.run.harness import BrokerProcess, eventually
from tests.support.run.serving_run import ServedRun

SEED: Final = 20_261
WINDOW: Final = 32
MOST_EPISODES: Final = 1000
TIMEOUT_S: Final = 2.0
GROWTH_BYTES: Final = 32 * MIB
"""What the process may grow by in any of these tests.

What it holds for requests in hand, and fragmentation.
"""
STREAM_BYTES: Final = 48 * MIB
"""The same for replies that are not read: 256 of them, and gRPC's buffers."""
PATIENCE_S: Final = 120.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    folder = tmp_path_factory.mktemp("abused")
    run = ServedRun(folder / "run")
    run.describe()
    run.promote(run.next_version())
    settings: dict[str, Any] = {
        "max_episodes": MOST_EPISODES,
        "episode_timeout_s": TIMEOUT_S,
        "max_calls_per_s": 1e6,
    }
    with harness.server(folder, run.folder, **settings) as process:
        yield process


@contextmanager
def unharmed(server: BrokerProcess, most: int = GROWTH_BYTES) -> Iterator[Memory]:
    """The server is ready, has logged no failure, has not grown, and answers an honest client."""
    before = errors(server.log)
    with (
        PolicyClient(server.address, deadline_s=PATIENCE_S) as honest,
        memory_within(server.process.pid, most) as memory,
    ):
        honest.act(np.zeros(4, np.float32))
        yield memory
        assert honest.act(np.zeros(4, np.float32)).version == 1
    assert errors(server.log) == before
    assert server.get("/readyz")[0] == 200


def errors(log: Path) -> list[str]:
    return [line for line in log.read_text().splitlines() if " request_id=" in line or "Traceback" in line]


@contextmanager
def stub_of(server: BrokerProcess) -> Iterator[PolicyServiceStub]:
    with RawChannel(server.address) as raw:
        yield PolicyServiceStub(raw.channel)


def refusal_of(reply: Any) -> Refusal:
    refusal = Refusal.from_proto(reply.refusal)
    assert refusal is not None, reply
    return refusal


def part(**fields: Any) -> list[pb.Part]:
    return [pb.Part(value=Tensor(**fields))]


WRONG: Final[dict[str, tuple[dict[str, Any], Reason, str]]] = {
    "shape": ({"observation": observing([0.0] * 3)}, Reason.INVALID, "float32(3,) came, float32(4,)"),
    "rank": (
        {"observation": part(dtype="float32", shape=[1] * 60, data=bytes(4))}, Reason.INVALID, "rank 60",
    ),
    "dtype": ({"observation": observing(dtype="float64")}, Reason.INVALID, "float64(4,) came"),
    "size": (
        {"observation": part(dtype="float32", shape=[2**62, 4], data=bytes(16))}, Reason.INVALID, "too large",
    ),
    "bytes": (
        {"observation": part(dtype="float32", shape=[4], data=bytes(15))}, Reason.INVALID, "15 are there",
    ),
    "nan": ({"observation": observing([0, np.nan, 0, 0])}, Reason.INVALID, "NaN or infinity"),
    "infinity": ({"observation": observing([0, np.inf, 0, 0])}, Reason.INVALID, "NaN or infinity"),
    "no parts": ({"observation": []}, Reason.INVALID, "0 parts, the space has ''"),
    "parts": ({"observation": observing() * 5000}, Reason.INVALID, "5000 parts, the space has ''"),
    "path": ({"observation": observing(path="p" * 10_000)}, Reason.INVALID, "is unknown or twice"),
    "batch": ({"batch": 2**32 - 1}, Reason.INVALID, "at most 1024 rows"),
    "rows": ({"batch": 1024}, Reason.INVALID, "float32(1024, 4) is wanted"),
    "mask": (
        {"action_mask": [pb.Part(value=to_tensor(np.zeros(3, bool)))]}, Reason.INVALID, "allows nothing",
    ),
    "state": ({"state": observing()}, Reason.INVALID, "no recurrent state"),
    "policy": ({"policy": "p" * 10_000}, Reason.INVALID, "'default' is served"),
    "client key": ({"client_key": "k" * 257}, Reason.INVALID, "1 to 256 characters"),
    "request id": ({"request_id": "r" * 129}, Reason.INVALID, "at most 128"),
    "version": ({"version": 99}, Reason.UNKNOWN_VERSION, "version=99: its weights are not held"),
    "large version": ({"version": 2**64 - 1}, Reason.UNKNOWN_VERSION, "its weights are not held"),
    "episode": ({"episode_id": "x"}, Reason.EPISODE_UNKNOWN, "no such id was ever given"),
    "elsewhere": ({"episode_id": "deadbeef-1-cafecafecafe"}, Reason.EPISODE_ELSEWHERE, "start a new one"),
}  # fmt: skip


def test_wrong_requests_are_refused_with_the_field(server: BrokerProcess) -> None:
    with unharmed(server), stub_of(server) as stub:
        requests = {name: asking(**({"request_id": name} | fields)) for name, (fields, _, _) in WRONG.items()}
        streamed = list(stub.ActStream(iter(requests.values()), timeout=PATIENCE_S))
        assert len(streamed) == len(WRONG)
        by_id = {reply.request_id: reply for reply in streamed}
        for name, (_, reason, words) in WRONG.items():
            request = requests[name]
            for reply in (stub.Act(request, timeout=PATIENCE_S), by_id[request.request_id]):
                refusal = refusal_of(reply)
                assert (refusal.reason, words in refusal.detail) == (reason, True), (name, refusal)
                assert len(refusal.detail) < 400
                assert not reply.action


def test_a_message_beyond_the_limit_is_refused_by_the_transport(server: BrokerProcess) -> None:
    with unharmed(server, 4 * MAX_MESSAGE_BYTES + GROWTH_BYTES), RawChannel(server.address) as channel:
        path = STREAM.replace("ActStream", "Act")
        large = asking(observation=part(dtype="float32", shape=[4], data=bytes(2 * MAX_MESSAGE_BYTES)))
        answer = channel.send(path, large.SerializeToString())
        assert answer.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        near = asking(observation=part(dtype="float32", shape=[4], data=bytes(MAX_MESSAGE_BYTES - 1000)))
        reply = pb.ActReply.FromString(channel.send(path, near.SerializeToString()).data)
        assert refusal_of(reply).reason is Reason.INVALID


def test_calls_that_grpc_itself_refuses_write_no_lines(server: BrokerProcess) -> None:
    size = server.log.stat().st_size
    with unharmed(server), RawChannel(server.address) as channel:
        for _ in range(100):
            answer = channel.send("/penstock.v1.PolicyService/Act", b"", compression=grpc.Compression.Gzip)
            assert answer.code is grpc.StatusCode.UNIMPLEMENTED, answer
    assert server.log.stat().st_size - size < 100 * len("Compression algorithm 'gzip' is disabled")


@pytest.mark.promise("repeated-call-gets-reply")
def test_a_call_replayed_a_thousand_times_counts_once(server: BrokerProcess) -> None:
    with unharmed(server), stub_of(server) as stub:
        start = pb.StartEpisodeRequest(request_id="replayed", client_key="replay")
        (episode,) = {stub.StartEpisode(start).episode_id for _ in range(100)}
        first = asking("first", episode_id=episode)
        (step,) = {stub.Act(first).step for _ in range(300)}
        second = asking("second", episode_id=episode, reward=1.0)
        assert (step, stub.Act(second).step) == (0, 1)
        assert refusal_of(stub.Act(first)).reason is Reason.INVALID
        reward = pb.RewardRequest(
            episode_id=episode, request_id="r", rewards=[pb.StepReward(step=0, amount=2.0)]
        )
        assert {stub.Reward(reward).late for _ in range(300)} == {0}
        end = pb.EndEpisodeRequest(episode_id=episode, request_id="e", ending=pb.ENDING_TERMINATED)
        assert {
            (reply.length, reply.total_return) for reply in (stub.EndEpisode(end) for _ in range(300))
        } == {(2, 3.0)}


def late_rewards(episode_id: str, first_step: int = 0) -> pb.RewardRequest:
    steps = range(first_step, first_step + 1024)
    return pb.RewardRequest(
        episode_id=episode_id, rewards=[pb.StepReward(step=step, amount=1.0) for step in steps]
    )


@pytest.mark.promise("clients-cannot-exhaust-server")
def test_late_rewards_of_episodes_that_never_were_are_not_stored(server: BrokerProcess) -> None:
    with unharmed(server), PolicyClient(server.address) as client, stub_of(server) as stub:
        episode = client.start_episode()
        name, number, token = episode.episode_id.split("-")
        forged = [
            f"{name}-999999-" + "x" * 100_000,
            f"{name}-999999-{token}",
            f"{name}-{number}-{'0' * 12}",
            f"{name}-{'9' * 5000}-{token}",
            f"{name}-\0",
        ]
        before = registry_bytes(server)
        for episode_id in forged:
            refusal = refusal_of(stub.Reward(late_rewards(episode_id), timeout=PATIENCE_S))
            assert refusal.reason is Reason.EPISODE_UNKNOWN, refusal
            assert len(refusal.detail) < 400
        assert registry_bytes(server) == before
        episode.act(np.zeros(4, np.float32))
        far = stub.Reward(late_rewards(episode.episode_id, 2**63), timeout=PATIENCE_S)
        assert refusal_of(far).reason is Reason.INVALID


def registry_bytes(server: BrokerProcess) -> int:
    return sum(path.stat().st_size for path in server.log.parent.glob("run/registry.sqlite*"))


def test_only_the_connection_that_calls_too_often_is_refused(tmp_path: Path) -> None:
    run = ServedRun(tmp_path / "run")
    run.describe()
    run.promote(run.next_version())
    data = asking().SerializeToString()
    with (
        harness.server(
            tmp_path, run.folder, "server", "--set=broker.max_calls_per_s=1", max_calls_per_s=5
        ) as server,
        RawChannel(server.address) as loud,
        PolicyClient(server.address, deadline_s=PATIENCE_S) as quiet,
    ):
        flying = [loud.start("/penstock.v1.PolicyService/Act", data) for _ in range(60)]
        for _ in range(4):
            quiet.act(np.zeros(4, np.float32))
        answers = [answer_of(call) for call in flying]
    refused = [answer for answer in answers if answer.code is grpc.StatusCode.RESOURCE_EXHAUSTED]
    assert len(refused) >= 40
    assert "serving.max_calls_per_s" in refused[0].text


def send_all(channel: RawChannel, cases: Iterator[tuple[str, bytes]]) -> Counter[str]:
    """Keep WINDOW calls in flight; how often each status came."""
    seen: Counter[str] = Counter()
    flying: list[Any] = []

    def land() -> None:
        answer: Answer = answer_of(flying.pop(0))
        assert answer.code in (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT), answer
        assert answer.code is grpc.StatusCode.OK or "that are no" in answer.text, answer
        seen[answer.code.name] += 1

    for path, data in cases:
        flying.append(channel.start(path, data))
        if len(flying) >= WINDOW:
            land()
    while flying:
        land()
    return seen


def plan(cases: int, seed: int) -> Iterator[tuple[str, bytes]]:
    for number in range(cases):
        for rpc in rpcs():
            yield rpc.path, case(str(rpc), seed, number)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("cases", [600, pytest.param(20_000, marks=[pytest.mark.slow])])
def test_random_bytes_do_not_break_a_policy_server(server: BrokerProcess, cases: int) -> None:
    with RawChannel(server.address) as channel:
        send_all(channel, plan(200, SEED + 1))
        with unharmed(server):
            before = server.refused("malformed")
            seen = send_all(channel, plan(cases, SEED))
            assert server.refused("malformed") - before == seen["INVALID_ARGUMENT"]
    print(dict(seen))
    assert seen["INVALID_ARGUMENT"] > cases // 2
    assert seen["OK"] > cases


def test_random_bytes_do_not_break_a_stream(server: BrokerProcess) -> None:
    ends: Counter[str] = Counter()
    with unharmed(server), RawChannel(server.address) as channel:
        for number in range(200):
            messages = [case("Act", SEED, 5 * number + index) for index in range(5)]
            call = channel.channel.stream_stream(STREAM, None, None)(iter(messages), timeout=PATIENCE_S)
            try:
                replies = [pb.ActReply.FromString(data) for data in call]
                assert len(replies) == 5
                ends["OK"] += 1
            except grpc.RpcError as error:
                assert call.code() is grpc.StatusCode.INVALID_ARGUMENT, error
                assert "no ActRequest" in call.details()
                ends["INVALID_ARGUMENT"] += 1
    assert min(ends["OK"], ends["INVALID_ARGUMENT"]) >= 1, ends


@pytest.mark.promise("clients-cannot-exhaust-server")
def test_ten_thousand_abandoned_episodes_take_limited_memory(server: BrokerProcess) -> None:
    with unharmed(server, 64 * MIB), RawChannel(server.address) as channel:
        path = STREAM.replace("ActStream", "StartEpisode")
        flying: list[Any] = []
        seen: Counter[str] = Counter()
        refused_in_a_row = most = 0
        for number in range(10_000):
            request = pb.StartEpisodeRequest(request_id=f"flood-{number}", client_key="k" * 250)
            flying.append(channel.start(path, request.SerializeToString()))
            if len(flying) < WINDOW:
                continue
            reply = pb.StartEpisodeReply.FromString(answer_of(flying.pop(0)).data)
            if reply.episode_id:
                seen["started"] += 1
                refused_in_a_row = 0
            else:
                refusal = refusal_of(reply)
                assert refusal.reason is Reason.OVERLOADED
                assert "serving.max_episodes" in refusal.detail
                assert refusal.retry_after_ms > 0
                seen["refused"] += 1
                refused_in_a_row += 1
                most = max(most, refused_in_a_row)
        for future in flying:
            answer_of(future)
        assert seen["started"] >= MOST_EPISODES
        assert seen["refused"] > 0
        assert open_episodes(server) <= MOST_EPISODES
        eventually(lambda: open_episodes(server) == 0, "all given up", within_s=60)
        with PolicyClient(server.address, deadline_s=PATIENCE_S) as client:
            assert client.start_episode().act(np.zeros(4, np.float32)).step == 0


def open_episodes(server: BrokerProcess) -> int:
    page = server.get("/metrics")[1].splitlines()
    return next(
        int(float(line.split()[-1])) for line in page if line.startswith("penstock_policy_episodes_open")
    )


@pytest.mark.promise("clients-cannot-exhaust-server")
def test_a_stream_is_not_read_while_its_client_does_not_read(server: BrokerProcess) -> None:
    sent = itertools.count()
    taken = 0

    def endless() -> Iterator[pb.ActRequest]:
        nonlocal taken
        for taken in sent:
            if taken == 20_000:
                return
            yield asking(
                str(taken), observation=observing(np.zeros((128, 4))), batch=128, want_distribution=True
            )

    files = open_files(server.process.pid)
    with (
        unharmed(server, STREAM_BYTES),
        PolicyClient(server.address, deadline_s=PATIENCE_S) as honest,
        stub_of(server) as stub,
    ):
        call = stub.ActStream(endless())
        still = before = 0
        while still < 100 and taken < 20_000:
            assert honest.act(np.zeros(4, np.float32)).version == 1
            still = still + 1 if taken == before and taken > 0 else 0
            before = taken
        assert taken < 20_000, "all of it was read and kept"
        call.cancel()
    eventually(lambda: open_files(server.process.pid) <= files + 4, "connections closed")


@pytest.mark.parametrize("streams", [100, pytest.param(5000, marks=pytest.mark.slow)])
def test_cancelled_streams_leave_nothing(server: BrokerProcess, streams: int) -> None:
    files = open_files(server.process.pid)
    request = asking("given up", observation=observing(np.zeros((128, 4))), batch=128)
    with unharmed(server), stub_of(server) as stub:
        for number in range(streams):
            call: Any = stub.ActStream(itertools.repeat(request), timeout=PATIENCE_S)
            for _ in range(number % 4):
                assert next(call).request_id == request.request_id
            call.cancel()
    eventually(lambda: open_files(server.process.pid) <= files + 4, "connections closed")
