"""`penstock serve` as a process over a run's folder, asked by the real clients."""

import asyncio
import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.serving import make_run
from penstock.client import (
    Action,
    ActionBatch,
    Arm,
    AsyncPolicyClient,
    EpisodeElsewhere,
    Fallback,
    InvalidRequest,
    PolicyClient,
    Unreachable,
    calls,
)
from penstock.client.calls import to_parts
from penstock.registry.registry import Registry
from penstock.runtime.exit import EXIT_OK
from penstock.v1 import policy_pb2 as pb
from penstock.v1.policy_pb2_grpc import PolicyServiceStub
from tests.support.run import harness
from tests.support.run.harness import BrokerProcess, eventually
from tests.support.run.serving_run import (
    ACTION,
    OBSERVATION,
    RUN,
    SERVICE,
    ServedRun,
    begun,
    follow,
    terminate,
)
from tests.support.serving import node_client

ROWS: Final = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)
NOT_SERVING: Final = health_pb2.HealthCheckResponse.NOT_SERVING
SERVING: Final = health_pb2.HealthCheckResponse.SERVING


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ServedRun:
    """A run whose version 1 was active first; tests add versions."""
    return begun(tmp_path_factory.mktemp("served") / "run")


@pytest.fixture(scope="module")
def server(run: ServedRun) -> Iterator[BrokerProcess]:
    """A server over it that is ready; short answers are never slow, and returns lie between 0 and 1."""
    settings: dict[str, Any] = {"canary.settle_s": 0.05, "canary.slow_ms": 1e6}
    with harness.server(run.folder.parent, run.folder, **settings) as process:
        yield process


@pytest.fixture
def client(server: BrokerProcess) -> Iterator[PolicyClient]:
    with PolicyClient(server.address, deadline_s=60.0) as connected:
        yield connected


def check(run: ServedRun, given: Action | ActionBatch, rows: Any) -> None:
    assert given.fallback is None
    expected = run.offline(given.version, np.reshape(rows, (-1, 4)))
    np.testing.assert_allclose(np.reshape(given.distribution["probability"], (-1, 3)), expected, atol=1e-5)


def test_actions_are_those_of_the_active_version(run: ServedRun, client: PolicyClient) -> None:
    follow(run, client, version := run.next_version())
    described = client.describe()
    assert (described.run, described.policy, described.learns) == (RUN, "default", False)
    assert (described.observation_space, described.action_space) == (OBSERVATION, ACTION)
    served = {one.version: one.arms for one in described.versions}
    assert served[version] == (Arm.LATEST, Arm.ACTIVE)
    one = client.act(ROWS[0], distribution=True, value=True)
    check(run, one, ROWS[0])
    assert (one.version, one.arm) == (version, Arm.ACTIVE)
    assert one.value is not None
    assert one.log_prob == pytest.approx(np.log(one.distribution["probability"][one.action]), abs=1e-5)
    many = client.act_batch(ROWS, distribution=True, value=True)
    check(run, many, ROWS)
    assert many.value is not None
    assert many.value[0] == pytest.approx(one.value, abs=1e-5)
    assert client.act(ROWS[0], seed=7).action == client.act(ROWS[0], seed=7).action
    assert client.act(ROWS[0], mask=[False, True, False]).action == 1


@pytest.mark.promise("feedback-arrives-step-went")
def test_a_reward_after_the_end_is_stored_under_episode_and_step(
    run: ServedRun, server: BrokerProcess, client: PolicyClient
) -> None:
    episode = client.start_episode("bea")
    for step in range(3):
        episode.act(ROWS[step], reward=1.0 if step else None)
    result = episode.end(terminated=True, reward=1.0)
    call = calls.reward(episode.episode_id, [(1, 0.25), (None, -2.0)])
    with grpc.insecure_channel(server.address) as channel:
        stub = PolicyServiceStub(channel)
        assert [stub.Reward(call.request, timeout=60).late for _ in range(3)] == [2, 2, 2]
    assert result.total_return == 3.0
    with Registry.open(run.url) as registry:
        kept = [
            (row.step, row.amount)
            for row in registry.feedback("default")
            if row.episode == episode.episode_id
        ]
    assert kept == [(1, 0.25), (2, -2.0)]


