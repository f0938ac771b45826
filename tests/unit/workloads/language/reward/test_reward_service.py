"""The reward service on a real connection, in a thread of this process: scores, limits, company, health."""

import asyncio
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.config.settings import Settings
from penstock.protocol.refusal import Reason, Refused
from penstock.rpc.auth import Credentials
from penstock.rpc.channel import open_channel
from penstock.runtime import metrics
from penstock.runtime.lifecycle import Lifecycle
from penstock.v1 import reward_pb2 as pb
from penstock.workloads.language.reward import reward_service
from penstock.workloads.language.reward.reward_client import RewardClient
from penstock.workloads.language.reward.reward_service import CALLS, Batcher, main
from penstock.workloads.language.reward.reward_source import (
    MAX_REWARD_SAMPLES,
    BadSample,
    Sample,
    Unavailable,
)
from tests.support.language.tiny_reward import make_reward_model, samples

PATIENCE_S = 60.0
SCORE = "/penstock.v1.RewardService/Score"


@dataclass(frozen=True)
class Served:
    """A service, and the scores that its model gives `samples()`."""

    address: str
    scores: list[float]


@pytest.fixture
def server(base: Path, tmp_path: Path, short_folder: Path) -> Iterator[Served]:
    """One that serves until the test is over."""
    scores = make_reward_model(base, tmp_path / "reward")
    address, lifecycle = f"unix:{short_folder}/reward.sock", Lifecycle("reward")
    told: list[int] = []

    def serve() -> None:
        told.append(
            main(lifecycle, Settings(), folder=tmp_path / "reward", base=None, device="cpu", listen=address)
        )

    thread = threading.Thread(target=serve)
    thread.start()
    with open_channel(address, Credentials()) as channel:
        grpc.channel_ready_future(channel).result(PATIENCE_S)
    yield Served(address, scores)
    lifecycle.drain("the test is over")
    thread.join(PATIENCE_S)
    assert [0] == told


@pytest.fixture
def client(server: Served) -> Iterator[RewardClient]:
    """Of that one."""
    opened = RewardClient(server.address, deadline_s=PATIENCE_S)
    yield opened
    opened.close()


def test_a_model_of_one_head_expects_nothing_of_people(client: RewardClient) -> None:
    with pytest.raises(BadSample, match="--head NAME=SCALE"):
        client.judge(samples()[0])


def test_its_scores_are_the_models_own(server: Served, client: RewardClient) -> None:
    rewards = client.score(samples())
    assert rewards.values == pytest.approx(server.scores, abs=1e-6)
    assert ("reward", 0.25, 2.0) == (rewards.by.name, rewards.by.mean, rewards.by.std)
    assert 64 == len(rewards.by.sha256)
    assert rewards.by == client.describe()
    assert () == client.score([]).values


def test_calls_that_come_at_once_are_scored_together(server: Served, client: RewardClient) -> None:
    before = passes()
    calls = 64
    begin = threading.Barrier(calls)

    def call(_index: int) -> Sequence[float | None]:
        begin.wait()
        return client.score(samples()).values

    with ThreadPoolExecutor(calls) as threads:
        for values in threads.map(call, range(calls)):
            assert values == pytest.approx(server.scores, abs=1e-6)
    assert passes() - before < calls


def passes() -> int:
    """Forward passes so far."""
    rows = metrics.exposition("reward").decode().splitlines()
    (row,) = [row for row in rows if row.startswith("penstock_reward_batch_rows_count")]
    return int(float(row.split()[-1]))


def test_a_call_of_more_samples_than_a_request_holds_is_sent_as_several(
    server: Served, client: RewardClient
) -> None:
    values = client.score(samples() * 60).values
    assert 20 * 60 > MAX_REWARD_SAMPLES
    assert values == pytest.approx(server.scores * 60, abs=1e-6)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (
            Sample(prompt="tree", response_ids=(4, 99_999)),
            r"samples\[1\]: token id 99999 of a vocabulary of 36",
        ),
        (Sample(prompt="tree", response="good " * 100), r"samples\[1\]: the response has 101 tokens, 64 fit"),
        (Sample(prompt="x" * 2_000_000, response="good"), r"samples\[1\]: .* bytes, at most"),
    ],
)
def test_a_sample_that_cannot_be_scored_is_named(client: RewardClient, bad: Sample, message: str) -> None:
    with pytest.raises(BadSample, match=message):
        client.score([samples()[0], bad])
    assert client.score(samples()[:1]).values


