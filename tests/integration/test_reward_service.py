"""The reward service as a process: scores, limits, who may call, restarts."""

import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from launch.certificates import Order
from launch.certificates import main as make_certificates
from launch.process import penstock
from penstock.v1 import reward_pb2 as pb
from penstock.wire.auth import Credentials
from penstock.wire.channel import open_channel
from penstock.wire.limits import MAX_REWARD_SAMPLES
from penstock.wire.refusal import Reason
from tests.integration.broker_process import PATIENCE_S, BrokerProcess, eventually
from tests.tiny_reward import make_base, make_reward_model, samples
from workloads.rlhf.reward.client import RewardClient
from workloads.rlhf.reward.source import BadReward, BadSample, Sample, Unavailable

START_S = 60.0
SCORE = "/penstock.v1.RewardService/Score"
RUN = "run-a"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A reward model's folder, and its scores of `samples()`."""
    folder = tmp_path_factory.mktemp("reward")
    return folder / "reward", make_reward_model(make_base(folder / "base"), folder / "reward")


@contextmanager
def serving(model: Path, folder: Path, *more: str, listen: str = "127.0.0.1:0") -> Iterator[BrokerProcess]:
    """`penstock reward serve`, ready."""
    folder.mkdir(exist_ok=True)
    endpoints, log = folder / "reward.json", folder / "reward.log"
    endpoints.unlink(missing_ok=True)
    command = penstock(
        "reward", "serve", str(model), "--listen", listen, "--endpoints", str(endpoints), *more
    )
    with log.open("ab") as stderr:
        process = subprocess.Popen(command, stderr=stderr, env={**os.environ, "OMP_NUM_THREADS": "1"})
    server = BrokerProcess(process=process, endpoint_file=endpoints, log=log)
    try:
        eventually(server.is_ready, "readiness of the reward service", within_s=START_S)
        yield server
    finally:
        server.end()


@pytest.fixture(scope="module")
def server(
    model: tuple[Path, list[float]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BrokerProcess]:
    """One that several tests share."""
    with serving(model[0], tmp_path_factory.mktemp("serving")) as process:
        yield process


@pytest.fixture
def client(server: BrokerProcess) -> Iterator[RewardClient]:
    """Of that one."""
    opened = RewardClient(server.address)
    yield opened
    opened.close()


def test_its_scores_are_the_models_own(client: RewardClient, model: tuple[Path, list[float]]) -> None:
    """Of text and of token ids; with the model that gave them."""
    rewards = client.score(samples())
    assert rewards.values == pytest.approx(model[1], abs=1e-6)
    assert ("reward", 0.25, 2.0) == (rewards.by.name, rewards.by.mean, rewards.by.std)
    assert 64 == len(rewards.by.sha256)
    assert rewards.by == client.describe()
    assert () == client.score([]).values


def test_calls_that_come_at_once_are_scored_together(
    server: BrokerProcess, client: RewardClient, model: tuple[Path, list[float]]
) -> None:
    """Each gets its own; the passes are fewer than the calls."""
    before = passes(server)
    calls = 64
    begin = threading.Barrier(calls)

    def call(_index: int) -> Sequence[float | None]:
        begin.wait()
        return client.score(samples()).values

    with ThreadPoolExecutor(calls) as threads:
        for values in threads.map(call, range(calls)):
            assert values == pytest.approx(model[1], abs=1e-6)
    assert passes(server) - before < calls


def passes(server: BrokerProcess) -> int:
    """Forward passes so far."""
    (row,) = [
        row
        for row in server.get("/metrics")[1].splitlines()
        if row.startswith("penstock_reward_batch_rows_count")
    ]
    return int(float(row.split()[-1]))


def test_a_call_of_more_samples_than_a_request_holds_is_sent_as_several(
    client: RewardClient, model: tuple[Path, list[float]]
) -> None:
    """In their order."""
    values = client.score(samples() * 60).values
    assert 20 * 60 > MAX_REWARD_SAMPLES
    assert values == pytest.approx(model[1] * 60, abs=1e-6)


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
    """The call is refused, others go on."""
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
        (empty_samples(MAX_REWARD_SAMPLES + 1), "fields; send less at once"),
        (empty_samples(4_000_000), "fields; send less at once"),
        (conversation(2_000_000), "fields; send less at once"),
        (b" " * (8 * 1024 * 1024 + 1), "send fewer samples at once"),
    ],
    ids=["noise", "one-more", "millions", "turns", "large"],
)
def test_what_would_unfold_to_too_much_is_not_parsed(server: BrokerProcess, data: bytes, words: str) -> None:
    """INVALID_ARGUMENT, and the process has not grown by it."""
    before = resident_bytes(server)
    with open_channel(server.address, Credentials()) as channel:
        call: Callable[..., bytes] = channel.unary_unary(SCORE, lambda given: given, lambda given: given)
        with pytest.raises(grpc.RpcError) as caught:
            call(data, timeout=PATIENCE_S)
    assert grpc.StatusCode.INVALID_ARGUMENT == caught.value.code()
    assert words in str(caught.value.details())
    assert resident_bytes(server) - before < 100_000_000