def test_answers_are_counted_in_the_metrics(server: BrokerProcess, client: PolicyClient) -> None:
    client.act_batch(ROWS)
    episode = client.start_episode("cleo")
    episode.act(ROWS[0])
    episode.end(terminated=True, reward=1.0)
    with pytest.raises(InvalidRequest):
        client.act(ROWS[0], client_key="k" * 1000)
    page = server.get("/metrics")[1]
    for series in (
        'penstock_policy_calls_total{call="act"}',
        'penstock_policy_answers_total{arm="active",fallback="none"}',
        "penstock_policy_answer_seconds_bucket",
        "penstock_policy_batch_rows_bucket",
        "penstock_policy_queue_seconds_bucket",
        'penstock_policy_version{arm="active"}',
        'penstock_policy_episode_return_count{arm="active"}',
        'penstock_refusals_total{reason="invalid"}',
    ):
        found = [line for line in page.splitlines() if line.startswith(series)]
        assert found, series
        assert float(found[-1].rpartition(" ")[2]) > 0, found[-1]


async def test_a_stream_answers_many_requests_in_flight(run: ServedRun, server: BrokerProcess) -> None:
    async with AsyncPolicyClient(server.address, deadline_s=60.0) as client, client.act_stream() as stream:
        asked = [stream.act(row, distribution=True) for row in np.tile(ROWS, (10, 1))]
        for given, row in zip(await asyncio.gather(*asked), itertools.cycle(ROWS), strict=False):
            check(run, given, row)
        episodes = [await client.start_episode() for _ in range(8)]

        async def play(episode: Any) -> int:
            steps = [(await episode.act(row, stream=stream)).step for row in ROWS]
            assert steps == list(range(len(ROWS)))
            return int((await episode.end(terminated=True)).length)

        assert await asyncio.gather(*map(play, episodes)) == [len(ROWS)] * 8


def test_a_custom_network_is_served_where_the_runs_configuration_allows_it(tmp_path: Path) -> None:
    module = "tests.support.experience.own_networks"
    run = begun(tmp_path / "run", network=f"{module}:Good")
    (run.folder / "config.toml").write_text(f'[actor]\nallow_modules = ["{module}"]\n')
    with (
        harness.server(tmp_path, run.folder, "server", "--trust") as server,
        PolicyClient(server.address, deadline_s=60.0) as client,
    ):
        check(run, client.act_batch(ROWS, distribution=True), ROWS)


@pytest.mark.promise("client-keeps-arm-versions")
def test_a_client_has_the_same_version_after_a_restart(tmp_path: Path) -> None:
    run = begun(tmp_path / "run")
    run.promote(run.next_version(), canary_share=0.5)
    keys, found = [f"client-{number}" for number in range(40)], []
    for name in ("first", "second"):
        with (
            harness.server(tmp_path, run.folder, name) as server,
            PolicyClient(server.address, deadline_s=60) as client,
        ):
            found.append([client.act(ROWS[0], client_key=key).version for key in keys])
            if name == "first":
                episode_id = client.start_episode().episode_id
            else:
                late = client.start_episode()
                late.episode_id = episode_id
                with pytest.raises(EpisodeElsewhere):
                    late.act(ROWS[0])
    assert found[0] == found[1]
    assert set(found[0]) == {1, 2}


def serves(client: PolicyClient, active: int) -> bool:
    return any(one.version == active and Arm.ACTIVE in one.arms for one in client.describe().versions)


