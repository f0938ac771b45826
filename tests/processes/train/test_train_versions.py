"""Versions of a real run: registered, answered for, promoted, rolled back and retired while it learns."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import grpc
import pytest

from penstock.policy import weights
from penstock.registry.records import PolicyVersion
from penstock.registry.registry import Registry
from penstock.registry.weight_files import read_kept, registry_url
from penstock.rpc.auth import Credentials
from penstock.rpc.channel import open_channel
from penstock.v1 import control_pb2, control_pb2_grpc, weights_pb2, weights_pb2_grpc
from tests.support.run import harness
from tests.support.run.harness import LONG, Training, command, open_run
from tests.support.run.simulated_actor import code_of

EVALUATED = ("--set", "evaluation.interval_steps=4000", "--set", "evaluation.episodes=8")
SOME = ("--set", "learner.keep_every_updates=40")
"""Versions that are kept however few of them are better than the ones before."""


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    """A run that goes on until it is asked to end, with an evaluation after every 4,000 steps."""
    with harness.run(tmp_path / "run", "CartPole-v1", *LONG, *EVALUATED, *SOME) as running:
        yield running


class Operator:
    """Who looks at a run by its broker and by its folder."""

    def __init__(self, training: Training) -> None:
        self.run_dir = training.run_dir
        channel = open_channel(training.endpoints()["broker"]["address"], Credentials())
        self.control = control_pb2_grpc.ControlServiceStub(channel)
        self._weights = weights_pb2_grpc.WeightServiceStub(channel)

    def versions(self) -> dict[int, Any]:
        """What ListVersions says, by number; a broker too busy to answer is asked again."""
        try:
            reply = self.control.ListVersions(control_pb2.ListVersionsRequest(), timeout=10)
        except grpc.RpcError as error:
            if code_of(error)[0] is grpc.StatusCode.DEADLINE_EXCEEDED:
                return self.versions()
            assert code_of(error)[0] is grpc.StatusCode.FAILED_PRECONDITION  # not made yet
            return {}
        return {one.version: one for one in reply.versions}

    def having(self, status: str) -> list[int]:
        return sorted(number for number, one in self.versions().items() if one.status == status)

    def weights(self, version: int) -> bytes | None:
        """What GetWeights answers; None where it does not hold the version."""
        blob, size = b"", 1
        while len(blob) < size:
            request = weights_pb2.GetWeightsRequest(session=1, version=version, offset=len(blob))
            try:
                reply = self._weights.GetWeights(request, timeout=10)
            except grpc.RpcError as error:
                assert code_of(error)[0] is grpc.StatusCode.NOT_FOUND
                return None
            blob, size = blob + reply.chunk, reply.publication.size
        return blob

    def policy(self, *arguments: str) -> Any:
        reply = command("policy", arguments[0], str(self.run_dir), *arguments[1:], "--json")
        assert reply.returncode == 0, reply.stderr
        return json.loads(reply.stdout)


@pytest.mark.promise("weights-registered-version-available")
def test_versions_of_a_run_are_kept_until_they_are_retired(training: Training) -> None:
    training.until_steps(1)
    operator = Operator(training)
    training.until_steps(15_000)
    # Chosen just before they are asked for: the oldest make room for newer ones.
    training.until(lambda: len(operator.having("active")) == 1 and len(operator.having("candidate")) >= 2)
    (active,) = operator.having("active")
    second, third = operator.having("candidate")[-2:]
    for version in (active, second, third):
        blob = operator.weights(version)
        assert blob is not None
        assert weights.sha256(blob) == operator.versions()[version].sha256
    assert operator.versions()[active].status == "active"
    assert operator.policy("list")["traffic"]["revision"] == 1

    promoted = operator.control.Promote(
        control_pb2.PromoteRequest(version=second, reason="better"), timeout=10
    )
    assert promoted.version.status == "active"
    rolled = operator.control.Rollback(
        control_pb2.RollbackRequest(version=second, reason="worse"), timeout=10
    )
    assert (rolled.withdrawn.version, rolled.active.version) == (second, active)
    training.until(lambda: operator.versions()[active].status == "retired")
    copy = next(one for one in operator.versions().values() if one.status == "active")
    assert (copy.parent, copy.origin) == (active, "rollback")
    training.until(lambda: operator.weights(copy.version) is not None)
    assert weights.sha256(operator.weights(copy.version) or b"") == operator.versions()[active].sha256
    training.until(lambda: operator.weights(active) is None)

    assert operator.policy("retire", str(third), "--reason", "not wanted")["status"] == "retired"
    training.until(lambda: operator.weights(third) is None)
    steps = training.steps()
    training.until(lambda: training.steps() > steps)
    training.process.terminate()
    code, _, err = training.end()
    assert code == 130, err
    check_files(training.run_dir, third)


def check_files(run_dir: Path, retired: int) -> None:
    """Every pinned version lies in the folder, whole, and can be read; what was retired is gone."""
    with Registry.open(registry_url(run_dir)) as registry:
        pinned: tuple[PolicyVersion, ...] = registry.pinned("default")
    assert pinned
    for row in pinned:
        assert len(read_kept(run_dir, row.version, row.sha256)) == row.size_bytes
    with pytest.raises(ValueError, match="is the version not retired"):
        read_kept(run_dir, retired, "0" * 64)


@pytest.fixture
def control(redis_url: str, tmp_path: Path) -> Iterator[Callable[..., control_pb2_grpc.ControlServiceStub]]:
    learner = open_run(redis_url)

    def start(**registry: str) -> control_pb2_grpc.ControlServiceStub:
        settings = {"run": "run-a", "registry": registry}
        broker = stack.enter_context(harness.broker(redis_url, tmp_path, settings=settings))
        return control_pb2_grpc.ControlServiceStub(open_channel(broker.address, Credentials()))

    with closing(learner), ExitStack() as stack:
        yield start


def test_a_broker_without_a_registry_names_the_setting(
    control: Callable[..., control_pb2_grpc.ControlServiceStub],
) -> None:
    stub = control()
    calls: dict[str, Callable[[], Any]] = {
        "ListVersions": lambda: stub.ListVersions(control_pb2.ListVersionsRequest(), timeout=10),
        "Promote": lambda: stub.Promote(control_pb2.PromoteRequest(version=1, reason="x"), timeout=10),
        "Rollback": lambda: stub.Rollback(control_pb2.RollbackRequest(reason="x"), timeout=10),
        "SetTraffic": lambda: stub.SetTraffic(control_pb2.SetTrafficRequest(reason="x"), timeout=10),
    }
    for name, call in calls.items():
        with pytest.raises(grpc.RpcError) as caught:
            call()
        code, text = code_of(caught.value)
        assert (name, code) == (name, grpc.StatusCode.FAILED_PRECONDITION)
        assert "set registry.url" in text
        assert "penstock policy" in text


def test_a_call_refused_by_the_registry_ends_with_its_message(
    control: Callable[..., control_pb2_grpc.ControlServiceStub], tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path / 'registry.sqlite'}"
    Registry.open(url, migrate=True).close()
    stub = control(url=url)
    traffic = stub.ListVersions(control_pb2.ListVersionsRequest(), timeout=10).traffic
    traffic.latest_share = 0.5
    done = stub.SetTraffic(control_pb2.SetTrafficRequest(traffic=traffic, reason="half"), timeout=10)
    assert (done.traffic.revision, done.traffic.latest_share) == (1, 0.5)
    stale = control_pb2.Traffic(revision=0, latest_share=1.0)
    refused: list[tuple[Callable[[], Any], grpc.StatusCode, str]] = [
        (
            lambda: stub.SetTraffic(control_pb2.SetTrafficRequest(traffic=stale, reason="x"), timeout=10),
            grpc.StatusCode.FAILED_PRECONDITION,
            "revision=1, not 0",
        ),
        (
            lambda: stub.Promote(control_pb2.PromoteRequest(version=5, reason="x"), timeout=10),
            grpc.StatusCode.NOT_FOUND,
            "version=5",
        ),
        (
            lambda: stub.Promote(control_pb2.PromoteRequest(version=5, to="king", reason="x"), timeout=10),
            grpc.StatusCode.INVALID_ARGUMENT,
            "to='king'",
        ),
        (
            lambda: stub.Promote(control_pb2.PromoteRequest(version=2**64 - 1, reason="x"), timeout=10),
            grpc.StatusCode.INVALID_ARGUMENT,
            "at most 2^53",
        ),
        (
            lambda: stub.Rollback(control_pb2.RollbackRequest(policy="no such/name"), timeout=10),
            grpc.StatusCode.INVALID_ARGUMENT,
            "policy=",
        ),
        (
            lambda: stub.Rollback(control_pb2.RollbackRequest(reason="x"), timeout=10),
            grpc.StatusCode.NOT_FOUND,
            "nothing to roll back",
        ),
    ]
    for call, wanted, words in refused:
        with pytest.raises(grpc.RpcError) as caught:
            call()
        code, text = code_of(caught.value)
        assert code is wanted, text
        assert words in text