def resident_bytes(server: BrokerProcess) -> int:
    """Of the process."""
    pages = Path(f"/proc/{server.process.pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def test_no_samples_are_a_refusal(server: BrokerProcess) -> None:
    """Inside the reply."""
    with open_channel(server.address, Credentials()) as channel:
        call: Any = channel.unary_unary(SCORE, pb.ScoreRequest.SerializeToString, pb.ScoreReply.FromString)
        reply = call(pb.ScoreRequest(), timeout=PATIENCE_S)
    assert Reason.INVALID == reply.refusal.reason
    assert not reply.HasField("model")


def test_health_and_reflection_stand_beside_it(server: BrokerProcess) -> None:
    """As at every server."""
    with open_channel(server.address, Credentials()) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service="penstock.v1.RewardService")
        assert health_pb2.HealthCheckResponse.SERVING == stub.Check(request, timeout=PATIENCE_S).status
    assert 200 == server.get("/healthz")[0]


def test_a_client_outlives_the_service(
    model: tuple[Path, list[float]], tmp_path: Path, short_folder: Path
) -> None:
    """A call that finds nobody is answered by the one that comes back; after its deadline it is unavailable."""
    listen = f"unix:{short_folder}/reward.sock"
    client = RewardClient(listen, deadline_s=START_S)
    with ThreadPoolExecutor(1) as threads:
        with serving(model[0], tmp_path / "a", listen=listen) as server:
            assert client.score(samples()).values == pytest.approx(model[1], abs=1e-6)
            server.process.send_signal(signal.SIGKILL)
            server.process.wait(PATIENCE_S)
            asked = threads.submit(client.score, samples())
            with serving(model[0], tmp_path / "b", listen=listen) as again:
                assert asked.result(START_S).values == pytest.approx(model[1], abs=1e-6)
                again.process.send_signal(signal.SIGTERM)
                assert 0 == again.process.wait(PATIENCE_S), again.log.read_text()
        impatient = RewardClient(listen, deadline_s=0.3)
        with pytest.raises(Unavailable, match="no answer within 0.3 s"):
            impatient.score(samples())
        waits = threads.submit(client.score, samples())
        client.close()
        with pytest.raises(Unavailable):
            waits.result(PATIENCE_S)


def test_only_actors_of_the_run_are_served_over_tls(model: tuple[Path, list[float]], tmp_path: Path) -> None:
    """By their certificates."""
    folder = tmp_path / "certificates"
    make_certificates(Order(folder=folder, run=RUN))

    def shown(name: str) -> Credentials:
        return Credentials.from_files(
            insecure=False,
            certificate=folder / f"{name}.pem",
            key=folder / f"{name}.key",
            authority=folder / "authority.pem",
        )

    files = {"tls_certificate": "server.pem", "tls_key": "server.key", "tls_authority": "authority.pem"}
    said = [f"security.{key}={json.dumps(str(folder / name))}" for key, name in files.items()]
    more = [word for text in (f"run={RUN}", *said) for word in ("--set", text)]
    with serving(model[0], tmp_path / "a", *more) as server:
        actor = RewardClient(server.address, credentials=shown("actor"))
        assert actor.score(samples()).values == pytest.approx(model[1], abs=1e-6)
        for name in ("client", "operator"):
            other = RewardClient(server.address, credentials=shown(name), deadline_s=5.0)
            with pytest.raises(BadReward, match="PERMISSION_DENIED"):
                other.score(samples())
            other.close()
        actor.close()


def test_an_address_beyond_loopback_wants_to_be_asked_for(model: tuple[Path, list[float]]) -> None:
    """Exit 2 with the remedy, as at every server."""
    done = subprocess.run(
        penstock("reward", "serve", str(model[0]), "--listen", "0.0.0.0:0"),
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )
    assert 2 == done.returncode
    assert "--insecure" in done.stderr