@pytest.mark.promise("answer-comes-wholly-version", "client-keeps-arm-versions")
def test_changing_versions_under_load_loses_no_request(run: ServedRun, server: BrokerProcess) -> None:
    clients, swaps = 8, 20
    stop, answers = threading.Event(), [0] * clients
    versions: list[set[int]] = [set() for _ in range(clients)]
    arms: list[set[Arm | None]] = [set() for _ in range(clients)]

    def ask(number: int) -> None:
        with PolicyClient(server.address, deadline_s=60.0) as client:
            while not stop.is_set():
                rows = ROWS[: 1 + number % 8]
                given = client.act_batch(rows, distribution=True, client_key=f"client-{number}")
                check(run, given, rows)
                answers[number] += 1
                versions[number].add(given.version)
                arms[number].add(given.arm)

    with ThreadPoolExecutor(clients) as threads, PolicyClient(server.address, deadline_s=60.0) as client:
        run.promote(canary := run.next_version(), canary_share=0.5)
        both = {Arm.ACTIVE, Arm.CANARY}
        eventually(lambda: {client.act(ROWS[0]).arm for _ in range(40)} == both, "a canary", 60)
        asking = [threads.submit(ask, number) for number in range(clients)]
        try:
            for _ in range(swaps):
                run.promote(version := run.next_version())
                eventually(partial(serves, client, version), f"version {version}", 60)
        finally:
            stop.set()
        for future in asking:
            future.result()
    run.withdraw_canary()
    assert min(answers) > 0
    seen = set.union(*versions)
    assert seen <= run.policies.keys()
    assert len(seen) > swaps // 2
    assert set.union(*arms) == both
    for of_client, answered_by in zip(arms, versions, strict=True):
        assert len(of_client) == 1
        assert answered_by == {canary} if Arm.CANARY in of_client else canary not in answered_by


def test_damaged_weights_are_not_served(run: ServedRun, server: BrokerProcess, client: PolicyClient) -> None:
    follow(run, client, good := run.next_version())
    damaged = run.next_version()
    run.damage(damaged)
    said = server.log.read_text().count("cannot be served")
    run.promote(damaged)
    eventually(lambda: client.act(ROWS[0]).fallback is Fallback.PREVIOUS, "the fallback")
    given = client.act(ROWS[0], distribution=True)
    assert (given.version, given.arm) == (good, Arm.ACTIVE)
    shares: Any = given.distribution["probability"]
    np.testing.assert_allclose(shares, run.offline(good, ROWS[:1])[0], atol=1e-5)
    eventually(lambda: "damaged" in server.log.read_text(), "a line in the log")
    for _ in range(50):
        client.act(ROWS[0])  # while the server looks again and again
    run.damage(damaged)
    eventually(lambda: client.act(ROWS[0]).fallback is None, "the repaired version")
    assert client.act(ROWS[0]).version == damaged
    # Not with every look: once for the newest version, once with the arm.
    assert server.log.read_text().count("cannot be served") - said <= 3


def test_calls_in_flight_are_answered_after_sigterm(tmp_path: Path) -> None:
    parts, more = to_parts("observation", OBSERVATION, ROWS[0]), threading.Event()

    def slowly() -> Iterator[pb.ActRequest]:
        yield pb.ActRequest(request_id="0", observation=parts)
        more.wait(60)
        yield pb.ActRequest(request_id="1", observation=parts)

    with (
        harness.server(tmp_path, begun(tmp_path / "run").folder) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        health = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        assert next(health).status == SERVING
        stream: Any = PolicyServiceStub(channel).ActStream(slowly())
        assert next(stream).version == 1
        terminate(server)
        assert next(health).status == NOT_SERVING
        more.set()
        assert [reply.version for reply in stream] == [1]
        health.cancel()
        assert server.wait()[0] == EXIT_OK
        with PolicyClient(server.address, deadline_s=0.2) as late, pytest.raises(Unreachable):
            late.describe()


def test_a_node_client_plays_episodes_and_sends_rewards(tmp_path: Path) -> None:
    node_client.install()
    make_run(tmp_path / "run")
    with harness.server(tmp_path, tmp_path / "run") as server, PolicyClient(server.address) as client:
        result = node_client.play(server.address, 3, learn=True)
        assert result["episodes"] == 3
        assert 8 <= result["mean_return"] <= 500
        assert not client.describe().learns