def empty_samples(count: int) -> bytes:
    """Two bytes each."""
    return b"\x0a\x00" * count


def conversation(turns: int) -> bytes:
    """One sample of empty messages, two bytes each."""
    inside = b"\x12\x00" * turns
    size = len(inside)
    prefix = bytearray(b"\x0a")
    while size > 127:
        prefix.append(size & 127 | 128)
        size >>= 7
    prefix.append(size)
    return bytes(prefix) + inside


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\xff\xff\xff", "Score: byte"),
        (empty_samples(MAX_REWARD_SAMPLES + 1), "samples: more than 1024"),
        (empty_samples(4_000_000), "samples: more than 1024"),
        (conversation(2_000_000), "fields; send less at once"),
    ],
    ids=["noise", "one-more", "millions", "turns"],
)
def test_what_would_unfold_to_too_much_is_not_parsed(server: Served, data: bytes, words: str) -> None:
    before = resident_bytes()
    with grpc.insecure_channel(server.address, [("grpc.max_send_message_length", -1)]) as channel:
        call: Callable[..., bytes] = channel.unary_unary(SCORE, lambda given: given, lambda given: given)
        with pytest.raises(grpc.RpcError) as caught:
            call(data, timeout=PATIENCE_S)
    assert grpc.StatusCode.INVALID_ARGUMENT == caught.value.code()
    assert words in str(caught.value.details())
    assert resident_bytes() - before < 100_000_000


def resident_bytes() -> int:
    """Of this process, which is the service's too."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_no_samples_are_a_refusal(server: Served) -> None:
    with open_channel(server.address, Credentials()) as channel:
        call: Any = channel.unary_unary(SCORE, pb.ScoreRequest.SerializeToString, pb.ScoreReply.FromString)
        reply = call(pb.ScoreRequest(), timeout=PATIENCE_S)
    assert Reason.INVALID == reply.refusal.reason
    assert not reply.HasField("model")


def test_health_and_reflection_stand_beside_it(server: Served) -> None:
    with open_channel(server.address, Credentials()) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service="penstock.v1.RewardService")
        assert health_pb2.HealthCheckResponse.SERVING == stub.Check(request, timeout=PATIENCE_S).status


def test_a_closed_client_and_one_that_finds_no_server_are_unavailable(short_folder: Path) -> None:
    absent = RewardClient(f"unix:{short_folder}/none.sock", deadline_s=0.3)
    with pytest.raises(Unavailable, match="no answer within 0.3 s"):
        absent.score(samples())
    waiting = RewardClient(f"unix:{short_folder}/none.sock", deadline_s=PATIENCE_S)
    with ThreadPoolExecutor(1) as threads:
        waits = threads.submit(waiting.score, samples())
        waiting.close()
        with pytest.raises(Unavailable):
            waits.result(PATIENCE_S)


async def test_a_full_queue_is_overloaded_and_an_error_reaches_its_callers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reward_service, "MAX_WAITING_ROWS", 4)
    gate = threading.Event()

    def score(rows: Sequence[Sequence[int]]) -> tuple[float | None, ...]:
        gate.wait(PATIENCE_S)
        if any(7 in row for row in rows):
            raise ValueError("seven")
        return tuple(float(row[0]) for row in rows)

    queue = Batcher(score, max_rows=2)
    first = asyncio.ensure_future(queue.ask([[1]]))
    await asyncio.sleep(0)
    await asyncio.sleep(0)  # the first pass has begun
    waiting = [asyncio.ensure_future(queue.ask([[number], [number]])) for number in (2, 7)]
    await asyncio.sleep(0)
    with pytest.raises(Refused) as caught:
        await queue.ask([[3]])
    assert Reason.OVERLOADED == caught.value.refusal.reason
    assert caught.value.refusal.retry_after_ms > 0
    gate.set()
    assert (1.0,) == await first
    assert (2.0, 2.0) == await waiting[0]
    with pytest.raises(ValueError, match="seven"):
        await waiting[1]
    assert (3.0,) == await queue.ask([[3]])
    queue.close()


def test_every_call_of_the_service_has_its_parties() -> None:
    (service,) = pb.DESCRIPTOR.services_by_name.values()
    assert CALLS.keys() == {f"/{service.full_name}/{method.name}" for method in service.methods}
